"""The kernel, split and cache for a decode step, from published rows or the performance model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from leanbench.advice.neighbours import (
    BETWEEN_GPUS,
    REFERENCES,
    Estimate,
    Measured,
    measured_on,
)
from leanbench.core.errors import InvalidValue, OutOfMemory, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.kinds import SAME
from leanbench.core.llm.config import registry
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import WEIGHT_BYTES, WholeModel, model_named, read_model
from leanbench.core.llm.weights import UnknownWeights
from leanbench.core.memory import RESERVE_BYTES
from leanbench.core.parallel import MOST_GPUS, NONE
from leanbench.core.problem import PROBLEM_AXES, AttentionProblem
from leanbench.core.registry import kernel, kernels
from leanbench.core.syntax import parse_names, short_count
from leanbench.decode.predict import without_attention_us
from leanbench.gpu.catalogue import find
from leanbench.model.error import is_modelled, model_error, scaled_from
from leanbench.model.predict import exchange_us, predict_cell, unknown_axis
from leanbench.records.published import PublishedRow
from leanbench.records.standing import SPREAD
from leanbench.run.cells import Grid

#: Loss up to which a choice counts as right.
WITHIN = 0.03
#: Choices that are tried, the preferred one first.
KV_DTYPES = (SAME, "e4m3")
PAGE_SIZES = (None, 16, 64)
#: Output tiles above which the performance model takes seconds.
MOST_TILES = 4096
#: End of the name of a model's checkpoint in 8 bits.
_FP8 = "-fp8"
#: GPUs that a shortage names.
_LARGER = ("h200", "b200", "b300")
#: Axes that a plain problem over fewer tokens stands for.
_LOCAL = ("window_left", "window_right", "attention_chunk", "sinks", "softcap")
#: Error above which a smaller lead is not even.
_KNOWN = 0.1


def backends(text: str | None) -> tuple[str, ...]:
    """Return kernels by their names or first words: ``lean,flashinfer``. Without a text: `lean`,
    `lean_mla` and all libraries.

    Raises:
        UserError: A kernel is unknown.
    """
    usable = [
        each.name
        for each in kernels().values()
        if each.name in REFERENCES or (each.is_peer and not each.only_in_whole_models)
    ]
    if text is None:
        return tuple(usable)
    names = []
    for word in parse_names("--backends", text):
        family = [name for name in usable if name.startswith(f"{word}_")]
        names += [word, *family] if word in kernels() else family or [kernel(word).name]
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Request:
    """One combination of a grid's axes, on a number of GPUs."""

    #: Model or shape as written.
    name: str
    grid: Grid
    spec: GpuSpec
    gpus: int
    #: Kernels to choose from; empty for the default.
    named: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    page_sizes: tuple[int | None, ...] = PAGE_SIZES
    #: Rows that were measured for it.
    own: tuple[PublishedRow, ...] = ()

    @property
    def measured(self) -> Measured:
        return measured_on(self.spec, self.own)

    @property
    def model(self) -> str | None:
        return next(iter(self.grid["model"]), None)

    @property
    def is_alias(self) -> bool:
        """True if the name is another model's with the same attention."""
        config = registry().get(self.model or "")
        name = self.name.lower().removesuffix(_FP8)
        return config is not None and name not in (config.name, config.hub.lower())

    def layers(self, tp: int) -> dict[Layer, int]:
        """Count the attention layers of each kind on one of `tp` GPUs."""
        if self.model:
            return model_named(self.model).layer_kinds(tp)
        (heads,), (head_dim,) = self.grid["heads"], self.grid["head_dim"]
        q_heads, kv_heads = heads
        return {Layer(q_heads, kv_heads, head_dim).share(tp, "the shape"): 1}

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Cached tokens of each sequence."""
        plain = {"model": (), "tp": (1,), "heads": ((1, 1),), "head_dim": (64,)}
        (problem,) = Grid(**{**self.grid.values, **plain}).problems()
        return problem.contexts

    @cached_property
    def splits(self) -> list[tuple[int, int]]:
        """Pairs of tp and cp that use all GPUs, most tp first; empty if none shares the model.

        A model with chosen tokens has no cp: `parallel` conflicts with `select`.
        """
        try:
            _ = self.whole
        except InvalidValue:
            return []
        layers = self.layers(1)
        most = 1 if any(each.selected for each in layers) else self.gpus
        pairs = [(self.gpus // cp, cp) for cp in range(1, most + 1) if self.gpus % cp == 0]
        return [pair for pair in pairs if all(each.divides(pair[0]) for each in layers)]

    @cached_property
    def whole(self) -> WholeModel | None:
        """One GPU's part of the model; None if its weights are unknown."""
        if self.model is None:
            return None
        positions = f"positions={max(self.contexts)}"  # can exceed the config's
        try:
            _ = read_model(f"{self.model}:{positions}")
            return read_model(f"{self.model}:tp={self.gpus}:{positions}")
        except UnknownWeights:
            return None

    @property
    def is_fp8(self) -> bool:
        """True for the checkpoint of a registered model in 8 bits, by its name."""
        return self.model in registry() and self.name.lower().endswith(_FP8)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight as published."""
        if self.is_fp8:
            return 1
        return self.whole.source.weight_bits / 8 if self.whole else WEIGHT_BYTES


@dataclass(frozen=True)
class Form:
    """How GPUs share the cache, and its format."""

    tp: int
    cp: int
    kv_dtype: str
    page_size: int | None
    #: Axes of a sweep over it, beyond the request's.
    axes: Mapping[str, Any]
    #: Attention of the GPUs that share a head, with the number of layers.
    layers: Mapping[AttentionProblem, int]

    @property
    def problem(self) -> AttentionProblem:
        """Layer with the most bytes in a step."""
        return max(self.layers, key=lambda problem: problem.kv_bytes * self.layers[problem])

    @property
    def single(self) -> AttentionProblem:
        """One GPU's part of `problem`."""
        return self.problem.shard(0) if self.cp > 1 else self.problem


