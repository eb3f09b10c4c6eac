"""The reports in the repository without a browser: their scripts run in Node over a document that
accepts anything.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("reports/h200/report.html", "reports/h100/report.html")
NODE = shutil.which("node")
#: Every property of it is a function that returns an equal object; the table's parts are kept.
DOCUMENT = """
const any = (known = {}) => new Proxy(function () {}, {
  get: (_, key) => key in known ? known[key]
    : key === Symbol.toPrimitive ? () => 0
    : key === Symbol.iterator ? function* () {} : any(),
  set: (_, key, value) => { known[key] = value; return true; },
  apply: () => any(),
});
const drawn = {};
const count = any();
const body = any({ replaceChildren: (...rows) => { drawn.rows = rows.length; } });
const parts = {
  data: { textContent: DATA },
  results: any({ tBodies: [body] }),
  filter: any({ value: "" }),
  count,
};
globalThis.document = any({ getElementById: (id) => parts[id] ?? any({ id }) });
globalThis.addEventListener = () => {};
globalThis.ResizeObserver = class { observe() {} };
globalThis.Option = class {};
"""


def data_of(page: str) -> tuple[str, dict[str, Any]]:
    html = (ROOT / page).read_text(encoding="utf-8")
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return html, json.loads(data)


@pytest.mark.parametrize("page", PAGES)
def test_a_committed_page_is_of_the_runs_beside_it(page: str) -> None:
    """CONTRIBUTING.md has the command that makes it again."""
    _, data = data_of(page)
    columns = [column["name"] for column in data["columns"]]
    column = data["columns"][columns.index("run")]
    places = Counter(row[columns.index("run")] for row in data["rows"])
    shown = {column["texts"][place]: count for place, count in places.items()}
    runs = (ROOT / page).parent.glob("*/results.jsonl")
    assert shown == {path.parent.name: len(path.read_bytes().splitlines()) for path in runs}


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_of_a_committed_page_draw_its_table(page: str) -> None:
    html, data = data_of(page)
    scripts = re.findall(r"<script>\n(.*?)</script>", html, re.DOTALL)
    assert len(scripts) > 1
    # As in a page, constants of one script are known to the next.
    program = "\n".join(
        [
            f"const DATA = {json.dumps(json.dumps(data))};",
            DOCUMENT,
            *scripts,
            "console.log(JSON.stringify([drawn.rows, count.textContent]));",
        ]
    )
    done = subprocess.run(
        [str(NODE), "-"], input=program, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = len(data["rows"])
    assert rows > 1000
    assert json.loads(done.stdout) == [200, f"{rows} rows"]
