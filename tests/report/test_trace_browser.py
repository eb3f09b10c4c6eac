"""The trace page in a real browser: pixels of spans, zoom, hover, and nothing is loaded."""

from pathlib import Path
from typing import Any

import pytest
from browser import MARKS, answer_of
from example_runs import HOSTILE
from trace_examples import fixed_split, lean

from leanbench.core.timeline import Timeline
from leanbench.report.trace.html import html_text
from leanbench.report.trace.picture import TILE_COLORS, Panel

pytestmark = MARKS

REDUCTION, WAIT, PLOT = "#16181c", "#b4bcc7", "#ffffff"

#: Headless Chromium draws frames irregularly. Here each is drawn on request.
AT_ONCE = "<script>window.requestAnimationFrame = (callback) => callback();</script>"
#: Helpers, then the test's lines replace PROBE. Times are in microseconds, between the grid
#: lines; rows count from the top.
PROBE = """
const hex = (data) => "#" + [...data].slice(0, 3).map((value) => value.toString(16).padStart(2, "0")).join("");
const place = (panel, row, rows, time) => ({
  offsetX: LEFT + (time - view.from) * panel.scale, offsetY: (row + 0.5) * plotHeight(panel) / rows,
});
const pixel = (index, row, rows, time) => {
  const panel = panels[index], { canvas } = panel;
  const at = place(panel, row, rows, time), ratio = canvas.width / canvas.clientWidth;
  return hex(canvas.getContext("2d").getImageData(at.offsetX * ratio, at.offsetY * ratio, 1, 1).data);
};
const send = (index, type, row, rows, time, more = {}) => {
  const { canvas } = panels[index], at = place(panels[index], row, rows, time), box = canvas.getBoundingClientRect();
  const where = { clientX: box.left + at.offsetX, clientY: box.top + at.offsetY, bubbles: true, cancelable: true };
  const make = type === "wheel" ? WheelEvent : type === "dblclick" ? MouseEvent : PointerEvent;
  canvas.dispatchEvent(new make(type, { ...where, pointerId: 1, ...more }));
};
Element.prototype.setPointerCapture = () => {};
const probe = async () => { PROBE };
addEventListener("load", async () => {
  let seen = null;
  try { seen = await probe(); } catch (error) { failures.push(`probe: ${error}`); }
  const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  const answer = document.createElement("pre");
  answer.id = "probe";
  answer.textContent = JSON.stringify({ seen, loaded, failures });
  document.body.append(answer);
});"""


def look(directory: Path, timelines: list[Timeline], probe: str) -> Any:
    """Return what `probe` answers in the page; a failure in the page fails."""
    page = html_text([Panel(timeline) for timeline in timelines])
    return answer_of(directory, page, AT_ONCE, PROBE, probe)["seen"]


def test_spans_are_drawn_where_they_are(tmp_path: Path) -> None:
    probe = """const row = (index, row, rows, ...times) => times.map((time) => pixel(index, row, rows, time));
      return { first: row(0, 0, 4, 6, 16, 26), host: row(0, 1, 4, 6, 16, 26, 36), empty: row(0, 3, 4, 6, 36),
        bands: [0, 3, 4, 7].map((band) => pixel(1, band, 8, 5)), merge: [0, 1, 2].map((each) => pixel(1, each, 4, 14)),
        after: pixel(1, 0, 8, 31), hover: hover(), grouped: grouped() };
      function hover() {
        return [[0, 1, 4, 35], [0, 0, 4, 5], [1, 6, 8, 5], [0, 3, 4, 5]].map(([index, row, rows, time]) => {
          send(index, "pointermove", row, rows, time);
          return tip.hidden ? null : tip.textContent.replaceAll("\\n", "; ");
        });
      }
      function grouped() {
        byId("rows").value = "sms"; byId("rows").dispatchEvent(new Event("change"));
        return [0, 1, 2, 3].map((row) => pixel(1, row, 8, 5));
      }"""
    seen = look(tmp_path, [lean(), fixed_split()], probe)
    zero, one = TILE_COLORS[:2]
    assert seen["first"] == [one, one, PLOT]
    assert seen["host"] == [zero, one, WAIT, REDUCTION]
    assert seen["empty"] == [PLOT, PLOT]
    # Two CTAs to an SM: output tile 0 in the upper band, 1 in the lower one; then the second launch
    # on two SMs.
    assert seen["bands"] == [zero, zero, one, one]
    assert seen["merge"] == [REDUCTION, REDUCTION, PLOT]
    # 16 us of the 40 that both pictures show.
    assert seen["after"] == PLOT
    # What a CTA did.
    tiles = "LeanTiles of output tile 1; 0.00 µs to"
    assert seen["hover"] == [
        "merges partials of output tile 1; 30.00 µs to 40.00 µs, 10.00 µs;"
        " lean_kernel, CTA 1 on SM 0",
        f"{tiles} 20.00 µs, 20.00 µs; lean_kernel, CTA 0 on SM 2",
        f"{tiles} 10.00 µs, 10.00 µs; split_kernel, CTA 6 on SM 2",
        None,
    ]
    # Rows by SM.
    assert seen["grouped"] == [zero, one, zero, one]


