"""Mutated lines of the CPU tests still exist in the sources."""

from __future__ import annotations

import test_append_on_cpu
import test_few_queries_on_cpu
import test_head_pairs_on_cpu
import test_lean_on_cpu
import test_many_rows_on_cpu
import test_mla_on_cpu
import test_peers_on_cpu
from lean_on_cpu import Mutation

from leanbench.core.paths import KERNELS


def gone(family: str, mutations: list[Mutation]) -> list[Mutation]:
    """Return the mutations with a line that does not occur exactly once in its file."""
    return [
        (file, old, new)
        for file, old, new in mutations
        if (KERNELS / family / file).read_text(encoding="utf-8").count(old) != 1
    ]


def test_every_mutation_is_of_a_line_that_is_there() -> None:
    lists = (*test_lean_on_cpu.MUTATIONS, *test_append_on_cpu.MUTATIONS)
    lists += tuple(test_head_pairs_on_cpu.MUTATIONS)
    lean = [mutation for _, mutation in lists]
    peers = [("peers.cuh", old, new) for old, new, _ in test_peers_on_cpu.MUTATIONS.values()]
    rows = test_many_rows_on_cpu.MUTATIONS | test_few_queries_on_cpu.MUTATIONS
    assert gone("lean", [*lean, *peers, *rows.values()]) == []
    mutations = test_mla_on_cpu.MUTATIONS | test_mla_on_cpu.FP8_MUTATIONS
    of_columns = [mutation for mutation, _ in test_mla_on_cpu.COLUMN_MUTATIONS.values()]
    assert gone("mla", [*mutations.values(), *of_columns]) == []
    assert len(gone("lean", [("lean.cu", "no such line", "")])) == 1
