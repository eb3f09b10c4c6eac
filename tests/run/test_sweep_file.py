import os
import re
from datetime import date, time
from pathlib import Path
from typing import Any

import pytest
from leanbench.kernels.fa2.configs import Fa2TritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.errors import OptionWithoutEffect, UserError
from leanbench.core.files import FileFault, UnreadableFile
from leanbench.core.paths import SWEEPS
from leanbench.core.registry import kernel, kernels
from leanbench.decode import BOUND
from leanbench.gpu.catalogue import find
from leanbench.measure.options import MeasureOptions
from leanbench.measure.timing import Effort
from leanbench.model.predict import predict_cell
from leanbench.run.cells import Grid, Sweep, expand
from leanbench.run.sweep_errors import in_toml
from leanbench.run.sweep_file import load_sweep, requested_sweep, shipped_sweeps


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return str(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as error:
        load_sweep(write(tmp_path, text))
    sentence = str(error.value)
    assert "\n" not in sentence
    assert sentence.startswith(str(tmp_path / "my.toml"))
    return sentence.removeprefix(str(tmp_path / "my.toml"))


def test_values_may_be_numbers_strings_or_lists_and_grids_inherit(tmp_path):
    text = (
        'name = "a"\ncontext = ["1k", 2048]\nheads = [56, "32/8"]\nbatch = 4\n'
        'lengths = ["mean-0.5", "zipf"]\ndtype = "bf16"\n'
    )
    shapes: dict[str, Any] = {"context": (1024, 2048), "heads": ((56, 56), (32, 8))}
    grid = Grid(**shapes, batch=(4,), dtype=("bf16",), lengths=("mean-0.5", "zipf"))
    assert load_sweep(write(tmp_path, text)) == Sweep("a", (grid,))
    grids = '[[grid]]\ncontext = "1k"\n[[grid]]\ncontext = "2k"\nhead_dim = [128]\n'
    assert load_sweep(write(tmp_path, f'name = "a"\nhead_dim = 64\n{grids}')).grids == (
        Grid(context=(1024,), head_dim=(64,)),
        Grid(context=(2048,), head_dim=(128,)),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "a"\ncontext = 1k\n', " is not TOML: Expected newline or end of document after a"),
        ('name = "a"\n\ncontxt = 1024\n', ", line 3: there is no key 'contxt', did you mean 'cont"),
        ('name = "a"\n[[grid]]\n[[grid]]\nhaeds = 8\n', ", line 4: there is no key 'haeds', did y"),
        ('name = "a"\n[[grid]]\nname = "b"\n', ", line 3: there is no key 'name', "),
        ('name = "a"\nbatch = 2\n[[grid]]\nbatch = "1,"\n', ", line 4, key 'batch': batch '1,' ha"),
        ('name = "a"\n"context" = "4q"\n', ", line 2, key 'context': context '4q' is "),
        ('name = "a"\ncontext = 0\n', ", line 2, key 'context': context '0' is below"),
        ('name = "a"\nheads = "32/5"\n', ", line 2, key 'heads': heads '32/5' needs query heads"),
        ('name = "a"\nkernels = ["lean", "laen"]\n', ", line 2, key 'kernels': there is no kernel"),
        ('name = "a"\nbatch = true\n', ", line 2, key 'batch': true is invalid"),
        ('name = "a"\nbatch = []\n', ", line 2, key 'batch': [] is invalid"),
        ('name = "a"\nconfigs = "fastest"\n', ", line 2, key 'configs': configs 'fastest' is not "),
        ('name = "../a"\n', ", line 1, key 'name': '../a' cannot name a folder: use up to 64 lett"),
        ("batch = 1\n", ", line 1: the key 'name' is missing"),
        (
            'name = "a"\nlatent = true\n',
            """, line 2, key 'latent': true is invalid: write "yes" or "no", a number""",
        ),
        ('name = "a"\ngrid = 3\n', ", line 2, key 'grid': 3 is invalid"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, text, words):
    assert refusal(tmp_path, text).startswith(words)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", {}),
        ('cache = "warm"\nenergy = true', {"cache": "warm", "energy": True}),
        ("sustained = true\ncounters = true", {"sustained": True, "counters": True}),
        ("occupancy = true\nenergy = false", {"occupancy": True}),
        ('prefill = "8k"', {"prefill": 8192}),
        ("prefill = 300", {"prefill": 300}),
        ("prefill = 0", {"prefill": 0}),
    ],
)
def test_a_file_may_ask_for_more_than_latency(tmp_path, text, asked):
    sweep = load_sweep(write(tmp_path, f'name = "a"\n{text}\n'))
    assert sweep.measure == MeasureOptions(**asked)
    assert {cell.cache for cell in expand(sweep)} == {sweep.measure.cache}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('cache = "hot"', ", line 2, key 'cache': 'hot' is invalid: write 'cold' or 'warm'"),
        ("energy = 3", ", line 2, key 'energy': 3 is invalid: write true or false"),
        ('occupancy = "all"', ", line 2, key 'occupancy': 'all' is invalid: write true or false"),
        ("prefill = -1", ", line 2, key 'prefill': prefill '-1' is below"),
        ('prefill = "8q"', ", line 2, key 'prefill': prefill '8q' is invalid: write a number of t"),
        ("prefill = true", ", line 2, key 'prefill': true is invalid: write a number of"),
        ("enregy = true", ", line 2: there is no key 'enregy', did you mean 'energy'?"),
        ("[[grid]]\nenergy = true", ", line 3: there is no key 'energy', "),
    ],
)
def test_what_to_measure_is_checked_like_the_rest(tmp_path, text, words):
    assert refusal(tmp_path, f'name = "a"\n{text}\n').startswith(words)


