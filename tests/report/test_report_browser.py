"""The page in a real browser: charts, table and filters work, and nothing is loaded."""

import json
from dataclasses import asdict, astuple, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from browser import MARKS, answer_of
from depth import deep
from example_runs import (
    HOSTILE,
    WriteRun,
    measured_rows,
    problem,
    row,
    row_with_all_fields,
    rows_with_all_fields,
    two_runs,
)

from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel as kernel_named
from leanbench.core.work import flops
from leanbench.gpu.catalogue import find
from leanbench.model.parts import predict_parts
from leanbench.records.samples import SAMPLES, Samples, pack
from leanbench.report import write_report

pytestmark = MARKS

TIED = {"lean": 10.0, "fa2": 9.9, "fixed_split": 10.1}

#: Runs last. PROBE is replaced by the lines of the test.
PROBE = Path(__file__).with_name("browser_probe.js").read_text(encoding="utf-8")


def look(directory: Path, probe: str = "return null;", *more_runs: Path) -> Any:
    """Return what `probe` answers in the page, and the charts; a failure in the page fails."""
    [report] = write_report(directory, directory, ["html"], more_runs)
    result = answer_of(directory, report.read_text(encoding="utf-8"), "", PROBE, probe)
    assert all(drawn for _, drawn in result["charts"]), result["charts"]
    return result["seen"], [key for key, _ in result["charts"]]


def seven_digits(value: float) -> float:
    """Round as the page does."""
    return float(f"{value:.7g}")


def test_charts_table_and_legend_show_the_rows(write_run: WriteRun) -> None:
    probe = """const seen = {
      lean: points("latency", "lean"), fa2: points("speedup", "fa2"), fixed: points("speedup", "fixed_split"),
      floor: points("latency", null), errors: line("latency", "fa2").points.map(({ low, high }) => [low, high]),
      type: chart("latency").picture.y.type, ticks: chart("latency").picture.x.ticks.map(([, text]) => text),
      x: text("latency", ".xtitle"), y: text("latency", ".ytitle"),
      drawn: chart("latency").querySelectorAll("g.line").length,
      open: line("share", "lean").points.map((point) => point.open),
      bytes: text("share", ".xtick"),
      up: sortBy("latency_us"), down: sortBy("latency_us"), text: sortBy("kernel"),
      marked: all("#results th[aria-sort]").length,
      found: filter("FA2 64k"), none: filter("nothing"), all: filter("")[0],
    };
    document.querySelector('#legend button[data-kernel="fa2"]').click();
    seen.hidden = all(".chart.charts").map((each) => line(each.id.slice("charts-".length), "fa2").hidden);
    return seen;"""
    seen, charts = look(write_run(measured_rows()), probe)
    assert charts == ["latency", "speedup", "share", "speedup_all"]
    assert seen["lean"] == [[1024, 10.0], [65536, 200.0]]
    assert seen["fa2"] == [[1024, 2.0], [65536, 8.0]]
    assert seen["fixed"] == [[1024, 1.0], [65536, 0.5]]
    floor = [[n, seven_digits(problem(n).kv_bytes / 4e6 + 2)] for n in (1024, 65536)]
    assert seen["floor"] == floor
    assert seen["errors"] == [[19.6, 21.0], [1568.0, 1680.0]]
    assert (seen["type"], seen["ticks"]) == ("log", ["1k", "64k"])
    assert (seen["x"], seen["y"]) == ("context (tokens)", "latency (µs)")
    assert (seen["drawn"], seen["bytes"]) == (4, "20 MB")
    assert seen["open"] == [False, False, True]
    ascending = ["10.00", "10.00", "12.50", "20.00", "100.0", "200.0", "1,600"]
    # Not measured stays last both ways.
    assert seen["up"] == ["ascending", [*ascending, "", ""]]
    assert seen["down"] == ["descending", [*reversed(ascending), "", ""]]
    assert seen["text"] == ["ascending", ["fa2"] * 3 + ["fixed_split"] * 3 + ["lean"] * 3]
    assert seen["marked"] == 1
    assert (seen["found"], seen["none"]) == (["1 of 9 rows", ["fa2"]], ["0 of 9 rows", []])
    assert seen["all"] == "9 rows"
    assert seen["hidden"] == [True] * len(charts)


