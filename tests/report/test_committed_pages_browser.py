"""The reports in the repository, opened in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from browser import MARKS, answer_of
from depth import deep
from example_runs import WriteRun, problem, row, row_with_all_fields
from test_committed_pages import PAGES, ROOT

from leanbench.report import write_report

pytestmark = MARKS

#: The longest page that is still read, in pixels.
TALLEST = 8000
PROBE = Path(__file__).with_name("browser_probe.js").read_text(encoding="utf-8")
#: Of the page as it opens and with every section unfolded: its height, how far it scrolls sideways.
SIZES = """const root = document.documentElement;
  const sideways = () => root.scrollWidth - root.clientWidth;
  const size = { height: root.scrollHeight, opened: sideways() };
  all("details").forEach((details) => { details.open = true; });
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  size.unfolded = sideways();
  const boxes = (svg) => [...svg.querySelectorAll(".xtick")].map((tick) => tick.getBoundingClientRect());
  const touches = (svg) => boxes(svg).some((box, i, every) => i && box.left < every[i - 1].right);
  size.touching = all("svg").filter(touches).map((svg) => svg.parentNode.id);"""


@pytest.mark.parametrize("page", [PAGES[0], deep(PAGES[1])])
def test_a_committed_page_shows_all_of_its_rows(tmp_path: Path, page: str) -> None:
    probe = f"""{SIZES}
      const drawn = () => all("#results tbody tr").length;
      const first = drawn();
      const [filtered, kernels] = filter("context=64k kernel=lean");
      const found = records.filter((row) => row.max_context === 65536 && row.kernel === "lean").length;
      // Without a layout, thousands of rows are drawn at once.
      document.getElementById("rows").hidden = true;
      filter("");
      document.getElementById("more").click();
      return {{ ...size, rows: page.rows.length, first, all: drawn(), filtered, kernels, found }};"""
    answer = answer_of(
        tmp_path, (ROOT / page).read_text(encoding="utf-8"), "", PROBE, probe, width=390
    )
    seen = answer["seen"]
    assert all(drawn for _, drawn in answer["charts"]), answer["charts"]
    assert seen["rows"] > 1000
    assert (seen["first"], seen["all"]) == (200, seen["rows"])
    assert seen["found"] > 0
    assert seen["filtered"] == f"{seen['found']} of {seen['rows']} rows"
    assert {*seen["kernels"]} == {"lean"}
    assert seen["height"] <= TALLEST
    assert (seen["opened"], seen["unfolded"], seen["touching"]) == (0, 0, [])


@pytest.mark.parametrize("page", [PAGES[0], deep(PAGES[1])])
def test_a_committed_page_is_not_endless_on_a_screen(tmp_path: Path, page: str) -> None:
    html = (ROOT / page).read_text(encoding="utf-8")
    probe = "return document.documentElement.scrollHeight;"
    assert answer_of(tmp_path, html, "", PROBE, probe, width=1440)["seen"] <= TALLEST


@pytest.mark.deep
@pytest.mark.parametrize("runs", [1, 5])
def test_long_names_do_not_widen_a_page(write_run: WriteRun, runs: int) -> None:
    long = "k" * 300

    def rows(number: int) -> list[dict[str, Any]]:
        shapes = [problem(context, heads) for context in (1024, 4096) for heads in (8, 16)]
        timed = [
            row_with_all_fields(shape, kernel, 10.0 + number, warnings=[f"w{long}"])
            for shape in shapes
            for kernel in ("lean", f"{long}a", f"{long}b")
        ]
        return [*timed, row(shapes[0], f"{long}c", status="crashed", reason=f"r{long}")]

    fields = {
        "command": f"leanbench sweep --name {long}",
        "gpu": {"product": f"G{long}", long: long},
        "sweep": {"name": long, "description": long},
    }
    directories = []
    for number in range(runs):
        own = {"env0": {"gpu_product": f"G{long}", long: f"{long}{number}"}}
        names = {"folder": f"run{number}", "name": f"{number}{long}", "environments": own}
        directories.append(write_run(rows(number), **names, **fields))
    [report] = write_report(directories[0], directories[0].parent, ["html"], directories[1:])
    html = report.read_text(encoding="utf-8")
    for width in (390, 1440):
        probe = f"{SIZES} return [size.opened, size.unfolded];"
        assert answer_of(report.parent, html, "", PROBE, probe, width)["seen"] == [0, 0]