def _form(request: Request, split: tuple[int, int], kv_dtype: str, page_size: int | None) -> Form:
    """Return a form.

    Raises:
        InvalidValue: A layer cannot have it.
    """
    tp, cp = split
    layers = request.layers(tp)
    axes: dict[str, Any] = {"kv_dtype": kv_dtype, "page_size": page_size}
    axes["parallel"] = NONE if cp == 1 else f"cp:{cp}"
    if page_size is not None:
        axes["lengths_on"] = "device"  # as servers call
    if request.model:
        axes["tp"] = tp
    else:
        (layer,) = layers
        axes["heads"] = (layer.q_heads, layer.kv_heads)
    grid = Grid(**{**request.grid.values, **{name: (value,) for name, value in axes.items()}})
    counts: dict[AttentionProblem, int] = {}
    for problem, count in zip(grid.problems(), layers.values(), strict=True):
        # Windows beyond the context make two kinds equal.
        counts[problem] = counts.get(problem, 0) + count
    return Form(tp, cp, kv_dtype, page_size, axes, counts)


@dataclass(frozen=True)
class Option:
    """A kernel as the attention of every layer."""

    kernel: str
    form: Form
    layers: Mapping[AttentionProblem, Estimate]

    @property
    def step_us(self) -> float:
        """Attention of all layers."""
        counts = self.form.layers
        return sum(counts[problem] * each.latency_us for problem, each in self.layers.items())

    @property
    def main(self) -> Estimate:
        return self.layers[self.form.problem]

    @property
    def source(self) -> str:
        """The least certain source of a layer."""
        sources = {each.source for each in self.layers.values()}
        return next(name for name in ("model", "neighbours", "measured") if name in sources)


def _options(
    request: Request, split: tuple[int, int], kv_dtype: str, page_size: int | None
) -> list[Option]:
    """Return the kernels that can be estimated in every layer, the fastest first.

    Raises:
        UserError: There are none. OutOfMemory if a layer alone needs more than there is.
    """
    form = _form(request, split, kv_dtype, page_size)
    found = {}
    for problem in form.layers:
        estimates = _estimates(request, problem)
        found[problem] = {name: estimates[name] for name in without_modes(estimates)}
    shared = set.intersection(*(set(of) for of in found.values()))
    if not shared:
        without = [problem for problem, of in found.items() if not of]
        raise _refused(request, form, without or [form.problem])
    options = [
        Option(name, form, {problem: of[name] for problem, of in found.items()}) for name in shared
    ]
    return sorted(options, key=lambda option: (option.step_us, option.kernel))


