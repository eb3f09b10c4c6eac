"""Where a sweep runs, by --executor: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.cli import output
from leanbench.cli.options import RunFlags
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.cluster.cluster import Cluster
    from leanbench.gpu.local import Target
    from leanbench.measure.options import MeasureOptions
    from leanbench.records.directory import RunDirectory
    from leanbench.run.cells import Cell
    from leanbench.run.executor import Executor
    from leanbench.run.limits import Limits

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class Machines:
    """What rows are about, and what makes them for a run."""

    target: Target
    executor_of: Callable[[RunDirectory], Executor]


@contextlib.contextmanager
def open_machines(
    flags: RunFlags, options: MeasureOptions, cells: Sequence[Cell], limits: Limits
) -> Iterator[Machines]:
    """The machines that a sweep's flags name.

    Raises:
        UserError: a flag is wrong, there is no such cluster, or no GPU of it can work.
    """
    if _uses_ray(flags.executor, flags.ray_address, flags.mix_boards):
        from leanbench.cluster.ray_cluster import RayCluster

        with contextlib.closing(RayCluster(flags.ray_address)) as cluster:
            yield _of_cluster(cluster, flags, options, cells, limits)
    else:
        yield _here(flags, options, cells, limits)


def _uses_ray(executor: str, ray_address: str | None, mix_boards: bool) -> bool:
    """Return True for --executor ray.

    Raises:
        UserError: it is unknown, or flags for a cluster are given for nothing.
    """
    from leanbench.core.syntax import choose

    if choose("--executor", executor, EXECUTORS) == "ray":
        return True
    given = {f"--ray-address {ray_address}": ray_address is not None, "--mix-boards": mix_boards}
    for flag, is_given in given.items():
        if is_given:
            raise UserError(f"{flag} says nothing here: add --executor ray or leave it out")
    return False


def _here(
    flags: RunFlags, options: MeasureOptions, cells: Sequence[Cell], limits: Limits
) -> Machines:
    from leanbench.gpu.local import choose
    from leanbench.records.directory import WORKER_LOG
    from leanbench.run.executor import LocalExecutor
    from leanbench.run.worker_process import WorkerTarget

    target = choose(flags.gpu, flags.require_gpu)
    # The rows of a shard will stand beside those of other boards.
    calibrate = flags.shard is not None and target.local_index is not None
    gpus = max((cell.problem.gpus.gpus for cell in cells), default=1)
    worker = WorkerTarget(target.spec, target.local_index, options, calibrate, gpus)
    return Machines(
        target, lambda run: LocalExecutor(worker, limits.timeout_s, run.path / WORKER_LOG)
    )


def _of_cluster(
    cluster: Cluster,
    flags: RunFlags,
    options: MeasureOptions,
    cells: Sequence[Cell],
    limits: Limits,
) -> Machines:
    from leanbench.cluster.cluster import shared_variables
    from leanbench.records.boards import boards_of
    from leanbench.records.directory import WORKER_LOG
    from leanbench.run.cluster_executor import AgentRequest, ClusterExecutor

    request = AgentRequest(
        flags.gpu, flags.require_gpu, options, limits.timeout_s, shared_variables()
    )
    executor = ClusterExecutor(cluster, request, cells, output.say)
    target = executor.target()

    def executor_of(run: RunDirectory) -> Executor:
        first = next(boards_of(run.manifest), None)
        executor.prepare(target, run.path / WORKER_LOG, first, flags.mix_boards)
        return executor

    return Machines(target, executor_of)
