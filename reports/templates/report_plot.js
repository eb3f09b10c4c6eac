// Pictures as SVG: lines with marks, bars and cells, what a pointer on them shows, and files that stand alone.
const NEUTRAL = "#808690";
const WARNED = "#D99A1C";
const LIGHT = { ink: "#1b1e23", grid: "#e8eaed", page: "#fff" };
// On the page, colours follow light, dark and paper without drawing again.
const OF_PAGE = { ink: "var(--ink)", grid: "var(--grid)", page: "var(--page)" };
const LETTER = 6.7;
const AREA = 0.5;

/** An SVG element; what is text stays text. */
function node(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null));
  return made;
}

const words = (text, x, y, colors, attributes) => node("text", { x, y, fill: colors.ink, "font-size": 12, ...attributes }, `${text}`);
/** Of a text that lines can cross. */
const halo = (colors) => ({ stroke: colors.page, "stroke-width": 3, "paint-order": "stroke" });
const segment = (x1, y1, x2, y2, attributes) => node("line", { x1, y1, x2, y2, ...attributes });
const widest = (texts) => LETTER * Math.max(0, ...texts.map((text) => `${text}`.length));

function polygon(corners, radius, turn = 0, inner = radius) {
  const points = Array.from({ length: corners }, (_, k) => {
    const angle = turn - Math.PI / 2 + (2 * Math.PI * k) / corners, r = k % 2 ? inner : radius;
    return `${(r * Math.cos(angle)).toFixed(2)},${(r * Math.sin(angle)).toFixed(2)}`;
  });
  return `M${points.join("L")}Z`;
}

const MARKS = {
  circle: (r) => polygon(20, r),
  square: (r) => polygon(4, 1.3 * r, Math.PI / 4),
  diamond: (r) => polygon(4, 1.35 * r),
  "triangle-up": (r) => polygon(3, 1.4 * r),
  "triangle-down": (r) => polygon(3, 1.4 * r, Math.PI),
  pentagon: (r) => polygon(5, 1.2 * r),
  cross: (r) => `M${-1.2 * r},0H${1.2 * r}M0,${-1.2 * r}V${1.2 * r}`,
  star: (r) => polygon(10, 1.5 * r, 0, 0.6 * r),
};

