"""The command of a row, read by the command line's own parsers, is the row's cell again."""

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from example_runs import HOSTILE, manifest, problem, row, row_with_all_fields

from leanbench.core.axes import AXES
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.records.reading import Run, read_run
from leanbench.records.row import Row
from leanbench.report.command import sweep_command
from leanbench.run.cells import expand
from leanbench.run.sweep_file import requested_sweep

REFERENCE_RUNS = sorted(path.parent for path in Path("reports").glob("*/*/results.jsonl"))


def command_of(row: dict[str, Any], problem: AttentionProblem, **fields: Any) -> str:
    run = Run(Path(), manifest(**fields), ())
    return sweep_command(Row.model_validate(row), problem, run)


def flags_of(command: str) -> dict[str, str]:
    leanbench, sweep, *words = shlex.split(command)
    assert (leanbench, sweep) == ("leanbench", "sweep")
    starts = [index for index, word in enumerate(words) if word.startswith("--")] + [len(words)]
    return {
        words[start].removeprefix("--").replace("-", "_"): " ".join(words[start + 1 : end])
        for start, end in pairwise(starts)
    }


@pytest.mark.parametrize(
    "directory",
    [
        *REFERENCE_RUNS[::5],
        *(deep(run) for run in REFERENCE_RUNS if run not in REFERENCE_RUNS[::5]),
    ],
    ids=lambda path: "/".join(path.parts[1:]),
)
def test_every_reference_row_can_be_repeated(directory: Path) -> None:
    run = read_run(directory)
    # Kernels of one run alone cannot be named. Some 50 rows of a long run are enough.
    known = [result for result in run.results if result[0].kernel in kernels()]
    assert known
    for taken, shape in known[:: 1 + len(known) // 50]:
        flags = flags_of(sweep_command(taken, shape, run))
        assert flags.pop("cache", "cold") == taken.cache
        optional = ("energy", "sustained", "occupancy", "counters")
        measured = {name: flags.pop(name) for name in optional if name in flags}
        assert ("energy" in measured) == (taken.energy_mj is not None)
        assert ("occupancy" in measured) == (taken.sm_busy_share is not None)
        names, config = flags.pop("kernels"), flags.pop("config", None)
        assert set(flags) <= {*AXES}
        request = requested_sweep(None, flags, names, None, None, [config] if config else [])
        [cell] = expand(request)
        assert (cell.problem, cell.kernel) == (shape, taken.kernel)
        assert (config is None) == (taken.config is None)
        if config:
            [override] = request.overrides.values()
            assert override == kernels()[taken.kernel].read_config(taken.config or {})


def test_a_row_in_full() -> None:
    fields = {"kv_heads": 8, "batch": 4, "head_dim": 128, "q_len": 2, "page_size": 64}
    shape = problem(4096, 32, dtype="bf16", kv_layout="NHD", **fields)
    taken = row_with_all_fields(shape, "lean", 10.0, cache="warm")
    assert command_of(taken, shape) == (
        "leanbench sweep --heads 32/8 --context 4096 --batch 4 --head-dim 128 --dtype bf16"
        " --kv-layout NHD --q-len 2 --page-size 64 --kernels lean --config"
        " lean:tile_tokens=128,num_warps=4,num_stages=3 --cache warm --energy --occupancy"
        " --counters"
    )


@pytest.mark.parametrize(
    ("energy", "flag"), [({}, "--sustained"), ({"energy_mj": 1.0}, "--energy")]
)
def test_sustained_is_part_of_energy(energy: dict[str, float], flag: str) -> None:
    taken = row(problem(), "lean", 10.0, config=None, sustained_us=5.0, **energy)
    assert command_of(taken, problem()).endswith(f" lean {flag}")


def test_a_prediction_names_its_gpu() -> None:
    taken = row(problem(), "fa2", 10.0, source="predicted", config={"align_grid": True})
    command = command_of(taken, problem(), gpu={"name": "a100-80gb"})
    assert command.endswith("--kernels fa2 --config fa2:align_grid=true --gpu a100-80gb")


def test_ragged_batches_by_their_lengths() -> None:
    given = problem((512, 16, 16), capacity=4096)
    flags = flags_of(command_of(row(given, "lean", 1.0), given))
    assert (flags["lengths"], flags["capacity"]) == ("512+16x2", "4096")
    assert flags.keys().isdisjoint(("batch", "context"))


def test_hostile_text_stays_one_word() -> None:
    taken = row(problem(), f"{HOSTILE}; rm -rf ~", 1.0, config={HOSTILE: "$(reboot)"})
    words = shlex.split(command_of(taken, problem()))
    assert words[words.index("--kernels") + 1] == f"{HOSTILE}; rm -rf ~"
    assert words[-1] == f"{HOSTILE}; rm -rf ~:{HOSTILE}=$(reboot)"