def without_modes(names: Iterable[str]) -> list[str]:
    """Leave out modes of kernels that are the best of several modes."""
    names = list(names)
    modes = {
        mode
        for name in names
        if name.endswith("_best")
        for mode in (name.removesuffix("_best"), *_modes(name))
    }
    return [name for name in names if name not in modes]


def runnable(request: Request, problems: Iterable[AttentionProblem]) -> list[str]:
    """Return the kernels to choose from that support all problems, installed here or not."""
    problems = list(problems)
    names = without_modes(request.named or backends(None))
    return [
        name
        for name in names
        if all(_refusal(kernel(name), problem) is None for problem in problems)
    ]


def _modes(name: str) -> list[str]:
    return [mode.name for mode in getattr(kernel(name), "modes", ())]


def _estimates(request: Request, problem: AttentionProblem) -> dict[str, Estimate]:
    measured = request.measured
    names = [
        name for name in request.named or backends(None) if _refusal(kernel(name), problem) is None
    ]
    if problem.parallel == NONE:
        return measured.estimates(problem, names) or _predicted(request, problem, names)
    own = measured.estimates(problem, names) if problem in measured.rows else {}
    added_us = exchange_us(problem, request.spec)
    if added_us is None:
        return own
    shard = problem.shard(0)
    alone = measured.estimates(shard, names) or _predicted(request, shard, names)
    shared = {
        name: Estimate(
            each.latency_us + added_us, "model" if each.source == "model" else "neighbours"
        )
        for name, each in alone.items()
    }
    return shared | own


def _refusal(each: Kernel, problem: AttentionProblem) -> str | None:
    """Return why a kernel does not support a problem. Libraries need not be installed here."""
    if modes := getattr(each, "modes", ()):
        reasons = [_refusal(mode, problem) for mode in modes]
        return each.shape_refusal(problem) or (None if None in reasons else reasons[0])
    reason = each.unsupported_reason(problem)
    return None if reason == each.unavailable_reason() else reason


def _predicted(
    request: Request, problem: AttentionProblem, names: Sequence[str]
) -> dict[str, Estimate]:
    """Return latencies by the performance model, which knows no libraries.

    Of variants that it does not know on this GPU, it predicts plain attention over the same tokens.
    """
    found = {}
    for each in map(kernel, names):
        if not is_modelled(each):
            continue
        fields = predict_cell(problem, each, "default", request.spec)
        if fields["status"] == "ok":
            is_unknown = scaled_from(request.spec.name) or fields.get("warnings")
            error = None if is_unknown else model_error(request.spec.name, [each.name])
            found[each.name] = Estimate(fields["latency_us"], "model", error)
        elif (plain := _as_plain(problem)) != problem:
            fields = predict_cell(plain, each, "default", request.spec)
            if fields["status"] == "ok":
                found[each.name] = Estimate(fields["latency_us"], "model", plain=plain)
    return found