function mark(line, point, x, y) {
  const hollow = point.open || line.symbol === "cross";
  const radius = line.radius ?? 3.2;
  const shape = node("path", {
    d: MARKS[line.symbol](radius), class: "mark", fill: hollow ? "none" : line.color, "fill-opacity": line.opacity,
    stroke: line.color, "stroke-width": line.symbol === "cross" ? 2 : 1, "stroke-opacity": line.opacity,
  });
  const ring = point.ringed ? node("circle", { r: 2 * radius, fill: "none", stroke: WARNED, "stroke-width": 1.5, "stroke-opacity": line.opacity, class: "ringed" }) : null;
  return node("g", { transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` }, ring, shape);
}

/** From values to pixels. */
function scaleOf({ type, range, values }, from, to) {
  if (type === "category") return (value) => from + ((values.indexOf(value) + 0.5) / values.length) * (to - from);
  const place = type === "log" ? Math.log10 : Number;
  const [low, high] = range.map(place);
  return (value) => from + ((place(value) - low) / (high - low || 1)) * (to - from);
}

/** Rows of the legend below a picture. */
function legendRows(lines, width) {
  const rows = [[]];
  let used = 0;
  for (const line of lines) {
    const needed = 44 + LETTER * line.name.length;
    if (used + needed > width && rows.at(-1).length) { rows.push([]); used = 0; }
    rows.at(-1).push({ line, x: used });
    used += needed;
  }
  return rows;
}

/** A frame around the plot with axes, ticks and titles; `plot` is [left, top, right, bottom]. */
function drawAxes(picture, [left, top, right, bottom], xAt, yAt, colors) {
  const { x, y } = picture;
  const parts = [];
  for (const [value, text] of y.ticks) {
    parts.push(segment(left, yAt(value), right, yAt(value), { stroke: colors.grid }));
    parts.push(words(text, left - 7, yAt(value) + 4, colors, { "text-anchor": "end", class: "ytick" }));
  }
  let free = -Infinity;
  for (const [value, text] of x.ticks) {
    if (x.type !== "category") parts.push(segment(xAt(value), top, xAt(value), bottom, { stroke: colors.grid }));
    parts.push(segment(xAt(value), bottom, xAt(value), bottom + 4, { stroke: NEUTRAL }));
    const half = widest([text]) / 2 + 3;
    if (xAt(value) - half < free) continue;
    free = xAt(value) + half;
    parts.push(words(text, xAt(value), bottom + 18, colors, { "text-anchor": "middle", class: "xtick" }));
  }
  parts.push(segment(left, bottom, right, bottom, { stroke: NEUTRAL }), segment(left, top, left, bottom, { stroke: NEUTRAL }));
  parts.push(words(x.title, (left + right) / 2, bottom + 36, colors, { "text-anchor": "middle", class: "xtitle" }));
  const middle = (top + bottom) / 2;
  parts.push(words(y.title, 0, 0, colors, { "text-anchor": "middle", class: "ytitle", transform: `translate(13,${middle}) rotate(-90)` }));
  return parts;
}

function drawLine(line, picture, [left, , right, bottom], xAt, yAt, colors) {
  const places = line.points.map((point) => [point, xAt(point.x), yAt(point.y)]);
  const parts = [];
  const path = places.map(([{ starts }, x, y], i) => `${i ? (starts ? "M" : "L") : ""}${x.toFixed(1)},${y.toFixed(1)}`).join("");
  const stroke = { stroke: line.color, "stroke-width": line.width ?? 1.5, "stroke-dasharray": line.dash };
  if (line.area && places.length > 1) {
    const base = line.points.map((point) => `${xAt(point.x).toFixed(1)},${yAt(point.base).toFixed(1)}`).reverse().join("L");
    parts.push(node("path", { d: `M${path}L${base}Z`, fill: line.color, "fill-opacity": AREA, class: "area" }));
  } else if (line.across && places.length) parts.push(segment(left, places[0][2], right, places[0][2], { ...stroke, class: "across" }));
  else if (line.bar) {
    const width = Math.min(90, (0.55 * (right - left)) / picture.x.values.length);
    for (const [point, x, y] of places) {
      const outline = point.ringed ? WARNED : null;
      const height = Math.max(0, (point.base == null ? bottom : yAt(point.base)) - y);
      parts.push(node("rect", { x: x - width / 2, y, width, height, fill: line.color, stroke: outline, "stroke-width": 2, class: "mark" }));
    }
  } else if (line.stroke) for (const [, x, y] of places) parts.push(segment(x - 15, y, x + 15, y, { ...stroke, "stroke-width": 2, class: "mark" }));
  else if (line.joined && places.length > 1) parts.push(node("path", { d: `M${path}`, fill: "none", ...stroke }));
  const named = [];
  if (line.label) parts.push(labelOf(line, places, colors));
  for (const [point, x, y] of places) {
    if (point.low != null) {
      const color = line.bar ? NEUTRAL : line.color;
      for (const end of [point.low, point.high]) parts.push(segment(x - 2.5, yAt(end), x + 2.5, yAt(end), { stroke: color }));
      parts.push(segment(x, yAt(point.low), x, yAt(point.high), { stroke: color, opacity: 0.7, class: "reach" }));
    }
    if (line.symbol && !line.bar) parts.push(mark(line, point, x, y));
    const touches = ([left, above]) => Math.abs(left - x) < widest([point.name]) && Math.abs(above - y) < 14;
    if (point.name && !named.some(touches) && named.push([x, y])) parts.push(words(point.name, x, y - 8, colors, { "text-anchor": "middle", class: "pointname", ...halo(colors) }));
  }
  return node("g", { class: "line", "data-name": line.name }, ...parts);
}

/** The name of a limit, above it: what lies below has marks. */
function labelOf({ label }, places, colors) {
  const [[, x1, y1], [, x2, y2]] = [places[0], places.at(-1)];
  const along = y2 < y1 ? 0.62 : 1, gap = y2 < y1 ? 8 : 0;
  return words(label, x1 + along * (x2 - x1) - gap, y1 + along * (y2 - y1) - 5, colors, { "text-anchor": "end", class: "limitname", ...halo(colors) });
}

/**
 * A picture with two axes. Lines have `points` of {x, y, low, high, open, ringed, text}; those that come later lie on top.
 * A line is `joined`, `across` the whole picture, a `bar` or a `stroke` at each point, or an `area` down to each point's `base`. Returns the SVG and its spots.
 */
function drawChart(picture, { width, height, colors, title = [], legend = false }) {
  const { x, y } = picture;
  const shown = picture.lines.filter((line) => !line.hidden);
  const rows = legend ? legendRows([...shown].reverse(), width - 20) : [];
  const left = 30 + widest(y.ticks.map(([, text]) => text)), top = 10 + 22 * title.length;
  const plot = [left, top, width - 14, height - 44 - 18 * rows.length];
  const xAt = scaleOf(x, plot[0], plot[2]), yAt = scaleOf(y, plot[3], plot[1]);
  const parts = [...drawAxes(picture, plot, xAt, yAt, colors)];
  if (picture.line_at != null) parts.push(segment(plot[0], yAt(picture.line_at), plot[2], yAt(picture.line_at), { stroke: NEUTRAL, class: "limit" }));
  for (const line of shown) parts.push(drawLine(line, picture, plot, xAt, yAt, colors));
  rows.forEach((row, i) => row.forEach(({ line, x: at }) => {
    const middle = height - 8 - 18 * (rows.length - 1 - i);
    if (line.area || (line.bar && !line.symbol)) parts.push(node("rect", { x: 14 + at, y: middle - 10, width: 12, height: 12, fill: line.color, "fill-opacity": line.area ? AREA : 1 }));
    else parts.push(segment(10 + at, middle - 4, 30 + at, middle - 4, { stroke: line.color, "stroke-width": 2, "stroke-dasharray": line.dash }));
    if (line.symbol) parts.push(mark(line, {}, 20 + at, middle - 4));
    parts.push(words(line.name, 36 + at, middle, colors, { class: "legendtext" }));
  }));
  return { svg: standing(parts, width, height, colors, title), spots: spotsOf(picture, xAt, yAt) };
}

function standing(parts, width, height, colors, title) {
  const ground = colors === LIGHT ? [node("rect", { width, height, fill: colors.page })] : [];
  const lines = title.map((text, i) => words(text, 12, 24 + 20 * i, colors, { "font-size": i ? 12 : 15, class: "title" }));
  return node("svg", { viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, sans-serif" }, ...ground, ...lines, ...parts);
}

/** What a pointer can rest on: all lines at one x, or single points. */
function spotsOf(picture, xAt, yAt) {
  const points = picture.lines.filter((line) => !line.hidden).flatMap((line) => line.points.map((point) => ({ line, point })));
  const entry = ({ line, point }) => ({ color: line.color, text: `${line.name}: ${picture.y.write(point.y - (point.base ?? 0))}${point.text ?? ""}` });
  if (picture.closest) return points.map((each) => ({ x: xAt(each.point.x), y: yAt(each.point.y), head: each.point.head, lines: [entry(each)] }));
  const byX = new Map();
  for (const each of points.reverse()) byX.set(each.point.x, [...(byX.get(each.point.x) ?? []), each]);
  return [...byX].map(([value, at]) => ({ x: xAt(value), head: picture.x.write(value), lines: at.map(entry) }));
}

/** A table of coloured cells {column, row, color, opacity, text, head, lines} below and behind their labels. */
function drawCells(picture, { width, height, colors, title = [] }) {
  const { columns, rows, cells } = picture;
  const left = 26 + widest(rows), top = 44 + 22 * title.length;
  const w = (width - left - 8) / columns.length, h = (height - top - 8) / rows.length;
  const parts = [words(picture.x_title, left + (width - left) / 2, top - 28, colors, { "text-anchor": "middle", class: "xtitle" })];
  const every = Math.ceil((widest(columns) + 6) / w);
  columns.forEach((text, i) => { if (i % every === 0) parts.push(words(text, left + (i + 0.5) * w, top - 8, colors, { "text-anchor": "middle", class: "xtick" })); });
  const skip = Math.ceil(11 / h);
  rows.forEach((text, i) => { if (i % skip === 0) parts.push(words(text, left - 6, top + (i + 0.5) * h + 4, colors, { "text-anchor": "end", "font-size": Math.min(12, Math.max(8, h)) })); });
  // Beside few lines its title has no room.
  if (rows.length > 3) parts.push(words(picture.y_title, 0, 0, colors, { "text-anchor": "middle", class: "ytitle", transform: `translate(12,${(top + height) / 2}) rotate(-90)` }));
  const size = Math.max(7, Math.min(11, h - 4, w / 3.4));
  for (const cell of cells) {
    const x = left + cell.column * w, y = top + cell.row * h;
    parts.push(node("rect", { x, y, width: w - 1, height: h - 1, fill: cell.color, "fill-opacity": cell.opacity, class: "mark" }));
    if (w > 20) parts.push(words(cell.text, x + w / 2, y + h / 2 + size / 3, colors, { "text-anchor": "middle", "font-size": size }));
  }
  const spots = cells.map((cell) => ({ x: left + (cell.column + 0.5) * w, y: top + (cell.row + 0.5) * h, head: cell.head, lines: cell.lines }));
  return { svg: standing(parts, width, height, colors, title), spots };
}

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

function showTip(spot, event) {
  const line = ({ color, text }) => {
    const made = document.createElement("div");
    const patch = document.createElement("i");
    patch.style.background = color;
    made.append(patch, text);
    return made;
  };
  const head = document.createElement("strong");
  head.textContent = spot.head ?? "";
  tip.replaceChildren(head, ...spot.lines.map(line));
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(4, event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY - height / 2, innerHeight - height - 4))}px`;
}

/** Puts a picture into its place and keeps it as wide as that; `draw` is drawChart or drawCells. */
function place(element, draw, picture, height) {
  const width = Math.max(280, element.clientWidth);
  const { svg, spots } = draw(picture, { width, height, colors: OF_PAGE, legend: picture.legend });
  element.picture = picture;
  element.replaceChildren(svg);
  const hair = svg.appendChild(segment(0, 8, 0, height - 44, { stroke: NEUTRAL, "stroke-dasharray": "2,2", visibility: "hidden" }));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), unit = width / box.width;
    const x = (event.clientX - box.left) * unit, y = (event.clientY - box.top) * unit;
    const distance = (spot) => Math.hypot(spot.x - x, spot.y == null ? 0 : spot.y - y);
    const nearest = spots.reduce((a, b) => (a && distance(a) <= distance(b) ? a : b), null);
    // All that stands at one x is shown wherever the pointer is; a single point from near by.
    if (!nearest || (nearest.y != null && distance(nearest) > 40)) return hide();
    showTip(nearest, event);
    if (nearest.y != null) return;
    hair.setAttribute("transform", `translate(${nearest.x},0)`);
    hair.setAttribute("visibility", "visible");
  });
  const hide = () => { tip.hidden = true; hair.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", hide);
}

/** Calls `draw` now and whenever the width of `element` changes. */
function keepDrawn(element, draw) {
  let width = null;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    draw();
  }).observe(element);
  draw();
}

/** Saves a picture that stands alone: light, and saying what it shows. */
async function savePicture(key, title, draw, picture, format, height) {
  const width = 800;
  const { svg } = draw(picture, { width, height, colors: LIGHT, title, legend: true });
  const text = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
  const link = document.createElement("a");
  link.href = format === "svg" ? text : await rastered(text, width, height);
  link.download = `${page.name}-${key}.${format}`;
  link.click();
}

async function rastered(source, width, height) {
  const image = new Image();
  image.width = width;
  image.height = height;
  image.src = source;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  return canvas.toDataURL("image/png");
}
