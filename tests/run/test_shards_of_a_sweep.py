"""Shards of a sweep's problems."""

import pytest

from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.problem import AttentionProblem
from leanbench.run.cells import Cell, Shard

CELLS = [
    Cell(AttentionProblem(1, 8, 8, 1024 * number, 64), kernel)
    for number in range(1, 8)
    for kernel in ("lean", "fa2")
]


def test_shards_are_every_nth_problem_with_all_its_kernels():
    shards = [Shard(index, 3).of(CELLS) for index in (1, 2, 3)]
    contexts = [[cell.problem.max_context // 1024 for cell in shard[::2]] for shard in shards]
    assert contexts == [[1, 4, 7], [2, 5], [3, 6]]
    assert [cell.kernel for cell in shards[1]] == ["lean", "fa2"] * 2
    assert sorted(cell.key for shard in shards for cell in shard) == sorted(
        cell.key for cell in CELLS
    )


def test_a_shard_is_a_pair_and_not_empty():
    assert Shard.parse(" 2/8 ") == Shard(2, 8)
    assert Shard(2, 8).to_manifest(CELLS[:1]) == {"index": 2, "count": 8, "cells": [CELLS[0].key]}
    with pytest.raises(UserError, match="--shard 8/8 is empty, the sweep has 7 problems"):
        Shard(8, 8).of(CELLS)


@pytest.mark.parametrize(
    ("text", "reason", "limit"),
    [
        ("2", Reason.SYNTAX, None),
        ("/4", Reason.SYNTAX, None),
        ("a/4", Reason.SYNTAX, None),
        ("-1/4", Reason.SYNTAX, None),
        ("0/4", Reason.BELOW_MINIMUM, "1/1"),
        ("1/0", Reason.BELOW_MINIMUM, "1/1"),
        ("5/4", Reason.ABOVE_MAXIMUM, "4/4"),
        ("1/1001", Reason.ABOVE_MAXIMUM, "1000/1000"),
        ("1/99999999", Reason.ABOVE_MAXIMUM, "1000/1000"),
    ],
)
def test_invalid_shards(text, reason, limit):
    with pytest.raises(InvalidValue) as error:
        Shard.parse(text)
    assert (error.value.value, error.value.reason, error.value.limit) == (text, reason, limit)
