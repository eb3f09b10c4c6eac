// Draws one kernel's figures of several runs into one picture, each run a line.
(() => {
  const measured = records.filter((row) => row.latency_us > 0 && timed(row));
  const element = document.getElementById("sides-sides");
  if (!element || !measured.length) return;

  const xAxis = page.axes.find((axis) => axis.is_x) ?? { name: "max_context", label: "context (tokens)" };
  // What tells the runs apart is no series of the picture.
  const axes = page.axes.filter((axis) => axis.name !== xAxis.name && !isCompared(axis));
  const { lines, quantities } = page.sides;
  const state = {
    chosen: fullestSeries(measured, axes, (row) => `${row.run} ${row.source} ${row.gpu} ${row[xAxis.name]}`),
    kernel: page.kernels[0].name, quantity: quantities[0],
  };

  const known = () => measured.filter((row) => row[state.quantity.column] != null);
  const ofKernel = () => known().filter((row) => row.kernel === state.kernel);
  const kernels = () => page.kernels.map((kernel) => kernel.name).filter((name) => known().some((row) => row.kernel === name));

  /** The nearest choice that has values. */
  function settle() {
    if (!ofKernel().length) [state.kernel] = kernels();
    state.chosen = nearestSeries(ofKernel(), axes, state.chosen);
    drawSelectors();
    draw();
  }

  function lineOf(side, shown, column, xText) {
    const fastest = new Map();
    for (const row of shown) {
      if (!COMPARED.every((name) => row[name] === side[name])) continue;
      const before = fastest.get(row[xAxis.name]);
      if (!before || row.latency_us < before.latency_us) fastest.set(row[xAxis.name], row);
    }
    const xs = [...fastest.keys()].sort((a, b) => a - b);
    const points = xs.map((x) => ({ x: xText(x), y: fastest.get(x)[column] }));
    // A prediction is dotted: nobody measured that line.
    return { name: side.name, color: side.color, symbol: side.symbol, dash: side.source === "predicted" ? "2,3" : null, width: 2, joined: true, points };
  }

  function build() {
    const { column, scale, y_title } = state.quantity;
    const shown = ofKernel().filter((row) => axes.every((axis) => row[axis.name] === state.chosen[axis.name]));
    const xText = (x) => textOf(xAxis, x);
    const values = [...new Set(shown.map((row) => row[xAxis.name]))].sort((a, b) => a - b).map(xText);
    const drawn = lines.map((side) => lineOf(side, shown, column, xText)).filter((line) => line.points.length).reverse();
    const ys = drawn.flatMap((line) => line.points.map((point) => point.y));
    const ticks = scale === "log" ? logTicks(ys) : linearTicks(0, Math.max(...ys), column);
    return {
      lines: drawn, legend: true,
      x: { type: "category", values, ticks: values.map((value) => [value, value]), title: xAxis.label, write: String },
      y: { title: y_title, write: (value) => written(value, column), ...ticks },
    };
  }

  function draw() {
    const picture = build();
    place(element, drawChart, picture, 310 + 18 * picture.lines.length);
  }

  function drawSelectors() {
    const choices = [["kernel", "kernel", kernels(), String], ["shown", "quantity", quantities, (each) => each.title]];
    const controls = choices.filter(([, , values]) => values.length > 1).map(([label, name, values, text]) =>
      select(label, values.map(text), values.indexOf(state[name]), (i) => { state[name] = values[i]; settle(); }));
    replaceSelectors("sides-selectors", [...controls, ...selectorsOf(ofKernel(), axes, state, settle)]);
  }

  document.querySelectorAll("#side-by-side .save").forEach((button) =>
    button.addEventListener("click", () => {
      const series = seriesText(varyingIn(ofKernel(), axes, state.chosen), state.chosen);
      const title = [`${state.quantity.title} of ${state.kernel}`, series].filter(Boolean);
      savePicture("sides", title, drawChart, build(), button.dataset.format, 480);
    }));

  settle();
  keepDrawn(element, draw);
})();
