"""A recommendation in words, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from leanbench.advice.recommend import MOST_TILES, Option, Recommendation, page_words
from leanbench.core.kinds import SAME
from leanbench.core.llm.model import WEIGHT_BYTES
from leanbench.core.memory import RESERVE_BYTES
from leanbench.core.registry import kernel
from leanbench.model.calibration import calibration_for
from leanbench.model.error import scaled_from, short_error
from leanbench.model.parts import Parts, predict_parts
from leanbench.model.predict import predict_cell
from leanbench.model.rates import floor_us
from leanbench.records.published import PublishedRow

_FP8 = "fp8 changes results, check the model's quality"
#: Half of an interval by the source of its middle.
_INTERVALS = {
    "measured": "95% interval, and what GPUs of a product differ by",
    "neighbours": "by the error of 9 of 10 near shapes",
    "model": "by the error of 9 of 10 predictions",
}


def title(of: Recommendation) -> str:
    request, contexts = of.request, of.request.contexts
    product = request.spec.product.removeprefix("NVIDIA ")
    gpus = f"{request.gpus} x {product}" if request.gpus > 1 else product
    lengths = f"{contexts[0]:,} token{'s' * (contexts[0] > 1)}"
    if len(set(contexts)) > 1:
        mean = sum(contexts) / len(contexts)
        lengths = f"{mean:,.0f} tokens in the mean, {max(contexts):,} at most"
    sequences = "1 sequence" if len(contexts) == 1 else f"{len(contexts)} sequences"
    return f"{request.name} on {gpus}, {sequences} of {lengths}"


def usd_per_million(of: Recommendation, usd_per_hour: float | None) -> float | None:
    """Return dollars per million tokens from the price of a GPU."""
    if usd_per_hour is None or of.tokens_per_s is None:
        return None
    return usd_per_hour * of.request.gpus / 3600 / of.tokens_per_s * 1e6


def sentences(of: Recommendation, usd_per_hour: float | None = None) -> dict[str, str]:
    """Return the sentences by their headings."""
    lines = {
        "Take": _take(of),
        "Attention": _attention(of),
        "Step": _step(of, usd_per_million(of, usd_per_hour)),
        "Lead": _lead(of),
        "From": _origin(of),
        "Sure": _sureness(of),
        "Why": _why(of),
        "Else": _other_forms(of),
        "Memory": _memory(of),
        "Note": _notes(of),
    }
    return {name: words for name, words in lines.items() if words}


def _take(of: Recommendation) -> str:
    form, row = of.choice.form, _near_row(of, of.choice)
    shares = [f"heads over {form.tp} GPUs (tp {form.tp})"] * (form.tp > 1)
    shares += [f"tokens over {form.cp} GPUs (cp {form.cp})"] * (form.cp > 1)
    dtype = "16-bit" if form.kv_dtype == SAME else form.kv_dtype
    mode = f" (mode {row.mode})" if row and row.mode else ""
    cache = f"{dtype} KV cache, {page_words(form.page_size)}"
    return ", ".join([f"{of.choice.kernel}{mode}", *shares, cache])


def _attention(of: Recommendation) -> str:
    choice, us, error = of.choice, of.choice.main.latency_us, of.choice.main.error
    layers = f"{_digits(us)} µs a layer"
    if error is not None and error < 1:
        ends = f"{_digits(us * (1 - error))} to {_digits(us * (1 + error))}"
        how = (
            "95% interval" if choice.main.row in of.request.own else _INTERVALS[choice.main.source]
        )
        layers += f" ({ends}: {how})"
    if of.request.model is None:
        return layers
    counts = choice.form.layers
    if len(counts) > 1:
        each = (
            f"{counts[one]} x {_digits(has.latency_us)} µs over {max(one.visible_lengths):,} tokens"
            for one, has in choice.layers.items()
        )
        layers = " + ".join(each)
    return f"{layers}, {_digits(choice.step_us / 1e3)} ms a step of {sum(counts.values())} layers"


def _step(of: Recommendation, usd: float | None) -> str:
    others_us, tokens = of.without_attention_us, of.tokens_per_s
    if others_us is None or tokens is None:
        return ""
    dollars = "" if usd is None else f", ${usd:.3g} per million tokens"
    return (
        f"{_digits((others_us + of.choice.step_us) / 1e3)} ms, with {_digits(others_us / 1e3)} ms"
        f" to read the weights: {tokens:,.0f} tokens/s of all sequences{dollars}. Real steps are"
        " slower: norms, gaps between GPU kernels and all-reduces are not counted"
    )


def _lead(of: Recommendation) -> str:
    if of.rival is None:
        return "unknown, no other backend can be estimated here"
    error = "an unknown error" if of.lead_error is None else f"an error of {of.lead_error:.1%}"
    lead = f"{of.rival.kernel} takes {of.lead:.2f}x as long, with {error}"
    if of.is_clear:
        return lead
    return f"none: {lead}. Either will do" if of.is_even else f"unsure: {lead}. Measure both"


def _origin(of: Recommendation) -> str:
    choice, measured = of.choice, of.request.measured
    if choice.source == "measured":
        runs = {each.row.run for each in choice.layers.values() if each.row is not None}
        named = sorted(f"{run.name} ({run.day})" for run in runs)
        return f"measured rows of this shape, {', '.join(named)}"
    if choice.source == "neighbours":
        exchange = ", and a predicted exchange" * (choice.form.cp > 1)
        near, single = measured.near(choice.form.single)[0], choice.form.single
        return f"measured rows near {single.label}, the nearest {near.label}{exchange}"
    where = "too little was measured near this shape"
    if not measured.rows:
        where = f"nothing was measured on {of.request.spec.name}"
    return f"the performance model, which knows no libraries; {where}"


def _sureness(of: Recommendation) -> str:
    choice, gpu = of.choice, of.request.spec.name
    if choice.source == "model":
        fitted = scaled_from(gpu)
        low = f"low, the model was fitted to {fitted}. " if fitted else ""
        return low + short_error(gpu, [choice.kernel]).rstrip(".")
    problem = choice.form.single
    middle = of.request.measured.error(problem, choice.kernel, share=5)
    if choice.source == "measured" or middle is None:
        return ""
    return (
        f"times of {choice.kernel} were off by {middle:.1%} in the median of near shapes, estimated"
        " without their own rows"
    )


def _why(of: Recommendation) -> str:
    choice, rival, floor = of.choice, of.rival, read_floor_us(of)
    megabytes = _digits(choice.form.single.kv_bytes / 1e6, 4)
    us, reader = choice.main.latency_us, "each GPU" if of.request.gpus > 1 else "a call"
    found = [
        f"{reader} reads {megabytes} MB a layer. Reading alone takes"
        f" {_digits(floor)} µs (the read floor), {min(1, floor / us):.0%} of {_digits(us)} µs"
    ]
    if parts := predicted_parts(of):
        named = (f"{name} {part:.1f}" for name, part in parts.by_name.items())
        found.append(f"By the model, {_digits(us)} µs are {' + '.join(named)}")
    if rival:
        above = [
            f"{each.kernel} {_digits(max(0, each.main.latency_us - floor))} µs{_launches(of, each)}"
            for each in (rival, choice)
        ]
        found.append(f"Above the floor, {' and '.join(above)}")
    return ". ".join(found)


def _launches(of: Recommendation, option: Option) -> str:
    """Return the GPU kernels of a call in words."""
    row = _near_row(of, option)
    if row is None or row.launches is None:
        return ""
    return f" in {row.launches} launch{'es' * (row.launches > 1)}"


def _near_row(of: Recommendation, option: Option) -> PublishedRow | None:
    """Return the kernel's row on the nearest published problem that has one."""
    measured = of.request.measured
    near = [option.form.single, *measured.near(option.form.single)]
    rows = (measured.rows.get(problem, {}).get(option.kernel) for problem in near)
    return next((row for row in rows if row is not None), None)


