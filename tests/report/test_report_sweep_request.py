"""Sweeps in a report."""

from dataclasses import replace
from typing import Any

import pytest

from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.report.document import Sentences, Table
from leanbench.report.facts.environment import sweep_blocks
from leanbench.run.cells import Grid, Sweep, expand
from leanbench.run.draw import Sample
from leanbench.run.sweep_file import load_sweep


def facts(sweep: Any) -> dict[str, str]:
    block = sweep_blocks(sweep)[0]
    assert isinstance(block, Sentences)
    return {item.name: str(item.words) for item in block.items}


def table(sweep: Any) -> list[str]:
    """Headings, then each grid."""
    block = sweep_blocks(sweep)[1]
    assert isinstance(block, Table)
    headings = [str(column.heading) for column in block.columns]
    return [" | ".join(headings), *(" | ".join(map(str, row)) for row in block.rows)]


def test_axes_at_their_defaults_are_left_out_and_values_are_those_of_flags():
    grids = (
        Grid(heads=((32, 8), (16, 16)), context=(1024, 4096), page_size=(None, 16)),
        Grid(capacity=(None, "4x"), softcap=(0.0, 50.0), sinks=(True,), window_left=(-1, 255)),
    )
    sweep = Sweep("mine", grids, ("lean", "fa2"), "best", sample=Sample(3, 7))
    defaults = "1024, 4096, 16384"
    assert table(sweep.to_dict()) == [
        "grid | heads | context | batch | head_dim | page_size | capacity | window_left | softcap"
        " | sinks",
        "1 | 32/8, 16 | 1024, 4096 | 1 | 128 | none, 16 | exact | none | none | no-sinks",
        f"2 | 32/8 | {defaults} | 1 | 128 | none | exact, 4x | none, 255 | none, 50 | sinks",
    ]
    assert "; ".join(f"{name} {words}" for name, words in facts(sweep.to_dict()).items()) == (
        "sweep mine; launch settings best; kernels lean, fa2; drawn 3 problems, seed 7"
    )


def test_what_others_say_is_left_out():
    models = Sweep("m", (Grid(model=("llama-3-8b",), tp=(1, 8)),)).to_dict()
    assert table(models) == [
        "grid | context | batch | model | tp",
        "1 | 1024, 4096, 16384 | 1 | llama-3-8b | 1, 8",
    ]
    lengths = Sweep("l", (Grid(lengths=("64k+16x3",)),)).to_dict()
    assert table(lengths) == ["grid | heads | head_dim | lengths", "1 | 32/8 | 128 | 64k+16x3"]
    drawn = load_sweep("serving").to_dict()
    headings, row = table(drawn)
    assert not {"heads", "head_dim", "context"} & {*headings.split(" | ")}
    assert row.startswith("drawn |")
    assert facts(drawn)["drawn"] == "320 problems, seed 1, capacities filled 1% to 100%"


def test_launch_settings_that_were_given():
    config = kernel("fa2_triton").default_config(expand(Sweep("s"))[0].problem, find("a100"))
    assert config is not None
    given = replace(Sweep("s"), overrides={"fa2": config}).to_dict()
    assert facts(given)["settings given"] == (
        "fa2:implementation=triton,tile_tokens=128,num_warps=4,num_stages=3"
    )


@pytest.mark.parametrize(
    ("sweep", "words"), [("by hand", "by hand"), (3, "3"), (["lean"], '["lean"]')]
)
def test_another_request_is_shown_as_it_is(sweep, words):
    assert facts(sweep) == {"": words}


def test_a_damaged_request_is_shown_as_far_as_it_goes():
    grid = {"heads": [[8]], "sinks": 1, "context": [None, {}], "other": [1]}
    damaged = {"name": None, "kernels": 3, "grids": [1, grid], "draw": [], "config": {"lean": 1}}
    assert facts(damaged) == {}
    assert table(damaged) == ["grid | heads | context", "2 | [8] | none, {}"]
