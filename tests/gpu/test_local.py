import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from leanbench.core.errors import UserError
from leanbench.gpu.catalogue import UnknownGpu, find
from leanbench.gpu.local import DEFAULT_GPU, Target, choose, spec_of_device
from leanbench.gpu.nvml_library import GpuLostError, NvmlError, OldBindingError

Install = Callable[..., Any]

H200 = {"product": "NVIDIA H200", "uuid": "GPU-aaaa"}
A100_40 = {"product": "NVIDIA A100-SXM4-40GB", "uuid": "GPU-bbbb"}
UNKNOWN = {"product": "NVIDIA X9000", "uuid": "GPU-dddd"}
BY_INDEX = "nvmlDeviceGetHandleByIndex"


def device(name: Any = "NVIDIA H200", uuid: Any = "aaaa", **properties: Any) -> SimpleNamespace:
    """Return an H200's properties in torch 2.5; `properties` replace or, when None, remove."""
    fields = {"name": name, "uuid": uuid, "major": 9, "minor": 0, "total_memory": 150_109_880_320}
    fields |= {"multi_processor_count": 132, "L2_cache_size": 62_914_560}
    fields |= {"shared_memory_per_multiprocessor": 233_472, "regs_per_multiprocessor": 65_536}
    fields |= {"shared_memory_per_block_optin": 232_448, **properties}
    return SimpleNamespace(**{name: value for name, value in fields.items() if value is not None})


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a torch with these devices."""

    def install(
        *devices: SimpleNamespace, available: bool = True, built_for: str | None = "13.0"
    ) -> None:
        cuda = SimpleNamespace(
            is_available=lambda: available,
            is_initialized=lambda: available,
            device_count=lambda: len(devices),
            get_device_properties=lambda index: devices[index],
        )
        version = SimpleNamespace(cuda=built_for)
        torch = SimpleNamespace(cuda=cuda, version=version, __version__="2.13.0")
        monkeypatch.setitem(sys.modules, "torch", torch)

    return install


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch fails."""
    monkeypatch.setitem(sys.modules, "torch", None)


def test_specs_are_the_drivers_or_the_catalogues(fake_torch):
    fake_torch(device(multi_processor_count=130, L2_cache_size=52_428_800))
    spec = spec_of_device(0)
    assert (spec.name, spec.product) == ("h200", "NVIDIA H200")
    assert (spec.sms, spec.l2_mib, spec.memory_gb) == (130, 50, 141)
    assert (spec.shared_kb_per_sm, spec.shared_kb_per_cta) == (228, 227)
    assert spec.registers_per_sm == 65_536
    assert (spec.bandwidth_tb_s, spec.boost_clock_mhz, spec.power_limit_w) == (4.8, 1980, 700)
    assert spec.source.startswith("the driver; bandwidth, clock and power: NVIDIA H200 datasheet")
    names = "L2_cache_size shared_memory_per_multiprocessor shared_memory_per_block_optin"
    fake_torch(device(**dict.fromkeys([*names.split(), "regs_per_multiprocessor"])))
    spec = spec_of_device(0)
    assert (spec.l2_mib, spec.shared_kb_per_sm, spec.shared_kb_per_cta) == (60, 228, 227)
    assert spec.registers_per_sm == 65_536