def read_floor_us(of: Recommendation) -> float:
    """Return the read floor of the main layer, measured or by the model."""
    choice, spec = of.choice, of.request.spec
    if choice.main.row and choice.main.row.read_floor_us:
        return choice.main.row.read_floor_us
    return floor_us(choice.form.single.kv_bytes, spec, calibration_for(spec).constants)


def predicted_parts(of: Recommendation) -> Parts | None:
    """Cut the choice's latency by the model; None if the model does not know it."""
    problem, spec, chosen = of.choice.form.single, of.request.spec, kernel(of.choice.kernel)
    if problem.batch * problem.kv_heads > MOST_TILES:
        return None
    row = predict_cell(problem, chosen, "default", spec)
    if row["status"] != "ok":
        return None
    parts = predict_parts(problem, chosen, chosen.read_config(row["config"]), spec)
    return None if parts is None else parts.scaled(of.choice.main.latency_us)


def _other_forms(of: Recommendation) -> str:
    phrases = []
    for words, option in of.others.items():
        own = f" with {option.kernel}" * (option.kernel != of.choice.kernel)
        caution = f" ({_FP8})" * words.startswith("e4m3")
        time = f"{_digits(option.main.latency_us)} µs"
        if len(of.choice.layers) > 1:
            # Kinds of layers can differ in opposite directions.
            time = f"{_digits(option.step_us / 1e3)} ms a step"
        phrases.append(f"{words} {time}{own}{caution}")
    return ", ".join(phrases)