DIGITS = "9" * 5000
HEX = f"0x{'f' * 5000}"
PYTHON = re.compile(r"True|False|None|datetime|int_max_str|recursion|codec|float\(|\binf\(")


@pytest.mark.parametrize("key", ["batch", "heads", "prefill", "kernels", "cache", "draw", "config"])
def test_a_value_is_told_as_the_file_has_it(tmp_path, key):
    dates = ("2031-05-06", "07:32:00", "[1979-05-27T07:32:00Z]")
    numbers = ("inf", "-nan", DIGITS, f"'{DIGITS}'", HEX, f"[1, {HEX}]")
    others = ("false", "[true, 1]", "{ a = [false] }", "[" * 400 + "]" * 400, '"\\u0000"')
    for value in (*dates, *numbers, *others):
        sentence = refusal(tmp_path, f'name = "a"\n{key} = {value}\n')
        assert not PYTHON.search(sentence), sentence
        assert len(sentence) < 6000


@pytest.mark.parametrize("count", [DIGITS, f"'{DIGITS}'", HEX, "'٣'", "true", "1e3"], ids=range(6))
def test_a_count_is_told_as_the_file_has_it(tmp_path, count):
    sentence = refusal(tmp_path, f'name = "a"\n[draw]\ncount = {count}\n')
    assert not PYTHON.search(sentence), sentence
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (date(2031, 5, 6), "2031-05-06"),
        ([time(7, 32), {"a": False}], "[07:32:00, {a = false}]"),
        (2**63 - 1, "9223372036854775807"),
        (2**63, "9223372036854775808"),
        ("a'b", '"a\'b"'),
        (["x" * 90], f"['{'x' * 78}..."),
        (float("-inf"), "-inf"),
    ],
)
def test_values_are_written_as_toml(value, text):
    assert in_toml(value) == text


