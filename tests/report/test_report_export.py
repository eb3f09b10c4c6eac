"""Runs for other people's tools: the GitHub action, OpenMetrics, tritonbench."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from example_runs import WriteRun, measured_rows, problem, row, rows_with_all_fields, two_runs

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.quantities import UNITS
from leanbench.gpu.catalogue import find
from leanbench.records.row import QUANTITIES
from leanbench.report import write_report
from leanbench.report.export.openmetrics import BASE_UNITS, metric_of


def written(directory: Path, format_: str, *more: Path, out: Path | None = None) -> str:
    [path] = write_report(directory, out or directory, [format_], more)
    return path.read_text(encoding="utf-8")


def test_the_github_action_gets_a_list_of_latencies(write_run: WriteRun):
    rows = [
        *measured_rows(),
        row(problem(128), "lean", 3.0, source="predicted"),
        row(problem(256), "lean", 4.0, cache="warm"),
    ]
    benchmarks = json.loads(written(write_run(rows), "github-benchmark"))
    assert [(own["name"], own["value"]) for own in benchmarks[-4:]] == [
        ("fixed_split · b1 h56 n65536 d64 fp16 HND", 100.0),
        ("lean · b2 h56 n512+4096 d64 fp16 HND", 12.5),
        ("lean · b1 h56 n128 d64 fp16 HND · predicted", 3.0),
        ("lean · b1 h56 n256 d64 fp16 HND · warm L2", 4.0),
    ]
    assert len(benchmarks) == 9
    # What the action's tool customSmallerIsBetter reads.
    assert {tuple(own) for own in benchmarks} == {("name", "unit", "value", "range", "extra")}
    assert benchmarks[0]["unit"] == "us"
    assert benchmarks[0]["range"] == "± 0.1"
    gpu, floor, command = benchmarks[0]["extra"].splitlines()
    assert (gpu, floor) == ("NVIDIA H200", "57% of the read floor")
    assert command.startswith("leanbench sweep --heads 56 --context 1024 ")


def test_names_of_several_runs_differ_and_no_latency_is_refused(write_run: WriteRun, tmp_path):
    first, second = two_runs(write_run)
    benchmarks = json.loads(written(first, "github-benchmark", second, out=tmp_path))
    names = [own["name"] for own in benchmarks]
    assert len(set(names)) == len(names)
    crashed = write_run([row(problem(), "lean", status="crashed", reason="x")], folder="none")
    with pytest.raises(UserError, match="no row of this run has a latency"):
        write_report(crashed, tmp_path, ["github-benchmark"])


#: A sample: metric, labels, value, time.
SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+) (\S+)')


def test_openmetrics_has_a_gauge_for_every_quantity(write_run: WriteRun):
    hostile = 'a"b\\c\nd'
    rows = [*rows_with_all_fields(), row(problem(64), hostile, 5.0)]
    lines = written(write_run(rows), "openmetrics").splitlines()
    assert lines[-1] == "# EOF"
    families = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(set(families)) == len(families) > 30
    samples = [line for line in lines if not line.startswith("#")]
    matched = [SAMPLE.fullmatch(line) for line in samples]
    assert all(matched)
    latency = [m for m in matched if m and m[1] == "leanbench_latency_seconds"]
    assert [m[2] for m in latency] == sorted(m[2] for m in latency)
    values = sorted(float(m[3]) for m in latency)
    assert values == pytest.approx([2e-6, 5e-6, 1e-5, 1e-5, 2e-5, 2e-4, 1.6e-3])
    assert {m[4] for m in latency} == {"1767323045.000"}
    assert 'kernel="a\\"b\\\\c\\nd"' in latency[0][2]
    assert 'run="example",gpu="NVIDIA H200",kernel="fa2",source="measured"' in latency[1][2]
    assert 'heads="56",context="1024",batch="1"' in latency[1][2]
    assert float(latency[1][3]) == pytest.approx(2e-5)
    assert "# UNIT leanbench_energy_joules joules" in lines
    assert "# UNIT leanbench_read_floor_share_ratio ratio" in lines


def test_every_unit_of_a_quantity_has_a_base_unit():
    assert BASE_UNITS.keys() == UNITS.keys()
    names = [metric_of(quantity)[0] for quantity in QUANTITIES]
    assert len(set(names)) == len(names)


def test_prometheus_reads_the_openmetrics(write_run: WriteRun):
    parser = pytest.importorskip(
        "prometheus_client.openmetrics.parser", reason="prometheus-client is not installed"
    )
    text = written(write_run(rows_with_all_fields()), "openmetrics")
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    latency = families["leanbench_latency_seconds"]
    assert (latency.type, latency.unit) == ("gauge", "seconds")
    assert latency.documentation.startswith("one launch; when measured")
    assert len(latency.samples) == 6
    [short] = [
        sample
        for sample in latency.samples
        if (sample.labels["kernel"], sample.labels["context"]) == ("lean", "1024")
    ]
    assert short.value == pytest.approx(1e-5)
    assert float(short.timestamp) == 1767323045


@pytest.fixture
def tritonbench(monkeypatch) -> SimpleNamespace:
    """In place of the module that operators import: what they register, by name. tritonbench names
    an operator by its module's path, which must begin with tritonbench.operators.
    """
    registered = SimpleNamespace(backends={}, metrics=[], x_label=None)

    def named(function: Any) -> None:
        assert function.__module__ == "tritonbench.operators.leanbench_decode.operator"

    def register_benchmark(baseline: bool = False) -> Any:
        def decorate(function: Any) -> Any:
            named(function)
            registered.backends[function.__name__] = baseline
            return function

        return decorate

    def register_metric() -> Any:
        def decorate(function: Any) -> Any:
            named(function)
            registered.metrics.append(function.__name__)
            return function

        return decorate

    def register_x_val(label: str) -> Any:
        registered.x_label = label
        return lambda function: function

    modules = {name: ModuleType(name) for name in ("tritonbench", "tritonbench.utils")}
    operators = ModuleType("tritonbench.operators")
    triton_op: Any = ModuleType("tritonbench.utils.triton_op")
    triton_op.BenchmarkOperator = type("BenchmarkOperator", (), {"device": "cpu"})
    triton_op.register_benchmark = register_benchmark
    triton_op.register_metric = register_metric
    triton_op.register_x_val = register_x_val
    for name, module in {
        **modules,
        "tritonbench.operators": operators,
        "tritonbench.utils.triton_op": triton_op,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    registered.operators = operators
    return registered


def test_an_operator_of_tritonbench_has_the_runs_problems_and_kernels(
    write_run: WriteRun, tmp_path, monkeypatch, tritonbench
):
    small = AttentionProblem(1, 8, 2, 100, 64)
    paged = AttentionProblem(2, 8, 2, (100, 37), 64, "bf16", "NHD", page_size=16)
    rows = [
        row(p, kernel, 1.0) for p in (small, paged) for kernel in ("lean", "fa2_triton", "gone")
    ]
    rows.append(row(small, "fixed_split", status="unsupported", reason="x"))
    [folder] = write_report(write_run(rows), tmp_path, ["tritonbench"], baseline="fa2_triton")
    assert folder.name == "leanbench_decode"
    tritonbench.operators.__path__ = [str(tmp_path)]
    module = importlib.import_module("tritonbench.operators.leanbench_decode.operator")
    monkeypatch.setattr(module, "spec_of_device", lambda index: find("h200"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert tritonbench.backends == {"lean": False, "fa2_triton": True}
    assert (tritonbench.metrics, tritonbench.x_label) == (["kv_gbps"], "problem")
    operator = module.Operator()
    inputs = list(operator.get_input_iter())
    assert [operator.get_x_val(own) for own in inputs] == [small.label, paged.label]
    for own in inputs:
        outputs = {name: getattr(operator, name)(*own)() for name in tritonbench.backends}
        check = Reference(operator.tensors)
        for output in outputs.values():
            operator.tensors.out.copy_(output)
            assert check.check(operator.tensors, None).relative_error < 1e-2
        assert outputs["lean"].data_ptr() != outputs["fa2_triton"].data_ptr()
    with pytest.raises(NotImplementedError, match="fa2_triton does not take page_size 1"):
        operator.fa2_triton({**inputs[1][0], "page_size": 1})
    gbps = operator.kv_gbps(None, inputs[0], SimpleNamespace(latency=0.001))
    assert gbps == pytest.approx(small.kv_bytes / 1e-6 * 1e-9)


def test_a_run_of_kernels_that_are_not_here_is_no_operator(write_run: WriteRun, tmp_path):
    directory = write_run([row(problem(), "somebodys", 1.0)])
    with pytest.raises(UserError, match="no kernel of this run can be a backend of tritonbench"):
        write_report(directory, tmp_path, ["tritonbench"])