def test_mig_and_virtual_gpus_have_their_share(fake_torch):
    share = {"total_memory": 141 * 2**30 // 8, "multi_processor_count": 16}
    fake_torch(device("NVIDIA H200 MIG 1g.18gb", **share))
    spec = spec_of_device(0)
    assert (spec.name, spec.sms, spec.memory_gb) == ("h200", 16, 17.6)
    assert spec.bandwidth_tb_s == pytest.approx(0.6)
    fake_torch(device("GRID A100D-20C", major=8, total_memory=20 * 2**30))
    spec = spec_of_device(0)
    assert (spec.name, spec.memory_gb, spec.bandwidth_tb_s) == ("a100-80gb-pcie", 20.0, 1.935)
    fake_torch(device("NVIDIA A100D-2-20C", major=8, total_memory=20 * 2**30))
    spec = spec_of_device(0)
    assert (spec.memory_gb, spec.bandwidth_tb_s) == (20.0, pytest.approx(1.935 / 4))


def test_unknown_products(fake_torch, fake_nvml):
    fake_nvml({**UNKNOWN, "memory_clock_mhz": 2000, "memory_bus_bits": 5120, "sm_clock_mhz": 1800})
    own = {"multi_processor_count": 64, "total_memory": 32 * 2**30}
    fake_torch(device("NVIDIA X9000", "dddd", major=11, minor=0, **own))
    spec = spec_of_device(0)
    assert (spec.name, spec.product, spec.compute_capability) == ("x9000", "NVIDIA X9000", (11, 0))
    assert (spec.sms, spec.memory_gb, spec.l2_mib, spec.shared_kb_per_sm) == (64, 32, 60, 228)
    assert (spec.bandwidth_tb_s, spec.boost_clock_mhz, spec.power_limit_w) == (2.56, 1800, 700)
    assert spec.source == "the driver; bandwidth: memory clock times bus width"
    fake_nvml(UNKNOWN).init_error = pynvml.NVML_ERROR_UNKNOWN
    fake_torch(device("NVIDIA X9000", "dddd"))
    spec = spec_of_device(0)
    assert (spec.sms, spec.bandwidth_tb_s) == (132, 0.25)
    assert spec.source.endswith("assumed: bandwidth, clock, power")
    fake_nvml({"product": "NVIDIA H100", "uuid": "GPU-aaaa"})
    fake_torch(device("NVIDIA H100", total_memory=94 * 2**30))
    assert spec_of_device(0).name == "h100-94gb"


@pytest.mark.usefixtures("no_torch")
def test_without_gpu_the_model_of_the_named_one_or_the_default(fake_nvml):
    fake_nvml().init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert choose(None, require_gpu=False) == Target(find(DEFAULT_GPU), None)
    assert choose("H200", require_gpu=False) == Target(find("h200"), None)
    with pytest.raises(UnknownGpu) as error:
        choose("a100-80g", require_gpu=False)
    assert (error.value.name, error.value.hint) == ("a100-80g", "did you mean 'a100-80gb'?")


@pytest.mark.usefixtures("no_torch")
def test_required_gpu_is_missing(fake_nvml, monkeypatch):
    fake = fake_nvml(H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="hides every GPU: unset it; leave --require-gpu out to p"):
        choose(None, require_gpu=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="no a100 here, only NVIDIA H200; leave --gpu out to meas"):
        choose("a100", require_gpu=True)
    fake.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    with pytest.raises(UserError, match="--require-gpu: there is no working NVIDIA driver here"):
        choose("h200", require_gpu=True)


@pytest.mark.parametrize("name", [None, "h200", "H200-SXM", "NVIDIA H200"])
@pytest.mark.parametrize("require_gpu", [False, True])
def test_local_gpu_that_answers(fake_nvml, fake_torch, name, require_gpu):
    fake_nvml(H200)
    fake_torch(device())
    target = choose(name, require_gpu)
    assert (target.local_index, target.spec, target.note) == (0, spec_of_device(0), None)


#: Names that mean the product that is here, and those that mean another one.
NAMES = {
    "NVIDIA A100-SXM4-40GB": ("a100 a100-40gb", "a100-80gb"),
    "NVIDIA A100-SXM-64GB": ("a100", ""),
    "NVIDIA A100-PCIE-40GB": ("", "a100-40gb"),
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": ("a100 a100-40gb", ""),
    "GRID A100-40C": ("a100", ""),
    "NVIDIA A100DX-1-10C": ("a100-80gb", ""),
    "NVIDIA H100L-94C": ("h100 h100-nvl", "h100-sxm"),
    "NVIDIA H100 80GB HBM2e": ("h100", ""),
    "NVIDIA H100": ("h100", "h100-sxm"),
    "NVIDIA H200 NVL": ("h200-nvl", "h200"),
    "NVIDIA H20-3e": ("", "h20"),
    "NVIDIA GH200 120GB": ("gh200 gh200-120gb", ""),
    "NVIDIA GH200 144G HBM3e": ("gh200", "gh200-96gb"),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": ("rtx-pro-6000", ""),
    "NVIDIA GeForce RTX 4090 D": ("", "rtx-4090"),
    "NVIDIA H200": ("", "h100 h20"),
    "NVIDIA X9000": ("x9000", ""),
    "NVIDIA X9000 MIG 1g.10gb": ("x9000", ""),
    "NVIDIA X9000 Ultra": ("x9000", ""),
}


@pytest.mark.parametrize("product", NAMES)
def test_names(fake_nvml, fake_torch, product):
    fake_nvml({"product": product, "uuid": "GPU-aaaa"})
    fake_torch(device(product))
    its_own, others = map(str.split, NAMES[product])
    for name in its_own:
        assert choose(name, require_gpu=False).local_index == 0, name
    for name in others:
        target = choose(name, require_gpu=False)
        assert (target.local_index, target.spec) == (None, find(name))
        with pytest.raises(UserError, match=f"--require-gpu: no {name} here, only {product}"):
            choose(name, require_gpu=True)


@pytest.mark.parametrize(
    ("product", "name", "own_name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-80gb", "a100-40gb"),
        ("NVIDIA H200 NVL", "h200", "h200-nvl"),
        ("NVIDIA H100L-94C", "h100-sxm", "h100-nvl"),
        ("NVIDIA GeForce RTX 4090 D", "4090", "rtx-4090-d"),
        ("NVIDIA H200", "h20", None),
    ],
)
def test_a_prediction_tells_of_another_product_of_the_model(fake_nvml, product, name, own_name):
    fake_nvml({"product": product, "uuid": "GPU-aaaa"})
    note = choose(name, require_gpu=False).note
    assert (note is None) is (own_name is None)
    assert note is None or (product in note and f"`--gpu {own_name}`" in note)


