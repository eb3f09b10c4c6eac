"""Work ranges that launches keep for later ones, on the CPU: kernels/lean/kept.cuh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lean_on_cpu import Cpu, Workspace, fixed, launch_on, needs_compiler, settings
from leanbench.kernels.lean.configs import CudaConfig

from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler
RAGGED = AttentionProblem(3, 8, 2, (300, 77, 190), 64, lengths_on="device", capacity=320)
#: Settings, a call, and the GPU's SMs.
CASES: dict[str, tuple[CudaConfig, AttentionProblem, int]] = {
    "stream-K": (settings(16, 2, 2, 1, 1, 8, "bulk"), RAGGED, 5),
    "splits": (
        settings(16, 2, 2, 1, 1, 8, "bulk"),
        AttentionProblem(3, 8, 2, (3000, 770, 190), 64, lengths_on="device", capacity=3072),
        32,
    ),
    "clusters": (settings(16, 2, 2, 1, 2, 8, "bulk"), RAGGED, 22),
    "a single warp": (settings(16, 1, 2, 1, 1, 8, "async"), RAGGED, 5),
    "fixed runs": (fixed(settings(16, 2, 2, 1, 1, 8, "bulk")), RAGGED, 7),
    "packed queries": (
        settings(16, 2, 2, 1, 1, 16, "bulk"),
        AttentionProblem(3, 8, 2, (300, 77, 190), 64, q_lens=(3, 1, 2), page_size=16),
        5,
    ),
    "padding": (settings(16, 2, 2, 1, 1, 8, "bulk"), replace(RAGGED, leftpad=True), 5),
    "more than a warp's": (
        settings(16, 2, 2, 1, 1, 8, "bulk"),
        AttentionProblem(45, 2, 2, (40, 3, 90) * 15, 64, lengths_on="device", capacity=96),
        9,
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def launch(
    case: tuple[CudaConfig, AttentionProblem, int], inputs: AttentionInputs, workspace: Workspace
) -> str | None:
    config, _, sms = case
    inputs.poison()
    workspace.epoch += 2  # new slots hold units of the next epoch
    CPU.launch(inputs, config, sms, workspace)
    return Reference(inputs).check(inputs).failure("fp16")


CPU = Cpu()


@cases
def test_a_second_launch_reads_what_the_first_kept(case):
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    assert launch(case, inputs, workspace) is None
    kept = workspace.kept.clone()
    assert launch(case, inputs, workspace) is None
    assert torch.equal(workspace.kept, kept)
    # The first CTA's range as if the lengths needed fewer, with the sum that belongs to it.
    of_cta = workspace.kept[: launch_on(inputs, case[0], case[2]).build.kept_stride(inputs.batch)]
    numbers = of_cta.long()
    numbers[11] += -1 - numbers[0]
    numbers[0] = -1
    of_cta.copy_(numbers)
    with pytest.raises(AssertionError):
        assert launch(case, inputs, workspace) is None


@cases
def test_other_lengths_are_searched_for(case):
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    assert launch(case, inputs, workspace) is None
    for turn in range(3):
        for array in (inputs.cache_seqlens, inputs.cache_leftpad):
            if array is not None and len(array) > turn:
                array[turn] = (array[turn] * 2 + 5) % 33
        assert launch(case, inputs, workspace) is None


@cases
def test_sequences_grow_by_a_token(case):
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    for _ in range(3):
        assert launch(case, inputs, workspace) is None
        if inputs.cache_seqlens is not None:
            inputs.cache_seqlens.add_((inputs.cache_seqlens < inputs.context).int())


@cases
def test_any_number_that_changed_is_noticed(case):
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    assert launch(case, inputs, workspace) is None
    kept, generator = workspace.kept.clone(), torch.Generator().manual_seed(3)
    arrays = (inputs.cache_seqlens, inputs.cache_leftpad, inputs.cu_seqlens_q)
    used = 32 + sum(len(array) for array in arrays if array is not None)
    build = launch_on(inputs, case[0], case[2]).build
    of_ctas = workspace.kept.view(-1, build.kept_stride(inputs.batch))
    numbers = torch.tensor([*range(12), *range(32, used)])
    for places in numbers[torch.randperm(len(numbers), generator=generator)].split(9):
        of_ctas[torch.randint(len(of_ctas), (len(places),), generator=generator), places] += 1
        assert launch(case, inputs, workspace) is None
        expected = kept.view_as(of_ctas)
        # A CTA without a range keeps no other numbers of one.
        works = expected[:, 0] != -1
        assert torch.equal(of_ctas[:, 0], expected[:, 0])
        assert torch.equal(of_ctas[works][:, numbers], expected[works][:, numbers])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0].copy == "bulk"])
def test_a_wrong_first_copy_is_dropped(name):
    case = CASES[name]
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    assert launch(case, inputs, workspace) is None
    build = launch_on(inputs, case[0], case[2]).build
    of_ctas = workspace.kept.view(-1, build.kept_stride(inputs.batch))
    of_warps = of_ctas[:, 16 : 16 + 4 * build.warps].unflatten(1, (-1, 4))
    generator = torch.Generator().manual_seed(5)
    for least, most in (
        (torch.tensor([0, 0, 0]), torch.tensor([inputs.batch, inputs.kv_heads, inputs.context])),
        (torch.tensor([-1 << 31] * 3), torch.tensor([1 << 31] * 3)),
    ):
        drawn = torch.rand(of_warps[..., 1:].shape, generator=generator, dtype=torch.float64)
        of_warps[..., 0] = of_ctas[:, 10:11]  # the launch's key
        of_warps[..., 1:] = (least + drawn * (most - least)).floor().int()
        assert launch(case, inputs, workspace) is None


@pytest.mark.deep
def test_a_warp_no_longer_has_the_chunks_that_follow_its_first():
    """Sequences of 64 tokens are packed, longer ones are not: warps then have every fourth chunk.

    First copies start at the same tokens, with the pages of the next chunks.
    """
    problem = AttentionProblem(
        3, 4, 2, (72,) * 3, 64, lengths_on="device", capacity=96, page_size=16
    )
    case = settings(16, 4, 2, 1, 1, 8, "bulk"), problem, 3
    inputs, workspace = make_inputs(problem, "cpu"), Workspace(epoch=7)
    assert inputs.cache_seqlens is not None
    for length in (64, 72, 64):
        inputs.cache_seqlens.fill_(length)
        assert launch(case, inputs, workspace) is None


def test_another_launch_has_another_key():
    case = CASES["stream-K"]
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    assert launch(case, inputs, workspace) is None
    config = replace(case[0], min_tiles_per_cta=3)
    assert launch((config, *case[1:]), inputs, workspace) is None


def test_lengths_of_another_launch_make_no_range():
    """Launches share memory if enough others lie between them. The last lengths of one can fall on
    the first numbers of a CTA of the other, whose lengths, key and sum stay.
    """
    case = CASES["stream-K"]
    inputs, workspace = make_inputs(case[1], "cpu"), Workspace(epoch=7)
    assert launch(case, inputs, workspace) is None
    first, slot = workspace.kept[64:66].tolist()
    short = AttentionProblem(34, 2, 2, (3,) * 32 + (first + 3, slot - 1), 64, lengths_on="device")
    other = case[0], short, 1
    assert launch(other, make_inputs(short, "cpu"), workspace) is None
    assert workspace.kept[64:66].tolist() == [first + 3, slot - 1]
    assert launch(case, inputs, workspace) is None
