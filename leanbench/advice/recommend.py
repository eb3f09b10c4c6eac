"""The kernel, split and cache for a decode step, from published rows or the performance model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median, quantiles

from leanbench.advice.neighbours import REFERENCES, WITHIN, Estimate, Trial, measured_on
from leanbench.core.errors import InvalidValue, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.kinds import SAME
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import WEIGHT_BYTES, WholeModel, model_named, read_model
from leanbench.core.llm.weights import UnknownWeights
from leanbench.core.memory import RESERVE_BYTES
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel, kernels
from leanbench.core.syntax import parse_names, short_count
from leanbench.decode.predict import without_attention_us
from leanbench.model.error import model_error
from leanbench.model.predict import exchange_us, predict_cell
from leanbench.run.cells import Grid

#: This project's kernels that the model predicts where no library was measured.
STAND_INS = ("fixed_split", "fa2")
#: Median difference between two runs of the same command on two GPUs of a product.
BETWEEN_GPUS = 0.021
#: Page sizes that were measured.
PAGE_SIZES = (None, 16, 64)
KV_DTYPES = (SAME, "e4m3")


def backends(text: str | None) -> tuple[str, ...]:
    """Return the kernels of a list of names, or of their first words: ``lean,flashinfer``. Without
    a list: `lean`, `lean_mla` and all libraries.

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
    names: dict[str, None] = {}
    for word in parse_names("--backends", text):
        family = [name for name in usable if name.startswith(f"{word}_")]
        names |= dict.fromkeys([*([word] if word in kernels() else []), *family])
        if not family and word not in names:
            kernel(word)  # raises
    return tuple(names)


