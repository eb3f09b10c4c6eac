// Draws the timelines on canvases that share one view of time.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const [CTA, TILES, WAIT, REDUCTION] = [0, 1, 2, 3];
const FIELDS = ["kind", "row", "lane", "lanes", "start", "end", "launch", "cta", "tile", "merged"];
const AXIS = 22, LEFT = 2, RIGHT = 10;
const LEAST_HEIGHT = 180, MOST_HEIGHT = 420, TALL_ROW = 7;
const byId = (id) => document.getElementById(id);
const full = Math.max(page.end_us, 1e-3);
const view = { from: 0, to: full };
/** The output tile that a click chose: everything else is pale. */
let followed = null;
let colors = {};

const panels = page.panels.map((panel, index) => {
  const marks = [];
  for (let at = 0; at < panel.marks.length; at += FIELDS.length) {
    marks.push(Object.fromEntries(FIELDS.map((field, i) => [field, panel.marks[at + i]])));
  }
  // CTAs first: spans lie on top of them.
  marks.sort((a, b) => (a.kind !== CTA) - (b.kind !== CTA));
  const lanes = new Map();
  for (const mark of marks) {
    const key = `${mark.lanes} ${mark.lane} ${mark.row}`;
    if (!lanes.has(key)) lanes.set(key, { ctas: [], spans: [] });
    lanes.get(key)[mark.kind === CTA ? "ctas" : "spans"].push(mark);
  }
  const laneCounts = [...new Set(marks.map((mark) => mark.lanes))];
  return { ...panel, marks, lanesByKey: lanes, laneCounts, canvas: document.querySelectorAll("canvas")[index] };
});

const inBands = () => byId("rows") === null || byId("rows").value === "bands";

/** Rows of a picture that has `lanes` of them for each SM: which one a lane of an SM is, and back. */
function rowOf(panel, mark) {
  return inBands() ? mark.lane * panel.sms.length + mark.row : mark.row * mark.lanes + mark.lane;
}
function laneAt(panel, lanes, share) {
  const row = Math.floor(share * lanes * panel.sms.length);
  const sms = panel.sms.length;
  return inBands() ? [Math.floor(row / sms), row % sms] : [row % lanes, Math.floor(row / lanes)];
}

function plotHeight(panel) {
  const rows = panel.sms.length * panel.lanes;
  if (byId("tall").checked) return rows * TALL_ROW;
  // Whole pixels for a row where that fits.
  return Math.min(MOST_HEIGHT, rows * Math.max(1, Math.ceil(LEAST_HEIGHT / rows)));
}

