"""Kernels that cheat: stand-ins over the fp64 reference, for a GPU that is a stand-in, too."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from pretended_gpu import Launch, Right

from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import OwnOutputs


def keeping(attend: Callable[[], Any], inputs: AttentionInputs) -> Callable[[], None]:
    """Return a launch that attends once, and copies that result ever after."""
    kept = []

    def launch() -> None:
        if not kept:
            attend()
            kept.append((inputs.out.clone(), inputs.lse.clone()))
        inputs.out.copy_(kept[0][0])
        inputs.lse.copy_(kept[0][1])

    return launch


class KeepsResults(Right):
    """Attends once over each set of inputs, and copies that result ever after."""

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        return Launch(self, keeping(super().prepare(inputs, config), inputs))


class LooksForChanges(Right):
    """Keeps results until the first number of K has changed."""

    def places(self, inputs: AttentionInputs) -> Any:
        return [0]

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        attend, places = super().prepare(inputs, config), self.places(inputs)
        seen: list[torch.Tensor] = []
        copy = keeping(attend, inputs)

        def launch() -> None:
            nonlocal copy
            numbers = inputs.k_cache.flatten()[places]
            if seen and not torch.equal(numbers, seen[0]):
                copy = keeping(attend, inputs)
            seen[:] = [numbers]
            copy()

        return Launch(self, launch)


class LooksAtMore(LooksForChanges):
    """Keeps results until one of 64 random numbers of K has changed."""

    def places(self, inputs: AttentionInputs) -> Any:
        return torch.randint(inputs.k_cache.numel(), (64,))


class LeavesResults(Right):
    """Does nothing where the outputs of an earlier launch are."""

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        attend = super().prepare(inputs, config)
        return Launch(self, lambda: attend() if inputs.out.isnan().any() else None)


class OtherStream(Right):
    """Works on a stream that a graph does not capture, but for its first launch."""

    def replay(self, launches: Sequence[Callable[[], object]]) -> None:
        launches[0]()


class LessWhenCaptured(Right):
    """Leaves out half of the tokens in the graph that is timed."""

    def replay(self, launches: Sequence[Callable[[], object]]) -> None:
        super().replay(launches)
        for buffer in self.copies:
            half = replace(buffer, cache_seqlens=None, context=buffer.context // 2)
            super().prepare(half, None)()

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: Any
    ) -> list[Callable[[], Any]]:
        self.copies = copies
        return super().prepare_all(copies, config)


class ReadsLess(Right):
    """Leaves out the last token."""

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        shorter = replace(inputs, cache_seqlens=None, context=inputs.context - 1)
        return super().prepare(shorter, config)


class ReadsLessElsewhere(Right):
    """Right over the first set of inputs, one that reads less over all others."""

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: Any
    ) -> list[Callable[[], Any]]:
        others = ReadsLess(self.name).prepare_all(copies[1:], config)
        return [self.prepare(copies[0], config), *others]


class ShortensOthers(Right):
    """Sets the lengths of other inputs to 1, which every kernel then reads faster."""

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: Any
    ) -> list[Callable[[], Any]]:
        for inputs in copies[1:]:
            assert inputs.cache_seqlens is not None
            inputs.cache_seqlens.fill_(1)
        return super().prepare_all(copies, config)


class ChangesInputs(Right):
    """Leaves another V behind."""

    def spoil(self, inputs: AttentionInputs) -> None:
        inputs.v_cache[0, 0, 0, 0] += 1


class ZerosElsewhere(Right):
    """Right over the first set of inputs, zeros over all others."""

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: Any
    ) -> list[Callable[[], Any]]:
        launches = super().prepare_all(copies, config)
        return [launches[0], *(Launch(self, inputs.out.zero_) for inputs in copies[1:])]


class ZeroHead(Right):
    """Zeros in one head of one sequence of the last set of inputs."""

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: Any
    ) -> list[Callable[[], Any]]:
        self.last = copies[-1]
        return super().prepare_all(copies, config)

    def spoil(self, inputs: AttentionInputs) -> None:
        if inputs is self.last:
            inputs.out[1, 0, 2] = 0


class SameAnswer(Right):
    """Writes the answer over the first set of inputs everywhere."""

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: Any
    ) -> list[Callable[[], Any]]:
        return [
            self.prepare(replace(copies[0], out=each.out, lse=each.lse), config) for each in copies
        ]


class OneBehind(Right):
    """Does the work of a launch at the next one."""

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        attend, pending = super().prepare(inputs, config), []

        def launch() -> None:
            if pending:
                attend()
            pending.append(1)

        return Launch(self, launch)


class Owned(OwnOutputs):
    """A launch with outputs of its own."""

    def __init__(self, kernel: Right, inputs: AttentionInputs, config: TileConfig | None) -> None:
        self.kernel = kernel
        super().__init__(replace(inputs, out=inputs.out.clone(), lse=inputs.lse.clone()))
        self.attend = Right.prepare(kernel, self.results, config)


class WhenRead(Owned):
    """Attends when somebody reads the results."""

    @property
    def results(self) -> AttentionInputs:
        if hasattr(self, "attend"):
            self.attend()
        return self._results

    @results.setter
    def results(self, results: AttentionInputs) -> None:
        self._results = results

    def __call__(self) -> None:
        pass

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._results.out, self._results.lse


class LaterTensor(torch.Tensor):
    """A tensor that could compute its elements when it is used."""


class LaterOutputs(Owned):
    """Returns tensors of a class of its own."""

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.attend()
        return self.results.out.as_subclass(LaterTensor), self.results.lse


class AnswersWhenRead(Right):
    """Leaves the work to the moment in which its outputs are read."""

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        return WhenRead(self, inputs, config)


class ReturnsLaterTensors(Right):
    """Returns outputs that are no plain tensors."""

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        return LaterOutputs(self, inputs, config)


class Tampers(Right):
    """Does something to the machine before it runs, and is right."""

    def __init__(self, name: str, tamper: Callable[[], object], when: str) -> None:
        super().__init__(name)
        self.tamper, self.when = tamper, when

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        if self.when == "prepare":
            self.tamper()
        return super().prepare(inputs, config)  # pyright: ignore[reportArgumentType]

    def spoil(self, inputs: AttentionInputs) -> None:
        # The check's, three in the graph, six in its two replays, and then those of extras.
        if (self.when == "capture" and self.launches > 1) or self.launches > 10:
            self.tamper()