def _memory(of: Recommendation) -> str:
    memory, available = of.memory, f"{of.request.spec.memory_gb:.0f} GB a GPU"
    if not memory.weights:
        cache = f"KV cache alone {memory.kv / 1e9:.3f} GB"
        return f"{cache} of {available}, the weights are not known"
    return (
        f"{memory.total / 1e9:.1f} of {available}: weights {memory.weights / 1e9:.1f} GB,"
        f" KV cache {memory.kv / 1e9:.1f} GB, other {RESERVE_BYTES / 1e9:.1f} GB"
    )


def _notes(of: Recommendation) -> str:
    request, whole = of.request, of.request.whole
    notes = []
    if request.model and whole is None:
        notes.append(
            f"the weights of {request.name} are not known: whether they fit is not, nor the time of"
            " a step"
        )
    if whole is not None:
        most = whole.source.keys.get("max_position_embeddings", 0)
        if request.is_alias:
            notes.append(f"the weights of {request.name} count as those of {request.model}")
        elif 0 < most < max(request.contexts):
            notes.append(f"{request.name} has {most:,} positions, fewer than the context")
        is_16_bit = request.weight_bytes == WEIGHT_BYTES
        quantization = "fp8" if request.is_fp8 else whole.source.quantization
        quantised = f"weights count as published ({quantization})"
        notes += [*(whole.notes if is_16_bit else [quantised]), *whole.prediction_notes]
    if any(each.plain for each in of.choice.layers.values()):
        notes.append(
            f"the model does not know {of.choice.kernel} on {request.spec.name} with windows,"
            " chunks, sinks or soft caps: such layers count as plain attention over the tokens that"
            " they read, with an unknown error"
        )
    selects = any(layer.selected for layer in request.layers(of.choice.form.tp))
    if selects and not any(problem.select for problem in request.measured.rows):
        notes.append(
            "nothing was measured with chosen tokens: times are those of as many tokens side by"
            " side, single rows take longer"
        )
    page_size = of.choice.form.page_size
    pages = [problem.page_size for problem in request.measured.rows if problem.page_size]
    least = min(pages, default=0)
    if of.choice.source == "neighbours" and page_size and page_size < least:
        notes.append(
            f"nothing was measured with pages of less than {least} tokens: times are those of"
            " larger ones, such small pages take longer"
        )
    if of.choice.form.kv_dtype != request.kv_dtypes[0]:
        notes.append(f"a 16-bit cache does not fit; {_FP8}")
    return "; ".join(notes)


def to_json(of: Recommendation, usd_per_hour: float | None = None) -> dict[str, Any]:
    form, parts = of.choice.form, predicted_parts(of)
    return {
        "model": of.request.model,
        "gpu": of.request.spec.name,
        "gpus": of.request.gpus,
        "contexts": of.request.contexts,
        **_fields(of.choice),
        **{name: getattr(form, name) for name in ("tp", "cp", "kv_dtype", "page_size")},
        "without_attention_us": of.without_attention_us,
        "tokens_per_s": of.tokens_per_s,
        "usd_per_million_tokens": usd_per_million(of, usd_per_hour),
        "lead": of.lead,
        "lead_error": of.lead_error,
        "is_clear": of.is_clear,
        "kv_bytes": form.single.kv_bytes,
        "read_floor_us": read_floor_us(of),
        "parts": None if parts is None else asdict(parts),
        "memory": {"weights_bytes": of.memory.weights or None, "kv_bytes": of.memory.kv},
        "options": list(map(_fields, of.options)),
        "others": {words: _fields(option) for words, option in of.others.items()},
        "sentences": sentences(of, usd_per_hour),
    }


def _fields(option: Option) -> dict[str, Any]:
    return {
        "kernel": option.kernel,
        "problem": option.form.problem.label,
        "layer_us": option.main.latency_us,
        "layer_error": option.main.error,
        "attention_us": option.step_us,
        "source": option.source,
    }


def _digits(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"