function draw(panel) {
  const { canvas } = panel;
  const width = canvas.clientWidth, plot = plotHeight(panel);
  const ratio = Math.min(devicePixelRatio || 1, 16000 / (plot + AXIS));
  canvas.style.height = `${plot + AXIS}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round((plot + AXIS) * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  panel.scale = (width - LEFT - RIGHT) / (view.to - view.from);
  const x = (time) => LEFT + (time - view.from) * panel.scale;
  pen.fillStyle = colors.plot;
  pen.fillRect(LEFT, 0, width - LEFT - RIGHT, plot);
  drawAxis(pen, x, width, plot);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT - RIGHT, plot);
  pen.clip();
  for (const mark of panel.marks) {
    if (mark.end < view.from || mark.start > view.to) continue;
    const height = plot / (mark.lanes * panel.sms.length);
    const left = Math.max(x(mark.start), -1), right = Math.min(x(mark.end), width + 1);
    pen.globalAlpha = followed === null || mark.tile === followed || mark.kind === CTA ? 1 : 0.15;
    pen.fillStyle = colorOf(mark);
    const gap = height >= 5 ? 1 : 0;
    // A span that is too short to be seen keeps a faint trace.
    pen.fillRect(left, rowOf(panel, mark) * height, Math.max(right - left, 0.3), height - gap);
  }
  pen.restore();
  pen.strokeStyle = colors.rule;
  pen.strokeRect(LEFT + 0.5, 0.5, width - LEFT - RIGHT - 1, plot - 1);
}

function drawAxis(pen, x, width, plot) {
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "top";
  const most = Math.max(2, Math.floor(width / 90));
  const step = stepOf(view.to - view.from, most);
  for (let index = Math.ceil(view.from / step - 1e-9); index * step <= view.to; index++) {
    const time = Number((index * step).toPrecision(9)), at = x(time);
    pen.fillStyle = colors.grid;
    pen.fillRect(Math.round(at), 0, 1, plot + 4);
    pen.fillStyle = colors.muted;
    const label = `${time}${index === Math.ceil(view.from / step - 1e-9) ? " µs" : ""}`;
    const half = pen.measureText(label).width / 2;
    pen.fillText(label, Math.min(Math.max(at - half, 0), width - 2 * half), plot + 7);
  }
}

/** 1, 2 or 5 times a power of ten, at most `most` of them in `span`. */
function stepOf(span, most) {
  let power = 10 ** Math.floor(Math.log10(span / most));
  for (;;) {
    for (const digit of [1, 2, 5]) if (span / (digit * power) <= most) return digit * power;
    power *= 10;
  }
}

function colorOf(mark) {
  if (mark.kind === TILES) return page.colors[mark.tile % page.colors.length];
  return [colors.cta, null, colors.wait, colors.reduction][mark.kind];
}

let isAsked = false;
function redraw() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    readColors();
    panels.forEach(draw);
  });
}

function readColors() {
  const style = getComputedStyle(document.documentElement);
  colors = Object.fromEntries(
    ["plot", "cta", "wait", "reduction", "grid", "muted", "rule"].map((name) => [name, style.getPropertyValue(`--${name}`)]),
  );
}

/** Zooms by `factor` about a time; the view never leaves the trace. */
function zoom(factor, about = (view.from + view.to) / 2) {
  const span = Math.min(full, Math.max(full * 1e-5, (view.to - view.from) * factor));
  const share = (about - view.from) / (view.to - view.from);
  show(about - share * span, span);
}
function show(from, span) {
  view.from = Math.min(Math.max(0, from), full - span);
  view.to = view.from + span;
  redraw();
}
const move = (time) => show(view.from + time, view.to - view.from);

/** The mark under a point of the canvas, a span before the CTA it belongs to. */
function markAt(panel, x, y) {
  const share = y / plotHeight(panel), time = view.from + (x - LEFT) / panel.scale;
  if (share < 0 || share >= 1) return null;
  const slack = 1 / panel.scale;
  let cta = null;
  for (const lanes of panel.laneCounts) {
    const [lane, row] = laneAt(panel, lanes, share);
    const found = panel.lanesByKey.get(`${lanes} ${lane} ${row}`);
    if (!found) continue;
    const span = nearest(found.spans, time, slack);
    if (span) return span;
    cta = cta || nearest(found.ctas, time, slack);
  }
  return cta;
}

/** The mark of a lane (in the order of time) at `time`, or else one within `slack`. */
function nearest(marks, time, slack) {
  let low = 0, high = marks.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (marks[middle].end < time) low = middle + 1;
    else high = middle;
  }
  const after = marks[low], before = marks[low - 1];
  if (after && after.start <= time) return after;
  if (before && time - before.end <= slack) return before;
  return after && after.start - time <= slack ? after : null;
}

const us = (time) => `${time.toFixed(2)} µs`;
function describe(panel, mark) {
  const what = {
    [CTA]: "CTA",
    [TILES]: `LeanTiles of output tile ${mark.tile}`,
    [WAIT]: `waits for partials of output tile ${mark.tile}`,
    [REDUCTION]: `merges partials of output tile ${mark.tile}`,
  }[mark.kind];
  const merged = mark.merged > 1 ? `\n${mark.merged} short ones drawn as one, this is the longest` : "";
  return `${what}\n${us(mark.start)} to ${us(mark.end)}, ${us(mark.end - mark.start)}\n`
    + `${panel.launches[mark.launch]}, CTA ${mark.cta} on SM ${panel.sms[mark.row]}${merged}`;
}

const tip = byId("tip");
function hover(panel, event) {
  const mark = markAt(panel, event.offsetX, event.offsetY);
  tip.hidden = mark === null;
  if (mark === null) return;
  tip.textContent = describe(panel, mark);
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}

function listen(panel) {
  const { canvas } = panel;
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return hover(panel, event);
    const distance = event.clientX - held.x;
    if (!held.moved && Math.abs(distance) < 4) return;
    held = { x: event.clientX, moved: true };
    canvas.classList.add("moving");
    tip.hidden = true;
    move(-distance / panel.scale);
  });
  const release = (event) => {
    if (held !== null && !held.moved && event.type === "pointerup") {
      const mark = markAt(panel, event.offsetX, event.offsetY);
      followed = mark === null || mark.tile < 0 || mark.tile === followed ? null : mark.tile;
      redraw();
    }
    held = null;
    canvas.classList.remove("moving");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => show(0, full));
  canvas.addEventListener("wheel", (event) => {
    // A plain wheel scrolls the page.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 250), view.from + (event.offsetX - LEFT) / panel.scale);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const span = view.to - view.from;
    const act = {
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: () => show(0, full),
      ArrowLeft: () => move(-span / 10), ArrowRight: () => move(span / 10),
    }[event.key];
    if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
  });
}

panels.forEach(listen);
byId("closer").addEventListener("click", () => zoom(0.6));
byId("farther").addEventListener("click", () => zoom(1 / 0.6));
byId("all").addEventListener("click", () => show(0, full));
for (const id of ["rows", "tall"]) byId(id)?.addEventListener("change", redraw);
addEventListener("resize", redraw);
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);
redraw();
