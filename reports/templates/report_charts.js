// Fills the charts with the rows of the series that is selected.
(() => {
  const drawn = records.filter((row) => row.latency_us != null && timed(row));
  if (!page.charts.length || !drawn.length) return;

  const xAxes = page.axes.filter((axis) => axis.is_x);
  const oneX = { name: "max_context", label: "context (tokens)", values: [] };
  const hiddenKernels = new Set();
  const severalSeries = page.axes.length > Math.min(1, xAxes.length);
  const state = { x: xAxes[0] || oneX, chosen: {} };

  const xText = (x) => textOf(state.x, x);
  const positive = (value) => value > 0;

  /** Axes of a series: all that vary but the one on the x axis. */
  const choosable = () => page.axes.filter((axis) => axis.name !== state.x.name);
  const ofSeries = (axes, chosen) => drawn.filter((row) => axes.every((axis) => row[axis.name] === chosen[axis.name]));
  const xAxesOfRun = () => varyingIn(drawn, xAxes, state.chosen);

  function chooseFullest(rows) {
    state.chosen = fullestSeries(rows, choosable(), (row) => row[state.x.name]);
  }

  /** The fullest series of the chosen run, over an x axis that varies in it. */
  function chooseInRun() {
    const known = xAxesOfRun();
    if (known.length && !known.includes(state.x)) state.x = known[0];
    chooseFullest(drawn.filter((row) => comparable(row, state.chosen)));
  }

  /** Whether a chart shows every problem of the run. */
  const isOfAll = (chart) => Boolean(chart.x) && !chart.along;

  /** The series that a chart shows: the chosen one, or the nearest that has values for it. */
  function seriesOf(chart) {
    const axes = choosable().filter((axis) => (!isOfAll(chart) || isCompared(axis)) && axis.name !== chart.along);
    const sums = chart.stack.slice(0, -1);
    const isFollowed = (row) => drawn.some((other) => other[chart.along] !== row[chart.along] && page.axes.every((axis) => axis.name === chart.along || other[axis.name] === row[axis.name]));
    const holds = (row) => row[chart.y] != null && (!chart.reading || row.window) && (!chart.along || isFollowed(row)) && (!sums.length || (isBaseline(row) && sums.some(([column]) => row[column] != null)));
    const rows = ofSeries(axes, state.chosen);
    if (rows.some(holds)) return { chosen: state.chosen, rows };
    const chosen = nearestSeries(drawn.filter(holds), axes, state.chosen);
    return { chosen: { ...state.chosen, ...chosen }, rows: ofSeries(axes, chosen) };
  }

  const told = (chosen) => varyingIn(drawn, choosable(), chosen);

  /** One row for each x: a kernel that ran with several configs is drawn with its fastest. */
  function fastestByX(series, x) {
    const byX = new Map();
    for (const row of series) if (!byX.has(row[x]) || row.latency_us < byX.get(row[x]).latency_us) byX.set(row[x], row);
    return [...byX.values()].sort((a, b) => a[x] - b[x]);
  }

  const isApart = (a, b, chart) => state.x.name !== chart.along && a[state.x.name] !== b[state.x.name];

  /** Rows in the order of their lines: those with one value of the selected axis, from batch to batch. */
  function followed(rows, chart) {
    const fastest = rows.filter((row) => rows.every((other) => other[chart.along] !== row[chart.along] || isApart(row, other, chart) || other.latency_us >= row.latency_us));
    return fastest.sort((a, b) => (isApart(a, b, chart) ? a[state.x.name] - b[state.x.name] : a[chart.along] - b[chart.along]));
  }

  function hover(row, chart) {
    const parts = [];
    const reach = [chart.low, chart.high].map((column) => (column ? row[column] : null));
    if (reach.every((value) => value != null)) parts.push(` (${reach.map((value) => +value.toPrecision(4)).join(" to ")})`);
    if (row.status === "noisy") parts.push(" noisy");
    if (row.warnings) parts.push(" !");
    return parts.join("");
  }

  /** Rows of a kernel that have a value in `column`, as points at `x` or at the kernel's bar. */
  function pointsOf(kernel, column, chart, series, x, asBars) {
    const rows = series.filter((row) => row.kernel === kernel.name && row[column] != null);
    const several = chart.along ? followed(rows, chart) : chart.x ? rows : fastestByX(rows, x);
    const ends = (row, next) => !next || isApart(row, next, chart);
    const isNamed = (row, i) => isBaseline(row) && state.x.name !== chart.along && ends(row, several[i + 1]);
    return several.map((row, i) => ({
      ...(chart.along && { starts: ends(row, several[i - 1]), name: isNamed(row, i) ? xText(row[state.x.name]) : null }),
      x: asBars ? kernel.name : row[x], y: row[column], text: column === chart.y ? hover(row, chart) : "", head: row.problem,
      open: row.status === "noisy", ringed: column === chart.y && Boolean(row.warnings),
      ...(column === chart.y && chart.low && { low: row[chart.low] ?? row[chart.y], high: row[chart.high] ?? row[chart.y] }),
    }));
  }

  function kernelLine(kernel, chart, series, x, asBars) {
    const points = pointsOf(kernel, chart.y, chart, series, x, asBars);
    const crowded = isOfAll(chart) && points.length > 60;
    return {
      name: kernel.name, color: kernel.color, symbol: kernel.symbol,
      width: series.some((row) => row.kernel === kernel.name && isBaseline(row)) ? 2.5 : 1.5,
      hidden: hiddenKernels.has(kernel.name), joined: !(isOfAll(chart) && (severalSeries || chart.has_roofs)), bar: asBars, points,
      ...(crowded && { radius: 2.4, opacity: 0.65 }),
    };
  }

  /** What the schedule allows: dotted, or a line across each bar. */
  function dottedLine(kernel, chart, series, x, asBars) {
    return {
      name: `${kernel.name}, ${chart.dotted_name}`, color: asBars ? NEUTRAL : kernel.color, dash: asBars ? null : "2,3",
      hidden: hiddenKernels.has(kernel.name), joined: true, stroke: asBars, dotted: true,
      points: pointsOf(kernel, chart.dotted, chart, series, x, asBars),
    };
  }

  /** What adds up to the baseline's line, lowest last: each filled from the sum below it. */
  function stackedAreas(chart, series, x, asBars) {
    const rows = fastestByX(series.filter(isBaseline), x);
    const sums = chart.stack.filter(([column]) => rows.some((row) => row[column] != null));
    return sums.map(([column, name], i) => {
      const below = (row) => (i ? row[sums[i - 1][0]] : 0);
      const whole = rows.filter((row) => row[column] != null && below(row) != null);
      const time = (row) => (columnOf(column).kind === "share" ? ` (${written((row[column] - below(row)) * row.latency_us, "latency_us")})` : "");
      const points = whole.map((row) => ({ x: asBars ? row.kernel : row[x], y: row[column], base: below(row), text: time(row) }));
      return { name, color: page.colors[(i + 3) % page.colors.length], area: !asBars, bar: asBars, points };
    });
  }

  function floorLine(chart, series, x, asBars) {
    const rows = fastestByX(series.filter((row) => positive(row[chart.floor])), x);
    const points = rows.map((row) => ({ x: asBars ? row.kernel : row[x], y: row[chart.floor] }));
    return { name: chart.floor_name, color: NEUTRAL, dash: "5,3", joined: true, across: asBars, points };
  }

  /** Limits of the GPU over the range of `xs`; that of the tensor cores only where rows come near. */
  function roofLines(series, xs) {
    const roofs = page.roofs[series[0].run];
    if (!roofs) return [];
    const [low, high] = [xs[0], xs[xs.length - 1]], ridge = roofs.tflop_s / roofs.bandwidth_tb_s;
    const line = (ends, label) => ({ name: label, label, color: NEUTRAL, joined: true, points: ends.map((x) => ({ x, y: Math.min(roofs.tflop_s, x * roofs.bandwidth_tb_s) })) });
    const lines = [];
    if (low < ridge) lines.push(line([low, Math.min(high, ridge)], `memory, ${roofs.bandwidth_tb_s} TB/s`));
    if (high > ridge / 8) lines.push(line([Math.max(low, ridge), Math.max(high, 2 * ridge)], `tensor cores, ${Math.round(roofs.tflop_s).toLocaleString("en")} TFLOP/s`));
    return lines;
  }

  /** Ticks at the values that occur, those left out that would touch their neighbour. */
  function xTicks(xs, width) {
    const logs = xs.map(Math.log10);
    const span = logs[logs.length - 1] - logs[0] || 1;
    const gap = (span * 44) / Math.max(width - 90, 100);
    const shown = [];
    logs.forEach((log, i) => { if (!shown.length || log - logs[shown[shown.length - 1]] >= gap) shown.push(i); });
    const margin = 10 ** Math.max(span * 0.03, 0.02);
    return { type: "log", ticks: shown.map((i) => [xs[i], xText(xs[i])]), range: [xs[0] / margin, xs[xs.length - 1] * margin], write: xText };
  }

  function bytesText(bytes) {
    const [unit, size] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find((each) => bytes >= each[1]) ?? ["B", 1];
    return `${+(bytes / size).toPrecision(3)} ${unit}`;
  }

  function yAxis(chart, lines, asBars) {
    const shown = lines.filter((line) => !line.hidden).flatMap((line) => line.points);
    const all = shown.flatMap((point) => [point.y, point.low, point.high]).filter((value) => value != null);
    const values = all.filter(positive);
    // Room for the names of limits and lines.
    if (shown.some((point) => point.name) || lines.some((line) => line.label)) values.push(1.5 * Math.max(...values));
    // At least 10% either way: a range of the last percent would draw noise as a slope.
    if (chart.line_at && chart.y_scale === "auto") values.push(0.9 * chart.line_at, 1.1 * chart.line_at);
    const spread = Math.max(...values) / Math.min(...values);
    const isLog = !asBars && (chart.y_scale === "log" || (chart.y_scale === "auto" && spread > 5));
    const axis = { title: chart.y_title, write: (value) => written(value, chart.y) };
    if (isLog) return { ...axis, ...logTicks(values) };
    const low = chart.y_scale === "auto" && !asBars ? Math.min(...values) : Math.min(0, ...all);
    return { ...axis, ...linearTicks(low, Math.max(0, ...all, ...values, chart.line_at ?? 0), chart.y) };
  }

  /** What was read over the seconds of a window, of each kernel's problem with the highest x. */
  function overWindow(chart) {
    const { chosen, rows } = seriesOf(chart);
    const held = rows.filter((row) => row.window);
    const last = Math.max(...held.map((row) => row[state.x.name]));
    const lines = page.kernels.map((kernel) => {
      const [row] = fastestByX(held.filter((each) => each.kernel === kernel.name && each[state.x.name] === last), state.x.name);
      const readings = row ? row.window.filter((reading) => reading[chart.reading] != null) : [];
      const points = readings.map((reading) => ({ x: reading[0], y: reading[chart.reading], head: row.problem }));
      return { name: kernel.name, color: kernel.color, width: row && isBaseline(row) ? 2.5 : 1.5, hidden: hiddenKernels.has(kernel.name), joined: true, points };
    }).filter((line) => line.points.length).reverse();
    if (!lines.length) return null;
    const seconds = Math.max(...lines.map((line) => line.points.at(-1).x));
    return { chosen, lines, closest: true, x: { title: "seconds", write: String, ...linearTicks(0, seconds, chart.y) }, y: yAxis(chart, lines, false) };
  }

  function build(chart, width) {
    if (chart.reading) return overWindow(chart);
    const { chosen, rows: series } = seriesOf(chart);
    const x = chart.x || state.x.name;
    const xs = [...new Set(series.map((row) => row[x]))].sort((a, b) => a - b);
    // Over a single x, lines are dots above one another: bars side by side read better.
    const asBars = xs.length === 1 && (!chart.x || new Set(series.map((row) => row.problem)).size === 1);
    const stacked = new Set(series.filter(isBaseline).map((row) => row.kernel));
    // What comes last lies on top: the baseline, the first of the kernels.
    const kernels = page.kernels.filter((kernel) => !chart.stack.length || stacked.has(kernel.name)).reverse();
    const lines = kernels.map((kernel) => kernelLine(kernel, chart, series, x, asBars));
    if (chart.stack.length) for (const line of lines) line.bar = false;
    if (chart.dotted) lines.unshift(...kernels.map((kernel) => dottedLine(kernel, chart, series, x, asBars)));
    if (chart.floor) lines.unshift(floorLine(chart, series, x, asBars));
    if (chart.stack.length) lines.unshift(...stackedAreas(chart, series, x, asBars));
    const roofs = chart.has_roofs && !asBars ? roofLines(series, xs) : [];
    lines.unshift(...roofs);
    const drawnLines = lines.filter((line) => line.points.length);
    if (!drawnLines.some((line) => line.symbol)) return null;
    const bars = lines.filter((line) => line.symbol && line.points.length && !line.hidden).map((line) => line.name).reverse();
    let xAxis = { title: state.x.label, ...xTicks(xs, width) };
    if (asBars) xAxis = { type: "category", values: bars, ticks: bars.map((name) => [name, name]), title: "", write: String };
    else if (chart.x) xAxis = { title: chart.x_title, write: String, ...logTicks([...xs, ...roofs.flatMap((roof) => roof.points.map((point) => point.x))], chart.x === "kv_bytes" ? bytesText : undefined) };
    const closest = Boolean(chart.x) || asBars;
    return { chosen, lines, x: xAxis, y: yAxis(chart, drawnLines, asBars), line_at: chart.line_at, closest, legend: chart.stack.length > 0 };
  }

  const element = (chart) => document.getElementById(`charts-${chart.key}`);

  function draw() {
    const shown = new Set();
    for (const chart of page.charts) {
      const figure = element(chart).closest("figure");
      const picture = build(chart, element(chart).clientWidth);
      figure.hidden = !picture;
      if (!picture) continue;
      tagFigure(figure, picture.chosen);
      const other = told(picture.chosen).filter((axis) => picture.chosen[axis.name] !== state.chosen[axis.name]);
      const instead = seriesText(other, picture.chosen);
      figure.querySelector(".series").textContent = instead && `No values in the chosen series. Shown: ${instead}.`;
      for (const line of picture.lines) if (line.points.length) shown.add(line.name);
      place(element(chart), drawChart, picture, 310);
    }
    document.querySelectorAll("#legend button").forEach((button) => { button.hidden = !shown.has(button.dataset.kernel); });
  }

  function drawSelectors() {
    const again = (axis) => {
      if (isCompared(axis)) chooseInRun();
      drawSelectors();
      draw();
    };
    const known = xAxesOfRun();
    const controls = selectorsOf(drawn, choosable(), state, again);
    if (known.length > 1)
      controls.unshift(select("x axis", known.map((axis) => axis.label), known.indexOf(state.x), (i) => {
        state.x = known[i];
        chooseFullest(drawn.filter((row) => comparable(row, state.chosen)));
        again(state.x);
      }));
    replaceSelectors("charts-selectors", controls);
  }

  document.querySelectorAll("#legend button").forEach((button) =>
    button.addEventListener("click", () => {
      const kernel = button.dataset.kernel;
      if (!hiddenKernels.delete(kernel)) hiddenKernels.add(kernel);
      button.setAttribute("aria-pressed", String(!hiddenKernels.has(kernel)));
      draw();
    }));
  document.querySelectorAll("#charts .save").forEach((button) =>
    button.addEventListener("click", () => {
      const chart = page.charts[button.dataset.chart];
      const picture = build(chart, 800);
      const title = pictureTitle(chart.title, picture.chosen, isOfAll(chart) ? "" : seriesText(told(picture.chosen), picture.chosen));
      savePicture(chart.key, title, drawChart, picture, button.dataset.format, 480);
    }));

  chooseFullest(drawn);
  chooseInRun();
  drawSelectors();
  keepDrawn(document.querySelector("#charts .grid"), draw);
})();
