"""A rank's part of a problem, without GPUs."""

from itertools import pairwise

import torch

from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.measure.shard import differing


def test_ranks_with_different_bits() -> None:
    assert differing(["a", "a", "b", "b"], 2) == []
    assert differing(["a", "b", "c", "d"], 1) == []
    assert differing(["a", "a", "b", "c"], 2) == ["ranks 2 to 3 have different bits"]
    assert differing(["a", "b"], 2) == ["ranks 0 to 1 have different bits"]


def test_references_of_shards_become_that_of_the_whole() -> None:
    whole = make_inputs(AttentionProblem(2, 4, 2, 100, 64), "cpu", 1)
    reference = Reference(whole)
    starts = (0, 70, 100)
    shards = []
    for start, end in pairwise(starts):
        problem = AttentionProblem(2, 4, 2, end - start, 64)
        shard = make_inputs(problem, "cpu", 2)
        for name in ("k_cache", "v_cache"):
            getattr(shard, name).copy_(getattr(whole, name)[:, start:end])
        shard.q.copy_(whole.q)
        shards.append(Reference(shard))
    outs = torch.stack([shard._out for shard in shards])
    lses = torch.stack([shard._lse for shard in shards])
    stacked = iter((outs, lses))
    shards[0].merge(lambda tensor: next(stacked))
    torch.testing.assert_close(shards[0]._out, reference._out)
    torch.testing.assert_close(shards[0]._lse, reference._lse)
