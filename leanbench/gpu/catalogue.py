"""The GPUs that leanbench knows without having them.

Units: `memory_gb` is the vendor's label, `bandwidth_tb_s` counts 10^12 bytes, `l2_mib` counts
2^20 and shared memory 2^10. The driver reports up to 7% more than 10^9 bytes a GB, or a little less
where ECC takes its share, so whoever asks whether something fits counts 10^9. Shared memory and
registers come from the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability"; a CTA can use 1 KB less than its SM holds. Where a datasheet says "up to" and the
driver reads another number, the driver's stands here and `source` says so.
"""

from __future__ import annotations

import re
from functools import cache

from leanbench.core.errors import UserError, nearest
from leanbench.core.gpu_spec import GpuSpec

#: Shared memory per SM, in KB, by compute capability.
_SHARED_KB_PER_SM = {(8, 0): 164, (8, 6): 100, (8, 9): 100, (9, 0): 228, (10, 0): 228, (12, 0): 100}
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
        aliases=("h100-pcie-80gb",),
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
            "NVIDIA GH200 datasheet and Grace Hopper whitepaper; 96 GB HBM3, power of the whole"
            " module"
        ),
        aliases=("gh200-96gb",),
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
)


def find(name: str) -> GpuSpec:
    """The GPU of that name, alias or product name; upper and lower case are the same.

    Raises:
        UserError: the catalogue has none; the nearest name is suggested.
    """
    known = _by_name()
    key = slug(name)
    if key not in known:
        raise UserError(f"there is no GPU {name!r} in the catalogue, {_suggestion(key)}")
    return known[key]


def match_product(product: str) -> GpuSpec | None:
    """The catalogue's entry for a product name as the driver prints it, or None.

    A MIG instance (``NVIDIA H200 MIG 1g.18gb``) matches the GPU that it is a slice of.
    """
    whole = re.sub(r"\s+MIG\s.*$", "", product)
    return _by_name().get(slug(whole))


def slug(name: str) -> str:
    """``NVIDIA GeForce RTX 4090`` -> ``rtx-4090``: lower case, without the brand, parts joined by
    hyphens.
    """
    words = re.split(r"[^a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla", ""))


@cache
def _by_name() -> dict[str, GpuSpec]:
    return {
        key: spec for spec in CATALOGUE for key in (spec.name, slug(spec.product), *spec.aliases)
    }


def _suggestion(key: str) -> str:
    # Only what `leanbench list gpus` shows is listed; aliases take part in the guess.
    guess = nearest(key, _by_name())
    return (
        guess
        if guess.startswith("did you mean")
        else nearest(key, (spec.name for spec in CATALOGUE))
    )
