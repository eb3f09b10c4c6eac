"""The problems that `leanbench check` runs, and one of them run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from leanbench.check.interpreter import runs_as
from leanbench.check.kind_cases import kind_problems
from leanbench.check.launches import launch_of
from leanbench.configs.lookup import resolve
from leanbench.core.axes import KINDS
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import written_by
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, PAGE_SIZES, AttentionProblem
from leanbench.core.registry import kernel
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.kernels.mla.configs import MlaConfig

#: (q_heads, kv_heads): MHA; GQA with groups of 4, 8 and of 5 and 7, which are no powers of two; MQA
#: up to two row tiles.
_HEADS = ((6, 6), (32, 8), (16, 2), (10, 2), (14, 2), (24, 1), (71, 1))
#: Around a LeanTile's boundary, a prime-ish middle, and one past a power of two.
_CONTEXTS = (1, 2, 127, 128, 129, 1000, 16384, 65537)
_RAGGED = ((1, 128, 4097), (1000, 1, 129, 33, 2), (65537, 127, 5000))
_INTERPRETER_CONTEXTS = (1, 31, 33, 150)
#: (q_len, page_size) besides one query token over a contiguous cache.
_TAILS_AND_PAGES = tuple(itertools.product((1, 2, 4, 7, 16), (None, *PAGE_SIZES)))[1:]
#: Their (q_heads, kv_heads): MHA, GQA with groups of 4 and 7, and MQA of several row tiles.
_TAIL_HEADS = ((6, 6), (32, 8), (14, 2), (24, 1))
#: Split counts that divide nothing evenly, besides none and a pair.
_SPLITS = (1, 2, 3, 7)


@dataclass(frozen=True)
class CheckCase:
    """One problem, and how sharp its softmax is."""

    problem: AttentionProblem
    #: 1: scores of standard deviation 1. 12: softmax picks few tokens.
    score_scale: float
    #: Varies what does not depend on the problem: split counts, smallest work per CTA.
    variant: int
    #: Picks one of all launch settings that are tuned over; None: the heuristic's.
    settings: int | None = None
    #: What the tensor of lengths says in place of the problem's: below 0, or past the cache.
    lengths: tuple[int, ...] | None = None

    @property
    def compiled_for(self) -> tuple[object, ...]:
        """Cases that agree in this share compiled kernels."""
        problem = self.problem
        return (
            problem.head_dim,
            problem.dtype,
            problem.group_size,
            problem.q_len,
            problem.page_size,
            *(problem.special.get(name) is not None for name in KINDS),
            (problem.kv_dtype, problem.q_dtype, problem.v_head_dim, problem.rotary_dim),
            self.settings,
        )


@dataclass(frozen=True)
class CaseResult:
    """One kernel on one case."""

    kernel: str
    case: CheckCase
    relative_error: float
    #: NaN: the kernel writes no LSE.
    lse_error: float
    #: A second run gave the same bits.
    repeats: bool
    #: One sentence, or None.
    failure: str | None


def gpu_cases() -> list[CheckCase]:
    """Those of plain decode, then every kind and size."""
    return [*plain_cases(), *_kind_cases()]


def plain_cases() -> list[CheckCase]:
    """Every head_dim with every grouping, both dtypes and layouts in turn, every context; then
    ragged batches. Then pages and several query tokens, and calls as servers make them.
    """
    return [
        *_cases(_CONTEXTS, _RAGGED, _HEADS),
        *_tail_and_page_cases(16384, _TAIL_HEADS, 2),
        *_server_cases(1000, _TAIL_HEADS),
    ]


def interpreter_cases() -> list[CheckCase]:
    """A small grid: Triton's interpreter takes a tenth of a second a problem."""
    cases = list(
        _cases(_INTERPRETER_CONTEXTS, ((1, 40, 7, 150),), ((2, 2), (5, 1), (14, 2), (40, 1)))
    )
    more = list(_tail_and_page_cases(150, ((2, 2), (5, 1), (14, 2)), 2))
    server = list(_server_cases(33, ((2, 2), (14, 2))))
    return [*cases[::2], *more[::4], *server[2::5]]


