// What maps, charts and the table share: the data of the page, selectors of a series, and saved pictures.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
page.columns.forEach(({ texts }, i) => {
  if (texts) for (const row of page.rows) if (row[i] !== null) row[i] = texts[row[i]];
});

/** 1024 -> "1k", 1048576 -> "1M", 1000 -> "1000". */
function tokens(count) {
  if (count >= 1 << 20 && count % (1 << 20) === 0) return `${count >> 20}M`;
  return count >= 1024 && count % 1024 === 0 ? `${count >> 10}k` : `${count}`;
}

const records = page.rows.map((values) => Object.fromEntries(page.columns.map((column, i) => [column.name, values[i]])));
const plotConfig = { displayModeBar: false, responsive: true };

// Plotly reads a little markup in texts; what comes from a result file is only text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/** The values of `axes` of a series that exists: `fixed` holds, and as much as possible of what was chosen before. */
function nearestSeries(rows, axes, before, fixed) {
  const kept = (row) => axes.filter((axis) => row[axis.name] === before[axis.name]).length;
  const score = (row) => kept(row) + (fixed && row[fixed.name] === fixed.value ? axes.length + 1 : 0);
  const best = rows.reduce((a, b) => (score(b) > score(a) ? b : a));
  return Object.fromEntries(axes.map((axis) => [axis.name, best[axis.name]]));
}

/** The values of `axes` of the series in which `pointOf` differs most, to begin with. */
function fullestSeries(rows, axes, pointOf) {
  const seen = new Map();
  for (const row of rows) {
    const key = JSON.stringify(axes.map((axis) => row[axis.name]));
    if (!seen.has(key)) seen.set(key, { row, points: new Set() });
    seen.get(key).points.add(pointOf(row));
  }
  const fullest = [...seen.values()].reduce((a, b) => (b.points.size > a.points.size ? b : a));
  return Object.fromEntries(axes.map((axis) => [axis.name, fullest.row[axis.name]]));
}

function select(label, options, value, onChange) {
  const wrapper = document.createElement("label");
  const control = document.createElement("select");
  options.forEach((option, i) => control.add(new Option(option, i)));
  control.selectedIndex = value;
  control.addEventListener("change", () => onChange(control.selectedIndex));
  wrapper.append(`${label} `, control);
  return wrapper;
}

/** Puts selectors into their place; the one that had the focus keeps it. */
function replaceSelectors(id, controls) {
  const focused = document.activeElement?.closest?.("label")?.firstChild.textContent;
  document.getElementById(id).replaceChildren(...controls);
  controls.find((control) => control.firstChild.textContent === focused)?.lastChild.focus();
}

function pictureTitle(title, { source, cache }, series) {
  const tag = source ? ` (${source})` : page.tag;
  const l2 = cache ?? page.l2;
  return `${plain(title)}${tag}, ${plain(page.gpus)}${l2 && `, ${l2} L2`}${series && `<br><sub>${plain(series)}</sub>`}`;
}

/** A picture that stands alone: light, and saying what it shows. */
async function savePicture(key, title, data, layout, format, height) {
  const alone = {
    ...layout, paper_bgcolor: "#fff", title: { text: title, font: { size: 15 }, x: 0.02, xanchor: "left" },
    margin: { ...layout.margin, t: layout.margin.t + 48 },
  };
  const link = document.createElement("a");
  link.href = await Plotly.toImage({ data, layout: alone }, { format, width: 800, height, scale: format === "png" ? 2 : 1 });
  link.download = `${page.name}-${key}.${format}`;
  link.click();
}
