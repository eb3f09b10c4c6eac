"""Problems of `leanbench check`, and the check of one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from leanbench.check.interpreter import runs_as
from leanbench.check.launches import launch_of
from leanbench.configs.lookup import resolve
from leanbench.core.axes import KINDS
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import written_by
from leanbench.core.problem import (
    DTYPES,
    HEAD_DIMS,
    KV_LAYOUTS,
    LENGTHS_ON,
    PAGE_SIZES,
    AttentionProblem,
)
from leanbench.core.registry import kernel
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.kernels.mla.build import gathers
from leanbench.kernels.mla.configs import MlaConfig

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: (q_heads, kv_heads): MHA; GQA with groups of 4, 8 and of 5 and 7, which are no powers of two; MQA
#: up to two row tiles.
_HEADS = ((6, 6), (32, 8), (16, 2), (10, 2), (14, 2), (24, 1), (71, 1))
#: Around a LeanTile's boundary, a prime-ish middle, and one past a power of two.
_CONTEXTS = (1, 2, 127, 128, 129, 1000, 16384, 65537)
_RAGGED = ((1, 128, 4097), (1000, 1, 129, 33, 2), (65537, 127, 5000))
_INTERPRETER_CONTEXTS = (1, 31, 33, 150)
#: (q_len, page_size) without one query token over a contiguous cache.
_TAILS_AND_PAGES = tuple(itertools.product((1, 2, 4, 7, 16), (None, *PAGE_SIZES)))[1:]
#: Their (q_heads, kv_heads): MHA, GQA with groups of 4 and 7, and MQA of several row tiles.
_TAIL_HEADS = ((6, 6), (32, 8), (14, 2), (24, 1))
#: Split counts: none, a pair, and two that divide nothing evenly.
_SPLITS = (1, 2, 3, 7)
#: One at a time, then with others that share code in a kernel.
_KINDS_ALONE: tuple[dict[str, Any], ...] = (
    {"q_len": 5, "causal": False},
    {"window_left": 100},
    {"attention_chunk": 100},
    {"q_len": 5, "attention_chunk": 64, "causal": False, "leftpad": True},
    {"q_len": 4, "window_left": 0},
    {"q_len": 4, "window_left": 33, "window_right": 2, "causal": False},
    {"softcap": 20.0},
    {"sinks": True},
    {"q_len": 3, "sinks": True, "window_left": 128},
    {"alibi": True},
    {"q_len": 6, "alibi": True, "causal": False},
    {"leftpad": True},
    {"leftpad": True, "window_left": 60, "q_len": 2},
    {"batch_idx": True},
    {"append": 1},
    {"append": 5, "q_len": 5},
    {"append": 1, "rotary_dim": 64},
    {"append": 3, "q_len": 3, "rotary_dim": 32, "rotary_interleaved": True},
    {"append": 2, "q_len": 4, "rotary_dim": 64, "causal": False},
    {"kv_dtype": "e4m3"},
    {"kv_dtype": "e4m3", "scaled": False},
    {"kv_dtype": "e5m2", "q_len": 4},
    {"kv_dtype": "e4m3", "q_dtype": "e4m3", "dtype": "bf16"},
    {"kv_dtype": "e4m3", "append": 1, "sinks": True},
    {"v_head_dim": 128, "head_dim": 192},
    {"q_lens": (1, 40, 3)},
    {"q_lens": (17, 1, 2), "window_left": 64, "sinks": True},
    {"softcap": 30.0, "alibi": True, "sinks": True, "window_left": 200, "q_len": 2},
    {"append": 2, "rotary_dim": 64, "leftpad": True, "batch_idx": True, "window_left": 90},
)
#: Sizes that not every kernel takes.
_SIZES: tuple[dict[str, Any], ...] = (
    *({"head_dim": head_dim} for head_dim in (8, 40, 72, 112, 160, 192, 512)),
    *({"page_size": page_size} for page_size in (1, 3, 48, 544)),
    *({"q_len": q_len} for q_len in (17, 40, 130)),
)
#: Those that only a paged cache has.
_PAGED: tuple[dict[str, Any], ...] = (
    {"kv_dtype": "e4m3", "page_scales": "page-head", "page_size": 64},
    {"kv_dtype": "e4m3", "page_scales": "page", "page_size": 16, "scaled": False},
    {"kv_dtype": "e5m2", "page_scales": "page-head", "page_size": 1, "q_len": 4},
    {
        "kv_dtype": "e4m3",
        "page_scales": "page-head",
        "page_size": 48,
        "append": 3,
        "leftpad": True,
        "window_left": 200,
        "sinks": True,
        "softcap": 20.0,
    },
    {"kv_dtype": "e4m3", "page_scales": "page", "page_size": 128, "q_len": 64},
    {"select": "4x16"},
    {"select": "2x128", "sinks": True},
    {"select": "40x3", "softcap": 20.0},
    {"select": "5x64", "kv_dtype": "e4m3", "page_scales": "page-head"},
    {"shared_prefix": 32, "page_size": 16},
    {"shared_prefix": 42, "page_size": 3, "q_len": 4, "sinks": True, "softcap": 20.0},
    {"shared_prefix": 32, "page_size": 32, "q_lens": (1, 14, 3)},
    {"shared_prefix": 45, "page_size": 1, "q_len": 40, "causal": False},
    {"shared_prefix": 40, "page_size": 8, "kv_dtype": "e4m3", "page_scales": "page-head"},
)
_KIND_CONTEXTS = (700, (129, 700, 45))
#: Query heads, query tokens and what else differs of latent problems: rows of part of a CTA, of a
#: pair of CTAs, of two pairs.
_LATENT_KINDS: tuple[dict[str, Any], ...] = (
    {"q_heads": 128},
    {"q_heads": 16, "page_size": 64},
    {"q_heads": 24, "q_len": 3, "page_size": 128},
    {"q_heads": 128, "q_len": 2, "causal": False},
    {"q_heads": 16, "page_size": 64, "kv_dtype": "e5m2", "scaled": False},
    {"q_heads": 128, "kv_dtype": "e4m3"},
    {"q_heads": 16, "page_size": 1},
    {"q_heads": 128, "page_size": 48, "q_len": 2, "kv_dtype": "e4m3"},
    {"q_heads": 24, "select": 500},
    {"q_heads": 128, "head_dim": 512, "v_head_dim": None},
    {"q_heads": 16, "head_dim": 512, "v_head_dim": None, "page_size": 1, "kv_dtype": "e4m3"},
    {"q_heads": 32, "head_dim": 320, "v_head_dim": 256, "page_size": 64, "q_len": 3},
    {"q_heads": 16, "head_dim": 288, "v_head_dim": 256, "page_size": 1},
    {"q_heads": 64, "head_dim": 160, "v_head_dim": 128},
    {"q_heads": 128, "select": 64, "kv_dtype": "e5m2"},
    {"q_heads": 16, "page_size": 1, "kv_dtype": "e4m3", "dtype": "bf16", "row_scales": True},
)
#: q k of all tokens, where they are equal. fp32 cannot hold differences of such scores.
_EQUAL_SCORES = (1e12, -1e12, 1e30, -1e30)
#: What else differs of their problems: rows of half an output tile, of one and of several.
_EQUAL_SCORE_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"q_len": 2},
    {"q_len": 4},
    {"q_len": 4, "causal": False},
    {"q_len": 20},
    {"q_len": 20, "causal": False, "head_dim": 64},
    {"q_len": 4, "window_left": 100},
    {"latent": True, "q_len": 2},
    {"latent": True, "q_len": 8, "causal": False},
)


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
    #: Lengths on the device instead of the problem's: below 0, or past the cache; (): of a batch of
    #: 0 with the problem's pages.
    lengths: tuple[int, ...] | None = None
    #: q k of every token; None: random.
    equal_scores: float | None = None

    @property
    def compiled_for(self) -> tuple[object, ...]:
        """Key that is equal for cases that share compiled kernels."""
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


_NO_SEQUENCES = CheckCase(
    AttentionProblem(1, 5, 1, 33, 64, page_size=16, lengths_on="device"), 1.0, 0, lengths=()
)


@dataclass(frozen=True)
class CaseResult:
    """Result of one kernel on one case."""

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
    """Return all cases: plain decode, then every kind and size."""
    return [*plain_cases(), *_kind_cases(), *_equal_score_cases(), _NO_SEQUENCES]


def plain_cases() -> list[CheckCase]:
    """Return the cases of plain decode.

    They cover every head_dim with every grouping, both dtypes and layouts in turn, and every
    context; then ragged batches, pages, several query tokens, and calls as servers make them.
    """
    return [
        *_cases(_CONTEXTS, _RAGGED, _HEADS),
        *_tail_and_page_cases(16384, _TAIL_HEADS, 2),
        *_server_cases(1000, _TAIL_HEADS),
    ]


def interpreter_cases() -> list[CheckCase]:
    """Return a small grid: Triton's interpreter takes a tenth of a second per problem."""
    cases = list(
        _cases(_INTERPRETER_CONTEXTS, ((1, 40, 7, 150),), ((2, 2), (5, 1), (14, 2), (40, 1)))
    )
    more = list(_tail_and_page_cases(150, ((2, 2), (5, 1), (14, 2)), 2))
    server = list(_server_cases(33, ((2, 2), (14, 2))))
    return [*cases[::2], *more[::4], *server[2::5], _NO_SEQUENCES]


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
            # A third of the families cover ragged batches: they need kernels of their own.
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
    """Yield `count` pairs of q_len and page size for every head_dim and grouping.

    Batches are uniform or ragged. Contexts are near the boundaries of pages and LeanTiles, and
    shorter than q_len.
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
    """Yield cases with lengths on the device in a cache with spare room.

    Lengths are equal, mostly short, or outside the cache; caches are contiguous or paged.
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