def test_indices_are_torchs_and_families_the_product_here(fake_nvml, fake_torch):
    fake_nvml(A100_40, H200)
    fake_torch(device(), device("NVIDIA A100-SXM4-40GB", "bbbb"))
    assert choose("a100", require_gpu=True).local_index == 1
    first = choose(None, require_gpu=True)
    assert (first.local_index, first.spec.name) == (0, "h200")
    fake_nvml(A100_40)
    fake_torch(available=False)
    assert choose("a100", require_gpu=False).spec == find("a100-40gb")


#: What is wrong with NVML, and the words for it.
MISSING, NO_LIBRARY = "missing", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
TOO_OLD, OLD_BINDING = "too old", "NVMLLibraryMismatchError"
UPDATED, HALFWAY = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "nvmlSystemGetDriverVersion"
FAULTS: dict[Any, str] = {
    MISSING: "pynvml is not installed: pip install nvidia-ml-py",
    NO_LIBRARY: "there is no working NVIDIA driver here (NVML: NVML Shared Library Not Found)",
    TOO_OLD: "NVML fails (Unversioned function called): see what `nvidia-smi` says",
    OLD_BINDING: str(OldBindingError(pynvml.__file__)),
    UPDATED: "the NVIDIA driver was updated while its kernel module kept running: reboot, or reload"
    " the module",
    # It says which GPUs there are, and no more.
    HALFWAY: "NVML fails (Unknown Error): see what `nvidia-smi` says",
}
#: A driver that is broken is no machine without a GPU.
BROKEN = (TOO_OLD, OLD_BINDING, UPDATED, HALFWAY)
SILENT = pytest.mark.parametrize("nvml", FAULTS)


