import json
import re
from pathlib import Path
from typing import Any

import pytest
from colors import contrast
from depth import deep
from example_runs import HOSTILE, WriteRun, measured_rows, problem, row, row_with_all_fields

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.model import known_error
from leanbench.records.reading import read_run
from leanbench.report import write_report
from leanbench.report.charts import PALETTE, kernel_styles
from leanbench.report.document import Table, Text
from leanbench.report.facts.results import Results
from leanbench.report.facts.trust import flagged_section
from leanbench.report.html import SCRIPTS, page_data

PREDICTED_GPU = {"name": "a100-80gb", "product": "NVIDIA A100-SXM4-80GB"}


def html_of(directory: Path) -> str:
    [path] = write_report(directory, directory, ["html"])
    return path.read_text(encoding="utf-8")


def page_of(directory: Path) -> dict[str, Any]:
    return page_data(Results([read_run(directory)]))


def test_text_of_result_files_is_only_text(write_run: WriteRun) -> None:
    rows = [
        *measured_rows(),
        row(problem(), HOSTILE, 5.0, config={HOSTILE: HOSTILE}, config_choice=HOSTILE),
    ]
    gpu = {"product": HOSTILE, HOSTILE: HOSTILE}
    fields = {"environments": {HOSTILE: {HOSTILE: HOSTILE}}, "sweep": {HOSTILE: HOSTILE}}
    directory = write_run(rows, name=HOSTILE, command=HOSTILE, gpu=gpu, **fields)
    html = html_of(directory)
    assert "<script>alert" not in html
    assert "<img" not in html
    # The page's own script elements are the only ones: data and code.
    own = 1 + len(SCRIPTS)
    assert (len(re.findall("<script", html)), html.count("</script>")) == (own, own)
    # Escaped for markup, and the very text in the data.
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert data
    page = json.loads(data[1])
    texts = {text for column in page["columns"] for text in column["texts"] or ()}
    assert HOSTILE in texts | {value for values in page["rows"] for value in values}


# With all fields a page is larger.
@pytest.mark.deep
@pytest.mark.parametrize("all_fields", [deep(False), True], ids=["latency", "all fields"])
def test_500_problems_and_5_kernels_stay_under_3_mb(write_run: WriteRun, all_fields: bool) -> None:
    problems = [
        AttentionProblem(batch, heads, kv_heads, 1024 << power, head_dim)
        for batch in (1, 2, 4, 8, 16)
        for heads, kv_heads in ((8, 8), (16, 16), (32, 8), (56, 56), (64, 8))
        for head_dim in (64, 128)
        for power in range(10)
    ]
    kernels = ("lean", "fa2", "fixed_split", "cudnn", "flashinfer")
    make = row_with_all_fields if all_fields else row
    directory = write_run(make(p, kernel, 10.0 / 3.0) for p in problems for kernel in kernels)
    [path] = write_report(directory, directory, ["html"])
    assert len(problems) == 500
    assert path.stat().st_size < 3_000_000


@pytest.mark.deep
def test_largest_reference_run_stays_under_3_mb(tmp_path: Path) -> None:
    runs = Path("reports").glob("*/*/results.jsonl")
    largest = max(runs, key=lambda path: path.stat().st_size).parent
    [path] = write_report(largest, tmp_path, ["html"])
    assert len(read_run(largest).results) > 1000
    assert path.stat().st_size < 3_000_000


def test_predicted_run_says_so_everywhere(write_run: WriteRun) -> None:
    rows = [dict(row, source="predicted") for row in measured_rows()]
    html = html_of(write_run(rows, source="predicted", gpu=PREDICTED_GPU))
    banner = "Predicted by the performance model for NVIDIA A100-SXM4-80GB; nothing was measured."
    assert banner in html
    assert known_error("a100", dict.fromkeys(row["kernel"] for row in rows)) in html
    titles = re.findall(r"<figcaption>.*?</figcaption>|<h2>.*?</h2>", html)
    tagged = [title for title in titles if '<span class="tag">predicted</span>' in title]
    # Every title but that of the environment, which is what computed the prediction.
    assert [title for title in titles if title not in tagged] == ["<h2>Environment</h2>"]
    assert len(re.findall("<figcaption>", html)) == 6
    # There is nothing to trust or not in a prediction but the model.
    assert 'id="trust"' not in html
    assert "<title>example (predicted): leanbench report</title>" in html
    assert "Measured on" not in html