def test_a_sweep_file_that_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.toml")
    os.mkfifo("pipe.jsonl")
    Path("loop.toml").symlink_to("loop.toml")
    Path("large.toml").touch()
    os.truncate("large.toml", 1 << 40)
    pipes = dict.fromkeys(("pipe.toml", "pipe.jsonl", "/dev/zero"), FileFault.NOT_REGULAR)
    others = {"loop.toml": FileFault.SYSTEM, "large.toml": FileFault.TOO_LARGE}
    for file, fault in (pipes | others).items():
        with pytest.raises(UnreadableFile) as refused:
            load_sweep(file)
        assert refused.value.fault is fault, file


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(UserError, match=r"no sweep file '.*none.toml'"):
        load_sweep(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match="there is no sweep 'smoek', did you mean 'smoke'"):
        load_sweep("smoek")
    # A byte order mark is no part of a sweep.
    (tmp_path / "my.toml").write_bytes(b'\xef\xbb\xbfname = "a"\r\nbatch = 3\r\n')
    sweep = load_sweep(str(tmp_path / "my.toml"))
    assert {cell.problem.batch for cell in expand(sweep)} == {3}
    (tmp_path / "my.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_sweep(str(tmp_path / "my.toml"))


def test_shipped_sweeps_load_under_their_own_names():
    assert {"smoke", "paper-fig7a"} <= set(shipped_sweeps())
    for name, path in shipped_sweeps().items():
        sweep = load_sweep(name)
        assert sweep.name == name == path.stem
        assert sweep.description
        assert expand(sweep)
        assert set(sweep.kernels) <= set(kernels())
        assert load_sweep(str(SWEEPS / f"{name}.toml")) == sweep


def test_every_kernel_is_in_a_shipped_sweep():
    """`leanbench decode` measures the bound itself."""
    named = {name for sweep in shipped_sweeps() for name in load_sweep(sweep).kernels}
    assert set(kernels()) - named == {BOUND}


def test_pages_and_query_tokens_of_a_file(tmp_path):
    grids = '[[grid]]\npage_size = ["none", 16]\n[[grid]]\npage_size = 64\n'
    file = write(tmp_path, f'name = "a"\nq_len = [1, 4]\n{grids}')
    problems = dict.fromkeys(
        cell.problem for cell in expand(load_sweep(file)) if cell.problem.context == 1024
    )
    assert [(problem.page_size, problem.q_len) for problem in problems] == [
        *((None, 1), (None, 4), (16, 1), (16, 4), (64, 1), (64, 4))
    ]
    sweep = requested_sweep(file, {"page_size": "none", "q_len": "2"}, None, None)
    assert {(cell.problem.page_size, cell.problem.q_len) for cell in expand(sweep)} == {(None, 2)}
    sentence = refusal(tmp_path, 'name = "a"\npage_size = [16, 0]\n')
    assert sentence.startswith(", line 2, key 'page_size': page_size '0' is below")


def test_flags_win_over_the_file_and_say_what_to_measure(tmp_path):
    grids = "[[grid]]\ncontext = 1024\n[[grid]]\ncontext = 2048\n"
    file = write(tmp_path, f'name = "a"\nkernels = ["lean"]\n{grids}')
    sweep = requested_sweep(file, {"context": "4k", "heads": "8"}, "fa2", "best")
    assert (sweep.name, sweep.kernels, sweep.configs) == ("a", ("fa2",), "best")
    assert [(cell.problem.context, cell.problem.q_heads) for cell in expand(sweep)] == [(4096, 8)]
    file = write(tmp_path, 'name = "a"\ncache = "warm"\nenergy = true\n')
    effort = Effort(relative_ci=0.02)
    flags = {"effort": effort, "window_s": 5.0, "counters": True}
    own = requested_sweep(file, {}, None, None, flags).measure
    assert own == MeasureOptions(effort, "warm", energy=True, window_s=5.0, counters=True)
    cold = requested_sweep(file, {}, None, None, {"cache": "cold"}).measure
    assert cold == MeasureOptions(energy=True)
    assert requested_sweep(file, {}, None, None, {}).measure == load_sweep(file).measure
    # Axes alone make a sweep that measures what flags say.
    assert requested_sweep(None, {"batch": "2"}, None, None, {"occupancy": True}) == Sweep(
        "custom", (Grid(batch=(2,)),), measure=MeasureOptions(occupancy=True)
    )


def test_without_a_file_axes_make_a_sweep_and_nothing_means_smoke():
    assert requested_sweep(None, {"batch": "2"}, None, None) == Sweep("custom", (Grid(batch=(2,)),))
    assert requested_sweep(None, {}, None, None) == load_sweep("smoke")
    assert requested_sweep(None, {}, "lean", None).name == "smoke"
    with pytest.raises(UserError, match="there is no kernel 'laen', did you mean 'lean'"):
        requested_sweep(None, {}, "laen", None)
    with pytest.raises(UserError, match="configs 'bset' is not supported"):
        requested_sweep(None, {}, None, "bset")


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_the_smoke_sweep_shows_where_stream_k_helps(gpu):
    spec, sweep = find(gpu), load_sweep("smoke")
    problems = dict.fromkeys(cell.problem for cell in expand(sweep))
    [waves, uneven] = [problem for problem in problems if problem.batch > 1]
    tiles = waves.batch * waves.kv_heads
    assert tiles > spec.sms
    assert tiles % spec.sms < spec.sms / 2
    assert uneven.is_ragged
    for problem in (waves, uneven):
        rows = {
            name: predict_cell(problem, kernel(name), "default", spec) for name in sweep.kernels
        }
        assert rows["lean"]["schedule"] == "stream-K"
        latency = {name: row["latency_us"] for name, row in rows.items()}
        assert latency["lean"] < latency["fa2"] / 1.1
        assert latency["lean"] < latency["fixed_split"] * 1.01


LEAN = (
    "lean:implementation=triton,tile_tokens=128,num_warps=4,num_stages=3,"
    "ctas_per_sm=2,min_tiles_per_cta=1,align_grid=false"
)
FA2 = "fa2:tile_tokens=64,num_warps=4,num_stages=3"


def test_a_file_may_give_settings(tmp_path):
    lean, fa2 = LeanTritonConfig(128, 4, 3, 2, 1, False), Fa2TritonConfig(64, 4, 3)
    file = write(tmp_path, f'name = "a"\nconfigs = "heuristic"\nconfig = "{LEAN}"\n')
    assert (load_sweep(file).configs, load_sweep(file).overrides) == ("heuristic", {"lean": lean})
    # A flag's settings win over the file's of the same kernel, and leave the others.
    different = LeanTritonConfig(128, 4, 3, 1, 1, False)
    flags = [LEAN.replace("ctas_per_sm=2", "ctas_per_sm=1"), FA2]
    own = requested_sweep(file, {}, None, None, overrides=flags).overrides
    assert own == {"lean": different, "fa2": fa2}
    assert requested_sweep(file, {}, None, None).overrides == {"lean": lean}
    file = write(tmp_path, f'name = "a"\nconfig = ["{LEAN}", "{FA2}"]\n')
    assert load_sweep(file).overrides == {"lean": lean, "fa2": fa2}
    with pytest.raises(UserError, match="add fa2 to --kernels or leave its config out"):
        requested_sweep(file, {}, "lean", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('config = "fa2:tile_tokens=96,num_warps=4,num_stages=3"', ", line 2, key 'config': confi"),
        ("config = 3", ", line 2, key 'config': 3 is invalid: write a string such as lean:"),
        ("config = []", ", line 2, key 'config': [] is invalid"),
        (
            f'config = ["{FA2}", "{FA2}"]',
            f", line 2, key 'config': config '{FA2}': fa2 already has",
        ),
    ],
)
def test_settings_of_a_file_are_checked_as_those_of_flags(tmp_path, text, words):
    assert refusal(tmp_path, f'name = "a"\n{text}\n').startswith(words)


@pytest.mark.parametrize(
    ("sweep", "axes", "cells"),
    [("chunks", {"q_lens": "1x3+4", "batch": "4"}, 10), ("variants", {"kv_dtype": "same"}, 222)],
)
def test_what_a_flag_makes_moot_in_a_file_is_no_mistake(sweep, axes, cells):
    assert len(expand(requested_sweep(sweep, axes, None, None))) == cells


def test_a_flag_or_a_file_that_changes_nothing_is_refused(tmp_path):
    with pytest.raises(OptionWithoutEffect) as error:
        requested_sweep("chunks", {"scaled": "no"}, None, None)
    assert (error.value.option, error.value.needs) == ("scaled unscaled", "kv_dtype e4m3")
    for table in ("", "[draw]\ncount = 3\n"):
        message = refusal(tmp_path, f'name = "x"\n{table}scaled = "no"\n')
        assert message.startswith(": scaled unscaled has no effect without kv_dtype e4m3")
