"""Kernels that cheat on a real GPU: graphs, streams, events and the L2 are its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cheats import keeping

from leanbench.core.errors import SuspectResult
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.measure import tampering
from leanbench.measure.instruments import open_instruments
from leanbench.measure.one_gpu import OneGpu
from leanbench.measure.protocol import measure_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

#: Small: a copy of the output takes about as long as reading K and V, so no floor helps.
PROBLEM = AttentionProblem(2, 8, 8, 512, 64)
RAGGED = replace(PROBLEM, context=(512, 500))


class Cheat(Kernel):
    """fa2 until a subclass does otherwise."""

    name = "cheat"
    title = "fa2 that cheats"
    decomposition = "one_cta_per_tile"
    source = "test"
    axes = Kernel.axes | {"lengths", "lengths_on"}

    def default_config(self, problem: AttentionProblem, gpu: Any) -> Any:
        return kernel("fa2").default_config(problem, gpu)

    def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        return kernel("fa2").prepare(inputs, config)


class KeepsResults(Cheat):
    def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        return keeping(super().prepare(inputs, config), inputs)


class LeavesResults(Cheat):
    def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        own = replace(inputs, out=inputs.out.clone(), lse=inputs.lse.clone())
        attend = super().prepare(own, config)

        def launch() -> None:
            attend()
            for result, new in ((inputs.out, own.out), (inputs.lse, own.lse)):
                result.copy_(torch.where(result.isnan(), new, result))

        return launch


class OtherStream(Cheat):
    def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        attend, side = super().prepare(inputs, config), torch.cuda.Stream()

        def launch() -> None:
            joins = not torch.cuda.is_current_stream_capturing()
            if joins:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                attend()
            if joins:
                torch.cuda.current_stream().wait_stream(side)

        return launch


class ReadsLess(Cheat):
    def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        return super().prepare(
            replace(inputs, cache_seqlens=None, context=inputs.context - 1), config
        )


class ReadsLessElsewhere(Cheat):
    def prepare_all(self, copies: Sequence[AttentionInputs], config: Any) -> list[Any]:
        others = ReadsLess().prepare_all(copies[1:], config)
        return [self.prepare(copies[0], config), *others]


class ZerosElsewhere(Cheat):
    def prepare_all(self, copies: Sequence[AttentionInputs], config: Any) -> list[Any]:
        return [self.prepare(copies[0], config), *(inputs.out.zero_ for inputs in copies[1:])]


class ShortensOthers(Cheat):
    def prepare_all(self, copies: Sequence[AttentionInputs], config: Any) -> list[Any]:
        for inputs in copies[1:]:
            assert inputs.cache_seqlens is not None
            inputs.cache_seqlens.fill_(1)
        return super().prepare_all(copies, config)


class PersistsL2(Cheat):
    def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        set_aside(16 << 20)
        return super().prepare(inputs, config)


def set_aside(size: int) -> None:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    (status,) = driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, size)
    assert int(status) == 0


def measured(cheat: Kernel, problem: AttentionProblem = PROBLEM) -> dict[str, Any]:
    rows = measure_problem(OneGpu(open_instruments(0), problem), [kernel("fa2"), cheat])
    assert rows["fa2"]["status"] in ("ok", "noisy"), rows["fa2"]
    return rows["cheat"]


def test_an_honest_kernel_has_a_figure():
    assert measured(Cheat())["status"] in ("ok", "noisy")


@pytest.mark.parametrize("cheat", [KeepsResults, LeavesResults, ReadsLessElsewhere, ZerosElsewhere])
def test_values_after_timing_show_a_cheat(cheat):
    fields = measured(cheat())
    assert fields["status"] == "incorrect"
    assert fields["reason"].startswith("after timing, over other K and V, relative error ")


def test_a_token_that_is_left_out_shows_at_once():
    fields = measured(ReadsLess())
    assert fields["status"] == "incorrect"
    assert fields["reason"].startswith("relative error ")


@pytest.mark.parametrize(
    ("cheat", "problem", "sentence"),
    [
        (OtherStream, PROBLEM, "outputs were not written when the CUDA graph was replayed"),
        (ShortensOthers, RAGGED, "cheat changed its inputs"),
        (PersistsL2, PROBLEM, "of the L2 aside for data that persists"),
    ],
)
def test_an_alarm_ends_a_cheat(cheat, problem, sentence):
    before = tampering.persisting_l2_bytes()
    try:
        with pytest.raises(SuspectResult, match=sentence):
            measured(cheat(), problem)
    finally:
        set_aside(before)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_events_that_halve_the_time_are_noticed(monkeypatch, is_noticed):
    """By a look at the function, and without it by the GPU's own clock."""
    true_time = torch.cuda.Event.elapsed_time

    class HalvesTime(Cheat):
        def prepare(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
            def elapsed_time(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
                return 0.5 * true_time(start, end)

            monkeypatch.setattr(torch.cuda.Event, "elapsed_time", elapsed_time)
            return super().prepare(inputs, config)

    # The difference exceeds the microsecond that the cross-check may be off.
    problem = AttentionProblem(1, 56, 56, 16384, 64)
    if is_noticed:
        with pytest.raises(SuspectResult, match=r"replaced torch\.cuda\.Event\.elapsed_time"):
            measured(HalvesTime(), problem)
        return
    monkeypatch.setattr(tampering, "replaced_functions", list)
    rows = measure_problem(OneGpu(open_instruments(0), problem), [HalvesTime()])
    assert rows["cheat"]["status"] == "suspect"
