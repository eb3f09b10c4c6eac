"""Every relative link, and every path of the repository in documents, leads to a file, and to a
heading if it has an anchor.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "kernels/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ROOMS = "leanbench|kernels|sweeps|reports|docs|tests"
#: A file that must not exist, and a folder of the wheel.
ELSEWHERE = {"kernels/__init__.py", "leanbench/_shipped"}
NAMED = re.compile(rf"`((?:{ROOMS})/[\w./*-]*)`")


@pytest.fixture(scope="module")
def paths() -> set[str]:
    """Return files of the repository, and their folders."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = listed.stdout.split()
    return {*files, *(str(folder) for file in files for folder in PurePosixPath(file).parents)}


def missing(text: str, folder: PurePosixPath, paths: set[str]) -> list[str]:
    """Return links and paths of a document in `folder` that are not in the repository."""
    links = {link.partition("#")[0] for link in LINK.findall(text) if "://" not in link}
    targets = {link: _normal(folder / link) for link in links if link}
    targets |= {name: _normal(PurePosixPath(name)) for name in {*NAMED.findall(text)} - ELSEWHERE}
    return sorted(name for name, path in targets.items() if not fnmatch.filter(paths, path))


def headings(text: str) -> set[str]:
    """Return anchors of a document's headings, as made by GitHub."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def dead_anchors(text: str, document: Path) -> list[str]:
    """Return links with an anchor without heading in their document."""
    dead = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" in link or not anchor or target.suffix != ".md" or not target.exists():
            continue
        if anchor not in headings(target.read_text(encoding="utf-8")):
            dead.append(link)
    return dead


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_points_to_exists(document: str, paths: set[str]) -> None:
    file = ROOT / document
    text = file.read_text(encoding="utf-8")
    assert missing(text, PurePosixPath(document).parent, paths) == []
    assert dead_anchors(text, file) == []


def test_a_link_that_leads_nowhere_is_named(paths: set[str]) -> None:
    text = "[a](../README.md#top) [b](gone.md) [c](https://x.y/z) `reports/h200/gone` `docs/*.md`"
    assert missing(text, PurePosixPath("docs"), paths) == ["gone.md", "reports/h200/gone"]


def test_an_anchor_without_a_heading_is_named(tmp_path: Path) -> None:
    """Ids in code blocks do not count."""
    document = tmp_path / "a.md"
    document.write_text("# A `call_of`, or (two)\n```sh\n# no heading\n```\n")
    text = "[a](#a-call_of-or-two) [b](a.md#no-heading) [c](gone.md#x) [d](https://x.y/z.md#q)"
    assert dead_anchors(text, document) == ["a.md#no-heading"]