def test_a_page_of_measured_rows(write_run: WriteRun) -> None:
    html = html_of(write_run(measured_rows()))
    assert "Measured on NVIDIA H200 · driver 580.1 · torch 2.11.0 · triton 3.6.0" in html
    # A namespace is a name.
    loaded = r"https?://|@import|url\(|<(?:link|iframe|img)|<[a-z][^>]*\s(?:src|href)="
    assert not re.findall(loaded, html.replace("http://www.w3.org/2000/svg", ""))
    assert "default-src 'none'" in html
    body = html[html.index("<body>") : html.index('<script type="application/json"')]
    assert "redicted" not in body
    # Without energy nothing speaks of it but some of the paper's claims.
    body = re.sub('<section id="claims">.*?</section>', "", body, flags=re.DOTALL)
    assert not [word for word in ("nergy", "ringed", "L2") if word in body]
    text = text_of(html, '<section id="summary"', '<section id="charts"')
    assert (
        "lean over fa2 4.00× geometric mean median 5.00× problems 2 ahead, level, behind 2, 0, 0 "
        "highest 8.00× context 64k, batch 1 lowest 2.00× context 1k, batch 1" in text
    )
    assert (
        "fixed_split 0.71× geometric mean median 0.75× problems 2 ahead, level, behind 0, 1, 1"
        in text
    )
    assert "rows of this run 9 in all ok 6 crashed 1 noisy 1 unsupported 1" in text


def test_flagged_rows_are_gathered_by_reason(write_run: WriteRun) -> None:
    fields: dict[str, Any] = {"status": "timeout", "reason": "no answer within 60 s"}
    rows = [row(problem(1024 << i), "fa2", **fields) for i in range(30)]
    section = flagged_section(Results([read_run(write_run(rows))]))
    shown = section.blocks[1]
    assert isinstance(shown, Table)
    [[status, kernel, reason, count, problems]] = shown.rows
    assert isinstance(status, Text)
    assert isinstance(problems, Text)
    assert (status.words, kernel) == ("timeout", "fa2")
    assert (reason, count) == ("no answer within 60 s", "30")
    assert (len(problems.more), problems.unnamed) == (19, 10)


@pytest.mark.parametrize(
    ("timed", "says"),
    [
        ([], "This run has no rows yet."),
        ([("lean", None)], "No row has a latency, so there is nothing to draw."),
        (
            [("lean", 10.0)],
            "No speedups: no problem has a timed row of lean and of another kernel.",
        ),
        ([("fa2", 10.0), ("cudnn", 9.0)], "fa2 is 0.90× as fast as the fastest other kernel."),
        (
            [("lean", 10.0), ("no_attention", 9.0)],
            "of another kernel. no_attention is the bound of all kernels and compared with none.",
        ),
    ],
)
def test_small_runs(write_run: WriteRun, timed: list[tuple[str, float | None]], says: str) -> None:
    failed = {"status": "timeout", "reason": "slow"}
    rows = [row(problem(), name, us, **({} if us else failed)) for name, us in timed]
    directory = write_run(rows)
    (directory / "manifest.json").write_text('{"schema_version": 2}')
    html = html_of(directory)
    assert says in html
    assert "<h1>run</h1>" in html
    assert "unknown GPU" in html
    assert "The manifest names no environment." in html


