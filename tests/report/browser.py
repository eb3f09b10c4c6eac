"""A page in headless Chromium: what goes wrong in it is kept, and a test's own lines run in it."""

import atexit
import json
import select
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import count
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
#: Ends with the answer of the page's last script.
ANSWER = """new Promise((done) => {
  const look = () => {
    const answer = document.getElementById("probe");
    answer ? done(answer.textContent) : setTimeout(look, 5);
  };
  look();
})"""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --remote-debugging-pipe"
)
#: Until an answer is late.
_LONGEST_S = 120


class Chromium:
    """A browser controlled over its DevTools pipe, descriptors 3 and 4: a NUL ends a message."""

    def __init__(self, profile: Path) -> None:
        words = [*FLAGS.split(), "--host-resolver-rules=MAP * ~NOTFOUND"]
        pipes = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'
        self._process = subprocess.Popen(
            ["sh", "-c", pipes, "sh", str(CHROMIUM), *words, f"--user-data-dir={profile}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._numbers = count(1)
        self._unread = b""

    def text_of(self, url: str, width: int) -> str:
        """The text of #probe, once the page at `url`, in a window of this width, has it."""
        context = self._call("Target.createBrowserContext")
        page = self._call("Target.createTarget", url="about:blank", **context)
        session = self._call("Target.attachToTarget", flatten=True, **page)["sessionId"]
        self._call("Page.enable", session)
        window = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **window)
        self._call("Page.navigate", session, url=url)
        self._read(lambda message: message.get("method") == "Page.loadEventFired")
        answer = self._call("Runtime.evaluate", session, expression=ANSWER, awaitPromise=True)
        self._call("Target.disposeBrowserContext", **context)
        return answer["result"]["value"]

    def close(self) -> None:
        self._call("Browser.close")
        self._process.wait(_LONGEST_S)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        reply = self._read(lambda message: message.get("id") == number)
        assert "error" not in reply, (method, reply)
        return reply["result"]

    def _read(self, is_wanted: Any) -> dict[str, Any]:
        """The next message that is wanted; those before it are events of no use."""
        while True:
            while b"\0" not in self._unread:
                self._unread += self._received()
            text, _, self._unread = self._unread.partition(b"\0")
            message = json.loads(text)
            if is_wanted(message):
                return message

    def _received(self) -> bytes:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _LONGEST_S)
        assert readable, f"Chromium answers nothing for {_LONGEST_S} s"
        content = self._process.stdout.read(1 << 16)
        assert content, f"Chromium ended with exit code {self._process.wait()}"
        return content


@cache
def _chromium() -> Chromium:
    """One for all tests of this process: to start it takes longer than all that a test does."""
    profile = tempfile.mkdtemp(prefix="leanbench-tests-chromium-")
    atexit.register(shutil.rmtree, profile, ignore_errors=True)
    chromium = Chromium(Path(profile))
    atexit.register(chromium.close)
    return chromium


def answer_of(
    directory: Path, page: str, first: str, last: str, probe: str, width: int = 1400
) -> dict[str, Any]:
    """Return the page's answer; fail if the page fails or loads anything.

    Args:
        directory: where the page is written.
        page: its HTML.
        first: a script that runs before anything else in it.
        last: one that runs after everything else, with { PROBE } for the lines of `probe`.
        probe: the test's own lines.
        width: of the window, in pixels.
    """
    page = page.replace("<head>", f"<head>{WATCH}{first}", 1)
    head, body_end, tail = page.rpartition("</body>")
    watched = directory / "watched.html"
    script = last.replace("{ PROBE }", f"{{ {probe} }}")
    watched.write_text(f"{head}<script>{script}</script>{body_end}{tail}", encoding="utf-8")
    result = json.loads(_chromium().text_of(watched.as_uri(), width))
    assert not result["failures"], result["failures"]
    assert result["loaded"] == []
    return result
