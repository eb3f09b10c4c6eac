"""Facts that a report states once, and facts that it omits."""

from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, measured_rows, problem, row, rows_with_all_fields

from leanbench.records.reading import read_run, read_runs
from leanbench.report import write_report
from leanbench.report.charts import maps_of
from leanbench.report.compare.ratios import margin_of
from leanbench.report.document import Document, Section, Sentences, Table
from leanbench.report.facts import ENDING, OPEN, facts
from leanbench.report.facts.environment import environment_section
from leanbench.report.facts.results import Results
from leanbench.report.series import FEW_KINDS, FEW_VALUES, fixed_words

ENVIRONMENT = {"torch": "2.11.0", "driver": "580.1", "gpu_product": "NVIDIA H200"}


def predicted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**fields, "source": "predicted"} for fields in rows]


def runs_of(write_run: WriteRun, count: int, rows: list[dict[str, Any]], **fields: Any) -> Results:
    names = [f"run{number}" for number in range(count)]
    return Results(read_runs([write_run(rows, folder=n, name=n, **fields) for n in names]))


def section(document: Document, key: str) -> Section:
    [found] = [section for section in document.sections if section.key == key]
    return found


def test_equal_environments_are_one_table_and_differences_another(write_run: WriteRun) -> None:
    other = {**ENVIRONMENT, "driver": "590.2", "host": "b"}
    environments = {"first": ENVIRONMENT, "second": other, "third": ENVIRONMENT}
    runs = [
        write_run([], folder=name, name=name, environments={f"e{fields is other:d}": fields})
        for name, fields in environments.items()
    ]
    shared, differing, gpu = environment_section(Results(read_runs(runs))).blocks
    assert isinstance(shared, Table)
    assert shared.rows == (("torch", "2.11.0"), ("gpu_product", "NVIDIA H200"))
    assert isinstance(differing, Table)
    headings = [column.heading for column in differing.columns]
    assert headings == ["environment", "runs", "driver", "host"]
    first, second = ("e0", "first, third", "580.1", ""), ("e1", "second", "590.2", "b")
    assert differing.rows == (first, second)
    # All runs are for one GPU.
    assert isinstance(gpu, Section)
    assert gpu.heading == "GPU figures used for schedules and predictions"


def test_one_environment_of_several_runs_is_one_table(write_run: WriteRun) -> None:
    results = runs_of(write_run, 3, [], environments={"e0": ENVIRONMENT}, gpu=None)
    [environment] = environment_section(results).blocks
    assert isinstance(environment, Table)
    assert environment.columns[1].heading == "e0"
    assert environment.rows == tuple(ENVIRONMENT.items())


def test_many_runs_open_on_their_overview(write_run: WriteRun) -> None:
    many = facts(runs_of(write_run, 4, rows_with_all_fields()))
    closed = [section.key for section in many.sections if section.folded == "closed"]
    assert {"charts", "trust", "flagged", "environment"} <= {*closed}
    assert not {*closed} - {"rows"} & {*OPEN}
    few = facts(Results([read_run(write_run(rows_with_all_fields(), folder="alone"))]))
    assert [section.key for section in few.sections if section.folded == "closed"] == ["rows"]


@pytest.mark.deep
def test_predicted_runs_have_one_banner_and_no_second_warning(write_run: WriteRun) -> None:
    gpu = {"name": "a100-80gb", "product": "NVIDIA A100-SXM4-80GB"}
    rows = predicted([row(problem(), name, us) for name, us in (("lean", 9.0), ("fa2", 20.0))])
    for count in (1, 2, 4):
        fields: dict[str, Any] = {"gpu": gpu, "source": "predicted"}
        names = [f"of{count}-{n}" for n in range(count)]
        runs = [write_run(rows, folder=name, name=name, **fields) for name in names]
        document = facts(Results(read_runs(runs)))
        [banner] = section(document, "banner").blocks
        assert isinstance(banner, Sentences)
        assert len(banner.items) == 1
        assert "nothing was measured" not in str(section(document, "summary"))
    # A terminal has no banner.
    ending = facts(Results(read_runs(runs[:1])), ENDING)
    assert "nothing was measured" in str(section(ending, "summary"))


