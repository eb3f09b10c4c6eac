"""Prediction of one cell: the fields of its row."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from leanbench.configs import lookup
from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.decomposition import Schedule, fixed_runs_us, quantisation_efficiency
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.memory import shortage_on
from leanbench.core.parallel import NONE
from leanbench.core.problem import MAX_Q_LEN, AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.mla.build import refusal_of_gpu
from leanbench.kernels.mla.configs import MlaConfig
from leanbench.model import lean_cuda
from leanbench.model.calibration import calibration_for
from leanbench.model.constants import Constants
from leanbench.model.error import model_error, uncompared
from leanbench.model.latent import LATENT_AXES, latent_us
from leanbench.model.rates import floor_us
from leanbench.model.simulate import fits, latency_us
from leanbench.model.workspace import workspace_bytes
from leanbench.records.outcome import Outcome


def predict_latency_us(
    problem: AttentionProblem,
    kernel: Kernel,
    config: TileConfig,
    spec: GpuSpec,
    resident: int | None = None,
) -> float:
    """Predict one launch, for ranking candidates: 2 to 30 ms for a grid of 400 CTAs.

    Args:
        resident: CTAs per SM, from the compiled kernel's registers and shared memory; estimated by
            default.

    Raises:
        UserError: The kernel has no schedule or no calibration, or no CTA of this config fits an
            SM.
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
    """Predict the energy of one launch, back to back with others."""
    in_use = calibration_for(spec)
    limit_w = find(in_use.calibration.gpu).power_limit_w
    running = schedule.running_sms(spec.sms)
    return energy_mj(predicted_us, problem.kv_bytes, running, spec, in_use.constants, limit_w)


#: Axes that the model knows. Problems with other axes off their defaults are unsupported.
AXES = frozenset(
    {
        *("dtype", "kv_layout", "q_len", "page_size", "capacity", "lengths", "lengths_on"),
        *("causal", "window_left", "window_right", "softcap", "sinks", "alibi"),
        *("leftpad", "batch_idx", "kv_dtype", "q_dtype", "scaled"),
    }
)


def axes_of(kernel: Kernel) -> frozenset[str]:
    """Return the axes that the model knows of a kernel's problems."""
    return AXES | LATENT_AXES if kernel is LEAN_MLA else AXES


def unknown_axis(problem: AttentionProblem, kernel: Kernel) -> str | None:
    """Return the first axis off its default that the model does not know of a kernel, or None."""
    unknown = [name for name in problem.seen.special if name not in axes_of(kernel)]
    return "latent caches" if unknown and problem.latent else next(iter(unknown), None)