def _equal_score_cases() -> Iterator[CheckCase]:
    """Yield each kind with each score, with lengths on the host and on the device."""
    every = itertools.product(_EQUAL_SCORE_KINDS, LENGTHS_ON, _EQUAL_SCORES)
    for number, (kinds, lengths_on, score) in enumerate(every):
        plain = AttentionProblem(3, 32, 2, (129, 700, 45), 128, "bf16")
        if "latent" in kinds:
            plain = replace(plain, q_heads=16, kv_heads=1, head_dim=576, v_head_dim=512)
        problem = replace(plain, **kinds, lengths_on=lengths_on)
        yield CheckCase(problem, 1.0, number, equal_scores=score)


def kind_problems() -> Iterator[AttentionProblem]:
    """Yield problems of every kind and size beyond plain decode; latent ones last."""
    yield from _kind_problems()
    yield from _latent_problems()


def _latent_problems() -> Iterator[AttentionProblem]:
    """Yield each kind with short and long lengths on the host, and with lengths on the device."""
    for number, kinds in enumerate(_LATENT_KINDS):
        dtype = DTYPES[number % 2]
        plain = AttentionProblem(2, 128, 1, 700, 576, dtype, v_head_dim=512, latent=True)
        problem = replace(plain, **kinds)
        yield from (problem, replace(problem, batch=1, context=9000))
        capacity = None if problem.select else "2x"
        problem = replace(problem, batch=3, context=(129, 700, 1), capacity=capacity)
        yield replace(problem, lengths_on="device")


