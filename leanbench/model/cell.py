"""Predicts one cell: the fields of its row that a model can fill."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from leanbench.configs import lookup
from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.decomposition import Schedule, quantisation_efficiency
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.memory import shortage_on
from leanbench.core.parallel import NONE
from leanbench.core.problem import MAX_Q_LEN, AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.model import lean_cuda
from leanbench.model.calibration import calibration_for
from leanbench.model.energy import energy_mj
from leanbench.model.error import model_error, uncompared
from leanbench.model.exchange import exchange_us
from leanbench.model.rates import floor_us
from leanbench.model.simulate import fits, latency_us
from leanbench.records.outcome import Outcome


def predict_latency_us(
    problem: AttentionProblem,
    kernel: Kernel,
    config: TileConfig,
    spec: GpuSpec,
    resident: int | None = None,
) -> float:
    """What one launch would take: 2 to 30 ms for a grid of 400 CTAs, for ranking candidates.

    Args:
        resident: CTAs that an SM holds at once, from the compiled kernel's registers and shared
            memory; left out, they are estimated.

    Raises:
        UserError: the kernel has no schedule to predict from or the model is not calibrated for it,
            or not even one CTA of this config fits an SM.
    """
    schedule = kernel.schedule(problem, config, spec)
    if schedule is None:
        raise UserError(
            f"{kernel.name} has no schedule to predict from: measure it, or leave it out"
        )
    return latency_us(schedule, problem, config, spec, resident=resident)


def predict_energy_mj(
    predicted_us: float, problem: AttentionProblem, schedule: Schedule, spec: GpuSpec
) -> float:
    """Energy of one launch of this latency, back to back with others."""
    in_use = calibration_for(spec)
    limit_w = find(in_use.calibration.gpu).power_limit_w
    running = schedule.running_sms(spec.sms)
    return energy_mj(predicted_us, problem.kv_bytes, running, spec, in_use.constants, limit_w)


#: Axes whose values, the default or not, predictions rest on. Any other is refused.
AXES = frozenset(
    {
        *("dtype", "kv_layout", "q_len", "page_size", "capacity", "lengths", "lengths_on"),
        *("causal", "window_left", "window_right", "softcap", "sinks", "alibi"),
        *("leftpad", "batch_idx", "kv_dtype", "q_dtype", "scaled"),
    }
)


def predict_cell(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> dict[str, Any]:
    """Fields of a `leanbench.records.row.Row`, `source` predicted; what only a measurement can know
    is left out.

    Args:
        configs: `default` or `heuristic`, see leanbench.configs.lookup; `best`: the kernel's
            candidate with the lowest predicted latency, of the implementation that runs on this GPU
            by default where another is not ahead by more than the model's error; or the launch
            settings themselves.
    """
    known = {
        "decomposition": kernel.decomposition,
        "source": "predicted",
        "kv_bytes": problem.kv_bytes,
    }
    return known | _predicted(problem, kernel, configs, spec).fields()


def _predicted(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> Outcome:
    if (reason := kernel.unsupported_reason(problem)) is not None:
        return _unsupported(reason)
    if problem.parallel != NONE:
        if (reason := unknown_exchange(problem, kernel)) is not None:
            return _unsupported(reason)
        return _shared(problem, kernel, configs, spec)
    if unknown := [name for name in problem.special if name not in AXES]:
        # What a latent cache is all about cannot be left out, nor its v_head_dim.
        if problem.latent:
            return _unsupported(
                "the performance model does not know latent caches: run it on a GPU"
            )
        return _unsupported(
            f"the performance model does not know {unknown[0]}: run it on a GPU, or leave"
            f" {unknown[0]} out"
        )
    if problem.q_len > MAX_Q_LEN:
        return _unsupported(
            f"the performance model does not know how long the arithmetic of {problem.q_len} query"
            f" tokens takes: choose q_len up to {MAX_Q_LEN}"
        )
    if (reason := shortage_on(problem, spec)) is not None:
        return Outcome(status="out_of_memory", reason=reason)
    choice = lookup.resolve(kernel, problem, spec, configs)
    candidates = _candidates(problem, kernel, spec, choice.config, configs == "best")
    known = [config for config in candidates if refusal(kernel, config, spec) is None]
    if candidates and not known:
        return _unsupported(refusal(kernel, candidates[0], spec))
    schedules = [
        (config, schedule)
        for config in known
        if (schedule := kernel.schedule(problem, config, spec)) is not None
    ]
    if not schedules:
        return _unsupported(
            f"{kernel.name} has no schedule to predict from: measure it, or leave it out"
        )
    fitting = [(config, schedule) for config, schedule in schedules if fits(problem, config, spec)]
    if not fitting:
        return _unsupported(
            f"{kernel.name} has no config that fits the {spec.shared_kb_per_cta} KB of shared"
            f" memory of {spec.name}"
        )
    config, schedule, predicted_us = _fastest(kernel, fitting, problem, spec)
    if configs == "best":
        why = f"the fastest of {len(fitting)} that were predicted for this cell"
        if len({kernel.implementation_of(config) for config, _ in fitting}) > 1:
            own = kernel.implementation_on(spec).name
            why += f", {own} unless another is ahead by more than the model's error"
        choice = lookup.Choice(config, f"best of {len(fitting)}", why)
    figures = _figures(config, schedule, predicted_us, problem, spec)
    warning = uncompared(kernel.implementation_of(config).name, problem, spec)
    noted = Outcome(warnings=[warning]) if warning else Outcome()
    return figures | noted | Outcome(**lookup.row_fields(kernel, choice))


def unknown_exchange(problem: AttentionProblem, kernel: Kernel) -> str | None:
    """A sentence where a kernel that runs the problem does not run one GPU's shard: it does more
    than attend to it.
    """
    if kernel.unsupported_reason(problem.shard(0)) is None:
        return None
    return f"the performance model does not know the exchange of {kernel.name}: measure"


def _shared(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> Outcome:
    """Of GPUs that share a problem: that of the one with the most of it, and the exchange; energy
    is that of all.
    """
    shard = _predicted(problem.shard(0), kernel, configs, spec)
    if shard.latency_us is None or shard.energy_mj is None or shard.read_floor_us is None:
        return shard
    added_us = exchange_us(problem, spec)
    if added_us is None:
        return _unsupported(
            f"the performance model does not know the links between GPUs of {spec.name}: predict"
            " tensor parallelism, or measure"
        )
    predicted_us = shard.latency_us + added_us
    return shard | Outcome(
        latency_us=predicted_us,
        bandwidth_tb_s=problem.kv_bytes / predicted_us / 1e6,
        read_floor_share=shard.read_floor_us / predicted_us,
        energy_mj=shard.energy_mj * problem.gpus.gpus,
        shard_us=shard.latency_us,
        exchange_us=added_us,
    )


def _unsupported(reason: str | None) -> Outcome:
    return Outcome(status="unsupported", reason=reason)


def refusal(kernel: Kernel, config: TileConfig, spec: GpuSpec) -> str | None:
    """One sentence why the model does not know what `config` launches on this GPU, or None."""
    if not isinstance(config, CudaConfig):
        return None
    name = kernel.implementation_of(config).name
    return lean_cuda.refusal(spec, calibration_for(spec).constants, config, name)


def _candidates(
    problem: AttentionProblem,
    kernel: Kernel,
    spec: GpuSpec,
    chosen: KernelConfig | None,
    all_of_them: bool,
) -> list[TileConfig]:
    """Those of LeanTiles: the model knows no others."""
    others = kernel.candidate_configs(problem, spec) if all_of_them else []
    return [config for config in dict.fromkeys([chosen, *others]) if isinstance(config, TileConfig)]


def _fastest(
    kernel: Kernel,
    candidates: list[tuple[TileConfig, Schedule]],
    problem: AttentionProblem,
    spec: GpuSpec,
) -> tuple[TileConfig, Schedule, float]:
    """The first of the fastest, so that equal ones do not change places between runs.

    Two implementations have constants fitted apart: the one that runs on this GPU by default wins,
    unless the other is ahead by more than the model's error.
    """
    played = [
        (config, schedule, latency_us(schedule, problem, config, spec))
        for config, schedule in candidates
    ]
    fastest = min(played, key=itemgetter(2))
    preferred = kernel.implementation_on(spec)
    rival = kernel.implementation_of(fastest[0])
    own = [cell for cell in played if kernel.implementation_of(cell[0]) is preferred]
    if rival is preferred or not own:
        return fastest
    own_fastest = min(own, key=itemgetter(2))
    margin = model_error(spec.name, [preferred.name, rival.name])
    return own_fastest if own_fastest[2] <= fastest[2] * (1 + margin) else fastest


def _figures(
    config: TileConfig,
    schedule: Schedule,
    predicted_us: float,
    problem: AttentionProblem,
    spec: GpuSpec,
) -> Outcome:
    read_us = floor_us(problem.kv_bytes, spec, calibration_for(spec).constants)
    # As for measured rows: one CTA on an SM at once, or as many as the config asks for.
    slots = schedule.slots(spec.sms, config.ctas_per_sm)
    return Outcome(
        status="ok",
        schedule=schedule.kind,
        latency_us=predicted_us,
        bandwidth_tb_s=problem.kv_bytes / predicted_us / 1e6,
        read_floor_us=read_us,
        read_floor_share=read_us / predicted_us,
        energy_mj=predict_energy_mj(predicted_us, problem, schedule, spec),
        quantisation_efficiency=quantisation_efficiency(schedule, slots),
    )