def test_zoom_and_move_keep_within_the_trace(tmp_path: Path) -> None:
    probe = """const seen = {}, now = () => [view.from, view.to];
      byId("farther").click(); seen.whole = now();
      byId("closer").click(); seen.closer = now();
      seen.colors = [pixel(0, 1, 4, 15), pixel(0, 1, 4, 25)];
      send(0, "wheel", 0, 4, 20, { deltaY: -100, ctrlKey: true }); seen.wheel = now();
      send(0, "wheel", 0, 4, 20, { deltaY: -100 }); seen.scrolled = now();
      byId("all").click(); byId("closer").click();
      send(0, "pointerdown", 0, 4, 20); send(0, "pointermove", 0, 4, 14); send(0, "pointerup", 0, 4, 14);
      seen.dragged = now();
      panels[0].canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" })); seen.key = now();
      for (let i = 0; i < 99; i++) panels[0].canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      seen.end = now(); send(0, "dblclick", 0, 4, 35); seen.all = now();
      return seen;"""
    seen = look(tmp_path, [lean(), fixed_split()], probe)
    assert seen["whole"] == [0, 40]
    assert seen["closer"] == [8, 32]
    assert seen["colors"] == [TILE_COLORS[1], WAIT]
    # About the pointer, at 20 us.
    from_us, to_us = seen["wheel"]
    assert from_us == pytest.approx(20 - 12 * 0.67032, abs=0.1)
    assert to_us == pytest.approx(20 + 12 * 0.67032, abs=0.1)
    assert seen["scrolled"] == seen["wheel"]
    assert seen["dragged"] == pytest.approx([14, 38], abs=0.1)
    assert seen["key"] == pytest.approx([11.6, 35.6], abs=0.1)
    assert seen["end"] == pytest.approx([16, 40])
    assert seen["all"] == [0, 40]


def test_a_click_follows_an_output_tile(tmp_path: Path) -> None:
    probe = """const click = async (row, time) => {
        send(0, "pointerdown", row, 4, time); send(0, "pointerup", row, 4, time);
        return [pixel(0, 1, 4, 5), pixel(0, 1, 4, 15), pixel(0, 1, 4, 35)];
      };
      return [await click(0, 5), await click(0, 5)];"""
    [followed, again] = look(tmp_path, [lean()], probe)
    zero, one = TILE_COLORS[:2]
    assert followed[1:] == [one, REDUCTION]
    assert followed[0] != zero
    assert again == [zero, one, REDUCTION]


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    probe = """return [document.images.length, document.querySelector("figcaption strong").textContent];"""
    seen = look(tmp_path, [lean(kernel=HOSTILE, gpu=HOSTILE, config={HOSTILE: HOSTILE})], probe)
    assert seen == [0, HOSTILE]


def test_an_empty_timeline_opens(tmp_path: Path) -> None:
    assert look(tmp_path, [lean(ctas=())], "return pixel(0, 1, 4, 0.0005);") == PLOT


def test_the_legend_is_legible_and_fits(tmp_path: Path) -> None:
    probe = """const legend = document.getElementById("swatches");
      legend.style.width = "366px";
      const boxes = [...legend.querySelectorAll(".swatch")].map((each) => each.getBoundingClientRect());
      const overlaps = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      return { overlapping: boxes.filter((a, i) => boxes.slice(i + 1).some((b) => overlaps(a, b))).length,
        opacity: getComputedStyle(legend.querySelector(".swatch")).opacity,
        width: boxes[1].width > 40, overflows: legend.scrollWidth > legend.clientWidth };"""
    seen = look(tmp_path, [lean()], probe)
    assert seen == {"overlapping": 0, "opacity": "1", "width": True, "overflows": False}
