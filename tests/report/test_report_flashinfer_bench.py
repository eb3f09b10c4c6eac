"""Runs as datasets of FlashInfer-Bench: fields, return as a sweep, and the published package."""

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import WriteRun, problem, row
from fib_schema import MODELS, faults

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.formats.definition import definition_of
from leanbench.formats.safetensors import read_integers, write_int32
from leanbench.formats.sources import solution_of
from leanbench.formats.workload import index_tensors, workload_of
from leanbench.report import write_report
from leanbench.run.cells import expand
from leanbench.run.sweep_file import load_sweep

PAGED = AttentionProblem(2, 8, 2, (100, 37), 64, page_size=16, lengths_on="device")
PROBLEMS = [
    problem(1024, 8),
    AttentionProblem(3, 8, 2, 100, 64, "bf16", "NHD"),
    AttentionProblem(3, 8, 2, 100, 64, "bf16", "NHD", capacity=256, lengths_on="device"),
    AttentionProblem(2, 8, 2, (100, 37), 64),
    AttentionProblem(2, 8, 2, (100, 37), 64, "bf16", "NHD", page_size=1),
    AttentionProblem(2, 8, 2, 96, 64, "bf16", "NHD", page_size=16, lengths_on="device"),
    PAGED,
]


def label(own: AttentionProblem) -> str:
    return own.label.replace(" ", "-")


@pytest.fixture
def dataset(write_run: WriteRun, tmp_path: Path) -> Path:
    rows = [own for p in PROBLEMS for own in (row(p, "lean", 10.0), row(p, "fa2", 25.0))]
    directory = write_run([*rows, row(problem(64, q_len=4), "lean", 10.0)])
    [folder] = write_report(directory, tmp_path, ["flashinfer-bench"], baseline="fa2")
    assert folder == tmp_path / "flashinfer-bench"
    return folder