def break_nvml(nvml: Any, fake_nvml: Install, monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(*arguments: Any) -> Any:
        if nvml == TOO_OLD:
            raise pynvml.NVMLLibraryMismatchError("Unversioned function called")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    fake = fake_nvml(H200)
    if nvml == MISSING:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif nvml == OLD_BINDING:
        monkeypatch.delattr(pynvml, nvml)
    elif nvml in (TOO_OLD, HALFWAY):
        monkeypatch.setattr(pynvml, HALFWAY if nvml == HALFWAY else BY_INDEX, fail)
    else:
        fake.init_error = nvml
    return FAULTS[nvml]


@pytest.fixture
def cuda_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanbench.gpu.local._has_cuda", lambda: True)


@SILENT
@pytest.mark.usefixtures("cuda_is_here")
@pytest.mark.parametrize(("name", "index"), [(None, 0), ("h200", 0), ("a100", 1)])
def test_torch_s_gpu_where_nvml_cannot_say(fake_nvml, fake_torch, monkeypatch, nvml, name, index):
    why = break_nvml(nvml, fake_nvml, monkeypatch)
    fake_torch(device(), device("NVIDIA A100-SXM4-40GB", "bbbb"))
    for require_gpu in (False, True):
        target = choose(name, require_gpu)
        assert (target.local_index, target.spec) == (index, spec_of_device(index))
        unknown = "Clocks, temperature, power and other processes stay unknown"
        assert target.note == f"{unknown}, NVML cannot be used ({why})"
    # Another one than torch has.
    note = f"NVML cannot be used ({why})" if nvml in BROKEN else None
    assert choose("b200", require_gpu=False) == Target(find("b200"), None, note)


@SILENT
@pytest.mark.usefixtures("cuda_is_here")
@pytest.mark.parametrize("with_torch", [False, True])
def test_neither_nvml_nor_torch_has_a_gpu(fake_nvml, fake_torch, monkeypatch, nvml, with_torch):
    why = break_nvml(nvml, fake_nvml, monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", None)
    if with_torch:
        fake_torch(available=False)
    note = f"NVML cannot be used ({why})" if nvml in BROKEN else None
    for name in (None, "h200"):
        assert choose(name, require_gpu=False) == Target(find(name or DEFAULT_GPU), None, note)
        with pytest.raises(UserError) as error:
            choose(name, require_gpu=True)
        assert why in str(error.value)
    if note is not None:
        with pytest.raises(UnknownGpu) as unknown:
            choose("x9000", require_gpu=False)
        assert unknown.value.hint.endswith(note)


@pytest.mark.usefixtures("cuda_is_here", "no_torch")
def test_torch_is_not_asked_where_nvml_says_that_there_is_no_gpu(fake_nvml, monkeypatch):
    def asked(*args: Any) -> Any:
        raise AssertionError("torch was asked")

    monkeypatch.setattr("leanbench.gpu.local._torch_target", asked)
    fake_nvml()
    assert choose(None, require_gpu=False) == Target(find(DEFAULT_GPU), None)
    fake_nvml(H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose("h200", require_gpu=False) == Target(find("h200"), None)


def test_torch_is_not_imported_without_the_driver_s_library(fake_nvml, fake_torch, monkeypatch):
    break_nvml(NO_LIBRARY, fake_nvml, monkeypatch)
    fake_torch(device())

    def load(name: str) -> Any:
        assert name == "libcuda.so.1"
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", load)
    assert choose(None, require_gpu=False) == Target(find(DEFAULT_GPU), None)
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    assert choose(None, require_gpu=False).local_index == 0


@pytest.mark.parametrize(
    ("built_for", "fix"),
    [(None, "is built without CUDA: install a CUDA build"), ("13.0", "update the driver")],
)
def test_torch_that_cannot_use_the_gpu(fake_nvml, fake_torch, built_for, fix):
    fake_nvml(H200)
    fake_torch(available=False, built_for=built_for)
    target = choose(None, require_gpu=False)
    assert (target.spec.name, target.local_index) == ("h200", None)
    assert fix in str(target.note)
    with pytest.raises(UserError, match=fix):
        choose(None, require_gpu=True)


@pytest.mark.parametrize("name", ["h20", "H200 NVL", "x9000"])
def test_torch_without_cuda_is_told_before_the_catalogue(fake_nvml, fake_torch, name):
    product = f"NVIDIA {name.upper()}"
    fake_nvml({"product": product, "uuid": "GPU-aaaa"})
    fake_torch(available=False, built_for=None)
    obstacle = f"there is an {product} here, but torch 2.13.0 is built without CUDA"
    if name == "x9000":
        with pytest.raises(UserError, match=obstacle):
            choose(name, require_gpu=False)
    else:
        target = choose(name, require_gpu=False)
        assert (target.spec, target.local_index) == (find(name), None)
        assert str(target.note).startswith(obstacle)


LOST = {"errors": {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}}
FORBIDDEN = {"uuid": "GPU-dddd", "errors": {"nvmlDeviceGetName": pynvml.NVML_ERROR_NO_PERMISSION}}


@pytest.mark.parametrize("fault", [LOST, FORBIDDEN])
@pytest.mark.parametrize("visible", [None, "0", "2,1,0"])
def test_a_gpu_that_cannot_be_read_matters_only_if_it_is_chosen(
    fake_nvml, fake_torch, monkeypatch, fault, visible
):
    fake_nvml(H200, fault, A100_40)
    fake_torch(device(), device("NVIDIA A100-SXM4-40GB", "bbbb"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose(None, require_gpu=True).local_index == 0
    assert choose("h200", require_gpu=True).note is None
    predicted = choose("b200", require_gpu=False)
    assert (predicted.spec, predicted.local_index) == (find("b200"), None)
    # It might be the one, where it is visible.
    assert (predicted.note is None) is (visible == "0")


@pytest.mark.parametrize(("fault", "kind"), [(LOST, GpuLostError), (FORBIDDEN, NvmlError)])
@pytest.mark.parametrize("require_gpu", [False, True])
def test_the_chosen_gpu_is_refused_by_its_number(fake_nvml, monkeypatch, fault, kind, require_gpu):
    fake_nvml(H200, fault, A100_40)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr("leanbench.gpu.local._has_cuda", lambda: False)
    with pytest.raises(NvmlError) as error:
        choose(None, require_gpu)
    assert type(error.value) is kind
    assert str(error.value).startswith("GPU 1 ")
    with pytest.raises(UserError, match=r"no b200 here, only NVIDIA H200; .*GPU 1 "):
        choose("b200", require_gpu=True)


@pytest.mark.usefixtures("cuda_is_here")
def test_torch_decides_which_gpu_is_first(fake_nvml, fake_torch):
    """CUDA does not count a GPU that the container may not use; NVML does."""
    fake_nvml(FORBIDDEN, H200)
    fake_torch(device())
    assert choose(None, require_gpu=True) == Target(spec_of_device(0), 0)
    fake_torch(device(uuid="dddd"))
    assert "GPU 0 cannot be read" in str(choose(None, require_gpu=True).note)


@pytest.mark.parametrize(
    ("visible", "is_told"), [("0,0", True), ("9", True), ("x", True), ("", False), ("-1", False)]
)
def test_cuda_visible_devices_is_told_and_not_the_driver(
    fake_nvml, fake_torch, monkeypatch, visible, is_told
):
    fake_nvml(H200)
    fake_torch(available=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    target = choose("h200", require_gpu=False)
    reason = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    assert (target.spec, target.local_index) == (find("h200"), None)
    assert (target.note is not None) is is_told
    assert target.note is None or target.note.startswith(reason)
    with pytest.raises(UserError, match=reason):
        choose(None, require_gpu=True)