@pytest.mark.deep
def test_a_pointer_shows_all_kernels_at_one_context(write_run: WriteRun) -> None:
    probe = """const svg = chart("latency").querySelector("svg"), box = svg.getBoundingClientRect();
      const move = (part) => svg.dispatchEvent(
        new PointerEvent("pointermove", { clientX: box.left + part * box.width, clientY: box.top + 50 }));
      const tip = document.getElementById("tip"), before = tip.hidden;
      move(0.7);
      const lines = [...tip.children].map((each) => each.textContent);
      svg.dispatchEvent(new PointerEvent("pointerleave"));
      return { before, lines, after: tip.hidden };"""
    seen, _ = look(write_run(measured_rows()), probe)
    floor_us = problem(65536).kv_bytes / 4e6 + 2
    assert seen["lines"] == [
        "64k",
        "lean: 200.0 µs (196 to 210)",
        "fa2: 1,600 µs (1568 to 1680)",
        "fixed_split: 100.0 µs (98 to 105)",
        f"read floor: {floor_us:.1f} µs",
    ]
    assert (seen["before"], seen["after"]) == (True, True)


@pytest.mark.deep
def test_a_speedup_of_one_percent_looks_small(write_run: WriteRun) -> None:
    cells = [(context, *timed) for context in (1024, 4096) for timed in TIED.items()]
    rows = [row(problem(context), kernel, us) for context, kernel, us in cells]
    seen, _ = look(write_run(rows), "return chart('speedup').picture.y.range;")
    assert seen[0] < 0.9
    assert seen[1] > 1.1


def map_rows() -> list[dict[str, Any]]:
    """One cell is lean's, one fa2's with noise, one a tie, one lean's alone; in bf16 another."""
    rows = []
    latencies = {(1024, 8): (10, 12), (4096, 8): (10, 5)}
    latencies |= {(1024, 16): (10, 10.04), (4096, 16): (10, None)}
    for (context, heads), (lean, fa2) in latencies.items():
        rows.append(row(problem(context, heads), "lean", lean, read_floor_share=lean / 20))
        if fa2:
            status = {"status": "noisy", "reason": "x"} if context == 4096 else {}
            share = fa2 / 20
            rows.append(row(problem(context, heads), "fa2", fa2, read_floor_share=share, **status))
    rows.append(row(problem(1024, 16, batch=2), "fixed_split", 11.0, status="suspect", reason="x"))
    bf16 = problem(1024, 8, dtype="bf16")
    return [*rows, row(bf16, "lean", 7.0), row(bf16, "fa2", 14.0), row(bf16, "fixed_split", 3.5)]


def test_maps_show_the_winner_the_speedup_and_the_floor(write_run: WriteRun) -> None:
    probe = """const picture = (key) => document.getElementById(`maps-${key}`).picture;
      const map = (key) => [picture(key).columns, picture(key).rows,
        ...["value", "text"].map((name) => picture(key).cells.map((cell) => cell[name]))];
      const first = [map("winner"), map("speedup"), map("floor")];
      const tops = all(".chart.maps").map((each) => each.getBoundingClientRect().top);
      const hover = [picture("winner").cells[1].head, ...picture("winner").cells[1].lines.map((each) => each.text)];
      choose("read floor share of", "fa2", "#maps-selectors"); const fa2 = map("floor")[2];
      const places = picture("winner").cells.map(({ row, column }) => [row, column]);
      choose("dtype", "bf16", "#maps-selectors");
      const titled = document.querySelector("#maps-winner .ytitle") !== null;
      return { first, hover, tops, fa2, titled, places, bf16: map("winner"),
        charts: points("latency", "lean").length };"""
    seen, _ = look(write_run(map_rows()), probe)
    axes = [["1k", "4k"], ["b1 h8", "b1 h16"]]
    # Kernels are lean, fa2, fixed_split: 3 is a tie. A suspect row is in no map.
    # Where lean ran alone, nobody won.
    assert seen["first"][0] == [*axes, [0, 1, 3], ["1.20", "2.00", "≈"]]
    assert seen["places"] == [[0, 0], [0, 1], [1, 0]]
    *sides, logs, texts = seen["first"][1]
    assert (sides, texts) == (axes, ["1.20", "0.50", "1.00"])
    assert logs[:2] == pytest.approx([0.26303, -1], abs=1e-5)
    assert seen["first"][2] == [*axes, [0.5, 0.5, 0.5, 0.5], ["50", "50", "50", "50"]]
    assert seen["hover"] == ["b1 h8 n4096 d64 fp16 HND", "fa2 5 µs", "lean 10 µs"]
    assert seen["fa2"] == [0.6, 0.25, 0.502]
    assert seen["bf16"] == [["1k"], ["b1 h8"], [2], ["2.00"]]
    assert len(set(seen["tops"])) == 1
    # One line is too low for the title of its axis.
    assert seen["titled"] is False
    # The charts have selectors of their own.
    assert seen["charts"] == 2


