// Fills the heat maps over batch x heads x context with the rows of the series that is selected.
(() => {
  const measured = records.filter((row) => row.latency_us > 0 && timed(row) && row.kernel !== page.bound);
  if (!page.maps.length || !measured.length) return;

  const inMap = ["max_context", "batch", "q_heads", "group_size"];
  const axes = page.axes.filter((axis) => !inMap.includes(axis.name));
  const names = page.kernels.map((kernel) => kernel.name);
  const cellOf = (row) => `${labelOf(row)} ${row.max_context}`;
  const state = {
    chosen: fullestSeries(measured, axes, cellOf),
    against: null,
    kernel: null,
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
      // One kernel alone, say because the others crashed, has won nothing.
      if (!second) return null;
      const ratio = second.latency_us / first.latency_us;
      // As in leanbench/records/standing.py.
      const overlap = (first.latency_ci_high_us ?? first.latency_us) >= (second.latency_ci_low_us ?? second.latency_us);
      if (ratio <= 1 + page.margin || overlap) return [page.kernels.length, "≈"];
      return [names.indexOf(first.kernel), ratioText(ratio)];
    },
    speedup(rows) {
      const base = rows.find(isBaseline);
      const [other] = byLatency(rows.filter((row) => row !== base && (!state.against || row.kernel === state.against)));
      if (!base || !other) return null;
      const ratio = other.latency_us / base.latency_us;
      return [Math.log2(ratio), ratioText(ratio)];
    },
    floor(rows) {
      const share = rows.find((row) => row.kernel === state.kernel)?.read_floor_share;
      return share == null ? null : [share, (100 * share).toFixed(0)];
    },
  };

  /** Beyond 4x a colour is as strong as it gets: a few extremes would fade all others. */
  function strongest(values) {
    return Math.min(2, Math.max(Math.log2(1.1), ...values.map(Math.abs)));
  }

  /** Colour and its strength. */
  const colours = {
    winner: (value) => (value === page.kernels.length ? [NEUTRAL, 0.35] : [page.kernels[value].color, 0.7]),
    speedup: (value, most) => [value > 0 ? page.colors[0] : WARNED, 0.08 + 0.72 * Math.min(1, Math.abs(value) / most)],
    floor: (value) => [page.colors[0], 0.75 * Math.min(1, value)],
  };

  function build(map) {
    const { contexts, labels, at } = grid();
    const cells = labels.flatMap((label, row) => contexts.map((context, column) => ({ row, column, rows: at(label, context) })));
    const filled = cells.map((cell) => ({ ...cell, value: cell.rows.length ? values[map.key](cell.rows) : null })).filter((cell) => cell.value);
    const most = strongest(filled.map(({ value }) => value[0]));
    return {
      columns: contexts.map(tokens), rows: labels, x_title: "context (tokens)", y_title: "batch, heads",
      cells: filled.map(({ row, column, rows, value }) => {
        const [color, opacity] = colours[map.key](value[0], most);
        const lines = byLatency(rows).map((each) => ({ color: colorOf(each.kernel), text: `${each.kernel} ${+each.latency_us.toPrecision(4)} µs` }));
        return { row, column, color, opacity, text: value[1], value: value[0], head: rows[0].problem, lines };
      }),
    };
  }

  const colorOf = (name) => page.kernels.find((kernel) => kernel.name === name).color;
  const element = (map) => document.getElementById(`maps-${map.key}`);
  const heightOf = (rows) => rows * (rows > 30 ? 10 : 20) + 52;

  function draw() {
    tagFigure(document.getElementById("maps"), state.chosen);
    for (const map of page.maps) place(element(map), drawCells, build(map), heightOf(grid().labels.length));
  }

  function drawSelectors() {
    const again = (axis) => {
      if (axis && isCompared(axis)) state.chosen = fullestSeries(measured.filter((row) => comparable(row, state.chosen)), axes, cellOf);
      drawSelectors();
      draw();
    };
    const inRun = measured.filter((row) => comparable(row, state.chosen));
    const present = names.filter((name) => inRun.some((row) => row.kernel === name));
    const others = present.filter((name) => !inRun.some((row) => row.kernel === name && isBaseline(row)));
    if (!others.includes(state.against)) state.against = null;
    if (!present.includes(state.kernel)) state.kernel = present.find((name) => !others.includes(name)) ?? present[0];
    document.querySelectorAll("#maps .legend [data-kernel]").forEach((each) => { each.hidden = !present.includes(each.dataset.kernel); });
    const controls = selectorsOf(measured, axes, state, again);
    const has = (key) => page.maps.some((map) => map.key === key);
    const choices = [null, ...others];
    if (has("speedup") && others.length > 1)
      controls.push(select("speedup over", ["the fastest other", ...others], choices.indexOf(state.against), (i) => {
        state.against = choices[i];
        again();
      }));
    if (has("floor") && present.length > 1)
      controls.push(select("read floor share of", present, present.indexOf(state.kernel), (i) => {
        state.kernel = present[i];
        again();
      }));
    replaceSelectors("maps-selectors", controls);
  }

  function titleOf(map) {
    const of = { winner: "", speedup: ` over ${state.against ?? "the fastest other"}`, floor: ` of ${state.kernel}` };
    const series = seriesText(varyingIn(measured, axes, state.chosen), state.chosen);
    return pictureTitle(`${map.title}${of[map.key]}`, state.chosen, series);
  }

  document.querySelectorAll("#maps .save").forEach((button) =>
    button.addEventListener("click", () => {
      const map = page.maps[button.dataset.chart];
      savePicture(`map-${map.key}`, titleOf(map), drawCells, build(map), button.dataset.format, heightOf(grid().labels.length) + 60);
    }));

  drawSelectors();
  keepDrawn(document.querySelector("#maps .grid"), draw);
})();
