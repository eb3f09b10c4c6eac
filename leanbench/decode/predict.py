"""Predicted step of a whole model: the performance model for attention, the time to read the
weights for the rest.
"""

from __future__ import annotations

from typing import Any

from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.llm.model import WEIGHT_BYTES, WholeModel
from leanbench.core.memory import shortage_on
from leanbench.core.problem import AttentionProblem
from leanbench.decode import BOUND
from leanbench.decode.attention import refusal
from leanbench.model.calibration import calibration_for
from leanbench.model.predict import predict_cell, predicted_fields
from leanbench.model.rates import floor_us
from leanbench.records.outcome import Outcome

#: What a row says of launch settings: those of the layers that see the whole context.
_SETTINGS = ("config", "config_choice", "config_reason")
#: Of every predicted step. 29 steps of the runs decode-models, decode-opt and paper-fig10.
_ROUGH = (
    "a step without attention is predicted as the time in which its weights are read: norms,"
    " rotary embedding and the gaps between GPU kernels (1,400 in a step of Llama-3-8B, some"
    " hundred in OPT's) are not in it, and steps of three models on an H200 took 1.1 to 2.0 times"
    " as long as predicted"
)


def predict_step(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> dict[str, Any]:
    """Return the fields of a predicted row.

    Args:
        configs: See `leanbench.model.predict.predict_cell`.
    """
    return predicted_fields(problem, kernel, _predicted(problem, kernel, configs, spec))


def _predicted(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> Outcome:
    assert problem.model is not None
    if (reason := refusal(kernel, problem, configs)) is not None:
        return Outcome(status="unsupported", reason=reason)
    if kernel.only_in_whole_models and kernel.name != BOUND:
        reason = f"{kernel.name} has no schedule to predict from: measure it, or leave it out"
        return Outcome(status="unsupported", reason=reason)
    if (reason := shortage_on(problem, spec)) is not None:
        return Outcome(status="out_of_memory", reason=reason)
    kinds = {} if kernel.name == BOUND else problem.model.layer_kinds
    layers = [predict_cell(problem.layer_problem(kind), kernel, configs, spec) for kind in kinds]
    for layer in layers:
        if layer["status"] != "ok":
            return Outcome(status=layer["status"], reason=layer["reason"])
    attention_us = sum(
        count * layer["latency_us"] for count, layer in zip(kinds.values(), layers, strict=True)
    )
    first = layers[0] if layers else {}
    settings = Outcome(**{name: first[name] for name in _SETTINGS if name in first})
    without_us = without_attention_us(problem.model, problem.batch, spec)
    step_us = without_us + attention_us
    return settings | Outcome(
        status="ok",
        latency_us=step_us,
        bandwidth_tb_s=None if kernel.name == BOUND else problem.kv_bytes / step_us / 1e6,
        tokens_per_s=problem.batch / step_us * 1e6,
        no_attention_us=without_us,
        attention_share=attention_us / step_us,
        weight_bytes=problem.model.weights * WEIGHT_BYTES,
        warnings=[_ROUGH, *problem.model.notes, *problem.model.prediction_notes],
    )


def without_attention_us(
    model: WholeModel, batch: int, spec: GpuSpec, weight_bytes: float = WEIGHT_BYTES
) -> float:
    """Return the time in which a step of `batch` sequences reads the weights."""
    bytes_read = int(model.weights_read(batch) * weight_bytes)
    return floor_us(bytes_read, spec, calibration_for(spec).constants)
