"""Tables for the planner AIConfigurator, read back by its columns and by its own readers."""

import csv
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from example_runs import WriteRun, problem, row

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.report import write_report
from leanbench.report.aiconfigurator import COLUMNS

GQA = AttentionProblem(8, 32, 8, 4096, 128, "bf16")
MLA = AttentionProblem(4, 16, 1, 8192, 576, "bf16", latent=True, v_head_dim=512, page_size=64)


#: (latency in ms, energy in mJ) by the keys of the planner's look-up.
Table = dict[tuple[Any, ...], tuple[float, float]]
Read = Callable[[str, str], Table]


def read_columns(text: str, file: str) -> Table:
    """Read a table as AIConfigurator 0.8 does. Of equal keys, the first counts."""
    found: Table = {}
    for fields in csv.DictReader(io.StringIO(text)):
        tokens = int(fields["isl"]) + int(fields["step"])
        assert fields["kv_cache_dtype"] in ("float16", "int8", "fp8")
        sizes: tuple[Any, ...] = (int(fields["num_heads"]), int(fields["batch_size"]), tokens)
        if file == "generation_attention_perf":
            heads, kv_heads = int(fields["num_heads"]), int(fields["num_key_value_heads"])
            own = (0 if heads == kv_heads else kv_heads, int(fields["head_dim"]))
            sizes = (*own, int(fields.get("window_size", 0)), *sizes)
            assert fields["attn_dtype"] in ("float16", "fp8")
        else:
            assert fields["mla_dtype"] in ("float16", "fp8")
        latency = float(fields["latency"])
        key = (fields["kv_cache_dtype"], *sizes)
        found.setdefault(key, (latency, float(fields.get("power", 0.0)) * latency))
    return found


def flattened(tree: Mapping[Any, Any], *key: Any) -> Table:
    if "latency" in tree:
        return {key: (tree["latency"], tree["energy"])}
    parts = (flattened(part, *key, getattr(own, "name", own)) for own, part in tree.items())
    return {size: figures for part in parts for size, figures in part.items()}


