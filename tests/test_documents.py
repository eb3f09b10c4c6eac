"""Documents: their links and paths lead to files, their commands are commands, and their samples
are what commands print. Commands in code blocks are not run.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer

from leanbench.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "kernels/*/README.md", "reports/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


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
    assert missing(read(document), PurePosixPath(document).parent, paths) == []
    assert dead_anchors(read(document), ROOT / document) == []


def test_a_link_that_leads_nowhere_is_named(paths: set[str]) -> None:
    text = "[a](../README.md#top) [b](gone.md) [c](https://x.y/z) `reports/h200/gone` `docs/*.md`"
    assert missing(text, PurePosixPath("docs"), paths) == ["gone.md", "reports/h200/gone"]


def test_an_anchor_without_a_heading_is_named(tmp_path: Path) -> None:
    """Ids in code blocks do not count."""
    document = tmp_path / "a.md"
    document.write_text("# A `call_of`, or (two)\n```sh\n# no heading\n```\n")
    text = "[a](#a-call_of-or-two) [b](a.md#no-heading) [c](gone.md#x) [d](https://x.y/z.md#q)"
    assert dead_anchors(text, document) == ["a.md#no-heading"]


#: A block, or a line of an indented one.
_BLOCK = re.compile(r"^```sh\n(.*?)^```|^    (leanbench [^\n]*)$", re.MULTILINE | re.DOTALL)
#: Flag of the axis that CONTRIBUTING.md adds.
MADE_UP = {"--temperature"}
COMMAND = typer.main.get_command(app)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind `leanbench` of each command; ``a|b`` gives one command for each."""
    blocks = "\n".join("".join(block) for block in _BLOCK.findall(text))
    for line in blocks.replace("\\\n", " ").splitlines():
        for part in re.split(r" && | >", line.partition(" #")[0]):
            words = shlex.split(part)
            if words[:1] == ["leanbench"] and not MADE_UP.intersection(words):
                choices = [word.split("|") for word in words[1:]]
                yield from map(list, itertools.product(*choices))


def fault(words: list[str]) -> str:
    """Return why a command is invalid, or an empty string."""
    command: Any = COMMAND
    name = "leanbench"
    while hasattr(command, "commands") and words:
        name, *words = words
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    try:
        command.make_context(name, list(words))
    except Exception as error:  # typer's own, or click's: by version
        return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_are_commands(document: str) -> None:
    found = list(commands(read(document)))
    assert {shlex.join(words): fault(words) for words in found if fault(words)} == {}


def test_a_command_that_is_none_is_named() -> None:
    text = "```sh\nleanbench swep smoke\nA=1 leanbench x  # no\nleanbench list kernels|gpus\n```\n"
    wrong, *right = commands(f"{text}```sh\nleanbench sweep --contxt 1k && leanbench check\n```")
    assert fault(wrong) == "there is no command 'swep'"
    assert [(words, fault(words)) for words in right] == [
        (["list", "kernels"], ""),
        (["list", "gpus"], ""),
        (["sweep", "--contxt", "1k"], "No such option: --contxt"),
        (["check"], ""),
    ]


def test_leanbench_is_on_the_path_before_it_is_called() -> None:
    """`make sweep` ends with this line, and the README has it."""
    activation = ". .venv/bin/activate"
    recipe = re.search(r"^sweep:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert recipe
    last = recipe[1].replace("$(BIN)", ".venv/bin").splitlines()[-1]
    assert last.startswith("\t@echo ")
    assert activation in last
    lines = "\n".join(block for block, _ in _BLOCK.findall(read("README.md")))
    before = lines.partition("\nleanbench ")[0]
    assert [line.partition(" #")[0].strip() for line in before.splitlines()] == [
        "make sweep",
        activation,
    ]


def test_samples_of_output_are_rendered():
    """So that test_figures.py compares them with what commands print."""
    for document in DOCUMENTS:
        if "```text\n$ leanbench" in read(document):
            assert "output(" in read(f"{document}.j2"), document
