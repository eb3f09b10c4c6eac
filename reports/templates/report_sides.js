// Draws one kernel's figures of several runs into one picture, each run a line.
(() => {
  const measured = records.filter((row) => row.latency_us > 0 && row.status === "ok");
  if (!page.sides || !measured.length) return;

  // What tells the runs apart is no series of the picture.
  const ofSide = ["run", "source", "gpu"];
  const xAxis = page.axes.find((axis) => axis.is_x) ?? { name: "max_context", label: "context (tokens)" };
  const axes = page.axes.filter((axis) => axis.name !== xAxis.name && ![...ofSide, "cache"].includes(axis.name));
  const kernels = page.kernels.filter((kernel) => measured.some((row) => row.kernel === kernel));
  const { figure, quantities } = page.sides;
  const state = {
    chosen: fullestSeries(measured, axes, (row) => `${row.run} ${row.source} ${row.gpu} ${row[xAxis.name]}`),
    kernel: kernels[0], quantity: quantities[0],
  };
  const element = document.getElementById("sides-sides");

  function build() {
    const { column } = state.quantity;
    const shown = measured.filter((row) => row.kernel === state.kernel && row[column] != null
      && axes.every((axis) => row[axis.name] === state.chosen[axis.name]));
    const xs = [...new Set(shown.map((row) => row[xAxis.name]))].sort((a, b) => a - b);
    const xText = (x) => (xAxis.name === "max_context" ? tokens(x) : `${x}`);
    const data = figure.data.map((trace) => {
      const fastest = new Map();
      for (const row of shown) {
        if (!Object.entries(trace.meta).every(([name, value]) => row[name] === value)) continue;
        const before = fastest.get(row[xAxis.name]);
        if (!before || row.latency_us < before.latency_us) fastest.set(row[xAxis.name], row);
      }
      const found = xs.filter((x) => fastest.has(x));
      return { ...trace, x: found.map(xText), y: found.map((x) => fastest.get(x)[column]) };
    });
    const layout = {
      ...figure.layout, autosize: true, dragmode: false,
      xaxis: { ...figure.layout.xaxis, title: { text: xAxis.label }, categoryorder: "array", categoryarray: xs.map(xText) },
      yaxis: {
        ...figure.layout.yaxis, title: { text: state.quantity.y_title, standoff: 8 },
        ...(state.quantity.scale === "log" ? { type: "log", dtick: 1 } : { type: "linear", rangemode: "tozero" }),
      },
    };
    return { data, layout };
  }

  function draw(paper) {
    const { data, layout } = build();
    if (paper) Object.assign(layout, { autosize: false, ...paper, font: { ...layout.font, size: 9 } });
    Plotly.react(element, data, layout, plotConfig);
  }

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
      const { data, layout } = build();
      const series = axes.map((axis) => `${axis.label} ${state.chosen[axis.name]}`).join(", ");
      const title = `${plain(`${state.quantity.title} of ${state.kernel}`)}${series && `<br><sub>${plain(series)}</sub>`}`;
      savePicture("sides", title, data, layout, button.dataset.format, 480);
    }));
  addEventListener("beforeprint", () => draw({ width: 680, height: 260 }));
  addEventListener("afterprint", () => draw());

  drawSelectors();
  draw();
})();