def _kind_problems() -> Iterator[AttentionProblem]:
    """Yield each kind with lengths on the host, and with lengths on the device in a larger cache,
    contiguous and paged.

    Dtypes, layouts and groups take turns.
    """
    numbers = itertools.count()
    for kinds, context in itertools.product((*_KINDS_ALONE, *_SIZES, *_PAGED), _KIND_CONTEXTS):
        number = next(numbers)
        heads, kv_heads = ((8, 2), (6, 6), (14, 1))[number % 3]
        plain = AttentionProblem(3, heads, kv_heads, context, (64, 128)[number // 2 % 2])
        plain = replace(plain, dtype=DTYPES[number % 2], kv_layout=KV_LAYOUTS[number // 2 % 2])
        problem = replace(plain, **kinds)
        yield problem
        capacity = None if problem.select else "2x"
        on_device = replace(problem, lengths_on="device", capacity=capacity)
        yield on_device
        if not problem.batch_idx and problem.page_size is None:
            yield replace(on_device, page_size=(16, 64, 1)[number % 3])


#: What a tensor of lengths says, and of a sequence for which it does: whether it is a full one.
_WILD_LENGTHS = ((0, False), (2**31 - 1, True), (-1, False), (2**30, True), (-(2**31), False))


def wild_case(problem: AttentionProblem, score_scale: float, variant: int) -> CheckCase:
    """Return a batch of one sequence of `problem` and others with lengths outside the cache."""
    # A choice of tokens has no room for more, and no sequence is shorter than a shared prefix.
    problem = replace(problem.seen, shared_prefix=0)
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


def set_equal_scores(inputs: AttentionInputs, score: float) -> None:
    """Change Q and K so that q k of every token is `score`; V stays as it is."""
    first = inputs.value_dim if inputs.latent else 0
    inputs.q.zero_()
    inputs.q[..., first:] = 1
    inputs.k_cache[..., first:] = score / (inputs.head_dim - first)


#: What a block table says of no page.
_NO_PAGES = (-1, -(2**31), 2**31 - 1)


def drop_pages(inputs: AttentionInputs, seed: int = 0) -> AttentionInputs:
    """Return the call with a fifth of its pages missing, and a fifth repeated, anywhere.

    The first sequence has no pages at all, the last one none in its first 128 tokens, and none has
    page 0.
    """
    import torch

    assert inputs.block_table is not None
    generator = torch.Generator().manual_seed(seed)
    table = inputs.block_table.cpu()
    draws = torch.rand(table.shape, generator=generator)
    table = torch.where(draws < 0.2, table.roll(1, dims=1), table)
    is_missing = (draws > 0.8) | (table == 0)
    is_missing[0] = True
    is_missing[-1, : 128 // inputs.k_cache.shape[1]] = True
    none = torch.tensor(_NO_PAGES, dtype=torch.int32)
    missing = none[torch.randint(len(none), table.shape, generator=generator)]
    table = torch.where(is_missing, missing, table)
    return replace(inputs, block_table=table.to(inputs.q.device))


def case_config(name: str, case: CheckCase, gpu: GpuSpec, interpreted: bool) -> KernelConfig | None:
    """Return the kernel's default settings; what needs no compilation varies by case."""
    target = kernel(runs_as(name, interpreted))
    config: Any = cast("Any", resolve(target, case.problem, gpu, "heuristic").config)
    if config is None:
        return None
    if case.settings is not None and (space := target.tuning_space(case.problem, gpu)):
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
    """Run a kernel twice over fresh inputs with poisoned outputs.

    The first run is compared with the reference, the second with the first. Unused parts of the
    cache are poisoned, too, for kernels that guard lengths.
    """
    import torch

    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs

    lse_base = kernel(name).lse_base
    inputs = make_inputs(case.problem, device, score_scale=case.score_scale)
    if case.lengths == ():
        return _run_without_sequences(name, case, inputs)
    if case.lengths is not None and inputs.cache_seqlens is not None:
        inputs.cache_seqlens.copy_(torch.tensor(case.lengths))
    if case.equal_scores is not None:
        set_equal_scores(inputs, case.equal_scores)
    # Only lean_mla skips missing pages.
    skips = MlaConfig in kernel(name).config_types and gathers(case.problem.page_size)
    if case.lengths is not None and skips:
        inputs = drop_pages(inputs, case.variant)
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


def _run_without_sequences(name: str, case: CheckCase, inputs: AttentionInputs) -> CaseResult:
    """Make the call for no sequence of the batch, which must give outputs without rows."""
    per_sequence = ("q", "block_table", "cache_seqlens", "out", "lse")
    inputs = replace(inputs, **{field: getattr(inputs, field)[:0] for field in per_sequence})
    launch = launch_of(kernel(name), inputs, None)
    launch()
    written = written_by(launch, inputs)
    is_right = written.out.shape == inputs.out.shape and written.lse.shape == inputs.lse.shape
    failure = None if is_right else f"a batch of 0 gave an LSE of shape {tuple(written.lse.shape)}"
    return CaseResult(name, case, 0.0, 0.0, True, failure)


def run_family(
    names: tuple[str, ...], cases: list[CheckCase], gpu: GpuSpec, device: str
) -> list[CaseResult]:
    """Run cases that share compiled kernels in one process; skip unsupported ones."""
    runnable = [
        (name, case)
        for case in cases
        for name in names
        if kernel(runs_as(name, device == "cpu")).unsupported_reason(case.problem) is None
        and (case.lengths is None or kernel(name).guards_lengths)
        # Only calls take a batch of 0.
        and (case.lengths != () or kernel(name).is_api)
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
