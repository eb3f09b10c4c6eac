"""All checks in their order, and how they are run."""

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

#: Kernels that are always checked: those of a sweep that names none.
MAIN_KERNELS = ("lean", "fa2", "fixed_split")

#: `gpu`: the driver has one. `launches`: kernels can run on it, too.
Needs = Literal["nothing", "gpu", "launches"]


@dataclass(frozen=True)
class Check:
    """One line of `leanbench doctor`."""

    name: str
    run: Callable[[Machine], Finding]
    needs: Needs = "nothing"
    #: What is said while it runs; None for a check that takes no time.
    slow: str | None = None
    #: Only where the machine is examined in depth.
    deep: bool = False


def checks(machine: Machine) -> list[Check]:
    """Every check. The energy counter comes before the load: it wants an idle GPU."""
    trying = "reading hardware counters for a try (half a minute)" if machine.deep else None
    return [
        Check("leanbench", software.leanbench_version),
        Check("python", software.python_version),
        Check("torch", software.torch_version),
        Check("triton", software.triton_version),
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
        Check("counters", instruments.hardware_counters, "launches", trying),
        *_library_checks(machine),
        Check("triton cache", software.triton_cache),
        Check("runs", software.runs_folder),
    ]


def _kernel_checks() -> list[Check]:
    """The reference is left out: it is what the others are held against. Libraries compile for a
    minute each.
    """
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
    """Runs the checks that this machine allows, and yields (name, finding).

    Args:
        quick: leave out what takes seconds.
        announce: called with what takes a while, before it starts.
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
    """Finding of a check; an exception is one, too."""
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