def predict_cell(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> dict[str, Any]:
    """Return the fields of a `leanbench.records.row.Row` with `source` predicted, without those
    that only a measurement can know.

    Args:
        configs: `default` or `heuristic`, see leanbench.configs.lookup; `best`: the candidate with
            the lowest predicted latency, preferring this GPU's default implementation unless
            another leads by more than the model's error; or launch settings.
    """
    return predicted_fields(problem, kernel, _predicted(problem, kernel, configs, spec))


def predicted_fields(problem: AttentionProblem, kernel: Kernel, outcome: Outcome) -> dict[str, Any]:
    """Return the fields of a row with a predicted outcome."""
    known = {
        "decomposition": kernel.decomposition,
        "source": "predicted",
        "kv_bytes": problem.kv_bytes,
    }
    return known | outcome.fields()


def _predicted(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> Outcome:
    if (reason := kernel.unsupported_reason(problem)) is not None:
        return _unsupported(reason)
    if problem.parallel != NONE:
        if (reason := unknown_exchange(problem, kernel)) is not None:
            return _unsupported(reason)
        return _shared(problem, kernel, configs, spec)
    # A call of chosen tokens is one of a cache of them.
    whole, problem = problem, problem.seen
    if name := unknown_axis(problem, kernel):
        return _unsupported(f"the performance model does not know {name}: run it on a GPU")
    if problem.q_len > MAX_Q_LEN:
        return _unsupported(
            f"the performance model does not know how long the arithmetic of {problem.q_len} query"
            f" tokens takes: choose q_len up to {MAX_Q_LEN}"
        )
    if (reason := shortage_on(whole, spec)) is not None:
        return Outcome(status="out_of_memory", reason=reason)
    if kernel is LEAN_MLA:
        return _latent(problem, configs, spec)
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
            default = kernel.implementation_on(spec).name
            why += f", {default} unless another is ahead by more than the model's error"
        choice = lookup.Choice(config, f"best of {len(fitting)}", why)
    figures = _figures(config, schedule, predicted_us, problem, spec)
    warning = uncompared(kernel.implementation_of(config).name, problem, spec)
    noted = Outcome(warnings=[warning]) if warning else Outcome()
    return figures | noted | Outcome(**lookup.row_fields(kernel, choice))


def _latent(problem: AttentionProblem, configs: str | KernelConfig, spec: GpuSpec) -> Outcome:
    choice = lookup.resolve(LEAN_MLA, problem, spec, configs)
    if configs == "best":
        every = LEAN_MLA.tuning_space(problem, spec)
        config = min(every, key=lambda config: latent_us(problem, config, spec))
        why = f"the fastest of {len(every)} that were predicted for this cell"
        choice = lookup.Choice(config, f"best of {len(every)}", why)
    assert isinstance(choice.config, MlaConfig)
    if (reason := refusal(LEAN_MLA, choice.config, spec)) is not None:
        return _unsupported(reason)
    predicted_us = latent_us(problem, choice.config, spec)
    read_us = floor_us(problem.kv_bytes, spec, calibration_for(spec).constants)
    warning = uncompared(LEAN_MLA.name, problem, spec)
    return Outcome(
        status="ok",
        latency_us=predicted_us,
        bandwidth_tb_s=problem.kv_bytes / predicted_us / 1e6,
        read_floor_us=read_us,
        read_floor_share=read_us / predicted_us,
        warnings=[warning] if warning else [],
        **lookup.row_fields(LEAN_MLA, choice),
    )


def unknown_exchange(problem: AttentionProblem, kernel: Kernel) -> str | None:
    """Return a sentence if a kernel runs a shared problem but not one GPU's shard: its exchange is
    unknown.
    """
    if kernel.unsupported_reason(problem.shard(0)) is None:
        return None
    return f"the performance model does not know the exchange of {kernel.name}: measure"


def _shared(
    problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, spec: GpuSpec
) -> Outcome:
    """Predict a problem that GPUs share: the shard with the most work, and the exchange. Energy is
    that of all GPUs.
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


def refusal(kernel: Kernel, config: KernelConfig | None, spec: GpuSpec) -> str | None:
    """Return a sentence if the model cannot predict `config` on this GPU, or None."""
    if isinstance(config, MlaConfig):
        return refusal_of_gpu(spec.compute_capability)
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
    """Return the candidates that read LeanTiles: the model knows no others."""
    further = kernel.candidate_configs(problem, spec) if all_of_them else []
    return [
        config for config in dict.fromkeys([chosen, *further]) if isinstance(config, TileConfig)
    ]


def _fastest(
    kernel: Kernel,
    candidates: list[tuple[TileConfig, Schedule]],
    problem: AttentionProblem,
    spec: GpuSpec,
) -> tuple[TileConfig, Schedule, float]:
    """Return the fastest candidate, the first of equal ones.

    Constants of two implementations are fitted apart. The default of this GPU wins, unless the
    other leads by more than the model's error.
    """
    played = [
        (config, schedule, latency_us(schedule, problem, config, spec))
        for config, schedule in candidates
    ]
    fastest = min(played, key=itemgetter(2))
    preferred = kernel.implementation_on(spec)
    rival = kernel.implementation_of(fastest[0])
    defaults = [cell for cell in played if kernel.implementation_of(cell[0]) is preferred]
    if rival is preferred or not defaults:
        return fastest
    default = min(defaults, key=itemgetter(2))
    margin = model_error(spec.name, [preferred.name, rival.name])
    return default if default[2] <= fastest[2] * (1 + margin) else fastest


def _figures(
    config: TileConfig,
    schedule: Schedule,
    predicted_us: float,
    problem: AttentionProblem,
    spec: GpuSpec,
) -> Outcome:
    read_us = floor_us(problem.kv_bytes, spec, calibration_for(spec).constants)
    # As in measured rows: one CTA per SM, or the number in the config.
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
        fixed_runs_us=fixed_runs_us(schedule, problem.kv_bytes, spec.bandwidth_tb_s),
        workspace_bytes=workspace_bytes(problem, config, schedule),
    )


#: Bytes of four numbers of a partial: kernels/lean/peers.cuh.
_PIECE_BYTES = 32


@dataclass(frozen=True)
class Link:
    """Connection of one GPU to all others of its host."""

    #: Time from the last CTA's partial to the merged output, without bandwidth.
    latency_us: float
    #: Time for the partial of each GPU beyond the second.
    further_us: float
    #: One-way bandwidth to the others.
    bandwidth_gb_s: float


#: Latency: the median of 32 problems, and one way of 4 kB from 128 threads between two H200s (entry
#: 45 of reports/performance-log.md; the message `partial` of tools/gpu/ping_pong.py). Further
#: partials: the median of 28 problems on four H200s (entry 71; shards below 100 us), without the
#: bandwidth's share. Bandwidth: NVLink 4, datasheet. An H100 SXM has the same links; an exchange of
#: one sequence adds 1.1 us on two and 2.0 on four in the median (reports/h100/scaling).
_NVLINK_4 = Link(1.4, 0.2, 450.0)
_LINKS = {"h200": _NVLINK_4, "h100-sxm": _NVLINK_4}


def exchange_us(problem: AttentionProblem, spec: GpuSpec) -> float | None:
    """Return the time of the exchange after attention over the shards; None if this GPU's links are
    unknown.
    """
    context = problem.gpus.context
    if context == 1:
        return 0.0
    if (link := _LINKS.get(spec.name)) is None:
        return None
    rows = problem.query_rows // problem.gpus.tensor
    sent = rows * problem.value_dim // 4 * _PIECE_BYTES * (context - 1)
    latency_us = link.latency_us + (context - 2) * link.further_us
    return latency_us + sent / link.bandwidth_gb_s / 1e3


_WATT_US_IN_MJ = 1e-3


def energy_mj(
    latency_us: float,
    kv_bytes: int,
    running_sms: int,
    spec: GpuSpec,
    constants: Constants,
    calibrated_limit_w: float,
) -> float:
    """Return the energy of one launch, back to back with others.

    Args:
        running_sms: SMs that run a CTA.
        calibrated_limit_w: Power limit of the calibrated GPU; the idle power scales with it.
    """
    idle_w = constants.idle_power_w * spec.power_limit_w / calibrated_limit_w
    static_mj = (idle_w + running_sms * constants.sm_power_w) * latency_us * _WATT_US_IN_MJ
    read_mj = kv_bytes * constants.byte_pj * 1e-9
    limit_mj = constants.power_cap_share * spec.power_limit_w * latency_us * _WATT_US_IN_MJ
    return min(static_mj + read_mj, limit_mj)
