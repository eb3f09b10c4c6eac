"""Every `leanbench` command in a code block of the documents is valid: its name, its flags and the
types of their values. No command is run.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from leanbench.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*"))]
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
    found = list(commands((ROOT / document).read_text(encoding="utf-8")))
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
    recipe = re.search(r"^sweep:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    last = recipe[1].replace("$(BIN)", ".venv/bin").splitlines()[-1]
    assert last.startswith("\t@echo ")
    assert activation in last
    lines = "\n".join(block for block, _ in _BLOCK.findall((ROOT / "README.md").read_text()))
    before = lines.partition("\nleanbench ")[0]
    assert [line.partition(" #")[0].strip() for line in before.splitlines()] == [
        "make sweep",
        activation,
    ]