@pytest.mark.parametrize(
    ("gpu", "words"),
    [("NVIDIA H200", "the model's error of "), ("NVIDIA B200", "the model's H200 error of ")],
)
def test_an_error_of_another_gpu_is_said_to_be_that(gpu: str, words: str) -> None:
    margin = margin_of("predicted", [gpu], ["lean", "fixed_split"])
    assert margin.words == f"{words}{margin.share:.1%}"
    assert margin_of("measured", [gpu], ["lean"]).words == "1%"


def test_a_map_of_winners_is_drawn_where_two_kernels_beat_the_baseline(write_run: WriteRun) -> None:
    def keys(latencies: list[dict[str, float]]) -> list[str]:
        shapes = [problem(context, heads) for context in (1024, 4096) for heads in (8, 16)]
        rows = [
            row(shape, kernel, us)
            for shape, of_shape in zip(shapes, latencies, strict=True)
            for kernel, us in of_shape.items()
        ]
        results = Results([read_run(write_run(rows, folder=rows[-1]["kernel"]))])
        return [drawn.key for drawn in maps_of(results.frame, results.margin)]

    lean = {"lean": 10.0, "fa2": 20.0, "cudnn": 20.0}
    lost = {"lean": 30.0, "cudnn": 20.0, "fa2": 20.5}
    assert keys([lean, lean, lean, lost]) == ["speedup", "floor"]
    won = keys([lean, lean, {**lean, "fa2": 1.0}, {**lean, "cudnn": 1.0}])
    assert won == ["winner", "speedup", "floor"]


def test_a_decomposition_of_one_place_is_the_summary_s_figure(write_run: WriteRun) -> None:
    config = {"implementation": "cuda"}
    rows = [
        row(problem(context), kernel, us, schedule="equal splits", config=config)
        for context in (1024, 4096)
        for kernel, us in (("lean", 10.0), ("fixed_split", 12.0))
    ]
    run = read_run(write_run(rows))
    assert facts(Results([run]), ["decompositions"]).sections == ()
    rows.append(row(problem(8192), "lean", 10.0, schedule="stream-K", config=config))
    rows.append(row(problem(8192), "fixed_split", 13.0, schedule="equal splits", config=config))
    run = read_run(write_run(rows, folder="both"))
    assert len(facts(Results([run]), ["decompositions"]).sections) == 1


def test_the_head_names_few_values_and_few_kinds(write_run: WriteRun) -> None:
    capacities = [row(problem(capacity=4096 << n), "lean", 10.0) for n in range(FEW_VALUES + 1)]
    frame = Results([read_run(write_run(capacities))]).frame
    assert f"capacity ({FEW_VALUES + 1} choices)" in fixed_words(frame).split(" · ")
    assert "capacity 4096/8192" in fixed_words(frame.head(2)).split(" · ")
    kinds: list[dict[str, Any]] = [
        *({"dtype": "bf16"}, {"kv_layout": "NHD"}, {"capacity": 4096}),
        *({"sinks": True}, {"softcap": 50.0}),
    ]
    assert len(kinds) > FEW_KINDS
    rows = [row(problem(**fields), "lean", 10.0) for fields in kinds]
    words = fixed_words(Results([read_run(write_run(rows, folder="kinds"))]).frame).split(" · ")
    assert words[-1] == "various dtype, layout, capacity, softcap, sinks"


def test_links_of_several_runs_stand_once(write_run: WriteRun) -> None:
    links = [{"first": 0, "second": 1, "peer_access": True, "nvlink": True, "nvlinks": 18}]
    environments = {"e0": {**ENVIRONMENT, "gpu_links": links}}
    results = runs_of(write_run, 2, measured_rows(), environments=environments)
    [block] = section(facts(results), "links").blocks
    assert isinstance(block, Sentences)
    assert [item.name for item in block.items] == ["run0 and run1"]


def test_a_page_of_hostile_manifests_opens(write_run: WriteRun, tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        {"environments": None, "gpu": None},
        {"environments": [1], "gpu": "x", "sweep": [1]},
        {"environments": {"a": 5, "b": {"c": [1, None]}}, "gpu": {"x": {"y": 1}}},
    ]
    runs = [
        write_run(measured_rows(), folder=f"odd{n}", name=f"odd{n}", **fields)
        for n, fields in enumerate(odd)
    ]
    [path] = write_report(runs[0], tmp_path / "out", ["html"], runs[1:])
    assert "1, None" in path.read_text(encoding="utf-8")
