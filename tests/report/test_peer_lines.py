"""In which modes libraries ran, and on which layout."""

from example_runs import WriteRun, as_rows, problem, row

from leanbench.records.reading import read_runs
from leanbench.report.facts.results import Results
from leanbench.report.facts.trust import layout_line, mode_lines, trust_section


def test_a_best_mode_is_counted_by_what_ran() -> None:
    modes = ["flashinfer", "flashinfer_single", "flashinfer"]
    rows = [
        row(problem(1024 * (1 + i)), "flashinfer_best", 10.0, config={"mode": mode})
        for i, mode in enumerate(modes)
    ]
    rows += [row(problem(), "lean", 10.0), row(problem(), "fa2", status="crashed", reason="x")]
    assert mode_lines(as_rows(rows)) == [
        "flashinfer_best: flashinfer in 2 of 3 cells, flashinfer_single in 1."
    ]


def test_a_run_with_a_library_names_its_layouts(write_run: WriteRun) -> None:
    failed = row(problem(1024), "cudnn", status="crashed", reason="x")
    own = [row(problem(1024), "lean", 10.0), failed]
    assert layout_line(as_rows(own)) is None
    rows = [*own, row(problem(2048, kv_layout="NHD"), "cudnn", 10.0)]
    line = layout_line(as_rows(rows))
    assert line is not None
    assert line.startswith("All kernels of a problem read the same K and V, in the layout of the")
    assert "(HND, NHD)" in line
    section = trust_section(Results(read_runs([write_run(rows[2:])])))
    assert f"Sentence(words={line.replace('HND, NHD', 'NHD')!r}, name='layout'" in repr(section)