def test_a_narrow_axis_has_ticks_and_a_map_s_colours_are_those_of_its_note(
    write_run: WriteRun,
) -> None:
    latencies = {(1024, 8): 8_100.0, (4096, 8): 9_000.0, (1024, 16): 10_500.0, (4096, 16): 16_900.0}
    rows = [
        row(problem(n, heads), name, latency_us * factor)
        for (n, heads), latency_us in latencies.items()
        for name, factor in (("lean_mla", 1.0), ("flash_mla", 1.01 if heads == 8 else 0.9))
    ]
    probe = """return [chart("latency").picture.y.ticks.length,
      document.getElementById("maps-speedup").picture.cells.map(({ color }) => color), page.colors[0]];"""
    (ticks, colors, blue), _ = look(write_run(rows), probe)
    assert ticks > 2
    assert colors == [blue, blue, "#D99A1C", "#D99A1C"]


@pytest.mark.deep
def test_maps_are_saved_as_svg_and_png(write_run: WriteRun) -> None:
    probe = """const saved = [];
      HTMLAnchorElement.prototype.click = function () { saved.push([this.download, this.href.slice(0, 14)]); };
      all("#maps .saves")[1].querySelectorAll("button").forEach((button) => button.click());
      for (let i = 0; i < 100 && saved.length < 2; i++) await new Promise((done) => setTimeout(done, 20));
      return saved.sort();"""
    seen, _ = look(write_run(map_rows()), probe)
    assert seen == [
        ["example-map-speedup.png", "data:image/png"],
        ["example-map-speedup.svg", "data:image/svg"],
    ]


def test_the_filter_asks_a_column_by_name(write_run: WriteRun) -> None:
    rows = [
        row(problem(1024, 8, batch=batch), name, 10.0)
        for batch in (1, 4)
        for name in ("lean", "lean_triton")
    ]
    probe = """return [filter("batch=4"), filter("kernel=lean"), filter("LEAN batch=4 status=ok"),
      filter("kernel="), filter("num_warps=4")[0]];"""
    seen, _ = look(write_run(rows), probe)
    both = ["lean", "lean_triton"]
    assert seen[:3] == [["2 of 4 rows", both], ["2 of 4 rows", ["lean"] * 2], ["2 of 4 rows", both]]
    # What names no column, such as a setting, is a word as any other.
    assert seen[3:] == [["0 of 4 rows", []], "4 rows"]


def test_of_many_rows_the_first_200_are_drawn_until_asked(write_run: WriteRun) -> None:
    rows = [row(problem(1024 + i), "lean", 10.0 + i) for i in range(201)]
    probe = """const drawn = () => document.querySelectorAll("#results tbody tr").length;
      const more = document.getElementById("more"); const first = [drawn(), more.hidden, more.textContent];
      more.click(); const heading = getComputedStyle(document.querySelector("#results th")).position;
      return { first, then: [drawn(), more.hidden], sorted: sortBy("latency_us")[1].at(-1), heading,
        again: [drawn(), more.hidden] };"""
    seen, _ = look(write_run(rows), probe)
    assert seen["first"] == [200, False, "Show all 201 rows"]
    assert seen["then"] == [201, True]
    assert (seen["sorted"], seen["again"]) == ("209.0", [200, False])
    assert seen["heading"] == "sticky"


def test_a_picture_without_values_shows_another_series(write_run: WriteRun) -> None:
    # Of the SM busy share, the first run has only what the schedule allows.
    plain = [row(problem(n), "lean", 10.0, quantisation_efficiency=0.9) for n in (1024, 2048, 4096)]
    full = [row_with_all_fields(problem(n), "fa2", 10.0) for n in (1024, 2048)]
    first = write_run(plain, folder="a", name="plain")
    second = write_run(full, folder="b", name="full")
    probe = """const shown = (key) => [chart(key).closest("figure").querySelector(".series").textContent,
        chart(key).picture.lines.filter((each) => each.points.length).map((each) => each.name)];
      const legend = () => all("#legend button").filter((button) => !button.hidden).map((button) => button.dataset.kernel);
      const keys = ["latency", "energy", "sm_busy"];
      const before = [keys.map(shown), legend()];
      choose("run", "full");
      return { before, chosen: [keys.map(shown), legend()], rows: all("#results tbody tr").length };"""
    seen, _ = look(first, probe, second)
    instead = "No values in the chosen series. Shown: run full."
    energy = ["energy floor", "fa2"]
    busy = ["fa2, CTA slots with work, by the schedule", "fa2"]
    latency = ["read floor", "lean"]
    assert seen["before"] == [[["", latency], [instead, energy], [instead, busy]], ["lean", "fa2"]]
    assert seen["chosen"] == [[["", ["read floor", "fa2"]], ["", energy], ["", busy]], ["fa2"]]
    assert seen["rows"] == 5


