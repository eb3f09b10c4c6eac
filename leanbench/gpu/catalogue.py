"""The GPUs that leanbench knows without having them.

Units: `memory_gb` is the vendor's label, `bandwidth_tb_s` counts 10^12 bytes, `l2_mib` counts
2^20 and shared memory 2^10. The driver reports up to 7% more than 10^9 bytes a GB, or a little less
where ECC takes its share, so whoever asks whether something fits counts 10^9. Shared memory and
registers come from the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability"; a CTA can use 1 KB less than its SM holds. Where a datasheet says "up to" and the
driver reads another number, the driver's stands here and `source` says so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec

#: Words of product names that tell nothing about the GPU.
_BRANDS = ("nvidia", "geforce", "tesla", "grid", "")
#: Shared memory per SM, in KB, by compute capability.
_SHARED_KB_PER_SM = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (12, 0): 100,
    (12, 1): 100,
}
#: The system's share of each CTA's shared memory, in KB.
_SHARED_KB_RESERVED = 1
#: 256 KB of 32-bit registers on every SM since compute capability 3.0.
_REGISTERS_PER_SM = 65_536


def _gpu(
    name: str,
    product: str,
    compute_capability: tuple[int, int],
    *,
    sms: int,
    memory_gb: float,
    bandwidth_tb_s: float,
    l2_mib: float,
    boost_clock_mhz: int,
    power_limit_w: int,
    source: str,
    aliases: tuple[str, ...] = (),
) -> GpuSpec:
    shared_kb = _SHARED_KB_PER_SM[compute_capability]
    return GpuSpec(
        name=name,
        product=product,
        compute_capability=compute_capability,
        sms=sms,
        memory_gb=memory_gb,
        bandwidth_tb_s=bandwidth_tb_s,
        l2_mib=l2_mib,
        shared_kb_per_sm=shared_kb,
        shared_kb_per_cta=shared_kb - _SHARED_KB_RESERVED,
        registers_per_sm=_REGISTERS_PER_SM,
        boost_clock_mhz=boost_clock_mhz,
        power_limit_w=power_limit_w,
        source=f"{source}; shared memory: CUDA C++ Programming Guide",
        aliases=aliases,
    )


CATALOGUE: tuple[GpuSpec, ...] = (
    _gpu(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        sms=108,
        memory_gb=40,
        bandwidth_tb_s=1.555,
        l2_mib=40,
        boost_clock_mhz=1410,
        power_limit_w=400,
        source="NVIDIA A100 datasheet and Ampere GA100 whitepaper",
        aliases=("a100-sxm-40gb", "a100-sxm4-40gb"),
    ),
    _gpu(
        "a100-40gb-pcie",
        "NVIDIA A100-PCIE-40GB",
        (8, 0),
        sms=108,
        memory_gb=40,
        bandwidth_tb_s=1.555,
        l2_mib=40,
        boost_clock_mhz=1410,
        power_limit_w=250,
        source="NVIDIA A100 datasheet and Ampere GA100 whitepaper",
        aliases=("a100-pcie-40gb",),
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        sms=108,
        memory_gb=80,
        bandwidth_tb_s=2.039,
        l2_mib=40,
        boost_clock_mhz=1410,
        power_limit_w=400,
        source="NVIDIA A100 datasheet and Ampere GA100 whitepaper",
        aliases=("a100", "a100-sxm", "a100-sxm-80gb", "a100-sxm4-80gb"),
    ),
    _gpu(
        "a100-80gb-pcie",
        "NVIDIA A100 80GB PCIe",
        (8, 0),
        sms=108,
        memory_gb=80,
        bandwidth_tb_s=1.935,
        l2_mib=40,
        boost_clock_mhz=1410,
        power_limit_w=300,
        source="NVIDIA A100 datasheet and Ampere GA100 whitepaper",
        aliases=("a100-pcie", "a100-pcie-80gb"),
    ),
    _gpu(
        "a100-64gb",
        "NVIDIA A100-SXM-64GB",
        (8, 0),
        sms=124,
        memory_gb=64,
        bandwidth_tb_s=1.640,
        l2_mib=32,
        boost_clock_mhz=1410,
        power_limit_w=440,
        source=(
            "CINECA's paper and user guide on LEONARDO; L2: 8 of 10 memory controllers; clock:"
            " that of its peak"
        ),
        aliases=("a100-sxm-64gb",),
    ),
    _gpu(
        "a800-80gb",
        "NVIDIA A800-SXM4-80GB",
        (8, 0),
        sms=108,
        memory_gb=80,
        bandwidth_tb_s=2.039,
        l2_mib=40,
        boost_clock_mhz=1410,
        power_limit_w=400,
        source="NVIDIA A800 datasheet; SMs, clock and L2 as on A100",
        aliases=("a800", "a800-sxm", "a800-sxm4-80gb"),
    ),
    _gpu(
        "a800-80gb-pcie",
        "NVIDIA A800 80GB PCIe",
        (8, 0),
        sms=108,
        memory_gb=80,
        bandwidth_tb_s=1.935,
        l2_mib=40,
        boost_clock_mhz=1410,
        power_limit_w=300,
        source="NVIDIA A800 datasheet; SMs, clock and L2 as on A100",
        aliases=("a800-pcie", "a800-pcie-80gb"),
    ),
    _gpu(
        "a30",
        "NVIDIA A30",
        (8, 0),
        sms=56,
        memory_gb=24,
        bandwidth_tb_s=0.933,
        l2_mib=24,
        boost_clock_mhz=1440,
        power_limit_w=165,
        source="NVIDIA A30 datasheet and product brief; SMs and L2 as the driver reads them",
    ),
    _gpu(
        "a10g",
        "NVIDIA A10G",
        (8, 6),
        sms=80,
        memory_gb=24,
        bandwidth_tb_s=0.600,
        l2_mib=6,
        boost_clock_mhz=1710,
        power_limit_w=300,
        source="NVIDIA A10G datasheet; SMs and L2 as the driver reads them",
    ),
    _gpu(
        "l4",
        "NVIDIA L4",
        (8, 9),
        sms=58,
        memory_gb=24,
        bandwidth_tb_s=0.300,
        l2_mib=48,
        boost_clock_mhz=2040,
        power_limit_w=72,
        source="NVIDIA L4 datasheet and Ada whitepaper",
    ),
    _gpu(
        "l20",
        "NVIDIA L20",
        (8, 9),
        sms=92,
        memory_gb=48,
        bandwidth_tb_s=0.864,
        l2_mib=96,
        boost_clock_mhz=2520,
        power_limit_w=275,
        source="NVIDIA L20 datasheet; SMs, clock and L2 as the driver reads them",
    ),
    _gpu(
        "l40s",
        "NVIDIA L40S",
        (8, 9),
        sms=142,
        memory_gb=48,
        bandwidth_tb_s=0.864,
        l2_mib=96,
        boost_clock_mhz=2520,
        power_limit_w=350,
        source="NVIDIA L40S datasheet and Ada whitepaper",
    ),
    _gpu(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        sms=128,
        memory_gb=24,
        bandwidth_tb_s=1.008,
        l2_mib=72,
        boost_clock_mhz=2520,
        power_limit_w=450,
        source="NVIDIA Ada GPU architecture whitepaper",
        aliases=("4090", "rtx4090"),
    ),
    _gpu(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        sms=170,
        memory_gb=32,
        bandwidth_tb_s=1.792,
        l2_mib=96,
        boost_clock_mhz=2407,
        power_limit_w=575,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper",
        aliases=("5090", "rtx5090"),
    ),
    _gpu(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        (12, 0),
        sms=188,
        memory_gb=96,
        bandwidth_tb_s=1.597,
        l2_mib=128,
        boost_clock_mhz=2430,
        power_limit_w=600,
        source=(
            "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet; SMs, clock and L2 as the"
            " driver reads them"
        ),
    ),
    _gpu(
        "gb10",
        "NVIDIA GB10",
        (12, 1),
        sms=48,
        memory_gb=128,
        bandwidth_tb_s=0.273,
        l2_mib=24,
        boost_clock_mhz=2418,
        power_limit_w=140,
        source=(
            "NVIDIA DGX Spark datasheet; memory shared with the CPU, SMs, clock and L2 as the"
            " driver reads them"
        ),
        aliases=("dgx-spark",),
    ),
    _gpu(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        (9, 0),
        sms=114,
        memory_gb=80,
        bandwidth_tb_s=2.039,
        l2_mib=50,
        boost_clock_mhz=1755,
        power_limit_w=350,
        source=(
            "NVIDIA H100 PCIe product brief and Hopper whitepaper; bandwidth: 5120 bits at 1593 MHz"
        ),
        aliases=("h100-pcie-80gb", "h100-80gb-hbm2e"),
    ),
    _gpu(
        "h100-sxm",
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        sms=132,
        memory_gb=80,
        bandwidth_tb_s=3.35,
        l2_mib=50,
        boost_clock_mhz=1980,
        power_limit_w=700,
        source="NVIDIA H100 datasheet and Hopper whitepaper",
        aliases=("h100", "h100-sxm5", "h100-80gb"),
    ),
    _gpu(
        "h100-nvl",
        "NVIDIA H100 NVL",
        (9, 0),
        sms=132,
        memory_gb=94,
        bandwidth_tb_s=3.9,
        l2_mib=60,
        boost_clock_mhz=1785,
        power_limit_w=400,
        source=(
            "NVIDIA H100 NVL product brief; L2: all six memory partitions are enabled, as on H200"
        ),
    ),
    _gpu(
        "h800",
        "NVIDIA H800",
        (9, 0),
        sms=132,
        memory_gb=80,
        bandwidth_tb_s=3.35,
        l2_mib=50,
        boost_clock_mhz=1980,
        power_limit_w=700,
        source="NVIDIA H800 datasheet; SMs, clock and L2 as on H100 SXM",
        aliases=("h800-sxm", "h800-sxm5", "h800-80gb"),
    ),
    _gpu(
        "h800-pcie",
        "NVIDIA H800 PCIe",
        (9, 0),
        sms=114,
        memory_gb=80,
        bandwidth_tb_s=2.039,
        l2_mib=50,
        boost_clock_mhz=1755,
        power_limit_w=350,
        source="NVIDIA H800 datasheet; SMs, clock, L2 and bandwidth as on H100 PCIe",
        aliases=("h800-pcie-80gb",),
    ),
    _gpu(
        "h20",
        "NVIDIA H20",
        (9, 0),
        sms=78,
        memory_gb=96,
        bandwidth_tb_s=4.0,
        l2_mib=60,
        boost_clock_mhz=1980,
        power_limit_w=500,
        source="NVIDIA HGX H20 specification; SMs, clock and L2 as the driver reads them",
        aliases=("h20-sxm", "h20-96gb"),
    ),
    _gpu(
        "h20-3e",
        "NVIDIA H20-3e",
        (9, 0),
        sms=78,
        memory_gb=141,
        bandwidth_tb_s=4.8,
        l2_mib=60,
        boost_clock_mhz=1980,
        power_limit_w=500,
        source="NVIDIA HGX H20 specification; SMs, clock and L2 as on H20",
        aliases=("h20-141gb",),
    ),
    _gpu(
        "h200",
        "NVIDIA H200",
        (9, 0),
        sms=132,
        memory_gb=141,
        bandwidth_tb_s=4.8,
        l2_mib=60,
        boost_clock_mhz=1980,
        power_limit_w=700,
        source="NVIDIA H200 datasheet; SMs and L2 as the driver reads them",
        aliases=("h200-sxm", "h200-sxm5"),
    ),
    _gpu(
        "h200-nvl",
        "NVIDIA H200 NVL",
        (9, 0),
        sms=132,
        memory_gb=141,
        bandwidth_tb_s=4.8,
        l2_mib=60,
        boost_clock_mhz=1785,
        power_limit_w=600,
        source="NVIDIA H200 datasheet; SMs and L2 as on H200",
    ),
    _gpu(
        "gh200",
        "NVIDIA GH200 480GB",
        (9, 0),
        sms=132,
        memory_gb=96,
        bandwidth_tb_s=4.0,
        l2_mib=60,
        boost_clock_mhz=1980,
        power_limit_w=1000,
        source=(
            "NVIDIA GH200 datasheet and Grace Hopper whitepaper; 96 GB HBM3 beside 120 or 480 GB of"
            " the CPU, power of the whole module"
        ),
        aliases=("gh200-96gb", "gh200-120gb"),
    ),
    _gpu(
        "gh200-144gb",
        "NVIDIA GH200 144G HBM3e",
        (9, 0),
        sms=132,
        memory_gb=144,
        bandwidth_tb_s=4.9,
        l2_mib=60,
        boost_clock_mhz=1980,
        power_limit_w=1000,
        source=(
            "NVIDIA GH200 datasheet; SMs and L2 as the driver reads them, power of the whole module"
        ),
        aliases=("gh200-144g",),
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        (10, 0),
        sms=148,
        memory_gb=180,
        bandwidth_tb_s=7.7,
        l2_mib=126,
        boost_clock_mhz=1965,
        power_limit_w=1000,
        source=(
            "NVIDIA DGX B200 datasheet and Blackwell tuning guide; SMs as the driver reads them, "
            "bandwidth: 7680 bits at 3996 MHz (the datasheet rounds up to 8)"
        ),
        aliases=("b200-sxm", "b200-180gb"),
    ),
    _gpu(
        "gb200",
        "NVIDIA GB200",
        (10, 0),
        sms=152,
        memory_gb=186,
        bandwidth_tb_s=8.0,
        l2_mib=126,
        boost_clock_mhz=2062,
        power_limit_w=1200,
        source=(
            "NVIDIA GB200 NVL72 datasheet; SMs and clock as the driver reads them, L2 as on B200"
        ),
    ),
    _gpu(
        "b300",
        "NVIDIA B300 SXM6 AC",
        (10, 3),
        sms=148,
        memory_gb=270,
        bandwidth_tb_s=7.7,
        l2_mib=126,
        boost_clock_mhz=2032,
        power_limit_w=1100,
        source="NVIDIA Blackwell Ultra datasheet; SMs, clock and L2 as the driver reads them",
        aliases=("b300-sxm", "b300-270gb"),
    ),
)


#: Whole GPUs behind the boards that names of virtual GPUs begin with, where these differ: NVIDIA AI
#: Enterprise user guide, "Virtual GPU Types".
_VIRTUAL_BOARDS = {
    "a100": "a100-40gb-pcie",
    "a100x": "a100-40gb",
    "a100d": "a100-80gb-pcie",
    "a100dx": "a100-80gb",
    "a800d": "a800-80gb-pcie",
    "a800dx": "a800-80gb",
    "h100": "h100-pcie",
    "h100xm": "h100-sxm",
    "h100l": "h100-nvl",
    "h800": "h800-pcie",
    "h800xm": "h800",
    "h200": "h200-nvl",
    "h200x": "h200",
    "h20x": "h20-3e",
    "rtx-pro-6000-blackwell-dc": "rtx-pro-6000",
}
#: ``A100-40C`` shares the GPU by time; ``A100-3-20C`` is backed by a MIG instance of 3 slices.
_VIRTUAL = re.compile(r"(.+?)-(?:(\d)-)?\d+[abcq](?:me|nome|meall|gfx)?")
_MIG = re.compile(r"\s+MIG\s.*$")


class UnknownGpu(UserError):
    """A name that the catalogue does not have.

    Attributes:
        name: Name as given.
        hint: Nearest name of the same model, or the known names.
    """

    def __init__(self, name: str, hint: str) -> None:
        super().__init__(name, hint)
        self.name = name
        self.hint = hint

    def __str__(self) -> str:
        return f"there is no GPU {self.name!r} in the catalogue, {self.hint}"


def find(name: str) -> GpuSpec:
    """The GPU of that name, alias or product name; upper and lower case are the same.

    Raises:
        UnknownGpu: The catalogue has none.
    """
    spec = _by_name().get(slug(name))
    if spec is None:
        raise UnknownGpu(name, _hint(name))
    return spec


def is_known(name: str) -> bool:
    """Return True if `find` knows the name."""
    return slug(name) in _by_name()


def match_product(product: str) -> GpuSpec | None:
    """The catalogue's entry for a product name as the driver prints it, or None.

    A MIG instance (``NVIDIA H200 MIG 1g.18gb``) or a virtual GPU (``NVIDIA H100L-94C``) matches the
    GPU that it is a part of.
    """
    key = slug(_MIG.sub("", product))
    if virtual := _VIRTUAL.fullmatch(key):
        key = _VIRTUAL_BOARDS.get(virtual[1], virtual[1])
    elif key == "h100":  # short for the most common of them; as a product it has 94 GB
        return None
    return _by_name().get(key)


def is_instance(product: str) -> bool:
    """Return True for a MIG instance, or a virtual GPU that is one."""
    virtual = _VIRTUAL.fullmatch(slug(product))
    return _MIG.search(product) is not None or (virtual is not None and virtual[2] is not None)


def is_virtual(product: str) -> bool:
    """Return True for a virtual GPU, which may have less memory than the whole."""
    return _VIRTUAL.fullmatch(slug(product)) is not None


def slug(name: str) -> str:
    """``NVIDIA GeForce RTX 4090`` -> ``rtx-4090``: lower case, without the brand, parts joined by
    hyphens.
    """
    words = re.split(r"[^a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in _BRANDS)


def model_of(name: str) -> str:
    """Return the model of a GPU's name or product: its words up to the first number, ``a100`` or
    ``rtx-pro-6000``.
    """
    spec = match_product(name) or _by_name().get(slug(name))
    key = spec.name if spec else slug(name)
    model = re.match(r"(?:[a-z]+-)*[a-z]*\d[a-z0-9]*", key)
    return model[0] if model else key


@cache
def _by_name() -> dict[str, GpuSpec]:
    return {
        key: spec for spec in CATALOGUE for key in (spec.name, slug(spec.product), *spec.aliases)
    }


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest known name of the same model. Another model has other SMs, another number
    of GB is another product: neither is a typing error.
    """
    key, numbers = slug(name), _numbers(name)
    alike = [
        other
        for other in known
        if other.replace("-", "") == key.replace("-", "")
        or (model_of(other) == model_of(name) and numbers <= _numbers(other))
    ]
    return next(iter(difflib.get_close_matches(key, alike, n=1, cutoff=0.5)), None)


def _numbers(name: str) -> set[str]:
    return set(re.findall(r"\d+", name))


def _hint(name: str) -> str:
    if (nearest := suggest(name, _by_name())) is not None:
        return f"did you mean {nearest!r}?"
    alike = [spec.name for spec in CATALOGUE if model_of(spec.name) == model_of(name)]
    return f"known: {', '.join(alike)}" if alike else "`leanbench list gpus` lists the known ones"