def test_not_finite_numbers_are_refused_and_missing_ones_are_null(write_run: WriteRun) -> None:
    missing = row(problem(), "lean", 10.0, relative_error=None)
    directory = write_run([missing, row(problem(), "fa2", 10.0 / 3.0)])
    page = page_of(directory)
    names = [column["name"] for column in page["columns"]]
    assert [values[names.index("relative_error")] for values in page["rows"]] == [None, 3.2e-4]
    # The CSV has every digit.
    assert [values[names.index("latency_us")] for values in page["rows"]] == [10.0, 3.333333]
    results = directory / "results.jsonl"
    text = results.read_text().replace('"relative_error": null', '"relative_error": NaN')
    results.write_text(text)
    sentence = (
        r"results\.jsonl, line 1 is not a row \(NaN is no finite number\): delete that line,"
        r" its cell will run again with --resume$"
    )
    with pytest.raises(UserError, match=sentence):
        html_of(directory)


def test_texts_that_repeat_are_in_the_page_once(write_run: WriteRun) -> None:
    rows = [
        row(problem(n), "lean", 10.0, gpu_kernels=["k"] if n < 4096 else None)
        for n in (1024, 2048, 4096, 8192)
    ]
    page = page_of(write_run(rows))
    columns = {column["name"]: (i, column["texts"]) for i, column in enumerate(page["columns"])}
    index, texts = columns["gpu_kernels"]
    assert (texts, [values[index] for values in page["rows"]]) == (["k"], [0, 0, None, None])
    index, texts = columns["problem"]
    assert (texts, page["rows"][0][index]) == (None, "b1 h56 n1024 d64 fp16 HND")
    assert columns["latency_us"][1] is None
    # Of a column without any value there is nothing.
    assert "energy_mj" not in columns


def test_no_two_parts_of_a_page_have_one_id(write_run: WriteRun, tmp_path: Path) -> None:
    rows = [
        row(problem(), "lean", 10.0, warnings=["one thing"], throttled_samples=0),
        row(problem(2048), "lean", status="crashed", reason="no memory"),
    ]
    runs = [write_run(rows, folder=name, name=name) for name in ("r0", "r1")]
    [path] = write_report(runs[0], tmp_path / "out", ["html"], runs[1:])
    names = re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8"))
    assert len(names) == len(set(names))
    assert "warnings" in names


def test_several_runs_begin_with_their_sentences(write_run: WriteRun, tmp_path: Path) -> None:
    both = (("lean", 10.0), ("fa2", 20.0))
    rows = [
        [row(problem(1024 << i), name, us + i) for i in (0, 1) for name, us in both],
        [row(problem(1024, heads=h), name, 10.0) for h in (8, 16) for name in ("lean", "fa2")],
        [row(problem(), "lean", 10.0)],
    ]
    runs = [write_run(of_run, folder=f"r{i}", name=f"r{i}") for i, of_run in enumerate(rows)]
    [path] = write_report(runs[0], tmp_path / "out", ["html"], runs[1:])
    html = path.read_text(encoding="utf-8")
    header = text_of(html, "<header>", "</header>")
    assert header.startswith(
        "r0, r1 and r2 r0 : Measured on NVIDIA H200 · 2026-01-02 03:04 UTC leanbench sweep"
    )
    assert header.count("driver 580.1 · torch 2.11.0 · triton 3.6.0") == 1
    summary = text_of(html, '<section id="summary"', '<section id="charts"')
    # Labels are short for the problems of each run.
    assert (
        "at worst 1.91× (context 2k), at best 2.00× (context 1k). Figures of r0 lean over fa2"
        in summary
    )
    assert "at worst 1.00× (heads 8), at best 1.00× (heads 8). Figures of r1" in summary
    # A run of one kernel has no sentences: its figures are not folded away.
    folded = re.findall(r"<details( open)?><summary>Figures of (r\d)", html)
    assert folded == [("", "r0"), ("", "r1")]


def test_table_shows_what_varies_and_what_was_measured(write_run: WriteRun) -> None:
    page = page_of(write_run([row(problem(), "lean", 10.0), row(problem(heads=8), "lean", 5.0)]))
    shown = {column["name"] for column in page["columns"] if column["shown"]}
    assert {*"max_context q_heads kernel status latency_us sm_clock_mhz config".split()} <= shown
    assert not {"batch", "head_dim", "dtype", "power_w", "throttle_reasons", "source"} & shown