def test_an_error_in_a_picture_leaves_the_table_alone(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    [report] = write_report(directory, directory, ["html"])
    html = report.read_text(encoding="utf-8").replace("function drawAxes(", "function broken(")
    probe = """return [failures.splice(0), filter("kernel=fa2")[0]];"""
    failures, count = answer_of(directory, html, "", PROBE, probe)["seen"]
    assert all("drawAxes" in failure for failure in failures)
    assert failures
    assert count == "3 of 9 rows"


@pytest.mark.deep
def test_runs_side_by_side_are_lines_of_one_picture(write_run: WriteRun) -> None:
    first, second = two_runs(write_run)
    probe = """const picture = () => document.getElementById("sides-sides").picture.lines.map((each) =>
        [each.name, each.points.map(({ x, y }) => [x, y]), each.dash]).reverse();
      const lean = picture();
      choose("kernel", "fa2", "#sides-selectors"); const fa2 = picture();
      choose("shown", "Energy", "#sides-selectors");
      // The charts show one run at a time.
      return { lean, fa2, unit: text0(), first: points("latency", "lean"), runs: selected() };
      function text0() { return document.querySelector("#sides-sides .ytitle").textContent; }"""
    seen, _ = look(first, probe, second)
    names = ["here, NVIDIA H200, measured", "there, NVIDIA B200, predicted"]
    for kernel, (here, there) in {"lean": ([10, 40], [5, 10]), "fa2": ([12, 60], [8, 30])}.items():
        assert seen[kernel] == [
            [names[0], [["1k", here[0]], ["4k", here[1]]], None],
            [names[1], [["1k", there[0]], ["4k", there[1]]], "2,3"],
        ]
    assert seen["unit"] == "energy of one launch (mJ)"
    assert seen["first"] == [[1024, 10], [4096, 40]]
    assert seen["runs"] == {"GPU": "NVIDIA H200", "source": "measured", "run": "here"}


@pytest.mark.deep
def test_a_row_hands_out_its_command(write_run: WriteRun) -> None:
    probe = """const written = [];
      const clipboard = { writeText: async (text) => { written.push(text); } };
      Object.defineProperty(navigator, "clipboard", { value: clipboard, configurable: true });
      const box = document.getElementById("command");
      const hidden = box.hidden;
      all("#results td.command button")[1].click();
      await new Promise((done) => setTimeout(done, 20));
      const copied = [box.textContent.trim(), String(getSelection())];
      clipboard.writeText = async () => { throw new Error("refused"); };
      document.execCommand = () => false;
      all("#results td.command button")[0].click();
      await new Promise((done) => setTimeout(done, 20));
      const buttons = all("#results td.command button").length;
      return { hidden, written, copied, refused: box.textContent.trim(), buttons, found: filter("leanbench")[0] };"""
    seen, _ = look(write_run(measured_rows()), probe)
    shape = (
        "leanbench sweep --heads 56 --context 1024 --batch 1 --head-dim 64 --dtype fp16"
        " --kv-layout HND"
    )
    config = "tile_tokens=128,num_warps=4,num_stages=3"
    command = f"{shape} --kernels fa2 --config fa2:{config}"
    assert seen["hidden"] is True
    assert seen["written"] == [command]
    assert seen["copied"] == [f"Copied: {command}", command]
    assert seen["refused"] == f"To copy: {shape} --kernels lean --config lean:{config}"
    # Every row has one. The filter ignores hidden text.
    assert (seen["buttons"], seen["found"]) == (9, "0 of 9 rows")


def test_selectors_pick_series_that_exist(write_run: WriteRun) -> None:
    cells = [(1024, 8), (2048, 8), (4096, 8), (1024, 32), (2048, 32)]
    rows = [row(problem(n, heads), "lean", n / 1024 + heads) for n, heads in cells]
    rows += [row(problem(512, 16, dtype="bf16"), "lean", 7.0)]
    probe = """const state = () => [selected(), points("latency", "lean")];
      const first = state();
      choose("query heads", "32"); const heads = state();
      choose("dtype", "bf16"); const dtype = [...state(), line("latency", "lean").bar];
      choose("x axis", "query heads"); const axis = [...state(), text("latency", ".xtitle")];
      return { first, heads, dtype, axis };"""
    seen, _ = look(write_run(rows), probe)
    context = "context (tokens)"
    assert seen["first"] == [
        {"x axis": context, "query heads": "8", "dtype": "fp16"},
        [[1024, 9], [2048, 10], [4096, 12]],
    ]
    assert seen["heads"] == [
        {"x axis": context, "query heads": "32", "dtype": "fp16"},
        [[1024, 33], [2048, 34]],
    ]
    # There is no bf16 with 32 heads: the heads follow. One problem alone is a bar.
    assert seen["dtype"] == [
        {"x axis": context, "query heads": "16", "dtype": "bf16"},
        [["lean", 7.0]],
        True,
    ]
    assert seen["axis"] == [
        {"x axis": "query heads", "context (tokens)": "1k", "dtype": "fp16"},
        [[8, 9], [32, 33]],
        "query heads",
    ]


@pytest.mark.deep
def test_measured_and_predicted_never_share_a_chart(write_run: WriteRun) -> None:
    predicted = [
        row(problem(), name, us, source="predicted") for name, us in (("lean", 3.0), ("fa2", 9.0))
    ]
    rows = [*measured_rows(), *predicted]
    probe = """const tags = () => [...new Set(all("#charts figcaption .tag").map((tag) => tag.textContent))];
      const before = [tags(), points("speedup_all", "fa2")];
      choose("source", "predicted"); return { before, after: [tags(), points("speedup_all", "fa2")] };"""
    seen, _ = look(write_run(rows), probe)
    short, long = problem(1024).kv_bytes, problem(65536).kv_bytes
    assert seen["before"] == [["measured"], [[short, 2.0], [long, 8.0]]]
    # One predicted problem is left, and it is shown as a bar.
    assert seen["after"] == [["predicted"], [["fa2", 3.0]]]


def test_energy_sustained_and_occupancy_are_drawn(write_run: WriteRun) -> None:
    probe = """return {
      energy: points("energy", "fa2"), floor: points("energy", null), idle: points("power", null),
      power: points("power", "lean"), sustained: points("sustained", "lean"), busy: points("sm_busy", "lean"),
      slots: points("sm_busy", "lean, CTA slots with work, by the schedule"),
      dash: line("sm_busy", "lean, CTA slots with work, by the schedule").dash,
      suspect: points("latency", "fixed_split"), rings: line("latency", "fa2").points.map((point) => point.ringed),
      none: line("latency", "lean").points.map((point) => point.ringed),
      marked: all("#results td.warned").map((cell) => [cell.textContent, cell.title]),
      differs: column("crosscheck_difference"),
      hover: document.querySelector('#results th[data-column="energy_mj"] button').title,
      ticks: [...chart("sustained").querySelectorAll(".ytick")].map((each) => each.textContent),
      paper: all("#results th:not(.screen)").map((th) => th.dataset.column),
    };"""
    seen, charts = look(write_run(rows_with_all_fields()), probe)
    assert charts == "latency speedup share energy power sustained sm_busy".split()
    assert seen["energy"] == [[1024, 12.5], [65536, 1000.0]]
    assert seen["floor"] == [[n, seven_digits(problem(n).kv_bytes * 1e-7)] for n in (1024, 65536)]
    assert seen["power"] == [[1024, 500.0], [65536, 500.0]]
    assert seen["idle"] == [[1024, 100.0], [65536, 100.0]]
    assert seen["sustained"] == [[1024, 0.25], [65536, 0.25]]
    assert seen["busy"] == [[1024, 0.85], [65536, 0.85]]
    assert (seen["slots"], seen["dash"]) == ([[1024, 0.97], [65536, 0.97]], "2,3")
    # The noisy row is drawn, the suspect one is not.
    assert seen["suspect"] == [[1024, 10.0]]
    assert (seen["rings"], seen["none"]) == ([True, True], [False, False])
    assert seen["marked"] == [
        ["20.00", "the cross-check (22.0 µs) differs by 10.0% from the latency"],
        ["1,600", "the cross-check (1552.0 µs) differs by 3.0% from the latency"],
    ]
    assert seen["differs"] == ["+5.0", "+10.0", "+1.0", "+1.0", "-3.0", "+1.0"]
    assert seen["hover"].startswith("of one launch over the sustained window")
    assert seen["ticks"][0] == "0%"
    assert "25%" in seen["ticks"]
    taken = ["bandwidth_tb_s", "read_floor_share", "speedup", "energy_mj"]
    assert seen["paper"] == ["kernel", "latency_us", "status", "max_context", *taken]


def test_one_problem_has_its_schedule_as_a_dash_over_the_bar(write_run: WriteRun) -> None:
    probe = """const slots = line("sm_busy", "lean, CTA slots with work, by the schedule");
      return [slots.stroke, slots.points.map(({ x, y }) => [x, y]), points("sm_busy", "lean"),
        line("power", null).across, points("power", null)];"""
    seen, _ = look(write_run([row_with_all_fields(problem(), "lean", 10.0)]), probe)
    assert seen == [True, [["lean", 0.97]], [["lean", 0.85]], True, [["lean", 100.0]]]


def test_cold_and_warm_never_share_a_chart(write_run: WriteRun) -> None:
    rows = [row_with_all_fields(problem(n), "lean", n / 1024) for n in (1024, 4096)]
    rows += [row_with_all_fields(problem(n), "lean", n / 4096, cache="warm") for n in (1024, 4096)]
    probe = """const state = () => [points("latency", "lean"), points("share", "lean").length,
        [...new Set(all("figcaption .l2").map((tag) => tag.textContent))]];
      const before = [selected(), state()];
      choose("L2", "warm"); return { before, after: state() };"""
    seen, _ = look(write_run(rows), probe)
    assert seen["before"] == [{"L2": "cold"}, [[[1024, 1], [4096, 4]], 2, ["cold L2"]]]
    assert seen["after"] == [[[1024, 0.25], [4096, 1]], 2, ["warm L2"]]


def test_hostile_names_are_only_text(write_run: WriteRun) -> None:
    shapes = (problem(), problem(4096), problem(4096, 8))
    rows = [row(shape, name, 5.0) for shape in shapes for name in ("lean", HOSTILE)]
    first = write_run(rows, folder="a", name=f"{HOSTILE} a")
    second = write_run(rows, folder="b", name=f"{HOSTILE} b")
    # In a script element, `</script>` would end it.
    kernel = json.dumps(HOSTILE).replace("<", "\\u003c")
    probe = f"""const kernel = {kernel};
      const inLegend = all("#legend button").some((button) => button.dataset.kernel === kernel);
      const drawn = points("latency", kernel).length;
      all("#maps-selectors select, #sides-selectors select").forEach((control) => {{
        control.selectedIndex = control.options.length - 1;
        control.dispatchEvent(new Event("change"));
      }});
      const [lean] = document.getElementById("maps-speedup").picture.cells.at(-1).lines.map((each) => each.text);
      const names = document.getElementById("sides-sides").querySelectorAll(".legendtext");
      return {{ inLegend, drawn, lean, images: document.images.length, names: [...names].map((each) => each.textContent),
        shown: column("kernel").filter((text) => text === kernel).length }};"""
    seen, _ = look(first, probe, second)
    assert seen.pop("names") == [f"{HOSTILE} a", f"{HOSTILE} b"]
    shown = {"inLegend": True, "drawn": 2, "lean": "lean 5 µs", "images": 0, "shown": 6}
    assert seen == shown


def test_chart_is_saved_as_a_picture_that_stands_alone(write_run: WriteRun) -> None:
    probe = """let saved;
      HTMLAnchorElement.prototype.click = function () { saved = [this.download, decodeURIComponent(this.href)]; };
      document.querySelector("#charts .save").click();
      for (let i = 0; i < 50 && !saved; i++) await new Promise((done) => setTimeout(done, 20));
      const svg = saved[1].slice(saved[1].indexOf("<svg"));
      const picture = new DOMParser().parseFromString(svg, "image/svg+xml");
      const legend = [...picture.querySelectorAll(".legendtext")].map((each) => each.textContent);
      const title = [...picture.querySelectorAll(".title")].map((each) => each.textContent);
      return [saved[0], title, legend];"""
    rows = [dict(row, source="predicted") for row in measured_rows()]
    (name, title, legend), _ = look(write_run(rows, source="predicted"), probe)
    assert name == "example-latency.svg"
    assert title == ["Latency (predicted), NVIDIA H200", "batch 1, batch lengths equal"]
    assert legend == ["lean", "fa2", "fixed_split", "read floor"]


def test_the_overview_of_many_runs_leads_to_each(write_run: WriteRun) -> None:
    runs = [write_run(measured_rows(), folder=f"run{number}") for number in range(4)]
    probe = """const link = all('#summary table a')[2], details = document.querySelector('#run-3').closest('details');
      const before = details.open;
      link.click();
      for (let i = 0; i < 50 && !details.open; i++) await new Promise((done) => setTimeout(done, 20));
      return [all('#summary table tbody tr').length, link.textContent, before, details.open,
        document.querySelector('#run-3').textContent];"""
    (count, name, before, after, heading), _ = look(runs[0], probe, *runs[1:])
    assert (count, before, after) == (4, False, True)
    assert name.endswith("run2")
    assert heading.startswith(f"{name}, measured")


FLOORLESS = row(problem(), "lean", 10.0, read_floor_us=None, read_floor_share=None)


@pytest.mark.parametrize(
    ("rows", "charts"),
    [
        ([], []),
        deep([row(problem(), "lean", status="timeout", reason="slow")], []),
        deep([row(problem(), "lean", 10.0)], ["latency", "share"]),
        deep([FLOORLESS], ["latency"]),
        deep([FLOORLESS, row(problem(dtype="bf16"), "lean", 9.0)], ["latency", "share"]),
    ],
    ids=["empty", "failed", "one cell", "no floor", "only dtype varies"],
)
def test_small_runs_open(write_run, rows, charts):
    _, drawn = look(write_run(rows))
    assert drawn == charts


def test_the_time_of_a_token_is_a_stack(write_run: WriteRun) -> None:
    """Filled from sum to sum, for the baseline alone."""
    rows = []
    for context in (1024, 2048, 4096):
        shape = AttentionProblem(1, 32, 32, context, 128, whole_model="opt-6.7b:positions=8192")
        attention_us = context / 10
        for name, factor in (("lean", 1), ("fa2", 2)):
            sums = {"no_attention_us": 300.0, "gemm_us": 200.0, "tokens_per_s": 1e3}
            rows.append(row(shape, name, 300.0 + factor * attention_us, **sums))
    probe = """return {
      areas: chart("token_time").picture.lines.filter((line) => line.area).map((line) => [line.name, line.points.map(({ y, base }) => [base, y])]),
      paths: chart("token_time").querySelectorAll("path.area").length,
      others: chart("token_time").picture.lines.filter((line) => !line.area).map((line) => line.name),
    };"""
    seen, charts = look(write_run(rows), probe)
    assert charts[:2] == ["token_time", "latency"]
    assert seen["areas"] == [
        ["GEMMs", [[0, 200]] * 3],
        ["all else", [[200, 300]] * 3],
        ["attention", [[300, 402.4], [300, 504.8], [300, 709.6]]],
    ]
    assert seen["paths"] == 3
    assert seen["others"] == ["lean"]


def test_a_roofline_shows_where_rows_leave_the_memory_roof(write_run: WriteRun) -> None:
    shapes = [AttentionProblem(1, 32, 8, 4096, 128, q_len=q) for q in (1, 16, 512)]
    rows = [row(shape, "lean", 10.0 * (i + 1)) for i, shape in enumerate(shapes)]
    probe = """const lines = chart("roofline").picture.lines;
      return { rows: points("roofline", "lean"), x: text("roofline", ".xtitle"),
        joined: line("roofline", "lean").joined,
        roofs: lines.filter((each) => each.label).map((each) => [each.label, points("roofline", each.name)]),
        names: [...chart("roofline").querySelectorAll(".limitname")].map((each) => each.textContent) };"""
    seen, charts = look(write_run(rows, gpu=asdict(find("h200"))), probe)
    assert "roofline" in charts
    assert (seen["x"], seen["joined"]) == ("FLOPs per byte", False)
    intensity = []
    for shape, us, (x, y) in zip(shapes, (10.0, 20.0, 30.0), seen["rows"], strict=True):
        work = flops(shape)
        assert work is not None
        intensity.append(work / shape.io_bytes)
        assert (x, y) == pytest.approx((intensity[-1], work / us * 1e-6), rel=1e-6)
    (memory, slope), (cores, level) = seen["roofs"]
    assert (memory, cores) == ("memory, 4.8 TB/s", "tensor cores, 1,071 TFLOP/s")
    assert slope[0] == pytest.approx([intensity[0], 4.8 * intensity[0]], rel=1e-6)
    # The slope ends where the level line begins.
    assert slope[1] == level[0]
    assert level[0][1] == level[1][1] == pytest.approx(1070.53, rel=1e-4)
    assert seen["names"] == [memory, cores]


@pytest.mark.parametrize("gpu", [None, {"name": "h200"}, asdict(find("h200"))], ids=str)
def test_problems_of_one_slope_have_no_roofline(write_run: WriteRun, gpu: Any) -> None:
    rows = [row(problem(context), "lean", 10.0) for context in (1024, 4096)]
    assert "roofline" not in look(write_run(rows, gpu=gpu))[1]


def test_the_time_of_a_launch_is_a_stack_of_shares(write_run: WriteRun) -> None:
    """By the model, of the baseline alone; one problem is a bar."""
    lean, h200 = kernel_named("lean"), find("h200")
    shapes = [problem(context) for context in (1024, 65536)]
    rows = []
    for shape, us in zip(shapes, (10.0, 200.0), strict=True):
        config: Any = lean.default_config(shape, h200)
        settings = {"config": config.to_dict()}
        rows += [row(shape, "lean", us, **settings), row(shape, "fa2", 2 * us)]
    probe = """const areas = chart("parts").picture.lines.filter((each) => !each.symbol);
      return { names: areas.map((each) => each.name), ends: areas.map((each) => each.points.map((point) => point.y)),
        hover: areas[2].points.at(-1).text, others: chart("parts").picture.lines.filter((each) => each.symbol).map((each) => each.name),
        legend: [...chart("parts").querySelectorAll(".legendtext")].map((each) => each.textContent),
        bars: areas.filter((each) => each.bar).length, top: points("parts", "lean") };"""
    seen, charts = look(write_run(rows, gpu=asdict(h200)), probe)
    assert charts[:2] == ["latency", "parts"]
    names = ["launch", "ramp", "read", "tail", "merge"]
    assert (seen["names"], seen["others"], seen["bars"]) == (names, ["lean"], 0)
    assert seen["legend"] == ["lean", *reversed(names)]
    assert seen["top"] == [[1024, 1.0], [65536, 1.0]]
    read_us = 0.0
    for at, shape in enumerate(shapes):
        parts = predict_parts(shape, lean, lean.default_config(shape, h200), h200)
        assert parts is not None
        ends = [end / parts.latency_us for end in accumulate(astuple(parts))]
        assert [each[at] for each in seen["ends"]] == pytest.approx(ends, rel=1e-6)
        read_us = parts.scaled(200.0).read_us
    assert seen["hover"] == f" ({read_us:.1f} µs)"
    one = write_run(rows[:2], folder="one", gpu=asdict(h200))
    assert look(one, probe)[0]["bars"] == 5


def test_clock_and_power_are_drawn_over_the_window_of_the_last_problem(
    write_run: WriteRun,
) -> None:
    rows = [row_with_all_fields(problem(context), "lean", 10.0) for context in (1024, 65536)]
    run = write_run(rows)
    for at, fields in enumerate(rows):
        window = [(0.0, 1980, 100.0 + at), (0.5, 1700, 690.0), (1.0, None, 695.0)]
        raw = Samples(
            cell=fields["cell"], samples_us=[10.0], rounds=[0], sm_clock_mhz=[1980], window=window
        )
        with (run / SAMPLES).open("ab") as file:
            file.write(pack(raw))
    probe = """return { clock: points("clock_window", "lean"), power: points("power_window", "lean"),
      head: line("power_window", "lean").points[0].head, x: text("power_window", ".xtitle") };"""
    seen, charts = look(run, probe)
    assert {"clock_window", "power_window"} <= {*charts}
    assert seen["clock"] == [[0, 1980], [0.5, 1700]]
    assert seen["power"] == [[0, 101], [0.5, 690], [1, 695]]
    assert (seen["head"], seen["x"]) == (problem(65536).label, "seconds")


def test_tokens_for_a_user_and_of_a_gpu_follow_the_batch(write_run: WriteRun) -> None:
    rows = []
    for context in (1024, 2048):
        for batch, us in ((1, 1000.0), (8, 2000.0)):
            shape = AttentionProblem(
                batch, 32, 8, context, 128, whole_model="llama-3-8b", lengths_on="device"
            )
            rows.append(row(shape, "lean", us, tokens_per_s=batch / us * 1e6))
    probe = """const { points: marks } = line("pareto", "lean");
      const first = marks.map(({ x, y, starts, name }) => [x, y, starts, name]);
      choose("x axis", "batch");
      return { first, batch: line("pareto", "lean").points.map(({ x, starts, name }) => [x, starts, name]) };"""
    seen, charts = look(write_run(rows), probe)
    assert charts[0] == "pareto"
    assert seen["first"] == [
        [1000, 1000, True, None],
        [500, 4000, False, "1k"],
        [1000, 1000, True, None],
        [500, 4000, False, "2k"],
    ]
    # One context is chosen.
    assert seen["batch"] == [[1000, True, None], [500, False, None]]


def test_steps_of_one_batch_have_no_line_of_batches(write_run: WriteRun) -> None:
    """Beside calls of attention alone, and beside another model's steps."""
    small, large = (
        AttentionProblem(1, 32, 8, 1024, 128, whole_model=name, lengths_on="device")
        for name in ("llama-3-8b", "llama-3-8b:layers=4")
    )
    one = [row(each, "lean", 1000.0, tokens_per_s=1000.0) for each in (small, large)]
    rows = [*one, row(problem(batch=8), "lean", 10.0)]
    assert "pareto" not in look(write_run(rows))[1]
    more = row(replace(small, batch=8), "lean", 2000.0, tokens_per_s=4000.0)
    probe = """choose("whole model", "llama-3-8b:layers=4");
      return [points("pareto", "lean"), chart("pareto").closest("figure").querySelector(".series").textContent];"""
    seen, _ = look(write_run([*rows, more], folder="more"), probe)
    assert seen == [
        [[1000, 1000], [500, 4000]],
        "No values in the chosen series. Shown: whole model llama-3-8b.",
    ]
