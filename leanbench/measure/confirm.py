"""Confirmation of a timing: by what a replay writes, and by the GPU's own clock."""

from __future__ import annotations

from leanbench.core.errors import SuspectResult
from leanbench.core.kernel import written_by
from leanbench.measure.candidate import TimedCandidate
from leanbench.measure.crosscheck import cross_check, disagreement
from leanbench.measure.fields import sample_fields, timing_outcome
from leanbench.measure.loaded import LoadedProblem
from leanbench.records.outcome import Outcome


def check_replay(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """Replays once over poisoned outputs: what was timed must be what computes.

    Raises:
        SuspectResult: part of the outputs was not written.
    """
    import torch

    pairs = zip(candidate.launches, loaded.buffers, strict=True)
    written = [written_by(launch, inputs) for launch, inputs in pairs]
    for results in written:
        results.poison()
    candidate.replay.graph.replay()
    # One wait for all of them.
    unwritten = int(torch.stack([results.out.isnan().any() for results in written]).sum())
    if unwritten:
        raise SuspectResult(
            f"{unwritten} of {len(written)} outputs were not written when the CUDA graph was "
            "replayed: part of the work ran on another stream and was not timed"
        )
    check = loaded.reference.check(written[0], candidate.kernel.lse_base)
    failure = check.failure(candidate.kernel.precision(loaded.problem))
    if failure is None:
        return Outcome()
    return Outcome(status="incorrect", reason=f"after timing, {failure}")


def latency_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """The latency, the clock's second opinion, and under `raw_samples` the samples of both."""
    timing = candidate.timing
    fields = timing_outcome(timing, loaded.problem.kv_bytes, candidate.read_floor_us)
    checked = cross_check(candidate.launches, timing.median_us)
    if isinstance(checked, str):
        candidate.warnings.append(checked)
        return fields | Outcome(raw_samples=sample_fields(timing, ()))
    differs = disagreement(checked.median_us, timing.samples_us)
    candidate.warnings += [differs] if differs else []
    return fields | Outcome(
        crosscheck_us=checked.median_us,
        gpu_kernels=list(checked.kernels) or None,
        raw_samples=sample_fields(timing, checked.samples_us),
    )
