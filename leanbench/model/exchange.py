"""How long GPUs that share sequences take to exchange partials in a launch of `lean`."""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: Of four numbers of a partial: kernels/lean/peers.cuh.
_PIECE_BYTES = 32


@dataclass(frozen=True)
class Link:
    """What one GPU has to all others of its host."""

    #: From the last CTA's partial to the merged output, where nothing waits for bandwidth.
    latency_us: float
    #: For the partial of each GPU beyond the second.
    further_us: float
    #: To the others, one direction.
    bandwidth_gb_s: float


#: Latency: written before a sweep ran, beside a ping-pong between two H200s whose program was not
#: kept (entry 45 of reports/performance-log.md: 4 kB from 128 threads take as long one way); 1.4 us
#: is also what `exchange_us` is in the median of 32 problems. tools/gpu/ping_pong.py measures that
#: message as `partial`; nothing here is read from it. Further partials: the median of 28 problems
#: on four H200s (reports/h200/shared-4, shards below 100 us), 1.8 us without the bandwidth's share.
#: Bandwidth: NVLink 4, datasheet. An H100 SXM has the same links, and an exchange of one sequence
#: adds 1.1 us on two and 2.0 on four in the median (reports/h100/scaling; here 1.5 and 2.0).
_NVLINK_4 = Link(1.4, 0.2, 450.0)
_LINKS = {"h200": _NVLINK_4, "h100-sxm": _NVLINK_4}


def exchange_us(problem: AttentionProblem, spec: GpuSpec) -> float | None:
    """What the exchange adds to attention over the shards; None: the links of this GPU are not
    known.
    """
    context = problem.gpus.context
    if context == 1:
        return 0.0
    link = _LINKS.get(spec.name)
    if link is None:
        return None
    rows = problem.query_rows // problem.gpus.tensor
    sent = rows * problem.value_dim // 4 * _PIECE_BYTES * (context - 1)
    latency_us = link.latency_us + (context - 2) * link.further_us
    return latency_us + sent / link.bandwidth_gb_s / 1e3
