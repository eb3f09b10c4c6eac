"""Mutation tests: each mutation is applied to a copy of the sources. Its check must fail there, and
pass in a copy without it. Both copies have the mutation's delay.

    python tests/gate/mutants.py gpu|cpu [--jobs N] [WORDS...]

Words select mutations by parts of their names. The exit code is 1 if any survives.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from mutations import MUTATIONS, Command, Delay, Mutation, by_pytest
from processes import Ended, end_together, run_within

from leanbench.records.environment import kernels_hash

ROOT = Path(__file__).resolve().parents[2]
#: Folders imported from a copy.
ROOMS = ("leanbench", "kernels")
#: Time limit of a check, halved for a mutation with a launch that does not end.
LIMIT_S = 60.0
CAUGHT = "caught"
SURVIVED = "SURVIVED"
NOT_JUDGED = "NOT JUDGED"
#: Evidence that a mutation does not compile.
_NO_PROGRAM = re.compile(
    r"does not compile|CompilationError|SyntaxError|ImportError|ModuleNotFoundError"
    r"|g\+\+.*non-zero exit status"
)
#: Reasons of a failed check, the most informative first.
_TELLING = (
    re.compile(r"^WRONG .*|^=+ Error: .*|^=+ RACECHECK SUMMARY.*", re.MULTILINE),
    re.compile(
        r"^E +(?:AssertionError|Failed|RuntimeError|torch\.\w+).*|^E +assert .*", re.MULTILINE
    ),
    re.compile(r".*(?:CUDA error|Timeout \(>).*", re.MULTILINE),
    re.compile(r"^E +.*", re.MULTILINE),
)


@dataclass(frozen=True)
class Verdict:
    """Result of a mutation."""

    mutation: Mutation
    outcome: str
    sentence: str
    seconds: float


def command_of(mutation: Mutation, where: str) -> Command | None:
    """Return the check of a mutation on the gpu or the cpu."""
    if where == "gpu":
        return mutation.gpu
    return None if mutation.cpu is None else by_pytest(mutation.cpu)


def judge(
    mutations: Iterable[Mutation], where: str, jobs: int, limit_s: float = LIMIT_S
) -> Iterator[Verdict]:
    """Yield the verdicts on mutations in order; mutations without a check are skipped."""
    checks = {
        mutation: check
        for mutation in mutations
        if (check := command_of(mutation, where)) is not None
    }
    with (
        tempfile.TemporaryDirectory(prefix="leanbench-mutants-") as name,
        ThreadPoolExecutor(jobs) as pool,
    ):
        folder = Path(name)
        unchanged: dict[tuple[Command, Delay | None], Future[Ended]] = {}
        befores: dict[Mutation, Future[Ended]] = {}
        changed: dict[Mutation, Future[Ended]] = {}
        # Launches that do not end come last, because they share the GPU with everything else.
        for mutation, check in sorted(checks.items(), key=lambda item: not item[0].ends):
            copy = folder / str(len(changed))
            delay = None if where == "cpu" else mutation.delay
            edits = [edit for edit in (delay, mutation) if edit is not None]
            allowed_s = limit_s if mutation.ends else limit_s / 2
            changed[mutation] = pool.submit(run, copy, edits, check, allowed_s)
            if (check, delay) not in unchanged:
                copy = folder / f"{len(unchanged)} unchanged"
                unchanged[check, delay] = pool.submit(run, copy, edits[:-1], check, 2 * limit_s)
            befores[mutation] = unchanged[check, delay]
        for mutation in checks:
            yield verdict(mutation, befores[mutation], changed[mutation])


def verdict(mutation: Mutation, unchanged: Future[Ended], changed: Future[Ended]) -> Verdict:
    """Judge a mutation: caught if its check passes without it and fails with it.

    A killed check counts as failed if the launch is not to end, and the check took less time
    without the mutation.
    """
    before, after = unchanged.result(), changed.result()
    if before.code != 0:
        return Verdict(mutation, NOT_JUDGED, f"unchanged: {sentence_of(before)}", before.seconds)
    if _NO_PROGRAM.search(after.output):
        return Verdict(mutation, NOT_JUDGED, f"no program: {sentence_of(after)}", after.seconds)
    if after.code == 0:
        return Verdict(mutation, SURVIVED, "its check passes", after.seconds)
    slow = after.code is None and (mutation.ends or before.seconds > after.seconds)
    outcome = CAUGHT if failed(after) and not slow else NOT_JUDGED
    return Verdict(mutation, outcome, sentence_of(after), after.seconds)


def failed(ended: Ended) -> bool:
    """Return True if a check found a fault, and did not fail for want of a test or program."""
    return ended.code is None or ended.code not in (0, 2, 3, 4, 5, 127)


def sentence_of(ended: Ended) -> str:
    """Return the message of a failed check."""
    if ended.code is None:
        return f"did not end in {ended.seconds:.0f} s"
    if ended.code < 0:
        return f"ended by {signal.Signals(-ended.code).name}"
    lines = [match[0] for pattern in _TELLING if (match := pattern.search(ended.output))]
    return (lines or ended.output.strip().splitlines()[-1:] or ["no output"])[0].strip("E= ")


def run(copy: Path, edits: list[Delay | Mutation], check: Command, limit_s: float) -> Ended:
    """Run a check in its own copy of the sources."""
    copy_sources(copy, edits)
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "LEANBENCH_CACHE": str(copy / "cache")}
    own |= {"TRITON_CACHE_DIR": str(copy / "triton"), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = run_within(limit_s, words_of(check), copy, own)
    shutil.rmtree(copy, ignore_errors=True)
    return ended


def copy_sources(copy: Path, edits: list[Delay | Mutation]) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        path = copy / edit.file
        path.write_text(changed(edit, path.read_text(encoding="utf-8")), encoding="utf-8")


def changed(edit: Delay | Mutation, text: str) -> str:
    """Return the source with the edit. Its old text must occur once."""
    count = text.count(edit.old)
    if count != 1:
        raise ValueError(f"{edit.name}: {edit.old!r} stands {count} times in {edit.file}")
    return text.replace(edit.old, edit.new)


def words_of(check: Command) -> list[str]:
    """Return the command line with paths of the checkout, because tests are not copied."""
    words = [str(ROOT / word) if word.startswith("tests/") else word for word in check]
    if words[0] != "compute-sanitizer":
        return [sys.executable, *words]
    tool = [words[0], "--tool", words[1], "--kernel-regex", "kns=lean", "--error-exitcode", "1"]
    return [*tool, sys.executable, *words[2:]]


def report(verdicts: Iterable[Verdict], where: str) -> int:
    """Print a line for each as it arrives, then the number caught; return 1 if any survives."""
    outcomes: Counter[str] = Counter()
    for each in verdicts:
        outcomes[each.outcome] += 1
        print(f"{each.outcome:<10} {each.seconds:5.1f} s  {each.mutation.name}", flush=True)
        print(f"{'':<19} {each.mutation.file}: {each.sentence}"[:300], flush=True)
    left = [f", {count} {outcome}" for outcome, count in outcomes.items() if outcome != CAUGHT]
    total = outcomes.total()
    print(f"{outcomes[CAUGHT]} of {total} mutations caught ({where}){''.join(left)}")
    return 0 if total and outcomes[CAUGHT] == total else 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=("gpu", "cpu"))
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    wanted = [
        mutation
        for mutation in MUTATIONS
        if not options.words or any(word in mutation.name for word in options.words)
    ]
    end_together()
    print(f"Mutations on the {options.where}, kernels {kernels_hash()}, {date.today()}", flush=True)
    return report(judge(wanted, options.where, options.jobs, options.limit_s), options.where)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
