"""A page in headless Chromium: what goes wrong in it is kept, and a test's own lines run in it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: What a module of such tests is marked with.
MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
    ),
]

#: Runs before anything else in the page, and keeps every failure.
WATCH = """<script>
window.failures = [];
addEventListener("error", (event) => failures.push(event.message));
addEventListener("unhandledrejection", (event) => failures.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => failures.push(`blocked ${event.blockedURI}`));
window.alert = (text) => failures.push(`alert ${text}`);
console.error = (...text) => failures.push(text.join(" "));
</script>"""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --window-size=1400,1000"
    " --virtual-time-budget=5000"
)


def answer_of(directory: Path, page: str, first: str, last: str, probe: str) -> dict[str, Any]:
    """What the page answers; any failure in it, and anything that it loads, fails.

    Args:
        directory: where the page is written.
        page: its HTML.
        first: a script that runs before anything else in it.
        last: one that runs after everything else, with { PROBE } for the lines of `probe`.
        probe: the test's own lines.
    """
    page = page.replace("<head>", f"<head>{WATCH}{first}", 1)
    head, body_end, tail = page.rpartition("</body>")
    watched = directory / "watched.html"
    script = last.replace("{ PROBE }", f"{{ {probe} }}")
    watched.write_text(f"{head}<script>{script}</script>{body_end}{tail}", encoding="utf-8")
    command = [
        *(str(CHROMIUM), *FLAGS.split(), "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={directory / 'profile'}", "--dump-dom", watched.as_uri()),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    answer = re.search(r'<pre id="probe">(.+?)</pre>', dom, re.DOTALL)
    assert answer, "the page did not reach its load event"
    result = json.loads(html.unescape(answer[1]))
    assert result["failures"] == []
    assert result["loaded"] == []
    return result
