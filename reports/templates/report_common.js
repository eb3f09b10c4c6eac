// What pictures and the table share: the data of the page, how values are written, ticks, and selectors of a series.
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

/** Whether a row's latency counts: a rival that was timed with noise is a rival. */
const timed = (row) => row.status === "ok" || row.status === "noisy";

/** Whether others of its run are compared with it. */
const isBaseline = (row) => row.kernel === row.baseline;

const formats = {
  text: String,
  command: String,
  sentence: String,
  outcome: String,
  count: String,
  tokens,
  figure: (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value && value.toPrecision(4)),
  fixed: (value) => value.toFixed(value >= 100 ? 1 : 2),
  fixed3: (value) => value.toFixed(3),
  share: (value) => (100 * value).toFixed(1),
  change: (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`,
  bytes: (value) => formats.figure(value / 1e6),
  exponent: (value) => value.toExponential(1),
};
const columnOf = (name) => page.columns.find((column) => column.name === name);

/** A value of a column with its unit. */
function written(value, name) {
  const { kind, unit } = columnOf(name);
  return `${formats[kind](value)}${unit === "%" ? "%" : unit ? ` ${unit}` : ""}`;
}

/** 1, 2, 5, 10 and so on, written out; powers of ten alone where those would be too many, round numbers between where too few. */
function logTicks(values, write = (tick) => tick.toLocaleString("en")) {
  const low = Math.min(...values), high = Math.max(...values);
  const steps = Math.log10(high / low) > 2.6 ? [1] : [1, 2, 5];
  const pad = 10 ** Math.max(0.04 * Math.log10(high / low), 0.03);
  const range = [low / pad, high * pad];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power++)
    for (const step of steps) ticks.push(+(step * 10 ** power).toPrecision(1));
  const within = (each) => each.filter((tick) => tick >= range[0] && tick <= range[1]);
  const few = within(ticks).length < 2;
  const shown = few && high > low ? within(linearTicks(low, high).ticks.map(([tick]) => tick)) : within(ticks);
  return { type: "log", range, ticks: shown.map((tick) => [tick, write(tick)]) };
}

/** About five round numbers; those of shares in per cent. */
function linearTicks(low, high, name) {
  const isShare = ["share", "change"].includes(columnOf(name)?.kind);
  const span = high - low || Math.abs(high) || 1;
  const rough = span / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const range = [low === 0 ? 0 : low - 0.05 * span, high === 0 ? 0 : high + 0.05 * span];
  const ticks = [];
  for (let i = Math.ceil(range[0] / step); i * step <= range[1] + 1e-9 * step; i++) ticks.push(+(i * step).toPrecision(12));
  const text = (tick) => (isShare ? `${+(100 * tick).toPrecision(6)}%` : tick.toLocaleString("en", { maximumFractionDigits: 6 }));
  return { type: "linear", range, ticks: ticks.map((tick) => [tick, text(tick)]) };
}

/** The values of `axes` of a series that exists: `fixed` holds, and as much as possible of what was chosen before. */
function nearestSeries(rows, axes, before, fixed) {
  const same = (row) => axes.filter((axis) => row[axis.name] === before[axis.name]).length;
  const score = (row) => same(row) + (fixed && row[fixed.name] === fixed.value ? axes.length + 1 : 0);
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

const COMPARED = ["run", "source", "gpu", "cache"];
const isCompared = (axis) => COMPARED.includes(axis.name);
const textOf = (axis, value) => (axis.name === "max_context" ? tokens(value) : `${value}`);

/** Measured and predicted rows, two GPUs or runs, or a cold and a warm L2 never share a picture. */
const comparable = (row, chosen) => COMPARED.every((name) => !(name in chosen) || row[name] === chosen[name]);

function valuesIn(rows, axis, chosen) {
  if (isCompared(axis)) return axis.values;
  const present = new Set(rows.filter((row) => comparable(row, chosen)).map((row) => row[axis.name]));
  return axis.values.filter((value) => present.has(value));
}

/** The axes that vary in the chosen run, behind those that tell runs apart. */
function varyingIn(rows, axes, chosen) {
  const varying = axes.filter((axis) => valuesIn(rows, axis, chosen).length > 1);
  return [...varying.filter(isCompared), ...varying.filter((axis) => !isCompared(axis))];
}

const seriesText = (axes, chosen) => axes.map((axis) => `${axis.label} ${textOf(axis, chosen[axis.name])}`).join(", ");

/** A selector for each axis that varies; the other axes follow to the nearest series that exists. */
function selectorsOf(rows, axes, state, onChange) {
  return varyingIn(rows, axes, state.chosen).map((axis) => {
    const values = valuesIn(rows, axis, state.chosen);
    const texts = values.map((value) => textOf(axis, value));
    return select(axis.label, texts, values.indexOf(state.chosen[axis.name]), (i) => {
      state.chosen = nearestSeries(rows, axes, state.chosen, { name: axis.name, value: values[i] });
      onChange(axis);
    });
  });
}

/** Tags of a figure whose rows are not all of one source or one state of the L2. */
function tagFigure(figure, { source, cache }) {
  if (source) figure.querySelectorAll(".tag").forEach((tag) => { tag.textContent = source; });
  if (cache) figure.querySelectorAll(".l2").forEach((tag) => { tag.textContent = `${cache} L2`; });
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

/** Lines that say what a saved picture shows. */
function pictureTitle(title, { source, cache }, series) {
  const tag = source ? ` (${source})` : page.tag;
  const l2 = cache ?? page.l2;
  return [`${title}${tag}, ${page.gpus}${l2 && `, ${l2} L2`}`, series].filter(Boolean);
}
