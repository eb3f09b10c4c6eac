"""Lookup of a call's launch settings: those tuned for this GPU if they promise to be faster than
the kernel's heuristic, else the heuristic's.

Files are parsed once. The heuristic uses the exact context. Timed choices and the formula are
looked up once for all contexts with the same number of LeanTiles. This module neither queries the
device nor imports torch.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.configs import store
from leanbench.configs.formula import Shape, divide, grid_of
from leanbench.configs.nearness import NEARBY_GROUP, EntryKey, gpu_distance, rank
from leanbench.configs.switch import SWITCH, is_off
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import BATCH_INVARIANT, Kernel
from leanbench.core.problem import PLAIN_AXES, AttentionProblem
from leanbench.kernels.lean.configs import LeanConfig, LeanTritonConfig

if TYPE_CHECKING:
    from leanbench.configs.entry import Entry
    from leanbench.configs.tuned import Family

#: Axes covered by tuned configs. The heuristic chooses if any other axis differs from its default.
_FAMILY = frozenset({"head_dim", "dtype", "kv_layout"})
#: Values of the variables that set the folder of the user's files or turn them off, and the number
#: of saves by this process.
State = tuple[bytes | None, bytes | None, bytes | None, int]


@dataclass(frozen=True)
class Choice:
    """Launch settings and their source."""

    #: None for a kernel without launch settings.
    config: KernelConfig | None
    #: `given`, `tuned`, `heuristic` or `none`.
    how: str
    #: Reason as a sentence without full stop.
    why: str


def resolve(
    kernel: Kernel, problem: AttentionProblem, spec: GpuSpec, request: str | KernelConfig
) -> Choice:
    """Return the settings of a sweep's request.

    These are given settings, `heuristic`, or tuned ones, if any: for latency (`default`), `energy`
    or `edp`. Kernels with a fixed request ignore it, see `Kernel.config_choice`.
    """
    if isinstance(request, KernelConfig):
        return choose(kernel, problem, spec, request)
    if request == BATCH_INVARIANT:
        config = kernel.batch_invariant_config(problem, spec)
        why = "these settings do not depend on the rest of the batch"
        return Choice(config, "heuristic" if config else "none", why)
    if request == "heuristic":
        return _heuristic(kernel, problem, spec, "the heuristic was asked for")
    return choose(
        kernel, problem, spec, objective=request if request in ("energy", "edp") else "latency"
    )


def row_fields(kernel: Kernel, choice: Choice) -> dict[str, Any]:
    """Return the fields of a leanbench.records.row.Row for the settings.

    The reason is empty for kernels without a choice.
    """
    chosen = choice.how != "none"
    there_was_a_choice = kernel.tuned_as is not None or kernel.config_choice == "best"
    return {
        "config": choice.config.to_dict() if choice.config else None,
        "config_choice": choice.how if chosen else None,
        "config_reason": choice.why if chosen and there_was_a_choice else None,
    }


def choose(
    kernel: Kernel,
    problem: AttentionProblem,
    spec: GpuSpec,
    explicit: KernelConfig | None = None,
    *,
    objective: str = "latency",
    uniform: bool = True,
) -> Choice:
    """Return the settings for launching `problem`: given, tuned, or the heuristic's.

    Args:
        objective: `latency`, `energy` or `edp`: the objective of the tuning.
        uniform: False for lengths on the device, with `problem.context` as their upper bound; as
            `problem.lengths_on` does. No configs are tuned for that.
    """
    if explicit is not None:
        return Choice(explicit, "given", "the settings were given")
    problem = problem.known_to_host
    if not uniform or problem.lengths_on == "device":
        config = kernel.any_length_config(problem, spec)
        why = "lengths are on the device, these settings are for any of them"
        return Choice(config, "heuristic" if config else "none", why)
    if kernel.tuned_as is None:
        return _heuristic(kernel, problem, spec, f"{kernel.name} is not tuned")
    if is_off():
        return _heuristic(kernel, problem, spec, f"{SWITCH} turns tuned configs off")
    # Few calls of the API use special axes.
    for axis in PLAIN_AXES if problem.special.keys() - _FAMILY else ():
        value = getattr(problem, axis.name)
        if axis.name not in _FAMILY and value != axis.default:
            why = f"configs are tuned for {axis.default_words}, not for {axis.name} {value}"
            return _heuristic(kernel, problem, spec, why)
    key = (problem.head_dim, problem.dtype, problem.group_size, problem.kv_layout, objective)
    entry = _entry(kernel, spec, key, state())
    if entry is None:
        what = f"head_dim {problem.head_dim}, group size {problem.group_size}, {objective}"
        return _heuristic(
            kernel, problem, spec, f"nothing is tuned that fits {what} on {spec.product}"
        )
    shape = Shape.of(problem)
    whole_tiles = -(-shape.context // entry.granule) * entry.granule
    heuristic = kernel.default_config(problem, spec)
    return _by_timings(entry, replace(shape, context=whole_tiles), heuristic)


@lru_cache(maxsize=4096)
def _by_timings(entry: Entry, shape: Shape, heuristic: LeanConfig) -> Choice:
    """Return the timed choice of a shape of whole LeanTiles, else the formula's.

    Both are compared with the heuristic's settings.
    """
    timed = entry.timed.get((shape.kv_heads, shape.context))
    # Timings without the heuristic's implementation do not cover its settings.
    if timed is None or heuristic.implementation not in entry.implementations:
        return _by_formula(entry, shape, heuristic)
    if _same_launch(entry, shape, timed.config, heuristic):
        return Choice(
            heuristic, "heuristic", f"{entry.source}: {timed.where}, where nothing was faster"
        )
    # The heuristic may have changed since.
    known = timed.gain is not None and _same_launch(entry, shape, timed.heuristic, heuristic)
    gain = f", {timed.gain:.1%} faster than the heuristic" if known else ""
    return Choice(timed.config, "tuned", f"{entry.source}: {timed.where}{gain}")


def _by_formula(entry: Entry, shape: Shape, heuristic: LeanConfig) -> Choice:
    """Return the fastest Triton config by the formula if the heuristic chooses Triton.

    For CUDA C++, the heuristic is better than the formula.
    """
    if not isinstance(heuristic, LeanTritonConfig):
        why = (
            f"times of {entry.times_of} are not carried over"
            if entry.times_of
            else "this size was not timed"
        )
        return Choice(heuristic, "heuristic", f"{entry.source}: {why}")
    sms, kernel = entry.spec.sms, entry.kernel
    rates = entry.rates_of(heuristic)
    if rates is None or not entry.shortlist:
        missing = (
            "the heuristic's settings have no formula"
            if rates is None
            else "no settings are on its shortlist"
        )
        return Choice(
            heuristic, "heuristic", f"{entry.source}: {missing}, so nothing can be compared"
        )
    if not entry.reaches(shape.kv_heads, shape.context):
        reach = (
            f"{entry.most_kv_heads} KV heads, {entry.most_tokens} tokens of all of them together"
        )
        return Choice(
            heuristic,
            "heuristic",
            f"{entry.source}: beyond what the formula was fitted to, {reach}",
        )
    heuristic_cost = rates.cost(divide(shape, heuristic, sms, kernel))
    costs = [rates.cost(divide(shape, config, sms, kernel)) for config, rates in entry.shortlist]
    best = min(costs)
    gain = 1 - best / heuristic_cost
    if gain < entry.least_gain:
        why = (
            f"no tuned config is predicted at least {entry.least_gain:.1%} {entry.better} than the"
            " heuristic here"
        )
        return Choice(heuristic, "heuristic", f"{entry.source}: {why}")
    config, _ = entry.shortlist[costs.index(best)]
    return Choice(
        config,
        "tuned",
        f"{entry.source}: predicted {gain:.1%} {entry.better} than the heuristic here",
    )


def _same_launch(entry: Entry, shape: Shape, config: LeanConfig, heuristic: LeanConfig) -> bool:
    """Return True if both settings result in the same build and grid."""
    launches = {
        (
            launched.build_key,
            launched.tile_tokens,
            grid_of(shape, launched, entry.spec.sms, entry.kernel),
        )
        for launched in (config, heuristic)
    }
    return len(launches) == 1


def _heuristic(kernel: Kernel, problem: AttentionProblem, spec: GpuSpec, why: str) -> Choice:
    config = kernel.default_config(problem.known_to_host, spec)
    return (
        Choice(config, "heuristic", why)
        if config
        else Choice(None, "none", f"{kernel.name} has no settings")
    )


#: Dictionary behind os.environ. Every call of the API reads it, and os.environ takes longer to
#: report a missing variable than the rest of the lookup.
_ENVIRONMENT: dict[bytes, bytes] = os.environ._data  # pyright: ignore[reportAttributeAccessIssue]


def state() -> State:
    """Return the state that results depend on, in addition to the arguments.

    Changes of files by other processes are not detected.
    """
    get = _ENVIRONMENT.get
    return get(b"LEANBENCH_HOME"), get(b"XDG_DATA_HOME"), get(b"LEANBENCH_CONFIGS"), store.saves()


@lru_cache(maxsize=512)
def _entry(kernel: Kernel, spec: GpuSpec, key: EntryKey, state: State) -> Entry | None:
    """Return the family that serves `key` on this GPU, ready for lookups."""
    from leanbench.configs.entry import Entry

    answering = _find(kernel, spec, key)
    if answering is None:
        return None
    file, family = answering
    return Entry.of(kernel, spec, key, file, family)


def _find(kernel: Kernel, spec: GpuSpec, key: EntryKey) -> tuple[store.File, Family] | None:
    """Return the best family and its file.

    Order: measured families of this GPU's files, then of the nearest GPUs', then predicted ones of
    this GPU's.
    """
    files = [file for file in _readable(spec) if file.tuned.kernel == kernel.tuned_as]
    own = [file for file in files if file.tuned.gpu.is_like(spec)]
    other_gpus = _of_others(files, spec)
    # This GPU's files compete: a shipped family with the exact group size beats a user's with
    # another.
    for source, together in (
        ("measured", own),
        *(("measured", [file]) for file in other_gpus),
        ("predicted", own),
    ):
        ranked = [
            ((order[0] == NEARBY_GROUP, index, order), file, family)
            for index, file in enumerate(together)
            for family in file.tuned.families
            if family.source == source and (order := rank(family, key)) is not None
        ]
        if ranked:
            _, file, family = min(ranked, key=itemgetter(0))
            if not file.tuned.gpu.is_like(spec):
                _warn_nearest(file, spec)
            return file, family
    return None


def _of_others(files: list[store.File], spec: GpuSpec) -> list[store.File]:
    """Return the files of other GPUs of the same architecture, the nearest first."""
    near = [
        (gpu_distance(file.tuned.gpu, spec), file)
        for file in files
        if not file.tuned.gpu.is_like(spec)
    ]
    known = [(far, file) for far, file in near if far is not None]
    return [file for _, file in sorted(known, key=itemgetter(0))]


def stand_in(spec: GpuSpec) -> store.File | None:
    """Return the file with the first measured families for a GPU without its own, or None.

    Without such a file, the heuristic chooses.
    """
    measured = (
        file
        for file in _of_others(_readable(spec), spec)
        if any(family.source == "measured" for family in file.tuned.families)
    )
    return next(measured, None)


def _readable(spec: GpuSpec) -> list[store.File]:
    """Return all readable files: the user's, then the shipped ones.

    In each group, files of the GPU's name come first.
    """
    files = sorted(
        store.all_files(), key=lambda file: (file.where != "yours", file.path.stem != spec.name)
    )
    for file in files:
        if isinstance(file.content, str) and file.path not in _warned:
            _warned.add(file.path)
            warnings.warn(f"{file.content}; it is not used", stacklevel=2)
    return [file for file in files if not isinstance(file.content, str)]


#: Warnings are issued once per process: unusable files, and pairs of GPUs.
_warned: set[Path] = set()
_warned_pairs: set[tuple[str, str]] = set()


def _warn_nearest(file: store.File, spec: GpuSpec) -> None:
    product = file.tuned.gpu.product
    if (product, spec.product) in _warned_pairs:
        return
    _warned_pairs.add((product, spec.product))
    warnings.warn(
        f"no configs are tuned for {spec.product}, those of {product} ({file.where}) are used in"
        " Triton and the heuristic's in CUDA C++: run `leanbench tune` to find this GPU's own",
        stacklevel=2,
    )
