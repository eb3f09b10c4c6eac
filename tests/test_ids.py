"""Ids of tests. Workers of pytest-xdist compare theirs, and abort a run if they differ."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Folders imported or read by collecting. Other parts of a checkout are linked.
COPIED = ("kernels", "leanbench", "sweeps", "tests")


def copy_checkout(to: Path) -> Path:
    to.mkdir()
    for part in ROOT.iterdir():
        if part.name in COPIED:
            # Another worker may be writing byte code.
            shutil.copytree(part, to / part.name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            (to / part.name).symlink_to(part)
    return to


def collected(root: Path, hash_seed: str) -> list[str]:
    """Collect all tests of a checkout in a separate process."""
    options = "--collect-only -q -n 0 -p no:cacheprovider -p no:syrupy"
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": hash_seed}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split()],
        cwd=root,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return list(takewhile(bool, done.stdout.splitlines()))


def by_file(tests: Iterable[str]) -> list[str]:
    """Sort only by file, as if files were named in that order."""
    return sorted(tests, key=lambda test: test.partition("::")[0])


@pytest.mark.deep
def test_ids_are_the_same_in_another_process_second_and_folder(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    items = request.session.items
    here = [item.nodeid for item in items]
    if {item.path for item in items} == {Path(__file__)}:  # alone, it would compare itself
        here = collected(ROOT, hash_seed="1")
    # A seed of 0 disables the randomization of all other seeds.
    there = collected(copy_checkout(tmp_path / "elsewhere"), hash_seed="0")
    wanted = set(here)
    assert by_file(test for test in there if test in wanted) == by_file(here)
