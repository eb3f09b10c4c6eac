// Draws one kernel's figures of several runs into one picture, each run a line.
(() => {
  const measured = records.filter((row) => row.latency_us > 0 && timed(row));
  const element = document.getElementById("sides-sides");
  if (!element || !measured.length) return;

  // What tells the runs apart is no series of the picture.
  const ofSide = ["run", "source", "gpu", "cache"];
  const xAxis = page.axes.find((axis) => axis.is_x) ?? { name: "max_context", label: "context (tokens)" };
  const axes = page.axes.filter((axis) => axis.name !== xAxis.name && !ofSide.includes(axis.name));
  const kernels = page.kernels.map((kernel) => kernel.name).filter((name) => measured.some((row) => row.kernel === name));
  const { lines, quantities } = page.sides;
  const state = {
    chosen: fullestSeries(measured, axes, (row) => `${row.run} ${row.source} ${row.gpu} ${row[xAxis.name]}`),
    kernel: kernels[0], quantity: quantities[0],
  };

  function lineOf(side, shown, column, xText) {
    const fastest = new Map();
    for (const row of shown) {
      if (!ofSide.every((name) => row[name] === side[name])) continue;
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
    const shown = measured.filter((row) => row.kernel === state.kernel && row[column] != null
      && axes.every((axis) => row[axis.name] === state.chosen[axis.name]));
    const xText = (x) => (xAxis.name === "max_context" ? tokens(x) : `${x}`);
    const values = [...new Set(shown.map((row) => row[xAxis.name]))].sort((a, b) => a - b).map(xText);
    const drawn = lines.map((side) => lineOf(side, shown, column, xText)).reverse();
    const ys = drawn.flatMap((line) => line.points.map((point) => point.y));
    const ticks = scale === "log" ? logTicks(ys) : linearTicks(0, Math.max(...ys), column);
    return {
      lines: drawn, legend: true,
      x: { type: "category", values, ticks: values.map((value) => [value, value]), title: xAxis.label, write: String },
      y: { title: y_title, write: (value) => written(value, column), ...ticks },
    };
  }

  const draw = () => place(element, drawChart, build(), 310 + 18 * lines.length);

  function drawSelectors() {
    const again = () => { drawSelectors(); draw(); };
    const controls = [];
    if (kernels.length > 1)
      controls.push(select("kernel", kernels, kernels.indexOf(state.kernel), (i) => { state.kernel = kernels[i]; again(); }));
    if (quantities.length > 1)
      controls.push(select("shown", quantities.map((each) => each.title), quantities.indexOf(state.quantity), (i) => {
        state.quantity = quantities[i];
        again();
      }));
    for (const axis of axes)
      controls.push(select(axis.label, axis.values.map(String), axis.values.indexOf(state.chosen[axis.name]), (i) => {
        state.chosen = nearestSeries(measured, axes, state.chosen, { name: axis.name, value: axis.values[i] });
        again();
      }));
    replaceSelectors("sides-selectors", controls);
  }

  document.querySelectorAll("#side-by-side .save").forEach((button) =>
    button.addEventListener("click", () => {
      const series = axes.map((axis) => `${axis.label} ${state.chosen[axis.name]}`).join(", ");
      const title = [`${state.quantity.title} of ${state.kernel}`, series].filter(Boolean);
      savePicture("sides", title, drawChart, build(), button.dataset.format, 480);
    }));

  drawSelectors();
  keepDrawn(element, draw);
})();