@dataclass(frozen=True)
class Request:
    """What is asked: one combination of a grid's axes, on a number of GPUs."""

    grid: Grid
    spec: GpuSpec
    gpus: int
    #: Kernels to choose from, and whether the user named them.
    kernels: tuple[str, ...]
    are_named: bool
    #: Choices; one if given.
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    page_sizes: tuple[int | None, ...] = PAGE_SIZES

    @property
    def model(self) -> str | None:
        return next(iter(self.grid["model"]), None)

    @property
    def name(self) -> str:
        """Model, or heads and head_dim."""
        (layer, *_) = self.layers(1)
        return self.model or f"{layer.q_heads}/{layer.kv_heads}x{layer.head_dim}"

    def layers(self, tp: int) -> dict[Layer, int]:
        """Count the layers of each kind on one of `tp` GPUs.

        Raises:
            InvalidValue: `tp` does not share out the heads.
        """
        if self.model:
            return model_named(self.model).layer_kinds(tp)
        ((heads,), (head_dim,)) = self.grid["heads"], self.grid["head_dim"]
        layer = Layer(*heads, head_dim)
        return {layer.share(tp, "the shape"): 1}

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Cached tokens of each sequence."""
        plain = {"model": (), "tp": (1,), "heads": ((1, 1),), "head_dim": (64,)}
        (problem,) = Grid(**{**self.grid.values, **plain}).problems()
        return problem.contexts

    @property
    def splits(self) -> list[tuple[int, int]]:
        """Pairs of tp and cp whose product is the number of GPUs, most tp first.

        Raises:
            InvalidValue: No tp shares out the heads.
        """
        pairs = [(self.gpus // cp, cp) for cp in range(1, self.gpus + 1) if self.gpus % cp == 0]
        layers = self.layers(1)
        return [pair for pair in pairs if all(layer.divides(pair[0]) for layer in layers)]

    def whole(self, gpus: int) -> WholeModel | None:
        """Return the part of the model that one GPU has; None if the weights are unknown."""
        if self.model is None:
            return None
        try:
            # Contexts can be longer than the config's positions.
            return read_model(f"{self.model}:tp={gpus}:positions={max(self.contexts)}")
        except UnknownWeights:
            return None


@dataclass(frozen=True)
class Form:
    """How the GPUs share the cache, and its format."""

    tp: int
    cp: int
    kv_dtype: str
    page_size: int | None
    #: Attention of one GPU, or of the `cp` GPUs that share tokens, with the number of layers.
    layers: Mapping[AttentionProblem, int]

    @property
    def problem(self) -> AttentionProblem:
        """The layer with the most bytes in a step."""
        return max(self.layers, key=lambda problem: problem.kv_bytes * self.layers[problem])


def _form(
    request: Request, split: tuple[int, int], kv_dtype: str, page_size: int | None
) -> Form | None:
    """Return a form; None if a layer cannot have it."""
    tp, cp = split
    values = {
        **request.grid.values,
        "kv_dtype": (kv_dtype,),
        "page_size": (page_size,),
        "parallel": (NONE if cp == 1 else f"cp:{cp}",),
    }
    if page_size is not None:
        # As servers call.
        values["lengths_on"] = ("device",)
    layers = request.layers(tp)
    if request.model:
        values["tp"] = (tp,)
    else:
        values["heads"] = tuple((layer.q_heads, layer.kv_heads) for layer in layers)
    counts: dict[AttentionProblem, int] = {}
    try:
        for problem, count in zip(Grid(**values).problems(), layers.values(), strict=True):
            # Windows beyond the context make two kinds alike.
            counts[problem] = counts.get(problem, 0) + count
    except InvalidValue:
        if (kv_dtype, page_size, cp) == (SAME, None, 1):
            raise
        return None
    return Form(tp, cp, kv_dtype, page_size, counts)


@dataclass(frozen=True)
class Option:
    """A kernel as the attention of every layer."""

    kernel: str
    form: Form
    #: Estimates of a layer.
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


def options(request: Request, form: Form) -> list[Option]:
    """Return the kernels that can be estimated, the fastest first."""
    estimates = {problem: _estimates(request, problem) for problem in form.layers}
    shared = [name for name in next(iter(estimates.values())) if _in_all(name, estimates.values())]
    found = [
        Option(name, form, {problem: of[name] for problem, of in estimates.items()})
        for name in shared
    ]
    return sorted(found, key=lambda option: option.step_us)


def _in_all(name: str, estimates: Iterable[Mapping[str, Estimate]]) -> bool:
    return all(name in each for each in estimates)


def _estimates(request: Request, problem: AttentionProblem) -> dict[str, Estimate]:
    usable = [name for name in request.kernels if _supports(name, problem)]
    measured = measured_on(request.spec.name)
    if problem.parallel == NONE:
        return measured.estimates(problem, usable) or _predictions(request, problem, usable)
    own = measured.estimates(problem, usable) if problem in measured.rows else {}
    added_us = exchange_us(problem, request.spec)
    if added_us is None:
        return own
    shard = problem.shard(0)
    alone = measured.estimates(shard, usable) or _predictions(request, shard, usable)
    shared = {
        name: replace(each, latency_us=each.latency_us + added_us, source=_less_sure(each))
        for name, each in alone.items()
    }
    return shared | own


def _less_sure(estimate: Estimate) -> str:
    """Return the source of an estimate with a predicted exchange."""
    return "model" if estimate.source == "model" else "neighbours"


def _refusal(name: str, problem: AttentionProblem) -> str | None:
    """Return why a kernel does not support a problem, or None. Libraries need not be installed
    here.
    """
    each = kernel(name)
    return each.shape_refusal(problem) if each.is_peer else each.unsupported_reason(problem)


def _supports(name: str, problem: AttentionProblem) -> bool:
    return _refusal(name, problem) is None


def _predictions(
    request: Request, problem: AttentionProblem, names: Sequence[str]
) -> dict[str, Estimate]:
    """Return what the model predicts; libraries have no prediction."""
    stand_ins = [] if request.are_named else STAND_INS
    predicted = {}
    for name in dict.fromkeys([*names, *stand_ins]):
        each = kernel(name)
        if type(each).schedule is not Kernel.schedule and _supports(name, problem):
            fields = predict_cell(problem, each, "default", request.spec)
            if fields["status"] == "ok":
                predicted[name] = Estimate(fields["latency_us"], "model")
    errors = model_error(request.spec.name, predicted)
    return {name: replace(each, error=errors) for name, each in predicted.items()}


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + RESERVE_BYTES


def _memory(request: Request, split: tuple[int, int], kv_dtype: str) -> Memory:
    tp, cp = split
    whole = request.whole(tp * cp)
    element = WEIGHT_BYTES if kv_dtype == SAME else 1
    kv = 0
    for layer, count in request.layers(tp).items():
        kinds = dict(layer.kinds)
        columns = layer.head_dim
        columns += 0 if kinds.get("latent") else kinds.get("v_head_dim", layer.head_dim)
        tokens = sum(-(-min(each, layer.window or each) // cp) for each in request.contexts)
        kv += count * layer.kv_heads * columns * element * tokens
    return Memory(0 if whole is None else whole.weights * WEIGHT_BYTES, kv)


def _fitting(request: Request) -> tuple[str, list[tuple[int, int]]]:
    """Return the first KV dtype that fits, and the splits that do.

    Raises:
        UserError: None fits. The message has what would.
    """
    for kv_dtype in request.kv_dtypes:
        fits = [split for split in request.splits if _fits(request, split, kv_dtype)]
        if fits:
            return kv_dtype, fits
    kv_dtype = request.kv_dtypes[0]
    needs = min(
        (_memory(request, split, kv_dtype) for split in request.splits),
        key=lambda memory: memory.total,
    )
    available = request.spec.memory_gb * 1e9
    left = available - needs.weights - RESERVE_BYTES
    batch, longest = len(request.contexts), max(request.contexts)
    fixes = []
    if (fewer := int(left / needs.kv * batch)) >= 1:
        fixes.append(f"a batch of {fewer}")
    if (shorter := int(left / needs.kv * longest) // 1024 * 1024) >= 1024:
        fixes.append(f"contexts up to {short_count(shorter)}")
    if more := _enough_gpus(request, kv_dtype):
        fixes.append(f"--gpus {more}")
    weights = f"weights {needs.weights / 1e9:.1f} GB, " if needs.weights else ""
    of = "each of" if request.gpus > 1 else "the"
    raise UserError(
        f"{request.name} needs {needs.total / 1e9:.1f} GB on {of} {request.gpus} GPU"
        f"{'s' * (request.gpus > 1)} ({weights}KV cache {needs.kv / 1e9:.1f} GB), and"
        f" {request.spec.name} has {available / 1e9:.0f} GB:"
        f" {' or '.join(fixes) or 'no number of GPUs up to 8'} would fit"
    )


def _fits(request: Request, split: tuple[int, int], kv_dtype: str) -> bool:
    return _memory(request, split, kv_dtype).total <= request.spec.memory_gb * 1e9


def _enough_gpus(request: Request, kv_dtype: str) -> int | None:
    for gpus in (2, 4, 8):
        more = replace(request, gpus=gpus)
        try:
            fits = any(_fits(more, split, kv_dtype) for split in more.splits)
        except InvalidValue:
            continue
        if gpus > request.gpus and fits:
            return gpus
    return None


@dataclass(frozen=True)
class Recommendation:
    request: Request
    #: Kernels in the chosen form, the fastest first.
    options: Sequence[Option]
    #: The fastest option of each other form, by what differs: KV dtype, page size, split.
    others: Mapping[str, Option]
    memory: Memory
    #: Part of the model on each GPU; None without known weights.
    whole: WholeModel | None
    #: Near published problems, estimated without their own rows.
    trials: Sequence[Trial]

    @property
    def choice(self) -> Option:
        return self.options[0]

    @property
    def rival(self) -> Option | None:
        """The next kernel of another library."""
        family = self.choice.kernel.partition("_")[0]
        return next(
            (each for each in self.options if each.kernel.partition("_")[0] != family), None
        )

    @property
    def lead(self) -> float | None:
        return None if self.rival is None else self.rival.step_us / self.choice.step_us

    @property
    def doubt(self) -> float:
        """Difference between the choice and the rival that may be error."""
        names = [each.kernel for each in (self.choice, self.rival) if each is not None]
        sources = {each.source for each in (self.choice, self.rival) if each is not None}
        if "model" in sources:
            return model_error(self.request.spec.name, names)
        if sources == {"measured"}:
            return BETWEEN_GPUS
        errors = [trial.error(names[0], *names[1:]) for trial in self.trials]
        return max(BETWEEN_GPUS, _p90([each for each in errors if each is not None]))

    @property
    def is_clear(self) -> bool:
        return self.lead is not None and self.lead - 1 > self.doubt

    @property
    def error(self) -> float:
        """Half of the interval of the choice's latency, as a share."""
        if self.choice.main.error is not None:
            return self.choice.main.error
        errors = [trial.error(self.choice.kernel) for trial in self.trials]
        return _p90([each for each in errors if each is not None])

    @property
    def median_error(self) -> float:
        errors = [trial.error(self.choice.kernel) for trial in self.trials]
        return median([each for each in errors if each is not None] or [0.0])

    @property
    def right(self) -> tuple[int, int]:
        """Trials with a choice within WITHIN of the best, and all with a choice."""
        losses = [trial.loss for trial in self.trials if len(trial.estimated) > 1]
        return sum(loss <= WITHIN for loss in losses), len(losses)

    @property
    def without_attention_us(self) -> float | None:
        if self.whole is None:
            return None
        batch = len(self.request.contexts)
        return without_attention_us(self.whole, batch, self.request.spec)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all sequences; new tokens of a step all count."""
        if self.without_attention_us is None:
            return None
        step_us = self.without_attention_us + self.choice.step_us
        return len(self.request.contexts) / step_us * 1e6


def _p90(values: Sequence[float]) -> float:
    if len(values) < 2:
        return max(values, default=1.0)
    return quantiles(values, n=10, method="inclusive")[-1]


def recommend(request: Request) -> Recommendation:
    """Choose kernel, split and cache.

    Raises:
        UserError: The memory does not hold weights and cache, or no kernel can be estimated.
    """
    kv_dtype, splits = _fitting(request)
    page_size = request.page_sizes[0]
    by_split = {}
    for split in splits:
        form = _form(request, split, kv_dtype, page_size)
        if form is not None and (found := options(request, form)):
            by_split[split] = found
    if not by_split:
        raise UserError(_why_none(request, splits[0], kv_dtype))
    split = min(by_split, key=lambda each: by_split[each][0].step_us)
    chosen = by_split[split]
    forms = {_split_words(each): _form(request, each, kv_dtype, page_size) for each in by_split}
    forms |= {
        f"{page_words(page)}": _form(request, split, kv_dtype, page)
        for page in request.page_sizes[1:]
    }
    forms |= {
        f"{dtype} KV cache": _form(request, split, dtype, page_size)
        for dtype in request.kv_dtypes
        if dtype != kv_dtype and _fits(request, split, dtype)
    }
    others = {}
    for words, form in forms.items():
        if form is not None and form != chosen[0].form and (found := options(request, form)):
            others[words] = found[0]
    problem = chosen[0].form.problem
    single = problem.shard(0) if problem.parallel != NONE else problem
    measured = measured_on(request.spec.name)
    is_modelled = chosen[0].source == "model"
    alike = [] if is_modelled else measured.alike(single)
    names = [option.kernel for option in chosen]
    return Recommendation(
        request,
        chosen,
        others,
        _memory(request, split, kv_dtype),
        request.whole(request.gpus),
        [measured.trial(each, names) for each in alike],
    )


def _split_words(split: tuple[int, int]) -> str:
    tp, cp = split
    shares = [f"tp {tp}"] * (tp > 1) + [f"cp {cp}"] * (cp > 1)
    return " x ".join(shares) or "one GPU"


def page_words(page_size: int | None) -> str:
    return "contiguous" if page_size is None else f"pages of {page_size}"


def _why_none(request: Request, split: tuple[int, int], kv_dtype: str) -> str:
    form = _form(request, split, kv_dtype, request.page_sizes[0])
    problem = form.problem if form else None
    reasons = [
        reason
        for name in request.kernels
        if problem and (reason := _refusal(name, problem)) is not None
    ]
    if len(reasons) == len(request.kernels) == 1:
        return f"{request.kernels[0]} does not support {request.name} here: {reasons[0]}"
    names = ", ".join(request.kernels[:4]) + ", ..." * (len(request.kernels) > 4)
    near = problem.label if problem else request.name
    return (
        f"nothing near {near} was measured with {names} on {request.spec.name}, and the"
        " performance model predicts this project's kernels alone, without every variant: leave"
        " --backends out, or use --measure on that GPU"
    )