def test_axes_are_what_varies(write_run: WriteRun) -> None:
    shapes = (problem(), problem(4096), problem((10, 20)), problem(dtype="bf16"))
    rows = [row(shape, "lean", 10.0) for shape in shapes]
    axes = page_of(write_run(rows))["axes"]
    assert [(axis["name"], axis["values"], axis["is_x"]) for axis in axes] == [
        ("max_context", [20, 1024, 4096], True),
        ("batch", [1, 2], True),
        ("lengths", ["equal", "ragged, mean 75% of longest"], False),
        ("dtype", ["fp16", "bf16"], False),
    ]


def text_of(html: str, start: str, end: str) -> str:
    part = html[html.index(start) : html.index(end)]
    return " ".join(re.sub("<[^>]+>", " ", part[part.index(">") + 1 :]).split())


def test_columns_without_values_are_hidden_and_the_others_explained(write_run: WriteRun) -> None:
    own = {"counted_dram_bytes": None}
    rows = [row_with_all_fields(problem(n), "lean", 10.0, **own) for n in (1024, 2048)]
    page = page_of(write_run(rows))
    shown = {column["name"]: column for column in page["columns"] if column["shown"]}
    known = "energy_mj sm_busy_share crosscheck_difference throttled_samples sustained_slowdown"
    assert {*known.split()} <= {*shown}
    hidden = "counted_dram_bytes warnings throttle_reasons cache energy_ratio"
    assert not {*hidden.split()} & {*shown}
    assert shown["energy_mj"]["unit"] == "mJ"
    assert "waiting" in shown["sm_busy_share"]["meaning"]
    assert shown["crosscheck_difference"]["heading"] == "cross-check off by"
    assert shown["sustained_slowdown"]["heading"] == "sustained over burst"
    # Energy before what only says how sure the latency is.
    of_table = "latency_us energy_mj energy_delay_mj_us latency_p25_us crosscheck_us".split()
    assert [name for name in shown if name in of_table] == of_table


@pytest.mark.parametrize(
    ("caches", "words"), [(["warm"], "warm L2"), (["cold", "warm"], "cold and warm L2")]
)
def test_a_warm_l2_is_said_at_every_picture(write_run, caches, words):
    cells = [(n, cache) for n in (1024, 2048) for cache in caches]
    rows = [row_with_all_fields(problem(n), "lean", 10.0, cache=cache) for n, cache in cells]
    html = html_of(write_run(rows))
    captions = re.findall("<figcaption>.*?</figcaption>", html)
    assert len(captions) >= 6
    assert all(f'<span class="l2">{words}</span>' in caption for caption in captions)
    header = text_of(html, "<header>", "</header>")
    assert header.count("L2") == 1
    assert words in header


def test_known_kernels_keep_their_colour() -> None:
    alone = kernel_styles(["fa2"])
    among = kernel_styles(["zeta", "lean", "fixed_split", "fa2", "alpha"])
    assert alone["fa2"] == among["fa2"] == ("#D55E00", "square")
    assert kernel_styles(["lean"])["lean"] == ("#0072B2", "circle")
    assert len(set(among.values())) == 5

    names = [f"kernel{i}" for i in range(5)]
    assert {color for color, _ in kernel_styles(names).values()} == {*PALETTE[3:]}


def test_kernels_of_a_run_differ_in_colour_and_all_kernels_in_colour_or_mark() -> None:
    names = [f"kernel{i}" for i in range(24)]
    runs = [names[i : i + 8] for i in range(0, 24, 8)]
    styles = kernel_styles(names, runs)
    assert [len({styles[name][0] for name in run}) for run in runs] == [8, 8, 8]
    assert len(set(styles.values())) == 24


@pytest.mark.parametrize("page", ["#ffffff", "#121417"])
def test_contrast_is_at_least_3_to_1_on_both_pages(page: str) -> None:
    assert min(contrast(color, page) for color in PALETTE) >= 3.0
