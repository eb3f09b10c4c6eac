"""Error of predictions by kernel, for warnings, pages and terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from leanbench.core.axes import AXES
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import find, is_known
from leanbench.kernels.mla import LEAN_MLA
from leanbench.model.calibration import Calibration, Errors, calibration_for


@dataclass(frozen=True)
class KernelError:
    """Error of one kernel's predictions, on the run with most rows."""

    run: str
    role: Literal["fitted", "checked"]
    errors: Errors
    #: Worst of all runs of that role.
    worst: float


def error_of(calibration: Calibration, kernel: str) -> KernelError | None:
    """Return the latency's error, on rows that no constant was fitted to if there are any; None if
    the kernel was never compared.
    """
    latencies = [run for run in calibration.runs if run.quantity == "latency"]
    runs = [run for run in latencies if kernel in run.by_kernel]
    runs = [run for run in runs if run.role == "checked"] or runs
    if not runs:
        return None
    # Medians of several runs cannot be joined.
    largest = max(runs, key=lambda run: run.by_kernel[kernel].rows)
    worst = max(run.by_kernel[kernel].worst for run in runs)
    return KernelError(largest.run, largest.role, largest.by_kernel[kernel], worst)


def is_modelled(kernel: Kernel) -> bool:
    """Return True if the model knows a kernel's launches, by its schedule or by a formula."""
    return type(kernel).schedule is not Kernel.schedule or kernel is LEAN_MLA


def uncompared(kernel: str, problem: AttentionProblem, spec: GpuSpec) -> str | None:
    """Return a sentence if the problem has a feature that none of the kernel's compared rows had.

    None if it has no such feature, or no row was ever compared.
    """
    runs = [run for run in calibration_for(spec).calibration.runs if kernel in run.by_kernel]
    seen = {feature for run in runs for feature in run.features}
    new = [feature for feature in features(problem) if feature not in seen]
    if not runs or not new:
        return None
    return (
        f"the model was never compared with measured rows of this kernel with {' or '.join(new)}:"
        " its error is unknown"
    )


def model_error(gpu: str, names: Iterable[str]) -> float:
    """Return the share of a latency below which the order of these kernels' predictions is unknown.

    It is the largest 90th percentile of their errors. A kernel that was never compared counts with
    that of all kernels.

    Args:
        gpu: Catalogue or product name.
        names: Kernels as in rows.
    """
    calibration, spec, _ = _in_use(gpu)
    errors = _errors(calibration)
    named = _modelled(names, spec)
    counted = [errors[name] for name in named if name in errors]
    if len(counted) < len(named):
        counted = list(errors.values())
    return max((error.errors.p90 for error in counted), default=0.0)


def scaled_from(gpu: str) -> str:
    """Return the GPU that the errors were measured on; empty if it is the same GPU."""
    calibration, _, scaled = _in_use(gpu)
    return find(calibration.gpu).product.removeprefix("NVIDIA ") if scaled else ""


def known_error(gpu: str, names: Iterable[str] = ()) -> str:
    """Describe the model's error by kernel, for a page with predictions for a GPU.

    Args:
        gpu: Catalogue or product name.
        names: Kernels as in rows; empty for all that were compared.
    """
    return _sentence(gpu, names, "", _words)


def short_error(gpu: str, names: Iterable[str] = ()) -> str:
    """Describe the error for a terminal: median, 90th percentile, and where to read more."""
    sentence = _sentence(gpu, names, ", median and 90th percentile", _short_words)
    return f"{sentence} More in docs/model.md."


def _sentence(
    gpu: str, names: Iterable[str], of: str, words_of: Callable[[KernelError], str]
) -> str:
    calibration, spec, scaled = _in_use(gpu)
    errors = _errors(calibration)
    words = [
        f"{name} {words_of(errors[name]) if name in errors else 'unknown'}"
        for name in _modelled(names, spec) or errors
    ]
    sentence = f"Model error on {calibration.gpu}{of}: {'; '.join(words) or 'unknown'}{scaled}."
    return " ".join([sentence, *(f"Note: {note}." for note in calibration_for(spec).notes)])


def _modelled(names: Iterable[str], spec: GpuSpec) -> list[str]:
    """Return the kernels behind these names, of `lean` the implementation on this GPU.

    Libraries have no prediction.
    """
    registered = kernels()
    modelled: list[str] = []
    for name in names:
        kernel = registered.get(name)
        if kernel is None:
            modelled.append(name)
        elif is_modelled(kernel):
            modelled.append(kernel.implementation_on(spec).name)
    return list(dict.fromkeys(modelled))


def _errors(calibration: Calibration) -> dict[str, KernelError]:
    names = dict.fromkeys(name for run in calibration.runs for name in run.by_kernel)
    errors = {name: error_of(calibration, name) for name in names}
    return {name: error for name, error in errors.items() if error is not None}


def _words(error: KernelError) -> str:
    fitted = ", which it was fitted to" if error.role == "fitted" else ""
    return (
        f"{error.errors.median:.1%} in the median, {error.errors.p90:.1%} at the 90th percentile"
        f" ({error.errors.rows} rows of {error.run}{fitted}), {error.worst:.0%} at worst"
    )


def _short_words(error: KernelError) -> str:
    fitted = " of rows it was fitted to" if error.role == "fitted" else ""
    return f"{error.errors.median:.1%} and {error.errors.p90:.1%}{fitted}"


def _in_use(gpu: str) -> tuple[Calibration, GpuSpec, str]:
    """Return the calibration in use for a GPU, the GPU, and a note if it is another GPU's."""
    # Without an entry in the catalogue a GPU has no calibration of its own.
    spec = find(gpu) if is_known(gpu) else find("h200")
    name = spec.name if is_known(gpu) else gpu or "this GPU"
    calibration = calibration_for(spec).calibration
    scaled = f"; scaled from {calibration.gpu} and not fitted to {name}"
    return calibration, spec, "" if calibration.gpu == name else scaled


#: Axes with a build of the kernel for any value but the default.
_MASKS = ("window_left", "causal", "softcap", "sinks", "alibi", "leftpad", "batch_idx")


def features(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the features, except size, that change a kernel's path through its code, in words."""
    return (
        f"head_dim {problem.head_dim}",
        f"kv_layout {problem.kv_layout}",
        f"q_len {problem.q_len}",
        "a contiguous cache" if problem.page_size is None else "a paged cache",
        f"lengths on the {problem.lengths_on}",
        *(AXES[name].title for name in _MASKS if name in problem.special),
        *(("an fp8 cache",) if problem.kv_dtype != SAME else ()),
    )