def _cases(
    contexts: tuple[int, ...],
    ragged: tuple[tuple[int, ...], ...],
    heads: tuple[tuple[int, int], ...],
) -> Iterator[CheckCase]:
    families = list(itertools.product(HEAD_DIMS, heads))
    numbers = itertools.count()
    for family, (head_dim, (q_heads, kv_heads)) in enumerate(families):
        # In turn along both: every head_dim and every grouping meets both.
        dtype = DTYPES[sum(divmod(family, len(heads))) % 2]
        for context in (*contexts, *ragged):
            number = next(numbers)
            is_ragged = not isinstance(context, int)
            # A third of the families cover ragged batches: those kernels are compiled apart.
            if is_ragged and family % 3:
                continue
            batch = (
                len(context)
                if isinstance(context, tuple)
                else 1 + (number % 2 if context < 65537 else 0)
            )
            # Not in step with the batch.
            layout = KV_LAYOUTS[number // 2 % 2]
            problem = AttentionProblem(batch, q_heads, kv_heads, context, head_dim, dtype, layout)
            yield CheckCase(problem, 12.0 if number % 5 == 4 else 1.0, number)


def _tail_and_page_cases(
    longest: int, heads: tuple[tuple[int, int], ...], count: int
) -> Iterator[CheckCase]:
    """`count` pairs of q_len and page size for every head_dim and grouping, uniform or ragged;
    contexts around the boundaries of pages and LeanTiles, and shorter than q_len.
    """
    pairs = itertools.cycle(_TAILS_AND_PAGES)
    numbers = itertools.count()
    families = itertools.product(HEAD_DIMS, heads, range(count))
    for family, (head_dim, (q_heads, kv_heads), _) in enumerate(families):
        q_len, page_size = next(pairs)
        page = min(page_size or 64, longest // 2)
        uniform = (max(1, q_len - 1), page - 1, page, page + 1, longest)
        ragged = ((max(1, q_len - 1), page + 1, q_len, longest), (page, 1, 2 * page - 1))
        for context in ragged if family // 2 % 2 else uniform:
            number = next(numbers)
            batch = len(context) if isinstance(context, tuple) else 1 + number % 2
            dtype, layout = DTYPES[family % 2], KV_LAYOUTS[number // 2 % 2]
            problem = AttentionProblem(
                batch, q_heads, kv_heads, context, head_dim, dtype, layout, q_len, page_size
            )
            yield CheckCase(problem, 12.0 if number % 5 == 4 else 1.0, number)


def _server_cases(longest: int, heads: tuple[tuple[int, int], ...]) -> Iterator[CheckCase]:
    """Lengths on the device in a cache with room for more: alike, few long ones, and lengths that
    the cache does not have; contiguous and in pages.
    """
    pages = itertools.cycle((None, None, *PAGE_SIZES))
    for number, (head_dim, (q_heads, kv_heads)) in enumerate(itertools.product(HEAD_DIMS, heads)):
        shape = AttentionProblem(
            2, q_heads, kv_heads, longest, head_dim, DTYPES[number % 2], KV_LAYOUTS[number // 2 % 2]
        )
        on_device = replace(shape, lengths_on="device", capacity="5x", page_size=next(pages))
        yield CheckCase(on_device, 1.0, number)
        yield CheckCase(replace(on_device, batch=4, context=(1, longest, 16, 1)), 12.0, number)
        yield wild_case(replace(on_device, page_size=next(pages)), 1.0, number)


def _kind_cases() -> Iterator[CheckCase]:
    for number, problem in enumerate(kind_problems()):
        yield CheckCase(problem, 4.0 if number % 5 == 4 else 1.0, number)
        if problem.lengths_on == "device" and number % 4 == 0:
            yield wild_case(problem, 1.0, number)


#: What a tensor of lengths says, and of a sequence for which it does: whether it is a full one.
_WILD_LENGTHS = ((0, False), (2**31 - 1, True), (-1, False), (2**30, True), (-(2**31), False))


def wild_case(problem: AttentionProblem, score_scale: float, variant: int) -> CheckCase:
    """A batch of one sequence as in `problem` and of such as no tensor of lengths should name."""
    full, least = problem.cache_capacity, max(1, problem.append)
    contexts = [full if is_full else least for _, is_full in _WILD_LENGTHS]
    lengths = [length for length, _ in _WILD_LENGTHS]
    q_lens = problem.q_lens
    if q_lens is not None:
        q_lens = (max(q_lens), *itertools.islice(itertools.cycle(q_lens), len(lengths)))
    batch = replace(
        problem,
        batch=1 + len(lengths),
        context=(problem.max_context, *contexts),
        capacity=full,
        lengths_on="device",
        q_lens=q_lens,
    )
    cached = problem.max_context - problem.append
    return CheckCase(batch, score_scale, variant, lengths=(cached, *lengths))


def case_config(name: str, case: CheckCase, gpu: GpuSpec, interpreted: bool) -> KernelConfig | None:
    """The kernel's default, with what costs no compilation varied from case to case."""
    asked = kernel(runs_as(name, interpreted))
    config: Any = cast("Any", resolve(asked, case.problem, gpu, "heuristic").config)
    if config is None:
        return None
    if case.settings is not None and (space := asked.tuning_space(case.problem, gpu)):
        config = space[case.settings % len(space)]
    if interpreted:
        config = replace(config, tile_tokens=32)
    if isinstance(config, FixedSplitTritonConfig | FixedSplitCudaConfig) and case.variant % 3:
        config = replace(config, splits=_SPLITS[case.variant % len(_SPLITS)])
    if isinstance(config, MlaConfig):
        config = replace(config, min_tiles_per_cta=1 + case.variant % 3)
    if isinstance(config, LeanConfig) and not config.fixed_run_tiles:
        config = replace(config, min_tiles_per_cta=1 + case.variant % 3)
    return config


def run_case(name: str, case: CheckCase, gpu: GpuSpec, device: str) -> CaseResult:
    """Two runs over fresh inputs with poisoned outputs, the first compared with the reference, the
    second with the first. What no sequence has in the cache is poisoned too, for kernels that are
    to survive it.
    """
    import torch

    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs

    lse_base = kernel(name).lse_base
    inputs = make_inputs(case.problem, device, score_scale=case.score_scale)
    if case.lengths is not None and inputs.cache_seqlens is not None:
        inputs.cache_seqlens.copy_(torch.tensor(case.lengths))
    if kernel(name).guards_lengths:
        inputs = poison_unused(inputs)
    config = case_config(name, case, gpu, interpreted=device == "cpu")
    launch = launch_of(kernel(name), inputs, config)
    launch()
    written = written_by(launch, inputs)
    check = Reference(inputs).check(written, lse_base)
    out, lse = written.out.clone(), written.lse.clone()
    written.poison()
    launch()
    written = written_by(launch, inputs)
    repeats = bool((written.out == out).all() and (lse_base is None or (written.lse == lse).all()))
    failure = check.failure(kernel(name).precision(case.problem)) or (
        None if repeats else "a second run gave other bits"
    )
    lse_error = math.nan if check.lse_error is None else check.lse_error
    return CaseResult(name, case, check.relative_error, lse_error, repeats, failure)


def run_family(
    names: tuple[str, ...], cases: list[CheckCase], gpu: GpuSpec, device: str
) -> list[CaseResult]:
    """Cases that share compiled kernels, in one process; a kernel is passed over where it says that
    it cannot.
    """
    runnable = [
        (name, case)
        for case in cases
        for name in names
        if kernel(runs_as(name, device == "cpu")).unsupported_reason(case.problem) is None
        and (case.lengths is None or kernel(name).guards_lengths)
    ]
    return [_run_or_fail(name, case, gpu, device) for name, case in runnable]


def _run_or_fail(name: str, case: CheckCase, gpu: GpuSpec, device: str) -> CaseResult:
    try:
        return run_case(name, case, gpu, device)
    except Exception as error:  # one kernel's exception must not hide what the others did
        lines = str(error).splitlines() or [""]
        return CaseResult(
            name, case, math.inf, math.inf, False, f"raised {type(error).__name__}: {lines[0]}"
        )
