// Every row, sorted by a click on a heading, narrowed by the words in the filter.
(() => {
  const AT_ONCE = 200;
  const columns = page.columns.map((column, index) => ({ ...column, index })).filter((column) => column.shown);
  const results = document.getElementById("results");
  const filter = document.getElementById("filter");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const state = { column: null, descending: false, limit: AT_ONCE };

  const textOf = (row, column) => (row[column.index] === null ? "" : formats[column.kind](row[column.index]));
  // What the filter sees of each row: the same texts as its reader, who sees of a command a button alone.
  const readable = columns.filter((column) => column.kind !== "command");
  const searchable = (row) => readable.map((column) => textOf(row, column)).join("\n").toLowerCase();
  const haystacks = new Map(page.rows.map((row) => [row, searchable(row)]));

  /** `batch=4` asks one column for this very text; any other word may stand anywhere in the row. */
  function testOf(word) {
    const [name, ...value] = word.split("=");
    const column = value.length && readable.find((each) => [each.name, each.heading.toLowerCase()].includes(name));
    if (!column) return (row) => haystacks.get(row).includes(word);
    return (row) => textOf(row, column).toLowerCase() === value.join("=");
  }

  function visibleRows() {
    const tests = filter.value.toLowerCase().split(/\s+/).filter(Boolean).map(testOf);
    const rows = page.rows.filter((row) => tests.every((test) => test(row)));
    if (!state.column) return rows;
    const { index } = state.column;
    const sign = state.descending ? -1 : 1;
    const compare = (a, b) =>
      typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    // Not measured stays at the end, whichever way the rest is sorted.
    const [measured, missing] = [rows.filter((row) => row[index] !== null), rows.filter((row) => row[index] === null)];
    return [...measured.sort((a, b) => sign * compare(a[index], b[index])), ...missing];
  }

  const classOf = (column) => `${column.is_number ? "number" : column.kind}${column.on_paper ? "" : " screen"}`;
  // Sentences that belong to a figure show where the pointer is on it.
  const notesAt = new Map(columns.map((column) => [column, page.columns.findIndex(({ name }) => name === column.notes)]));

  /** Shows the command, selected, and puts it on the clipboard where the browser lets a local file do that. */
  async function copy(command) {
    const shown = document.getElementById("command");
    shown.hidden = false;
    shown.lastElementChild.textContent = command;
    getSelection().selectAllChildren(shown.lastElementChild);
    let copied = false;
    try {
      await navigator.clipboard.writeText(command);
      copied = true;
    } catch {
      copied = document.execCommand("copy");
    }
    shown.firstElementChild.textContent = copied ? "Copied:" : "To copy:";
  }

  function copyButton(command) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.title = command;
    button.addEventListener("click", () => copy(command));
    return button;
  }

  function cell(row, column) {
    const td = document.createElement("td");
    td.className = classOf(column);
    if (column.kind === "command") {
      if (row[column.index]) td.append(copyButton(row[column.index]));
      return td;
    }
    const notes = row[notesAt.get(column)];
    if (notes) {
      td.classList.add("warned");
      td.title = notes;
    }
    td.textContent = textOf(row, column);
    if (column.kind === "outcome") td.classList.add("status", row[column.index]);
    return td;
  }

  function draw() {
    const rows = visibleRows();
    const body = rows.slice(0, state.limit).map((row) => {
      const tr = document.createElement("tr");
      tr.append(...columns.map((column) => cell(row, column)));
      return tr;
    });
    results.tBodies[0].replaceChildren(...body);
    const total = `${page.rows.length} rows`;
    count.textContent = rows.length === page.rows.length ? total : `${rows.length} of ${total}`;
    more.hidden = rows.length <= state.limit;
    more.textContent = `Show all ${rows.length} rows`;
  }

  /** Of another order or choice, the first rows again: thousands take seconds. */
  function drawFirst() {
    state.limit = AT_ONCE;
    draw();
  }

  function heading(column) {
    const th = document.createElement("th");
    const button = document.createElement("button");
    const unit = document.createElement("small");
    th.scope = "col";
    th.dataset.column = column.name;
    th.className = classOf(column);
    button.title = column.meaning;
    button.type = "button";
    button.textContent = column.heading;
    unit.textContent = column.unit;
    th.append(button, unit);
    button.addEventListener("click", () => {
      state.descending = state.column === column && !state.descending;
      state.column = column;
      results.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      drawFirst();
    });
    return th;
  }

  const head = document.createElement("tr");
  head.append(...columns.map(heading));
  results.tHead.replaceChildren(head);
  filter.addEventListener("input", drawFirst);
  more.addEventListener("click", () => { state.limit = Infinity; draw(); });
  // On paper there is no button to press.
  addEventListener("beforeprint", () => { state.limit = Infinity; draw(); });
  draw();
})();
