// Fills the charts with the rows of the series that is selected.
(() => {
  const drawn = records.filter((row) => row.latency_us != null && (row.status === "ok" || row.status === "noisy"));
  if (!page.charts.length || !drawn.length) return;

  const xAxes = page.axes.filter((axis) => axis.is_x);
  const oneX = { name: "max_context", label: "context (tokens)", values: [] };
  const hiddenKernels = new Set();
  const severalSeries = page.axes.length > Math.min(1, xAxes.length);
  const state = { x: xAxes[0] || oneX, chosen: {} };

  const xText = (x) => (state.x.name === "max_context" ? tokens(x) : `${x}`);
  const positive = (value) => value > 0;

  /** Axes a reader chooses a value of: all that vary but the one on the x axis. */
  const choosable = () => page.axes.filter((axis) => axis.name !== state.x.name);
  const matches = (row) => choosable().every((axis) => row[axis.name] === state.chosen[axis.name]);
  /** Measured and predicted rows, two GPUs or runs, or a cold and a warm L2 never share a picture. */
  const comparable = (row) => ["run", "source", "gpu", "cache"].every((name) => !(name in state.chosen) || row[name] === state.chosen[name]);

  function chooseFullest() {
    state.chosen = fullestSeries(drawn, choosable(), (row) => row[state.x.name]);
  }

  /** One row for each x: a kernel that ran with several configs is drawn with its fastest. */
  function fastestByX(series, x) {
    const byX = new Map();
    for (const row of series) if (!byX.has(row[x]) || row.latency_us < byX.get(row[x]).latency_us) byX.set(row[x], row);
    return [...byX.values()].sort((a, b) => a[x] - b[x]);
  }

  function hover(row, meta) {
    const parts = [];
    const reach = [meta.low, meta.high].map((column) => (column ? row[column] : null));
    if (reach.every((value) => value != null)) parts.push(` (${reach.map((value) => +value.toPrecision(4)).join(" to ")})`);
    if (row.status === "noisy") parts.push(" noisy");
    if (row.warnings) parts.push(" !");
    if (meta.all_problems) parts.push(`<br>${plain(row.problem)}`);
    return parts.join("");
  }

  function kernelTrace(trace, meta, series, x, asBars) {
    const column = trace.meta.column ?? meta.y;
    let points = series.filter((row) => row.kernel === trace.meta.kernel && row[column] != null);
    if (!meta.all_problems) points = fastestByX(points, x);
    const symbol = trace.marker.symbol;
    const filled = {
      ...trace,
      x: points.map((row) => (asBars ? trace.name : row[x])),
      y: points.map((row) => row[column]),
      text: points.map((row) => hover(row, meta)),
      mode: meta.all_problems && severalSeries ? "markers" : "lines+markers",
      visible: !hiddenKernels.has(trace.meta.kernel),
    };
    if (trace.meta.column) return besideTrace(filled, asBars);
    if (asBars) {
      const unused = { mode: undefined, cliponaxis: undefined, line: undefined };
      Object.assign(filled, { ...unused, type: "bar", textposition: "none", marker: { color: trace.marker.color } });
    } else {
      const symbols = points.map((row) => (row.status === "noisy" ? `${symbol}-open` : symbol));
      const crowded = meta.all_problems && points.length > 60;
      filled.marker = { ...trace.marker, symbol: symbols, ...(crowded && { opacity: 0.65, size: 5 }) };
    }
    const ringed = points.map((row) => (row.warnings ? 2 : 0));
    if (ringed.some(Boolean)) filled.marker = { ...filled.marker, line: { color: "#D99A1C", width: ringed } };
    if (meta.low) {
      const above = points.map((row) => Math.max(0, (row[meta.high] ?? row[meta.y]) - row[meta.y]));
      const below = points.map((row) => Math.max(0, row[meta.y] - (row[meta.low] ?? row[meta.y])));
      filled.error_y = { ...trace.error_y, array: above, arrayminus: below };
      // On a bar of its own colour it would not be seen.
      if (asBars) filled.error_y.color = "#808690";
    }
    return filled;
  }

  /** Dotted; on bars, a line across each. */
  function besideTrace(filled, asBars) {
    if (!asBars) return { ...filled, text: filled.text.map(() => ""), mode: filled.mode === "markers" ? "markers" : "lines" };
    const { color } = filled.marker;
    return { ...filled, text: [], mode: "markers", marker: { symbol: "line-ew", size: 30, line: { color: "#808690", width: 2 }, color } };
  }

  function floorTrace(trace, meta, series, x) {
    const points = fastestByX(series.filter((row) => positive(row[meta.floor])), x);
    return { ...trace, x: points.map((row) => row[x]), y: points.map((row) => row[meta.floor]) };
  }

  /** Ticks at the values that occur, those left out that would touch their neighbour. */
  function xTicks(xs, width) {
    const logs = xs.map(Math.log10);
    const span = logs[logs.length - 1] - logs[0] || 1;
    const gap = (span * 44) / Math.max(width - 90, 100);
    const kept = [];
    logs.forEach((log, i) => { if (!kept.length || log - logs[kept[kept.length - 1]] >= gap) kept.push(i); });
    const margin = Math.max(span * 0.03, 0.02);
    return {
      type: "log", tickvals: kept.map((i) => xs[i]), ticktext: kept.map((i) => xText(xs[i])),
      range: [logs[0] - margin, logs[logs.length - 1] + margin], hoverformat: ",d",
    };
  }

  function bytesText(bytes) {
    const [unit, size] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find((each) => bytes >= each[1]) ?? ["B", 1];
    return `${+(bytes / size).toPrecision(3)} ${unit}`;
  }

  /** 1, 2, 5, 10 and so on, written out; powers of ten alone where those would be too many. */
  function logTicks(low, high, write = (tick) => tick.toLocaleString("en")) {
    const steps = Math.log10(high / low) > 2.6 ? [1] : [1, 2, 5];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power++)
      for (const step of steps) ticks.push(+(step * 10 ** power).toPrecision(1));
    const pad = Math.max(0.04 * Math.log10(high / low), 0.03);
    return {
      tickvals: ticks, ticktext: ticks.map(write),
      range: [Math.log10(low) - pad, Math.log10(high) + pad],
    };
  }

  /** What an empty picture says: which choice would fill it. */
  function emptyNote(meta) {
    const near = nearestSeries(drawn.filter((row) => row[meta.y] != null), choosable(), state.chosen);
    const other = choosable().filter((axis) => near[axis.name] !== state.chosen[axis.name]);
    const words = other.map((axis) => `${axis.label} ${axis.name === "max_context" ? tokens(near[axis.name]) : near[axis.name]}`);
    const text = `no values in this series; choose<br>${plain(words.join(", "))}`;
    return { text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
  }

  function layoutOf(figure, data, xs, asBars, width) {
    const meta = figure.layout.meta;
    // A finger that drags wants to scroll the page.
    const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    const layout = { ...figure.layout, autosize: true, dragmode };
    if (!data.some((trace) => trace.meta.kernel !== null && trace.y.length)) {
      const bare = { showgrid: false, showline: false, showticklabels: false, ticks: "", title: { text: "" } };
      return { ...layout, xaxis: { ...layout.xaxis, ...bare }, yaxis: { ...layout.yaxis, ...bare }, shapes: [], annotations: [emptyNote(meta)] };
    }
    const values = data.flatMap((trace) => (trace.visible === false ? [] : trace.y)).filter(positive);
    // At least 10% either way: a zoom into the last percent would draw noise as a slope.
    if (meta.line_at !== null && meta.y_scale === "auto") values.push(0.9 * meta.line_at, 1.1 * meta.line_at);
    const spread = Math.max(...values) / Math.min(...values);
    const isLog = !asBars && (meta.y_scale === "log" || (meta.y_scale === "auto" && spread > 5));
    layout.yaxis = { ...layout.yaxis, type: isLog ? "log" : "linear" };
    if (isLog) Object.assign(layout.yaxis, logTicks(Math.min(...values), Math.max(...values)));
    if (asBars) return layout;
    if (meta.all_problems) layout.xaxis = { ...layout.xaxis, type: "log", ...logTicks(xs[0], xs[xs.length - 1], bytesText) };
    else layout.xaxis = { ...layout.xaxis, ...xTicks(xs, width), title: { text: state.x.label } };
    if (meta.y_scale === "auto" && !isLog && !asBars) {
      const low = Math.min(...values), high = Math.max(...values), pad = 0.08 * (high - low) || 0.1;
      layout.yaxis.range = [low - pad, high + pad];
    }
    return layout;
  }

  function build(chart, width) {
    const { figure } = chart;
    const meta = figure.layout.meta;
    const series = drawn.filter(meta.all_problems ? comparable : matches);
    const x = meta.all_problems ? "kv_bytes" : state.x.name;
    const xs = [...new Set(series.map((row) => row[x]))].sort((a, b) => a - b);
    // Over a single x, lines are dots above one another: bars side by side read better.
    const asBars = xs.length === 1 && (!meta.all_problems || new Set(series.map((row) => row.problem)).size === 1);
    const data = figure.data.map((trace) =>
      trace.meta.kernel === null ? floorTrace(trace, meta, series, x) : kernelTrace(trace, meta, series, x, asBars));
    const layout = layoutOf(figure, data, xs, asBars, width);
    if (asBars) barsLayout(data, layout);
    return { data, layout };
  }

  /** Bars of kernels side by side, lean first; the read floor is a line across. */
  function barsLayout(data, layout) {
    const bars = data.filter((trace) => trace.type === "bar" && trace.y.length && trace.visible).reverse();
    bars.forEach((trace) => { trace.width = Math.min(0.5, 0.12 * bars.length); });
    const categories = { type: "category", categoryarray: bars.map((trace) => trace.name) };
    layout.xaxis = { ...layout.xaxis, ...categories, showgrid: false, title: { text: "" } };
    layout.yaxis = { ...layout.yaxis, rangemode: "tozero" };
    layout.hovermode = "closest";
    const floor = data.find((trace) => trace.meta.kernel === null);
    if (!floor?.y.length) return;
    const across = { type: "line", xref: "paper", x0: 0, x1: 1, y0: floor.y[0], y1: floor.y[0], line: floor.line };
    layout.shapes = [...(layout.shapes ?? []), across];
    Object.assign(floor, { x: [], y: [] });
  }

  const element = (chart) => document.getElementById(`charts-${chart.figure.layout.meta.key}`);
  const seriesText = () => choosable().map((axis) => `${axis.label} ${state.chosen[axis.name]}`).join(", ");

  /** `paper`: the size of a chart where the page cannot stretch it. */
  function draw(paper) {
    const { source, cache } = state.chosen;
    if (source) document.querySelectorAll("#charts figcaption .tag").forEach((tag) => { tag.textContent = source; });
    if (cache) document.querySelectorAll("#charts figcaption .l2").forEach((tag) => { tag.textContent = `${cache} L2`; });
    for (const chart of page.charts) {
      const { data, layout } = build(chart, paper?.width ?? element(chart).clientWidth);
      if (paper) Object.assign(layout, { autosize: false, ...paper, font: { ...layout.font, size: 9 } });
      Plotly.react(element(chart), data, layout, plotConfig);
    }
  }

  function drawSelectors() {
    const again = () => { drawSelectors(); draw(); };
    const controls = [];
    if (xAxes.length > 1)
      controls.push(select("x axis", xAxes.map((axis) => axis.label), xAxes.indexOf(state.x), (i) => {
        state.x = xAxes[i];
        chooseFullest();
        again();
      }));
    for (const axis of choosable()) {
      const texts = axis.values.map((value) => (axis.name === "max_context" ? tokens(value) : `${value}`));
      controls.push(select(axis.label, texts, axis.values.indexOf(state.chosen[axis.name]), (i) => {
        state.chosen = nearestSeries(drawn, choosable(), state.chosen, { name: axis.name, value: axis.values[i] });
        again();
      }));
    }
    replaceSelectors("charts-selectors", controls);
  }

  function save(chart, format) {
    const { data, layout } = build(chart, 800);
    const series = chart.figure.layout.meta.all_problems ? "" : seriesText();
    const alone = { ...layout, showlegend: true, legend: { ...layout.legend, orientation: "h", y: -0.18 } };
    const title = pictureTitle(chart.title, state.chosen, series);
    savePicture(chart.figure.layout.meta.key, title, data, alone, format, 480);
  }

  document.querySelectorAll("#legend button").forEach((button) =>
    button.addEventListener("click", () => {
      const kernel = button.dataset.kernel;
      if (!hiddenKernels.delete(kernel)) hiddenKernels.add(kernel);
      button.setAttribute("aria-pressed", String(!hiddenKernels.has(kernel)));
      draw();
    }));
  document.querySelectorAll("#charts .save").forEach((button) =>
    button.addEventListener("click", () => save(page.charts[button.dataset.chart], button.dataset.format)));
  addEventListener("beforeprint", () => draw({ width: 340, height: 210 }));
  addEventListener("afterprint", () => draw());

  chooseFullest();
  drawSelectors();
  draw();
})();