def traces(folder: Path, kind: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"{kind}/**/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_every_file_has_the_fields_that_flashinfer_bench_takes(dataset):
    kinds = {"definitions": "Definition", "solutions": "Solution"}
    for folder, kind in kinds.items():
        paths = sorted(dataset.glob(f"{folder}/**/*.json"))
        assert len(paths) == 7
        contents = {path.stem: json.loads(path.read_text()) for path in paths}
        assert [content["name"] for content in contents.values()] == [*contents]
        assert [faults(own, kind, stem) for stem, own in contents.items()] == [[]] * 7
    for folder in ("workloads", "traces"):
        assert [faults(trace, "Trace") for trace in traces(dataset, folder)] == [[]] * 7
    with_tensors = [own for own in PROBLEMS if own.lengths_on == "device" or own.is_ragged]
    assert len(sorted(dataset.glob("blob/**/*.safetensors"))) == len(with_tensors) == 5


def test_the_description_of_the_fields_can_fail():
    good = {"definition": "d", "workload": {"axes": {"n": 1}, "inputs": {}, "uuid": "u"}}
    assert faults(good, "Trace") == []
    assert faults({**good, "wrong": 1}, "Trace") == [".wrong is unknown"]
    assert faults({"definition": 1, "workload": good["workload"]}, "Trace") == [
        ".definition: 1 is no str"
    ]
    assert faults({"definition": "d"}, "Trace") == [".workload is missing"]


def test_a_trace_says_what_was_measured(dataset):
    trace = traces(dataset, "traces")[0]
    assert trace["solution"] == f"leanbench_lean_{trace['definition']}"
    evaluation = trace["evaluation"]
    assert evaluation["environment"]["hardware"] == "NVIDIA_H200"
    assert evaluation["environment"]["libs"]["driver"] == "580.1"
    assert evaluation["performance"] == {
        "latency_ms": pytest.approx(0.01),
        "reference_latency_ms": pytest.approx(0.025),
        "speedup_factor": 2.5,
    }
    assert evaluation["correctness"]["extra"] == {"relative_error_of_norms": 3.2e-4}
    assert evaluation["log"].startswith("leanbench sweep --heads 8")


def test_statuses_and_what_is_no_trace(write_run: WriteRun, tmp_path: Path):
    one = problem(1024, 8)
    rows = [row(one, "lean", 10.0), row(one, "fixed_split", 10.0)]
    others: list[tuple[float | None, dict[str, str]]] = [
        (None, {"status": "crashed", "reason": "an illegal address"}),
        (None, {"status": "timeout", "reason": "120 s"}),
        (1.0, {"status": "incorrect", "reason": "wrong"}),
        (1.0, {"status": "suspect", "reason": "faster than the memory"}),
        *((1.0, {"source": "predicted"}), (1.0, {"cache": "warm"})),
    ]
    rows += [row(problem(16 + i, 8), "lean", us, **own) for i, (us, own) in enumerate(others)]
    [folder] = write_report(write_run(rows), tmp_path, ["flashinfer-bench"])
    written = traces(folder, "traces")
    assert [faults(trace, "Trace") for trace in written] == [[]] * 4
    evaluations = [trace["evaluation"] for trace in written]
    statuses = ["PASSED", "RUNTIME_ERROR", "TIMEOUT", "INCORRECT_NUMERICAL"]
    assert [evaluation["status"] for evaluation in evaluations] == statuses
    assert evaluations[0]["performance"] == {"latency_ms": 0.01}
    assert ["correctness" in evaluation for evaluation in evaluations] == [True, False, False, True]
    assert ["performance" in evaluation for evaluation in evaluations] == [True, *[False] * 3]
    assert evaluations[1]["log"].startswith("an illegal address\nleanbench sweep ")
    assert len(traces(folder, "workloads")) == 7


def test_a_run_without_such_problems_is_refused(write_run: WriteRun, tmp_path: Path, caplog):
    shapes = problem(64, window_left=8), problem(64, softcap=5.0)
    rows = [row(shape, "lean", 1.0) for shape in shapes]
    with pytest.raises(UserError, match="no problem of this run can be a definition"):
        write_report(write_run(rows), tmp_path, ["flashinfer-bench"])
    plain = write_run([*rows, row(problem(64), "lean", 1.0)], folder="b")
    write_report(plain, tmp_path, ["flashinfer-bench"])
    assert caplog.messages[-1].startswith("2 of 3 problems are left out of FlashInfer-Bench: ")


def test_back_as_a_sweep_it_has_the_same_problems(dataset):
    sweep = load_sweep(str(dataset))
    assert {cell.problem for cell in expand(sweep)} == set(PROBLEMS)
    assert sweep.kernels == ("lean", "fa2", "fixed_split")
    [workloads] = dataset.glob("workloads/*/gqa_paged_decode_h8_kv2_d64_ps16_fp16_hnd.jsonl")
    assert [cell.problem for cell in expand(load_sweep(str(workloads)))] == [PAGED] * 3


def function(source: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(compile(source, "<source>", "exec"), scope)
    return scope["run"]


def arguments(own: AttentionProblem, definition: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The problem's inputs, and the same as FlashInfer-Bench passes them."""
    inputs = make_inputs(own, "cpu", seed=1)
    scalars = {"sm_scale": inputs.softmax_scale, "cache_seqlens": own.max_context}
    caches = {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    if own.kv_layout == "HND":
        caches = {name: cache.transpose(1, 2) for name, cache in caches.items()}
    given = {**scalars, **caches, "q": inputs.q.squeeze(1)}
    given |= {name: torch.tensor(v, dtype=torch.int32) for name, v in index_tensors(own).items()}
    if own.page_size is not None:
        # The pages that the inputs have, not those of the workload.
        assert inputs.block_table is not None
        pages = zip(inputs.block_table, own.page_counts, strict=True)
        given["kv_indices"] = torch.cat([table[:count] for table, count in pages])
    return inputs, {name: given[name] for name in definition["inputs"]}


@pytest.mark.parametrize("own", PROBLEMS[1:], ids=label)
def test_reference_and_solution_are_right(own):
    definition = definition_of(own)
    inputs, given = arguments(own, definition)
    for name, tensor in definition["inputs"].items():
        shape = list(given[name].shape) if tensor["shape"] is not None else []
        assert len(shape) == len(tensor["shape"] or [])
    solution = solution_of(own, definition)["sources"][0]["content"]
    # Pages of one token are read on a GPU alone.
    for source in (definition["reference"], solution)[: 1 if own.page_size == 1 else 2]:
        output, lse = function(source)(**given)
        inputs.out.copy_(output.unsqueeze(1))
        inputs.lse.copy_(lse.unsqueeze(2))
        check = Reference(inputs).check(inputs, lse_base=2)
        assert check.relative_error < 1e-2, source
        assert check.lse_error is not None
        assert check.lse_error < 1e-3, source


def test_safetensors_come_back_and_damaged_ones_are_refused():
    content = write_int32({"a": [1, -2, 3], "b": []})
    assert (read_integers(content, "a"), read_integers(content, "b")) == ([1, -2, 3], [])
    for damaged, words in (
        (b"", "no safetensors file"),
        (content[:20], "no safetensors file"),
        (content[:-4], "tensor 'a' is cut off"),
        (content.replace(b"I32", b"F32"), 'is "F32"'),
        (content.replace(b"[0,12]", b"[0,99]"), "cut off"),
        (content.replace(b"[0,12]", b"[12,0]"), "cut off"),
    ):
        with pytest.raises(ValueError, match=words):
            read_integers(damaged, "a")
    with pytest.raises(ValueError, match="no tensor 'c'"):
        read_integers(content, "c")


# Against the published package.


@pytest.fixture(scope="module")
def fib() -> Any:
    pytest.importorskip(
        "flashinfer_bench", reason="flashinfer-bench is not installed: pip install flashinfer-bench"
    )
    import flashinfer_bench.data

    return flashinfer_bench.data


def test_the_fields_are_those_of_the_package(fib):
    for name, fields in MODELS.items():
        if name not in ("Axis", "Input"):
            model = getattr(fib, name, None) or getattr(fib.solution, name)
            own = {key.removesuffix("?"): key.endswith("?") for key in fields}
            assert own == {key: not f.is_required() for key, f in model.model_fields.items()}, name


def test_the_package_reads_the_dataset(fib, dataset):
    read = fib.TraceSet.from_path(str(dataset))
    assert len(read.definitions) == len(read.solutions) == len(read.workloads) == 7
    for name, own in read.traces.items():
        assert [trace.is_successful() for trace in own] == [True]
        assert read.get_solution(own[0].solution).definition == name
        assert math.isnan(own[0].evaluation.correctness.max_absolute_error)
        definition = read.definitions[name]
        [workload] = [trace.workload for trace in read.workloads[name]]
        assert definition.get_input_shapes(workload.axes)
        assert ast.parse(definition.reference)


def test_the_package_builds_and_runs_the_solution(fib, tmp_path, monkeypatch):
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    from flashinfer_bench.compile.builders.python_builder import PythonBuilder

    definition = definition_of(PAGED)
    read = fib.Definition.model_validate_json(json.dumps(definition))
    solution = fib.Solution.model_validate_json(json.dumps(solution_of(PAGED, definition)))
    runnable = PythonBuilder().build(read, solution)
    _, given = arguments(PAGED, definition)
    output, lse = runnable(*given.values())
    expected, expected_lse = function(definition["reference"])(**given)
    torch.testing.assert_close(output, expected, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


def test_the_package_loads_a_workloads_tensors(fib, dataset):
    from flashinfer_bench.bench.utils import load_safetensors

    definition = definition_of(PAGED)
    workload = fib.Workload.model_validate_json(json.dumps(workload_of(PAGED, definition)))
    tensors = load_safetensors(
        fib.Definition.model_validate_json(json.dumps(definition)), workload, dataset
    )
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == index_tensors(PAGED)
