"""A recommendation in words, and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from leanbench.advice.neighbours import WITHIN, differences, measured_on
from leanbench.advice.recommend import Option, Recommendation, page_words
from leanbench.core.kinds import SAME
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.model.calibration import calibration_for
from leanbench.model.error import scaled_from, short_error
from leanbench.model.rates import floor_us
from leanbench.model.timeline import predict_timeline

#: More output tiles take too long to play.
_MOST_TILES = 4096
_FP8_CAUTION = "fp8 changes results: check the model's quality"


@dataclass(frozen=True)
class Parts:
    """Parts of a layer's latency above reading, by the performance model."""

    #: From the launch to the first byte.
    launch_us: float
    #: Waiting for and merging partials in the CTA that ends last.
    merge_us: float
    #: Mean time in which an SM has no work.
    tail_us: float


@dataclass(frozen=True)
class Words:
    """Sentences about a recommendation."""

    of: Recommendation
    usd_per_hour: float | None = None

    @cached_property
    def single(self) -> AttentionProblem:
        """What one GPU computes in the main layer."""
        problem = self.of.choice.form.problem
        return problem.shard(0) if problem.parallel != NONE else problem

    @property
    def gpu(self) -> str:
        return self.of.request.spec.product.removeprefix("NVIDIA ")

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million tokens."""
        if self.usd_per_hour is None or self.of.tokens_per_s is None:
            return None
        return self.usd_per_hour * self.of.request.gpus / 3600 / self.of.tokens_per_s * 1e6

    @property
    def title(self) -> str:
        request = self.of.request
        gpus = f"{request.gpus} x {self.gpu}" if request.gpus > 1 else self.gpu
        contexts = request.contexts
        sequences = f"{len(contexts)} sequence{'s' * (len(contexts) > 1)}"
        lengths = f"of {contexts[0]:,} tokens"
        if len(set(contexts)) > 1:
            mean = sum(contexts) / len(contexts)
            lengths = f"of {mean:,.0f} tokens in the mean, {max(contexts):,} at most"
        return f"{request.name} on {gpus}, {sequences} {lengths}"

    @property
    def take(self) -> str:
        form = self.of.choice.form
        shares = []
        if form.tp > 1:
            shares.append(f"heads over {form.tp} GPUs (tp {form.tp})")
        if form.cp > 1:
            shares.append(f"tokens over {form.cp} GPUs (cp {form.cp})")
        cache = f"{'bf16' if form.kv_dtype == SAME else form.kv_dtype} KV cache"
        pages = page_words(form.page_size)
        return ", ".join([self.of.choice.kernel, *shares, f"{cache}, {pages}"])

    @property
    def attention(self) -> str:
        choice, counts = self.of.choice, self.of.choice.form.layers
        error = self.of.error
        us = choice.main.latency_us
        ends = f"{_us(us * (1 - min(error, 0.99)))} to {_us(us * (1 + error))}"
        if self.of.request.model is None:
            return f"{_us(us)} µs a layer ({ends})"
        if len(counts) == 1:
            layers = f"{_us(us)} µs a layer ({ends})"
        else:
            layers = ", ".join(
                f"{_us(each.latency_us)} µs in each of {counts[problem]} layers of {problem.label}"
                for problem, each in choice.layers.items()
            )
        return f"{layers}, {choice.step_us / 1e3:.3g} ms a step of {sum(counts.values())} layers"

    @property
    def step(self) -> str:
        recommendation = self.of
        others_us, tokens = recommendation.without_attention_us, recommendation.tokens_per_s
        if others_us is None or tokens is None:
            return ""
        step_us = others_us + recommendation.choice.step_us
        usd = self.usd_per_million
        dollars = "" if usd is None else f", ${usd:.3g} per million tokens"
        return (
            f"{step_us / 1e3:.3g} ms with {others_us / 1e3:.3g} ms to read the weights:"
            f" {tokens:,.0f} tokens/s of all sequences{dollars}. A bound: norms, gaps between"
            " GPU kernels and all-reduces are not in it"
        )

    @property
    def lead(self) -> str:
        rival, lead, doubt = self.of.rival, self.of.lead, self.of.doubt
        if rival is None or lead is None:
            return "no other backend can be estimated here"
        if self.of.is_clear:
            return f"{lead:.2f}x as fast as {rival.kernel}; the error of that ratio is {doubt:.1%}"
        return (
            f"none: {rival.kernel} takes {lead:.2f}x as long, within the error of {doubt:.1%}."
            " Either will do"
        )

    @property
    def origin(self) -> str:
        choice, spec = self.of.choice, self.of.request.spec
        if choice.source == "measured":
            runs = {each.row.run for each in choice.layers.values() if each.row is not None}
            named = (f"{run.name} ({run.day})" for run in sorted(runs, key=lambda run: run.name))
            return f"measured rows of this shape: {', '.join(named)}"
        if choice.source == "neighbours":
            near = measured_on(spec.name).alike(self.single)[0]
            shift = differences(self.single, near)
            exchange = ", and a predicted exchange" if choice.form.cp > 1 else ""
            if not shift:
                return f"measured rows of {self.single.label}{exchange}"
            return f"rows of near shapes, the nearest {near.label} ({shift}){exchange}"
        missing = (
            "no near shape was measured"
            if measured_on(spec.name).rows
            else (f"nothing was measured on {spec.name}")
        )
        return f"the performance model, {missing}; it knows no libraries"

    @property
    def sureness(self) -> str:
        choice, spec = self.of.choice, self.of.request.spec
        if choice.source == "model":
            source = scaled_from(spec.name)
            beware = f"low, the model was fitted to {source}. " if source else ""
            return beware + short_error(spec.name, [choice.kernel])
        if choice.source == "measured" and self.of.doubt < WITHIN:
            return "high: medians of one GPU; another of the product differs by 2.1% in the median"
        right, tried = self.of.right
        return (
            f"{right} of {tried} near shapes, each estimated without its own rows, got a kernel"
            f" within {WITHIN:.0%} of the best; times of {choice.kernel} were off by"
            f" {self.of.median_error:.1%} in the median"
        )

    @property
    def why(self) -> str:
        choice = self.of.choice
        us, floor = choice.main.latency_us, self.floor_us
        each = "each GPU" if self.of.request.gpus > 1 else "it"
        sentences = [
            f"{each} reads {self.single.kv_bytes / 1e6:,.4g} MB a layer; reading alone takes"
            f" {_us(floor)} µs (the read floor), {min(1, floor / us):.0%} of {_us(us)} µs"
        ]
        if (parts := self.parts) is not None:
            sentences.append(
                f"Predicted parts: {parts.launch_us:.1f} µs to the first byte, {parts.merge_us:.1f}"
                f" µs to merge partial results, {parts.tail_us:.1f} µs without work in a mean SM"
                " (tail)"
            )
        if (rival := self.of.rival) is not None:
            above = rival.main.latency_us - floor
            words = f"{rival.kernel} takes {_us(above)} µs above the floor, {choice.kernel}"
            sentences.append(f"{words} {_us(max(0.0, us - floor))} µs{self._launches(rival)}")
        return ". ".join(sentences)

    def _launches(self, rival: Option) -> str:
        """Compare the GPU kernels of a call, if both are known and differ."""
        counts = [self._gpu_kernels(name) for name in (rival.kernel, self.of.choice.kernel)]
        if None in counts or counts[0] == counts[1]:
            return ""
        return f"; a call is {counts[0]} GPU kernels and {counts[1]}"

    def _gpu_kernels(self, name: str) -> int | None:
        measured = measured_on(self.of.request.spec.name)
        near = [self.single, *measured.alike(self.single)] if measured.rows else []
        rows = [measured.rows[each][name] for each in near if name in measured.rows.get(each, {})]
        return rows[0].launches if rows else None

    @cached_property
    def floor_us(self) -> float:
        """Read floor of the main layer, measured or by the model."""
        row = self.of.choice.main.row
        if row is not None and row.read_floor_us is not None:
            return row.read_floor_us
        spec = self.of.request.spec
        return floor_us(self.single.kv_bytes, spec, calibration_for(spec).constants)

    @cached_property
    def parts(self) -> Parts | None:
        """Parts of the choice's latency; None if the model does not know it."""
        spec, problem = self.of.request.spec, self.single
        if problem.batch * problem.kv_heads > _MOST_TILES:
            return None
        timeline = predict_timeline(problem, kernel(self.of.choice.kernel), "default", spec)
        if isinstance(timeline, str):
            return None
        last = max(timeline.ctas, key=lambda cta: cta.end_us)
        merging = [span for span in last.spans if span.kind != "tiles"]
        constants = calibration_for(spec).constants
        return Parts(
            constants.launch_us + constants.first_read_us,
            sum(span.end_us - span.start_us for span in merging),
            timeline.duration_us * (1 - timeline.sm_busy_share),
        )

    @property
    def other_forms(self) -> str:
        """Times of other splits, pages and dtypes."""
        phrases = [
            f"{words} {_us(option.main.latency_us)} µs"
            + (f" with {option.kernel}" if option.kernel != self.of.choice.kernel else "")
            for words, option in self.of.others.items()
        ]
        caution = _FP8_CAUTION if any("e4m3" in words for words in self.of.others) else ""
        return "; ".join([*phrases, *([caution] if phrases and caution else [])])

    @property
    def memory(self) -> str:
        memory, spec = self.of.memory, self.of.request.spec
        weights = f"weights {memory.weights / 1e9:.1f} GB, " if memory.weights else ""
        return (
            f"{memory.total / 1e9:.1f} of {spec.memory_gb:.0f} GB a GPU: {weights}KV cache"
            f" {memory.kv / 1e9:.1f} GB"
        )

    @property
    def notes(self) -> list[str]:
        request, whole = self.of.request, self.of.whole
        notes = []
        if request.model and whole is None:
            notes.append(f"the weights of {request.model} are not known: no step and no tokens/s")
        if whole is not None:
            positions = whole.source.keys.get("max_position_embeddings", math.inf)
            if max(request.contexts) > positions:
                notes.append(
                    f"{request.model} has {positions:,} positions, fewer than the longest context"
                )
            notes += [*whole.notes, *whole.prediction_notes]
        if self.of.choice.form.kv_dtype != SAME and len(request.kv_dtypes) > 1:
            notes.append(f"a 16-bit cache does not fit; {_FP8_CAUTION}")
        return notes

    def lines(self) -> dict[str, str]:
        """Return the sentences by their first word."""
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
            "Note": "; ".join(self.notes),
        }
        return {name: words for name, words in lines.items() if words}

    def to_json(self) -> dict[str, Any]:
        recommendation = self.of
        choice, rival, request = recommendation.choice, recommendation.rival, recommendation.request
        right, tried = recommendation.right
        parts = None if self.parts is None else vars(self.parts)
        return {
            "model": request.model,
            "gpu": request.spec.name,
            "gpus": request.gpus,
            "contexts": request.contexts,
            "choice": {
                **_fields(choice),
                "tp": choice.form.tp,
                "cp": choice.form.cp,
                "kv_dtype": choice.form.kv_dtype,
                "page_size": choice.form.page_size,
                "error": recommendation.error,
            },
            "attention_us": choice.step_us,
            "without_attention_us": recommendation.without_attention_us,
            "tokens_per_s": recommendation.tokens_per_s,
            "usd_per_million_tokens": self.usd_per_million,
            "rival": None if rival is None else rival.kernel,
            "lead": recommendation.lead,
            "lead_error": recommendation.doubt,
            "is_clear": recommendation.is_clear,
            "near_shapes": {"within_3_percent": right, "tried": tried},
            "kv_bytes": self.single.kv_bytes,
            "read_floor_us": self.floor_us,
            "parts": parts,
            "memory": {**vars(recommendation.memory), "total": recommendation.memory.total},
            "options": [_fields(option) for option in recommendation.options],
            "others": {words: _fields(option) for words, option in recommendation.others.items()},
            "sentences": self.lines(),
        }


def _fields(option: Option) -> dict[str, Any]:
    return {
        "kernel": option.kernel,
        "layer_us": option.main.latency_us,
        "step_us": option.step_us,
        "source": option.source,
        "problem": option.form.problem.label,
    }


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
