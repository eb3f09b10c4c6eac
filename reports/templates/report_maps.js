// Fills the heat maps over batch x heads x context with the rows of the series that is selected.
(() => {
  const measured = records.filter((row) => row.latency_us > 0 && row.status === "ok");
  if (!page.maps.length || !measured.length) return;

  const inMap = ["max_context", "batch", "q_heads", "group_size"];
  const axes = page.axes.filter((axis) => !inMap.includes(axis.name));
  const others = page.kernels.filter((kernel) => kernel !== page.subject);
  const cellOf = (row) => `${labelOf(row)} ${row.max_context}`;
  const state = {
    chosen: fullestSeries(measured, axes, cellOf),
    against: null,
    kernel: measured.some((row) => row.kernel === page.subject) ? page.subject : page.kernels[0],
  };

  function labelOf(row) {
    return `b${row.batch} h${row.q_heads}${row.q_heads === row.kv_heads ? "" : `/${row.kv_heads}`}`;
  }

  /** What the selected series has: sorted columns and rows, and each kernel's fastest row by cell. */
  function grid() {
    const series = measured.filter((row) => axes.every((axis) => row[axis.name] === state.chosen[axis.name]));
    const contexts = [...new Set(series.map((row) => row.max_context))].sort((a, b) => a - b);
    const bySize = (a, b) => a.batch - b.batch || a.q_heads - b.q_heads || a.kv_heads - b.kv_heads;
    const labels = [...new Set([...series].sort(bySize).map(labelOf))];
    const cells = new Map();
    for (const row of series) {
      const fastest = cells.get(cellOf(row)) ?? {};
      if (!(fastest[row.kernel]?.latency_us <= row.latency_us)) fastest[row.kernel] = row;
      cells.set(cellOf(row), fastest);
    }
    return { contexts, labels, at: (label, context) => Object.values(cells.get(`${label} ${context}`) ?? {}) };
  }

  const byLatency = (rows) => [...rows].sort((a, b) => a.latency_us - b.latency_us);
  const ratioText = (ratio) => ratio.toFixed(ratio < 9.995 ? 2 : 1);

  /** The value of a cell and the text on it; null where its rows do not say. */
  const values = {
    winner(rows) {
      const [first, second] = byLatency(rows);
      // One kernel alone, say because the others were noisy, has won nothing.
      if (!second) return null;
      const ratio = second.latency_us / first.latency_us;
      if (ratio <= 1 + page.margin) return [page.kernels.length, "≈"];
      return [page.kernels.indexOf(first.kernel), ratioText(ratio)];
    },
    speedup(rows) {
      const lean = rows.find((row) => row.kernel === page.subject);
      const [other] = byLatency(rows.filter((row) => row !== lean && (!state.against || row.kernel === state.against)));
      if (!lean || !other) return null;
      const ratio = other.latency_us / lean.latency_us;
      return [Math.log2(ratio), ratioText(ratio)];
    },
    floor(rows) {
      const share = rows.find((row) => row.kernel === state.kernel)?.read_floor_share;
      return share == null ? null : [share, (100 * share).toFixed(0)];
    },
  };

  function hover(rows) {
    const lines = byLatency(rows).map((row) => `${plain(row.kernel)} ${+row.latency_us.toPrecision(4)} µs`);
    return rows.length ? [plain(rows[0].problem), ...lines].join("<br>") : "";
  }

  function build(figure, width, height) {
    const { contexts, labels, at } = grid();
    const [trace] = figure.data;
    const cells = labels.map((label) => contexts.map((context) => at(label, context)));
    const found = cells.map((line) => line.map((rows) => (rows.length ? values[trace.meta](rows) : null)));
    const cellWidth = (width - 90) / contexts.length;
    const filled = {
      ...trace, x: contexts.map(tokens), y: labels,
      z: found.map((line) => line.map((each) => each && each[0])),
      text: found.map((line) => line.map((each) => (each ? each[1] : ""))),
      hovertext: cells.map((line) => line.map(hover)),
      textfont: { size: height < 16 * labels.length ? 7 : Math.max(8, Math.min(11, Math.round(cellWidth / 3.6))) },
      ...(cellWidth < 21 && { texttemplate: "" }),
    };
    if (trace.meta === "speedup") {
      const most = Math.max(Math.log2(1.1), ...filled.z.flat().filter((z) => z !== null).map(Math.abs));
      // Beyond 4x a colour is as strong as it gets: a few extremes would fade all others.
      filled.zmax = Math.min(2, most);
      filled.zmin = -filled.zmax;
    }
    const layout = { ...figure.layout, autosize: true, dragmode: false };
    // Beside few lines its title has no room.
    if (labels.length < 4) layout.yaxis = { ...layout.yaxis, title: { text: "" } };
    return { data: [filled], layout };
  }

  const element = (map) => document.getElementById(`maps-${map.key}`);
  const heightOf = (rows, each) => each * rows + 70;

  function draw(paper) {
    const { source, cache } = state.chosen;
    if (source) document.querySelectorAll("#maps figcaption .tag").forEach((tag) => { tag.textContent = source; });
    if (cache) document.querySelectorAll("#maps figcaption .l2").forEach((tag) => { tag.textContent = `${cache} L2`; });
    const lines = grid().labels.length;
    for (const map of page.maps) {
      const height = heightOf(lines, paper ? 12 : 20);
      element(map).style.height = `${height}px`;
      const { data, layout } = build(map.figure, paper?.width ?? element(map).clientWidth, height);
      if (paper) Object.assign(layout, { autosize: false, ...paper, height, font: { ...layout.font, size: 8 } });
      Plotly.react(element(map), data, layout, plotConfig);
    }
  }

  function drawSelectors() {
    const again = () => { drawSelectors(); draw(); };
    const controls = axes.map((axis) =>
      select(axis.label, axis.values.map(String), axis.values.indexOf(state.chosen[axis.name]), (i) => {
        state.chosen = nearestSeries(measured, axes, state.chosen, { name: axis.name, value: axis.values[i] });
        again();
      }));
    const has = (key) => page.maps.some((map) => map.key === key);
    const choices = [null, ...others];
    if (has("speedup") && others.length > 1)
      controls.push(select("speedup over", ["the fastest other", ...others], choices.indexOf(state.against), (i) => {
        state.against = choices[i];
        again();
      }));
    if (has("floor") && page.kernels.length > 1)
      controls.push(select("read floor share of", page.kernels, page.kernels.indexOf(state.kernel), (i) => {
        state.kernel = page.kernels[i];
        again();
      }));
    replaceSelectors("maps-selectors", controls);
  }

  function titleOf(map) {
    const of = { winner: "", speedup: ` over ${state.against ?? "the fastest other"}`, floor: ` of ${state.kernel}` };
    const series = axes.map((axis) => `${axis.label} ${state.chosen[axis.name]}`).join(", ");
    return pictureTitle(`${map.title}${of[map.key]}`, state.chosen, series);
  }

  document.querySelectorAll("#maps .save").forEach((button) =>
    button.addEventListener("click", () => {
      const map = page.maps[button.dataset.chart];
      const height = heightOf(grid().labels.length, 20) + 60;
      const { data, layout } = build(map.figure, 800, height);
      savePicture(`map-${map.key}`, titleOf(map), data, layout, button.dataset.format, height);
    }));
  addEventListener("beforeprint", () => draw({ width: 340 }));
  addEventListener("afterprint", () => draw());

  drawSelectors();
  draw();
})();