@pytest.fixture(params=["columns", "planner"])
def read_back(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    """Return a reader of tables: the one above, or AIConfigurator's own."""
    if request.param == "columns":
        return read_columns
    needs = "needs aiconfigurator up to 0.8, whose readers take CSV"
    planner = pytest.importorskip("aiconfigurator.sdk.perf_database", reason=needs)
    if not hasattr(planner.common.KVCacheQuantMode, "float16"):
        pytest.skip(needs)

    def read(text: str, file: str) -> Table:
        path = tmp_path / f"{file}.txt"
        path.write_text(text)
        return flattened(getattr(planner, f"load_{file.removesuffix('_perf')}_data")(str(path)))

    return read


def tables(write_run: WriteRun, rows: list[dict[str, Any]], **options: Any) -> dict[str, str]:
    directory = write_run(rows, folder=f"run{len(rows)}-{len(options)}")
    [folder] = write_report(directory, directory, ["aiconfigurator"], **options)
    return {path.stem: path.read_text() for path in folder.glob("*.txt")}


def test_a_row_is_found_where_the_planner_looks_for_it(write_run: WriteRun, read_back: Read):
    rows = [
        row(GQA, "lean", 50.0),
        row(replace(GQA, kv_dtype="e4m3"), "lean", 30.0),
        row(replace(GQA, window_left=1023), "lean", 20.0),
        row(problem(1024), "lean", 12.5),
        row(MLA, "lean_mla", 40.0),
        row(replace(MLA, kv_dtype="e4m3"), "lean_mla", 25.0, status="noisy", reason="wide"),
        row(GQA, "fa2", 1.0),
    ]
    found = tables(write_run, rows)
    assert read_back(found["generation_attention_perf"], "generation_attention_perf") == {
        # Cache, KV heads (0: as many as heads), head_dim, window, heads, batch, tokens.
        ("float16", 8, 128, 0, 32, 8, 4096): (0.05, 0.0),
        ("fp8", 8, 128, 0, 32, 8, 4096): (0.03, 0.0),
        ("float16", 8, 128, 1024, 32, 8, 4096): (0.02, 0.0),
        ("float16", 0, 64, 0, 56, 1, 1024): (0.0125, 0.0),
    }
    assert read_back(found["generation_mla_perf"], "generation_mla_perf") == {
        ("float16", 16, 4, 8192): (0.04, 0.0),
        ("fp8", 16, 4, 8192): (0.025, 0.0),
    }
    for name, text in found.items():
        header, *lines = text.splitlines()
        assert tuple(header.split(",")) == COLUMNS[name]
        assert all(line.startswith("leanbench,0.1.0,NVIDIA H200,") for line in lines)


def test_a_kernel_of_a_library_and_power(write_run: WriteRun, read_back: Read):
    energy = {"energy_mj": 25.0, "sustained_us": 50.0, "sustained_power_w": 500.0}
    rows = [row(GQA, "lean", 40.0), row(GQA, "fa2", 50.0, **energy)]
    text = tables(write_run, rows, baseline="fa2")["generation_attention_perf"]
    [(latency_ms, energy_mj)] = read_back(text, "generation_attention_perf").values()
    assert (latency_ms, energy_mj) == pytest.approx((0.05, 25.0))
    assert ",fa2," in text
    # A column is of all rows or of none.
    rows.append(row(replace(GQA, batch=1), "fa2", 10.0))
    assert "power" not in tables(write_run, rows, baseline="fa2")["generation_attention_perf"]


def test_of_equal_sizes_the_call_of_a_server_counts(write_run: WriteRun, read_back: Read, caplog):
    paged = replace(GQA, page_size=16, lengths_on="device")
    device = replace(GQA, lengths_on="device")
    rows = [row(each, "lean", us) for each, us in ((GQA, 50.0), (paged, 52.0), (device, 51.0))]
    with caplog.at_level(logging.WARNING):
        text = tables(write_run, rows)["generation_attention_perf"]
    [(latency_ms, _)] = read_back(text, "generation_attention_perf").values()
    assert latency_ms == 0.052
    assert "2 of 3 rows are left out" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "predicted"},
        {"cache": "warm"},
        {"kernel": "fa2"},
        {"problem": replace(GQA, softcap=30.0)},
        {"problem": replace(GQA, q_len=4)},
        {"problem": replace(GQA, context=(4096,) * 7 + (100,))},
        {"problem": replace(GQA, parallel="cp:2")},
    ],
)
def test_what_no_table_can_hold_is_refused(
    write_run: WriteRun, fields: dict[str, Any], caplog: Any
):
    own = {"problem": GQA, "kernel": "lean", **fields}
    rows = [row(own.pop("problem"), own.pop("kernel"), 50.0, **own)]
    with pytest.raises(UserError, match=r"no row can .*: it takes .*; name a run"):
        tables(write_run, rows)
    assert not caplog.text


def test_a_table_is_of_one_gpu(write_run: WriteRun, tmp_path):
    first, second = (
        write_run(
            [row(GQA, "lean", 50.0)],
            folder=name,
            environments={"env0": {"gpu_product": f"NVIDIA {name}"}},
        )
        for name in ("H100", "H200")
    )
    with pytest.raises(UserError, match="these runs are of NVIDIA H100 and NVIDIA H200: report"):
        write_report(first, tmp_path, ["aiconfigurator"], [second])


def test_tables_of_another_kernel_do_not_stay(write_run: WriteRun):
    rows = [row(GQA, "lean", 50.0), row(MLA, "lean_mla", 40.0), row(GQA, "cudnn", 60.0)]
    directory = write_run(rows)
    [folder] = write_report(directory, directory, ["aiconfigurator"])
    names = {path.stem for path in folder.iterdir()}
    assert names == {"generation_attention_perf", "generation_mla_perf"}
    write_report(directory, directory, ["aiconfigurator"], baseline="cudnn")
    assert {path.stem for path in folder.iterdir()} == {"generation_attention_perf"}
    assert ",cudnn,8,1," in (folder / "generation_attention_perf.txt").read_text()


def test_parquet_has_the_names_of_later_versions(write_run: WriteRun):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    directory = write_run([row(GQA, "lean", 50.0)])
    [folder] = write_report(directory, directory, ["aiconfigurator"])
    frame = pd.read_parquet(folder / "generation_attention_perf.parquet")
    assert tuple(frame.columns) == COLUMNS["generation_attention_perf"]
    assert (frame.kv_cache_dtype[0], frame.attn_dtype[0]) == ("bfloat16", "bfloat16")
    assert frame.isl[0] + frame.step[0] == 4096
