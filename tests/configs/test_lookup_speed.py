"""Cost and inputs of a lookup."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from call_counts import function_calls
from leanbench.kernels.lean.configs import LeanTritonConfig
from tuned_examples import H200, HEURISTIC, LEAN, PROBLEM, candidate, family, problem_of

from leanbench.configs import lookup, store
from leanbench.configs.lookup import choose
from leanbench.configs.store import save_families
from leanbench.configs.tuned import Family, TunedConfigs
from leanbench.core.problem import AttentionProblem


@pytest.fixture(autouse=True)
def _home(home):
    """Start every test without tuned settings."""


def test_what_is_saved_counts_at_once():
    assert choose(LEAN, PROBLEM, H200).how == "heuristic"
    save_families(H200, [family()])
    assert choose(LEAN, PROBLEM, H200).how == "tuned"


def test_a_growing_context_asks_the_formula_once_a_lean_tile(monkeypatch):
    save_families(H200, [family()])
    contexts: list[int] = []
    by_formula = lookup._by_formula
    monkeypatch.setattr(
        lookup,
        "_by_formula",
        lambda *given: contexts.append(given[1].context) or by_formula(*given),
    )
    lookup._by_timings.cache_clear()
    for context in range(1, 513):
        choose(LEAN, replace(PROBLEM, context=context), H200)
    # HEURISTIC's LeanTiles, the smallest.
    assert contexts == [64, 128, 192, 256, 320, 384, 448, 512]


def ten_candidates() -> Family:
    configs = [
        LeanTritonConfig(128, 4, 3, per_sm, least, align)
        for per_sm in (1, 2, 3)
        for least in (1, 2)
        for align in (True, False)
    ]
    candidates = [candidate(HEURISTIC, 0), *(candidate(config, 1) for config in configs[:10])]
    return family(candidates=candidates, shortlist=list(range(1, 11)))


def test_a_look_up_costs_few_calls():
    """A call takes about 0.1 us, so a new problem costs tens of microseconds, a known one a few."""
    save_families(H200, [ten_candidates()])
    choose(LEAN, PROBLEM, H200)
    fresh = AttentionProblem(1, 32, 8, 128 * 77, 128)
    assert 0 < function_calls(lambda: choose(LEAN, fresh, H200)) < 900
    assert 0 < function_calls(lambda: choose(LEAN, fresh, H200)) < 900


def test_a_look_up_imports_no_torch_and_reads_what_is_there(home):
    save_families(H200, [family()])
    script = (
        "import json, sys; from leanbench.configs.lookup import choose; from"
        " leanbench.core.registry import kernel;from leanbench.gpu.catalogue import find; from"
        " leanbench.core.problem import AttentionProblem as Problem;choices = [choose(kernel(name),"
        " Problem(1, 32, 8, 4096, 128), find('h200')) for name in"
        " sys.argv[1:]];print(json.dumps([choice.how for choice in choices]),"
        " choices[0].config.tile_tokens, {'torch', 'triton'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", script, "lean_triton", "lean"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == '["tuned", "heuristic"] 128 set()\n'


def test_a_file_is_parsed_once(monkeypatch):
    save_families(H200, [family(), family(group_size=8), family(head_dim=64)])
    reads = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda path: reads.append(path) or read(path))
    for group_size in (4, 8, 5, 1):
        choose(LEAN, problem_of(group_size), H200)
    assert len(reads) == 1
    assert isinstance(store.all_files()[0].tuned, TunedConfigs)
