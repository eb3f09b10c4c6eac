"""All checks in order, and their execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

from leanbench.core.errors import UserError
from leanbench.core.registry import kernels as all_kernels
from leanbench.doctor import gpu, instruments, software
from leanbench.doctor.machine import Finding, Machine, problem
from leanbench.doctor.spread import PROCESSES, process_spread

#: Kernels that are always checked, the default of sweeps.
MAIN_KERNELS = ("lean", "fa2", "fixed_split")

#: `gpu`: the driver has one. `launches`: kernels also run on it.
Needs = Literal["nothing", "gpu", "launches"]


@dataclass(frozen=True)
class Check:
    """One line of `leanbench doctor`."""

    name: str
    run: Callable[[Machine], Finding]
    needs: Needs = "nothing"
    #: Description of a slow check; None for a fast one.
    slow: str | None = None
    #: Only with --deep.
    deep: bool = False


def checks(machine: Machine) -> list[Check]:
    """Return all checks. The energy counter comes first because it needs an idle GPU."""
    trying = "reading hardware counters for a try (half a minute)" if machine.deep else None
    return [
        Check("leanbench", software.leanbench_version),
        Check("python", software.python_version),
        Check("torch", software.torch_version),
        Check("triton", software.triton_version),
        Check("calls", software.path_of_calls),
        Check("environment", software.environment_variables),
        Check("gpu", gpu.product),
        Check("driver", gpu.driver, "gpu"),
        Check("memory", gpu.memory, "gpu"),
        Check("mig", gpu.mig, "gpu"),
        Check("links", gpu.links, "gpu"),
        Check("processes", gpu.other_processes, "gpu"),
        Check("clocks", gpu.clocks_and_power, "gpu"),
        Check("throttling", gpu.throttling, "gpu"),
        Check(
            "energy",
            instruments.energy_counter,
            "gpu",
            "watching the energy counter of the idle GPU (2 s)",
        ),
        Check("events", instruments.event_resolution, "launches"),
        Check(
            "timer",
            instruments.timer_tick,
            "launches",
            "compiling a kernel that reads %globaltimer",
        ),
        *_kernel_checks(),
        Check(
            "bandwidth",
            instruments.read_bandwidth,
            "launches",
            "measuring the read bandwidth (3 s)",
        ),
        Check("noise", instruments.noise_floor, "launches", "timing lean against itself (3 s)"),
        Check(
            "spread",
            process_spread,
            "launches",
            f"timing lean in {PROCESSES} processes (half a minute)",
            deep=True,
        ),
        Check("counters", instruments.hardware_counters, "launches", trying),
        *_library_checks(machine),
        Check("triton cache", software.triton_cache),
        Check("runs", software.runs_folder),
    ]


def _kernel_checks() -> list[Check]:
    """Return a check per timed kernel. Libraries compile for a minute each."""
    return [
        Check(
            f"kernel {name}",
            partial(software.kernel_is_right, kernel),
            "launches",
            f"compiling and checking {name}",
            deep=name not in MAIN_KERNELS,
        )
        for name, kernel in all_kernels().items()
        if kernel.is_timed
    ]


def _library_checks(machine: Machine) -> list[Check]:
    """Check each installed library, and name the others in one line. Only importing takes time."""
    installed = {
        module: distribution
        for module, distribution in software.LIBRARIES.items()
        if find_spec(module) is not None
    }
    checks = [
        Check(
            module,
            partial(software.library, module, distribution),
            slow=f"importing {distribution}" if machine.deep else None,
        )
        for module, distribution in installed.items()
    ]
    missing = [name for module, name in software.LIBRARIES.items() if module not in installed]
    return [*checks, Check("libraries", partial(software.missing_libraries, missing))]


def examine(
    machine: Machine, quick: bool, announce: Callable[[str], None]
) -> Iterator[tuple[str, Finding]]:
    """Run the checks that this machine allows, and yield (name, finding).

    Args:
        quick: Leave out slow checks.
        announce: Receives a description before each slow check.
    """
    for check in checks(machine):
        if (quick and check.slow is not None) or (check.deep and not machine.deep):
            continue
        if check.needs == "gpu" and not machine.has_gpu:
            continue
        if check.needs == "launches" and not machine.can_launch:
            continue
        if check.slow is not None:
            announce(check.slow)
        yield check.name, run_check(check, machine)


def run_check(check: Check, machine: Machine) -> Finding:
    """Return the finding of a check, also for an exception."""
    try:
        return check.run(machine)
    except UserError as error:
        return problem(str(error), None)
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        return problem(
            f"this check failed: {type(error).__name__}{': ' if message else ''}{message}",
            "if the line does not say what to do, report it with the output of `leanbench doctor"
            " --json`",
        )