def _as_plain(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem without windows, chunks, sinks and soft cap, over the tokens that it
    reads.
    """
    lengths = problem.visible_lengths
    context = lengths if problem.is_ragged else lengths[0]
    axes = {axis.name: axis.default for axis in PROBLEM_AXES if axis.name in _LOCAL}
    return replace(problem, context=context, **axes)


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + RESERVE_BYTES


def _memory(
    request: Request, split: tuple[int, int], kv_dtype: str, longest: int | None = None
) -> Memory:
    """Return the memory that is needed, of contexts cut to the `longest`."""
    tp, cp = split
    kv, longest = 0, longest or max(request.contexts)
    for layer, count in request.layers(tp).items():
        kinds = dict(layer.kinds)
        values = 0 if kinds.get("latent") else kinds.get("v_head_dim", layer.head_dim)
        most = layer.window or kinds.get("attention_chunk", longest)
        tokens = sum(-(-min(each, most, longest) // cp) for each in request.contexts)
        token_bytes = (layer.head_dim + values) * (WEIGHT_BYTES if kv_dtype == SAME else 1)
        kv += count * layer.kv_heads * tokens * token_bytes
    weights = request.whole.weights if request.whole else 0
    return Memory(int(weights * request.weight_bytes), kv)


def _fits(
    request: Request, split: tuple[int, int], kv_dtype: str, longest: int | None = None
) -> bool:
    return _memory(request, split, kv_dtype, longest).total <= request.spec.memory_gb * 1e9


def _least(request: Request, kv_dtype: str, splits: Sequence[tuple[int, int]]) -> Memory:
    """Return the memory of the split that needs least."""
    return min((_memory(request, split, kv_dtype) for split in splits), key=lambda each: each.total)


def _in_8_bits(request: Request) -> Request:
    """Return the request for the checkpoint in 8 bits, or as it is if its weights have no more."""
    named = replace(request, name=request.name + _FP8)
    has_fewer = request.whole is not None and named.weight_bytes < request.weight_bytes
    return named if has_fewer else request


def _smaller(request: Request, kv_dtype: str, splits: Sequence[tuple[int, int]]) -> list[str]:
    """Return changes that would fit, each alone: of batch, contexts and checkpoint."""
    if not splits:
        return []
    needs = _least(request, kv_dtype, splits)
    share = (request.spec.memory_gb * 1e9 - needs.weights - RESERVE_BYTES) / needs.kv
    batch = int(share * len(request.contexts))
    fixes = [f"a batch of {batch}"] * (batch > 0)
    lengths = range(1024, max(request.contexts), 1024)
    short = bisect_left(
        lengths,
        True,
        key=lambda longest: not any(_fits(request, each, kv_dtype, longest) for each in splits),
    )
    fixes += [f"contexts up to {short_count(longest)}" for longest in lengths[:short][-1:]]
    in_8_bits = _in_8_bits(request)
    if in_8_bits is not request and any(_fits(in_8_bits, each, kv_dtype) for each in splits):
        fixes.append(in_8_bits.name)
    return fixes


def _together(request: Request, kv_dtype: str, sharing: Container[int]) -> list[str]:
    """Return what would fit on more GPUs, the most first; in 8 bits only where 16 do not fit.

    Args:
        sharing: Values of cp to choose from.
    """
    for name in dict.fromkeys((request.name, _in_8_bits(request).name)):
        for gpus in range(MOST_GPUS, request.gpus - 1, -1):
            each = replace(request, name=name, gpus=gpus)
            splits = [(tp, cp) for tp, cp in each.splits if cp in sharing]
            if fixes := _smaller(each, kv_dtype, splits):
                changed = [f"--gpus {gpus}"] * (gpus > request.gpus)
                changed += [name] * (name != request.name)
                return [f"with {' and '.join(changed)}, {' or '.join(fixes)}"]
    return []


def _shortage(request: Request, kv_dtype: str, splits: Sequence[tuple[int, int]]) -> str:
    """Return why splits do not fit, and what would."""
    needs = _least(request, kv_dtype, splits)
    available = request.spec.memory_gb * 1e9
    more = {f"--gpus {gpus}": gpus for gpus in range(request.gpus + 1, MOST_GPUS + 1)}
    larger = {flag: replace(request, gpus=gpus) for flag, gpus in more.items()}
    larger |= {f"--gpu {name}": replace(request, spec=find(name)) for name in _LARGER}
    sharing = {cp for _, cp in splits}
    enough = (
        flag
        for flag, each in larger.items()
        if any(cp in sharing and _fits(each, (tp, cp), kv_dtype) for tp, cp in each.splits)
    )
    fixes = _smaller(request, kv_dtype, splits)
    fixes += [flag for flag in [next(enough, None)] if flag]
    fixes = fixes or _together(request, kv_dtype, sharing)
    weights = f"weights {needs.weights / 1e9:.1f} GB, " if needs.weights else ""
    weights += f"{kv_dtype} " * (kv_dtype != SAME)
    verb = "fit" if needs.weights else "hold the cache"
    return (
        f"{request.name} needs {needs.total / 1e9:.1f} GB"
        f"{f' on each of {request.gpus} GPUs' if request.gpus > 1 else ''} ({weights}KV cache"
        f" {needs.kv / 1e9:.1f} GB, other {RESERVE_BYTES / 1e9:.1f} GB),"
        f" {request.spec.name} has {available / 1e9:.0f} GB:"
        f" {' or '.join(fixes) or 'a smaller model'} would {verb}"
    )


@dataclass(frozen=True)
class Recommendation:
    request: Request
    #: Kernels in the chosen form, the fastest first.
    options: Sequence[Option]
    #: The fastest option of each other form, by what differs.
    others: Mapping[str, Option]
    memory: Memory

    @property
    def choice(self) -> Option:
        return self.options[0]

    @property
    def rival(self) -> Option | None:
        """The next kernel of another library."""
        family = self.choice.kernel.partition("_")[0]
        others = (each for each in self.options if each.kernel.partition("_")[0] != family)
        return next(others, None)

    @property
    def lead(self) -> float | None:
        return None if self.rival is None else self.rival.step_us / self.choice.step_us

    @property
    def lead_error(self) -> float | None:
        """Part of the lead that may be error; None if unknown."""
        if self.rival is None:
            return None
        gpu, names = self.request.spec, (self.choice.kernel, self.rival.kernel)
        sources = {self.choice.source, self.rival.source}
        if "model" in sources:
            return None if scaled_from(gpu.name) else model_error(gpu.name, names)
        if sources == {"measured"}:
            both = (self.choice.main.row, self.rival.main.row)
            return SPREAD if set(both) <= set(self.request.own) else BETWEEN_GPUS
        error = self.request.measured.error(self.choice.form.single, *names)
        return None if error is None else max(BETWEEN_GPUS, error)

    @property
    def is_clear(self) -> bool:
        return bool(self.lead and self.lead_error and self.lead - 1 > self.lead_error)

    @property
    def is_even(self) -> bool:
        """True if choice and rival take as long, as far as is known."""
        ahead, error = (self.lead or 2) - 1, self.lead_error or 1
        return ahead < WITHIN or ahead < error < _KNOWN

    @property
    def without_attention_us(self) -> float | None:
        request = self.request
        if request.whole is None:
            return None
        batch = len(request.contexts)
        return without_attention_us(request.whole, batch, request.spec, request.weight_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all sequences."""
        if self.without_attention_us is None:
            return None
        step_us = self.without_attention_us + self.choice.step_us
        return len(self.request.contexts) / step_us * 1e6


def recommend(request: Request) -> Recommendation:
    """Choose kernel, split and cache.

    Raises:
        UserError: The memory does not hold weights and cache, or no kernel can be estimated.
    """
    kv_dtype, by_split = _that_fit(request)
    page_size, *pages = request.page_sizes
    fastest_us = min(found[0].step_us for found in by_split.values())
    # Of equally fast splits, the one with most tp needs least of a server.
    split = next(
        each for each in by_split if by_split[each][0].step_us <= fastest_us * (1 + WITHIN)
    )
    chosen = by_split.pop(split)
    others = {_split_words(each): found[0] for each, found in by_split.items()}
    problem = chosen[0].form.single
    forms = {page_words(each): (kv_dtype, each) for each in pages}
    for dtype in request.kv_dtypes[request.kv_dtypes.index(kv_dtype) + 1 :]:
        forms[f"{dtype} cache"] = (dtype, page_size)
    is_slow = chosen[0].source == "model" and problem.batch * problem.kv_heads > MOST_TILES
    for words, form in () if is_slow else forms.items():
        with suppress(UserError):
            others[words] = _options(request, split, *form)[0]
    return Recommendation(request, chosen, others, _memory(request, split, kv_dtype))


def form_to_measure(request: Request) -> Form:
    """Return the form that is recommended without measuring, or else the first that fits.

    Raises:
        UserError: The memory does not hold weights and cache.
    """
    try:
        return recommend(request).choice.form
    except UserError:
        for kv_dtype in request.kv_dtypes:
            for split in request.splits:
                if _fits(request, split, kv_dtype):
                    return _form(request, split, kv_dtype, request.page_sizes[0])
        if not request.splits:
            raise
        shortage = _shortage(request, request.kv_dtypes[-1], request.splits)
        raise UserError(shortage) from None


def _that_fit(request: Request) -> tuple[str, dict[tuple[int, int], list[Option]]]:
    """Return the first KV dtype with kernels in a split that fits, and such splits.

    Raises:
        UserError: There is none.
    """
    if not request.splits:
        more = (replace(request, gpus=gpus) for gpus in range(1, MOST_GPUS + 1))
        can = ", ".join(str(each.gpus) for each in more if each.splits)
        raise UserError(f"{request.gpus} GPUs cannot share {request.name}: choose --gpus {can}")
    reasons: list[str] = []
    for kv_dtype in request.kv_dtypes:
        if found := _able(request, kv_dtype, reasons, fitting=True):
            return kv_dtype, found
    unfit: list[str] = []
    for kv_dtype in reversed(request.kv_dtypes):
        unfit.clear()
        if found := _able(request, kv_dtype, unfit, fitting=False):
            raise UserError(_shortage(request, kv_dtype, list(found)))
    fewer = (replace(request, gpus=gpus) for gpus in range(request.gpus - 1, 0, -1))
    enough = (
        f"; --gpus {each.gpus} would do"
        for each in fewer
        if any(_able(each, kv_dtype, [], fitting=True) for kv_dtype in request.kv_dtypes)
    )
    raise UserError([*reasons, *unfit][0] + next(enough, ""))


def _able(
    request: Request, kv_dtype: str, reasons: list[str], *, fitting: bool
) -> dict[tuple[int, int], list[Option]]:
    """Return the splits that fit, or those that do not, with their kernels.

    Args:
        reasons: Receives why splits have none.
    """
    found = {}
    for split in request.splits:
        if _fits(request, split, kv_dtype) == fitting:
            try:
                found[split] = _options(request, split, kv_dtype, request.page_sizes[0])
            except UserError as error:
                if isinstance(error, OutOfMemory) and not fitting:
                    # A layer alone is too large: what is missing depends on all layers.
                    found[split] = []
                else:
                    reasons.append(str(error))
    return found


def _split_words(split: tuple[int, int]) -> str:
    shares = [f"{name} {size}" for name, size in zip(("tp", "cp"), split, strict=True) if size > 1]
    return " x ".join(shares)


def page_words(page_size: int | None) -> str:
    return "contiguous" if page_size is None else f"pages of {page_size}"


def _refused(request: Request, form: Form, layers: Sequence[AttentionProblem]) -> UserError:
    """Return why no kernel can be estimated in these layers."""
    problem, words = layers[0], layers[0].label
    others = model_named(request.model).other_layers if request.model else {}
    if others or len(form.layers) > 1:
        words = " and ".join(f"{form.layers[each]} layers ({each.label})" for each in layers)
        words += f" of {request.name}"
    every = [kernel(name) for name in request.named or REFERENCES[:: -1 if problem.latent else 1]]
    # The kernel that an fp8 cache alone rules out tells more than one that never runs it.
    plain = replace(problem, kv_dtype=SAME)
    runs = (each for of in (problem, plain) for each in every if _refusal(each, of) is None)
    each = next(runs, every[0])
    if reason := _refusal(each, problem):
        return UserError(f"no kernel runs {words}: {reason}")
    if not is_modelled(each):
        fix = "leave --backends out, or measure" if request.named else "measure it"
        reason = f"the performance model does not know {each.name}: {fix}"
    elif name := unknown_axis(problem, each):
        fix = f"measure {each.name} on that GPU, with --measure"
        reason = f"the performance model does not know {name}: {fix}"
    else:
        fields = predict_cell(problem, each, "default", request.spec)
        if fields["status"] == "out_of_memory":
            return OutOfMemory(f"{problem.label} {fields['reason']}")
        reason = fields["reason"]
    named = ", ".join(f"{count} of {name}" for name, count in others.items())
    rest = f"; layers without an attention that leanbench has ({named}) do not count" * bool(named)
    return UserError(
        f"too little was measured on {request.spec.name} near {words}, and {reason}{rest}"
    )
