"""A `pynvml` that lacks names: another package of that name, or an old release."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

import leanbench.gpu
from leanbench.doctor.checks import examine
from leanbench.doctor.machine import Machine
from leanbench.gpu.nvml import Nvml
from leanbench.gpu.nvml_library import OldBindingError
from leanbench.gpu.topology import topology
from leanbench.gpu.visible import local_gpus

Install = Callable[..., Any]
#: Every name of the bindings that the package uses.
NAMES = sorted(
    {
        name
        for path in Path(leanbench.gpu.__file__).parent.glob("*.py")
        for name in re.findall(r"\bNVML\w+|\bnvml[A-Z]\w+", path.read_text())
        if hasattr(pynvml, name)
    }
)
#: Names that pynvml 8 and 11 and early releases of nvidia-ml-py lack.
GETTERS = (
    "CudaComputeCapability CurrentClocksEventReasons DeviceHandleFromMigDeviceHandle FieldValues"
    " MPSComputeRunningProcesses MemoryBusWidth MigMode P2PStatus ProcessUtilization"
)
CONSTANTS = "DEVICE_MIG_ENABLE FI_DEV_POWER_INSTANT P2P_CAPS_INDEX_NVLINK P2P_CAPS_INDEX_WRITE"
KNOWN = (
    "NVMLLibraryMismatchError",
    *(f"NVML_{name}" for name in CONSTANTS.split()),
    *(f"nvmlDeviceGet{name}" for name in GETTERS.split()),
)


def read_everything() -> None:
    """Ask NVML all that a command may ask."""
    local_gpus()
    with Nvml("GPU-aaaa") as nvml:
        nvml.state()
        nvml.limits()
        nvml.total_energy_mj()
        nvml.power_limit_w()
        nvml.other_processes()
    topology()


@pytest.mark.parametrize("name", [*NAMES, *(name for name in KNOWN if name not in NAMES)])
def test_a_missing_name_is_one_sentence(fake_nvml, monkeypatch, name):
    fake = fake_nvml({"uuid": "GPU-aaaa"}, {"uuid": "GPU-bbbb"})
    monkeypatch.delattr(pynvml, name)
    path = None
    try:
        read_everything()
    except OldBindingError as error:
        path = error.path
    assert path == pynvml.__file__ or name not in KNOWN
    # Without these two it cannot be closed.
    assert fake.open == (name in ("NVMLError", "nvmlShutdown"))


def test_doctor_lists_it_as_a_problem(fake_nvml, monkeypatch, tmp_path):
    fake_nvml({})
    monkeypatch.delattr(pynvml, "NVMLLibraryMismatchError")
    monkeypatch.setattr("leanbench.gpu.local._has_cuda", lambda: False)
    finding = dict(examine(Machine(tmp_path), True, lambda what: None))["gpu"]
    assert (finding.status, finding.text) == ("problem", str(OldBindingError(pynvml.__file__)))


@pytest.mark.parametrize(
    ("file", "text", "is_broken"),
    [
        ("pynvml.py", "def nvmlInit(): pass\n", False),
        ("pynvml.py", "print 'Python 2'\n", True),
        ("pynvml.py", "raise RuntimeError('no')\n", True),
        ("pynvml.py", "import no_such_module_of_theirs\n", True),
        ("pynvml/__init__.py", "NVMLError = Exception\n", False),
    ],
)
def test_another_module_of_that_name(tmp_path, monkeypatch, file, text, is_broken):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OldBindingError) as error:
        local_gpus()
    assert (error.value.path, error.value.is_broken) == (str(path), is_broken)
