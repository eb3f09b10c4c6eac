"""Where `leanbench tune` runs, by --executor: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import typer

from leanbench.cli import output
from leanbench.cli.interruption import signal_of
from leanbench.cli.machines import connected, uses_ray

if TYPE_CHECKING:
    from leanbench.configs.tuned import Family
    from leanbench.gpu.local import Target
    from leanbench.tune.cluster import ClusterTuner
    from leanbench.tune.result import Summary
    from leanbench.tune.run import Request


@dataclass(frozen=True)
class TuneFlags:
    """Flags of `leanbench tune` that say where it runs."""

    gpu: str | None
    require_gpu: bool
    executor: str
    ray_address: str | None
    mix_boards: bool
    quiet: bool


class Tuner(Protocol):
    """A tuning's machines."""

    def target(self) -> Target:
        """The GPU that is tuned for.

        Raises:
            UserError: a flag is wrong, or nothing can work.
        """
        ...

    def tune(self, request: Request) -> list[tuple[Summary, Family]]:
        """See leanbench.tune.run.tune.

        Raises:
            typer.Exit: it was interrupted.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drops what was noted for an interruption."""
        ...


@contextlib.contextmanager
def open_tuner(flags: TuneFlags) -> Iterator[Tuner]:
    """The machines that the flags name.

    Raises:
        UserError: a flag is wrong, or there is no such cluster.
    """
    if not uses_ray(flags.executor, flags.ray_address, flags.mix_boards):
        yield _Here(flags)
        return
    from leanbench.cluster.cluster import shared_variables
    from leanbench.tune.cluster import AgentRequest, ClusterTuner

    with contextlib.closing(connected(flags.ray_address)) as cluster:
        request = AgentRequest(flags.gpu, flags.require_gpu, shared_variables())
        yield _OnCluster(ClusterTuner(cluster, request, flags.mix_boards, output.say))


@dataclass(frozen=True)
class _Here:
    flags: TuneFlags

    def target(self) -> Target:
        from leanbench.gpu.local import choose

        return choose(self.flags.gpu, self.flags.require_gpu)

    def tune(self, request: Request) -> list[tuple[Summary, Family]]:
        from leanbench.cli.tune_progress import TuneProgress
        from leanbench.tune.run import tune

        predicted = request.plan.predicted
        with TuneProgress(predicted=predicted, quiet=self.flags.quiet) as progress:
            try:
                return tune(request, progress)
            except KeyboardInterrupt as error:
                progress.stop()
                output.say(
                    "Stopped: nothing was saved but what was compiled, the same command takes less"
                    " time."
                    if predicted
                    else f"Stopped: {progress.done} problems are noted, the same command goes on"
                    " from there."
                )
                raise typer.Exit(128 + signal_of(error)) from None

    def forget(self, request: Request) -> None:
        from leanbench.tune.run import forget

        forget(request)


@dataclass(frozen=True)
class _OnCluster:
    tuner: ClusterTuner

    def target(self) -> Target:
        return self.tuner.target()

    def tune(self, request: Request) -> list[tuple[Summary, Family]]:
        try:
            return self.tuner.tune(request)
        except KeyboardInterrupt as error:
            output.say(
                "Stopped: families that were tuned are noted, the same command goes on from there."
            )
            raise typer.Exit(128 + signal_of(error)) from None

    def forget(self, request: Request) -> None:
        self.tuner.forget(request)
