"""A recommendation in words, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from leanbench.advice.neighbours import differences, measured_on
from leanbench.advice.recommend import (
    BETWEEN_GPUS,
    MOST_TILES,
    STAND_INS,
    WITHIN,
    Option,
    Recommendation,
    page_words,
)
from leanbench.core.kinds import SAME
from leanbench.core.llm.model import WEIGHT_BYTES
from leanbench.core.registry import kernel
from leanbench.model.calibration import calibration_for
from leanbench.model.error import scaled_from, short_error
from leanbench.model.rates import floor_us
from leanbench.model.timeline import predict_timeline
from leanbench.records.published import PublishedRow

_FP8 = "fp8 changes results, check the model's quality"


@dataclass(frozen=True)
class Parts:
    """Parts of a layer's latency beyond reading, by the performance model."""

    #: From the launch to the first byte.
    launch_us: float
    #: Waiting for partials and merging them, in the CTA that ends last.
    merge_us: float
    #: Mean time in which an SM has no work.
    tail_us: float


@dataclass(frozen=True)
class Words:
    of: Recommendation
    #: Price of a GPU.
    usd_per_hour: float | None = None

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million tokens."""
        if self.usd_per_hour is None or self.of.tokens_per_s is None:
            return None
        return self.usd_per_hour * self.of.request.gpus / 3600 / self.of.tokens_per_s * 1e6

    @property
    def title(self) -> str:
        request, contexts = self.of.request, self.of.request.contexts
        product = request.spec.product.removeprefix("NVIDIA ")
        gpus = f"{request.gpus} x {product}" if request.gpus > 1 else product
        lengths = f"{contexts[0]:,} tokens"
        if len(set(contexts)) > 1:
            mean = sum(contexts) / len(contexts)
            lengths = f"{mean:,.0f} tokens in the mean, {max(contexts):,} at most"
        sequences = "1 sequence" if len(contexts) == 1 else f"{len(contexts)} sequences"
        return f"{request.name} on {gpus}, {sequences} of {lengths}"

    @property
    def take(self) -> str:
        form = self.of.choice.form
        shares = [f"heads over {form.tp} GPUs (tp {form.tp})"] * (form.tp > 1)
        shares += [f"tokens over {form.cp} GPUs (cp {form.cp})"] * (form.cp > 1)
        dtype = "16-bit" if form.kv_dtype == SAME else form.kv_dtype
        cache = f"{dtype} KV cache, {page_words(form.page_size)}"
        row = self._near_row(self.of.choice)
        mode = f" (mode {row.mode})" if row and row.mode else ""
        return ", ".join([f"{self.of.choice.kernel}{mode}", *shares, cache])

    @property
    def attention(self) -> str:
        choice, us, error = self.of.choice, self.of.choice.main.latency_us, self.of.error
        counts = choice.form.layers
        layers = f"{_us(us)} µs a layer ({_us(us * max(0, 1 - error))} to {_us(us * (1 + error))})"
        if self.of.request.model is None:
            return layers
        if len(counts) > 1:
            each = (f"{counts[one]} x {_us(of.latency_us)} µs" for one, of in choice.layers.items())
            layers = f"{' + '.join(each)} in layers of {len(counts)} kinds"
        return f"{layers}, {choice.step_us / 1e3:.3g} ms a step of {sum(counts.values())} layers"

    @property
    def step(self) -> str:
        others_us, tokens = self.of.without_attention_us, self.of.tokens_per_s
        if others_us is None or tokens is None:
            return ""
        step_us = others_us + self.of.choice.step_us
        usd = self.usd_per_million
        dollars = "" if usd is None else f", ${usd:.3g} per million tokens"
        return (
            f"{step_us / 1e3:.3g} ms, with {others_us / 1e3:.3g} ms to read the weights:"
            f" {tokens:,.0f} tokens/s of all sequences{dollars}. Real steps are slower: norms,"
            " gaps between GPU kernels and all-reduces are not counted"
        )

    @property
    def lead(self) -> str:
        rival, lead, error = self.of.rival, self.of.lead, self.of.lead_error
        if rival is None or lead is None:
            return "unknown, no other backend can be estimated here"
        if error is None:
            return f"unsure: {rival.kernel} takes {lead:.2f}x as long by a model of another GPU"
        if self.of.is_clear:
            return f"{rival.kernel} takes {lead:.2f}x as long, with an error of {error:.1%}"
        return (
            f"none: {rival.kernel} takes {lead:.2f}x as long, within the error of {error:.1%}."
            " Either will do"
        )

    @property
    def origin(self) -> str:
        choice, measured = self.of.choice, measured_on(self.of.request.spec)
        if choice.source == "measured":
            runs = {each.row.run for each in choice.layers.values() if each.row is not None}
            named = sorted(f"{run.name} ({run.day})" for run in runs)
            return f"measured rows of this shape, {', '.join(named)}"
        if choice.source == "neighbours":
            exchange = ", and a predicted exchange" * (choice.form.cp > 1)
            near = measured.near(choice.form.single)[0]
            shift = differences(choice.form.single, near)
            return f"measured rows of near shapes, the nearest {near.label} ({shift}){exchange}"
        near = "near this shape" if measured.rows else f"on {self.of.request.spec.name}"
        return f"the performance model, which knows no libraries; nothing was measured {near}"

    @property
    def sureness(self) -> str:
        choice, gpu = self.of.choice, self.of.request.spec.name
        if choice.source == "model":
            fitted = scaled_from(gpu)
            low = f"low, the model was fitted to {fitted}. " if fitted else ""
            return low + short_error(gpu, [choice.kernel]).rstrip(".")
        if choice.source == "measured" and self.of.lead_error == BETWEEN_GPUS:
            return f"high; another GPU of the product differs by {BETWEEN_GPUS:.1%} in the median"
        right, tried = self.of.right
        off = f"times of {choice.kernel} were off by {self.of.median_error:.1%} in the median"
        if not tried:
            return f"of near shapes estimated without their own rows, {off}"
        return (
            f"for {right} of the {tried} nearest shapes, estimated without their own rows, the"
            f" choice was within {WITHIN:.0%} of the best; {off}"
        )

    @property
    def why(self) -> str:
        choice, rival, floor = self.of.choice, self.of.rival, self.floor_us
        us, reader = choice.main.latency_us, "each GPU" if self.of.request.gpus > 1 else "a call"
        sentences = [
            f"{reader} reads {choice.form.single.kv_bytes / 1e6:,.4g} MB a layer. Reading alone"
            f" takes {_us(floor)} µs (the read floor), {min(1, floor / us):.0%} of {_us(us)} µs"
        ]
        if parts := self.parts:
            sentences.append(
                f"Predicted parts: {parts.launch_us:.1f} µs to the first byte, {parts.merge_us:.1f}"
                f" µs to merge partial results, {parts.tail_us:.1f} µs of a mean SM without work"
                " (tail)"
            )
        if rival:
            above = (f"{_us(max(0, each.main.latency_us - floor))} µs" for each in (rival, choice))
            sentences.append(
                f"Above the floor, {rival.kernel} takes {next(above)}{self._launches(rival)} and"
                f" {choice.kernel} {next(above)}{self._launches(choice)}"
            )
        return ". ".join(sentences)

    def _launches(self, option: Option) -> str:
        """Return the GPU kernels of a call in words."""
        row = self._near_row(option)
        if row is None or row.launches is None:
            return ""
        return f" in {row.launches} launch{'es' * (row.launches > 1)}"

    def _near_row(self, option: Option) -> PublishedRow | None:
        """Return the kernel's row on the nearest published problem that has one."""
        measured = measured_on(self.of.request.spec)
        near = [option.form.single, *measured.near(option.form.single)]
        rows = (measured.rows.get(problem, {}).get(option.kernel) for problem in near)
        return next((row for row in rows if row is not None), None)

    @cached_property
    def floor_us(self) -> float:
        """Read floor of the main layer, measured or by the model."""
        choice, spec = self.of.choice, self.of.request.spec
        if choice.main.row and choice.main.row.read_floor_us:
            return choice.main.row.read_floor_us
        return floor_us(choice.form.single.kv_bytes, spec, calibration_for(spec).constants)

    @cached_property
    def parts(self) -> Parts | None:
        """Parts of the choice's latency; None if the model does not know it."""
        choice, spec = self.of.choice, self.of.request.spec
        problem = choice.form.single
        if problem.batch * problem.kv_heads > MOST_TILES:
            return None
        timeline = predict_timeline(problem, kernel(choice.kernel), "default", spec)
        if isinstance(timeline, str):
            return None
        last = max(timeline.ctas, key=lambda cta: cta.end_us)
        merge_us = sum(span.end_us - span.start_us for span in last.spans if span.kind != "tiles")
        constants = calibration_for(spec).constants
        launch_us = constants.launch_us + constants.first_read_us
        tail_us = timeline.duration_us * (1 - timeline.sm_busy_share)
        return Parts(launch_us, merge_us, tail_us)

    @property
    def other_forms(self) -> str:
        """Times in other forms."""
        main = self.of.choice.kernel
        phrases = []
        for words, option in self.of.others.items():
            own = f" with {option.kernel}" * (option.kernel != main)
            caution = f" ({_FP8})" * words.startswith("e4m3")
            phrases.append(f"{words} {_us(option.main.latency_us)} µs{own}{caution}")
        return ", ".join(phrases)

    @property
    def memory(self) -> str:
        memory = self.of.memory
        available = f"{self.of.request.spec.memory_gb:.0f} GB a GPU"
        if not memory.weights:
            return f"KV cache alone {memory.kv / 1e9:.1f} of {available}"
        return (
            f"{memory.total / 1e9:.1f} of {available}: weights {memory.weights / 1e9:.1f} GB,"
            f" KV cache {memory.kv / 1e9:.1f} GB"
        )

    @property
    def notes(self) -> str:
        request, whole, choice = self.of.request, self.of.request.whole, self.of.choice
        notes = []
        if request.model and whole is None:
            notes.append(
                f"the weights of {request.name} are not known: whether they fit is not, nor the"
                " time of a step"
            )
        if whole is not None:
            most = whole.source.keys.get("max_position_embeddings", 0)
            if request.is_alias:
                notes.append(f"the weights of {request.name} count as those of {request.model}")
            elif 0 < most < max(request.contexts):
                notes.append(f"{request.name} has {most:,} positions, fewer than the context")
            is_16_bit = request.weight_bytes == WEIGHT_BYTES
            quantised = f"weights count as published ({whole.source.quantization})"
            notes += [*(whole.notes if is_16_bit else [quantised]), *whole.prediction_notes]
        if choice.form.kv_dtype != request.kv_dtypes[0]:
            notes.append(f"a 16-bit cache does not fit; {_FP8}")
        if choice.kernel in STAND_INS and not request.named:
            notes.append("fixed_split stands for libraries that split the context, fa2 for others")
        return "; ".join(notes)

    def lines(self) -> dict[str, str]:
        """Return the sentences by their headings."""
        lines = {
            "Take": self.take,
            "Attention": self.attention,
            "Step": self.step,
            "Lead": self.lead,
            "From": self.origin,
            "Sure": self.sureness,
            "Why": self.why,
            "Else": self.other_forms,
            "Memory": self.memory,
            "Note": self.notes,
        }
        return {name: words for name, words in lines.items() if words}

    def to_json(self) -> dict[str, Any]:
        of, choice = self.of, self.of.choice
        right, tried = of.right
        return {
            "model": of.request.model,
            "gpu": of.request.spec.name,
            "gpus": of.request.gpus,
            "contexts": of.request.contexts,
            **_fields(choice),
            "tp": choice.form.tp,
            "cp": choice.form.cp,
            "kv_dtype": choice.form.kv_dtype,
            "page_size": choice.form.page_size,
            "layer_error": of.error,
            "without_attention_us": of.without_attention_us,
            "tokens_per_s": of.tokens_per_s,
            "usd_per_million_tokens": self.usd_per_million,
            "lead": of.lead,
            "lead_error": of.lead_error,
            "is_clear": of.is_clear,
            "near_shapes": {"within_3_percent": right, "tried": tried},
            "kv_bytes": choice.form.single.kv_bytes,
            "read_floor_us": self.floor_us,
            "parts": self.parts and asdict(self.parts),
            "memory": asdict(of.memory),
            "options": [_fields(option) for option in of.options],
            "others": {words: _fields(option) for words, option in of.others.items()},
            "sentences": self.lines(),
        }


def _fields(option: Option) -> dict[str, Any]:
    return {
        "kernel": option.kernel,
        "problem": option.form.problem.label,
        "layer_us": option.main.latency_us,
        "attention_us": option.step_us,
        "source": option.source,
    }


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
