"""Versions, environment variables, folders, optional libraries, and kernels that are right."""

from __future__ import annotations

import importlib
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from leanbench.core.kernel import Kernel, written_by
from leanbench.core.paths import nearest_existing
from leanbench.core.problem import AttentionProblem
from leanbench.doctor.machine import Finding, Machine, note, ok, problem

#: Variables that affect timings: harmless value, effect of any other.
_FALSIFYING = {
    "CUDA_LAUNCH_BLOCKING": ("0", "makes every launch wait, and CUDA graphs cannot be captured"),
    "TRITON_INTERPRET": ("0", "runs the kernels in Triton's interpreter on the CPU"),
    "TRITON_DEBUG": ("0", "compiles assertions into the kernels"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", "makes torch allocate memory on every call"),
    "CUDA_INJECTION64_PATH": ("", "loads a profiler or sanitizer into every CUDA program"),
    "NSYS_PROFILING_SESSION_ID": ("", "says that Nsight Systems is profiling this process"),
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": ("100", "leaves a part of the SMs unused"),
}
#: Modules and distributions of libraries to compare with.
LIBRARIES = {
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash_attn_3",
    "flashinfer": "flashinfer-python",
    "flash_mla": "sgl-flash-mla",
    "cudnn": "nvidia-cudnn-frontend",
    "xformers": "xformers",
}
#: Run directories take a few MB per thousand cells, Triton's cache some hundred.
_MIN_FREE_BYTES = 1_000_000_000
#: Small problem with grouped queries. The noise floor uses the same build.
TRIED = AttentionProblem(1, 32, 8, 1024, 128)


def leanbench_version(machine: Machine) -> Finding:
    from leanbench.records.environment import predicted_environment

    environment = predicted_environment()
    commit = environment["commit"]
    shown = (
        ""
        if commit is None
        else f", commit {commit[:12]}{'+changes' if commit.endswith('+changes') else ''}"
    )
    return ok(
        f"leanbench {environment['leanbench']}{shown}, kernels {environment['kernels']}",
        leanbench=environment["leanbench"],
        commit=commit,
        kernels=environment["kernels"],
    )


def python_version(machine: Machine) -> Finding:
    python = platform.python_version()
    return ok(f"Python {python} on {platform.system()} {platform.machine()}", python=python)


def torch_version(machine: Machine) -> Finding:
    import torch

    built_for = torch.version.cuda
    text = f"torch {torch.__version__}, " + (
        f"built for CUDA {built_for}" if built_for else "built without CUDA"
    )
    values = {"torch": str(torch.__version__), "torch_cuda": built_for}
    if machine.target is not None and machine.target.local_index is None:
        why, _, fix = (machine.target.note or text).partition(": ")
        return problem(why, fix or "install a torch that was built for this GPU", **values)
    return ok(text, **values)


def triton_version(machine: Machine) -> Finding:
    try:
        return ok(f"Triton {version('triton')}", triton=version("triton"))
    except PackageNotFoundError:
        return problem(
            "Triton is not installed, no kernel can run", "pip install triton", triton=None
        )


def path_of_calls(machine: Machine) -> Finding:
    from leanbench.attention import fast

    if fast.why_not is None:
        return ok("calls seen before take the C path", c_path=True)
    return note(
        f"calls take Python's path, not C's: {fast.why_not}",
        "install leanbench again where there is gcc or clang, with Python's headers",
        c_path=False,
    )


def environment_variables(machine: Machine) -> Finding:
    variables = {
        name: os.environ[name]
        for name, (harmless, _) in _FALSIFYING.items()
        if os.environ.get(name, "") not in ("", harmless)
    }
    if not variables:
        return ok("no environment variable that changes what is timed")
    effects = "; ".join(
        f"{name}={value} {_FALSIFYING[name][1]}" for name, value in variables.items()
    )
    if not machine.has_gpu:
        return note(f"{effects}; here nothing is timed", variables=variables)
    return problem(effects, f"unset {' '.join(variables)}", variables=variables)


def triton_cache(machine: Machine) -> Finding:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    return _folder(
        "compiled kernels", folder, "set TRITON_CACHE_DIR to a folder that can be written"
    )


def runs_folder(machine: Machine) -> Finding:
    return _folder(
        "run directories", machine.runs, "give `leanbench sweep` another folder with --out"
    )


def _folder(purpose: str, folder: Path, fix: str) -> Finding:
    """Check that files can be made in a folder, or in its nearest parent."""
    path = Path(os.path.expanduser(folder)).absolute()
    existing = nearest_existing(path)
    try:
        with tempfile.TemporaryFile(dir=existing):
            free_bytes = shutil.disk_usage(existing).free
    except OSError as error:
        return problem(
            f"{purpose} cannot be written to {path}: {error.strerror}", fix, folder=str(path)
        )
    values = {"folder": str(path), "free_bytes": free_bytes}
    text = f"{purpose} go to {path}, {free_bytes / 1e9:.3g} GB free"
    if free_bytes < _MIN_FREE_BYTES:
        return problem(text, f"delete something there, or {fix}", **values)
    return ok(text, **values)


def missing_libraries(distributions: Sequence[str], machine: Machine) -> Finding:
    """Name the libraries that are not installed."""
    if not distributions:
        return ok("every library that kernels wrap is installed", missing=[])
    return note(
        f"not installed: {', '.join(distributions)}; only kernels that wrap them need them",
        missing=list(distributions),
    )


def library(module: str, distribution: str, machine: Machine) -> Finding:
    """Report the version of an installed library. In depth, import it: a library built for another
    torch does not load.
    """
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        installed = "of unknown version"
    if not machine.deep:
        return ok(f"{distribution} {installed} is here; --deep imports it", version=installed)
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken library raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return note(
            f"{distribution} is installed and cannot be imported: {reason}",
            f"reinstall {distribution}",
        )
    return ok(f"{distribution} {installed} can be imported", version=installed)


def kernel_is_right(kernel: Kernel, machine: Machine) -> Finding:
    """Compare one call on fresh inputs with the fp64 reference."""
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs

    reason = kernel.unsupported_reason(TRIED)
    if reason is not None:
        return note(reason)
    inputs = make_inputs(TRIED, machine.device)
    launch = kernel.prepare(inputs, kernel.default_config(TRIED, machine.spec))
    launch()
    check = Reference(inputs).check(written_by(launch, inputs), kernel.lse_base)
    failure = check.failure(kernel.precision(TRIED))
    if failure is not None:
        fix = (
            f"trust no figure of it; `leanbench check --kernels {kernel.name}` shows where it is"
            " wrong"
        )
        # Infinity stands for an unwritten output. JSON has no infinity.
        error = check.relative_error if math.isfinite(check.relative_error) else None
        return problem(f"wrong on {TRIED.label}: {failure}", fix, relative_error=error)
    return ok(
        f"right on {TRIED.label}, relative error {check.relative_error:.1e}",
        relative_error=check.relative_error,
    )
