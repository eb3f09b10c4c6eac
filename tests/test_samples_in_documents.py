"""Samples of a command in the documents match its output at 80 columns."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leanbench.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
#: A block of text that begins with a command.
SAMPLE = re.compile(r"^```text\n\$ leanbench (.*)\n([\s\S]*?)\n```$", re.MULTILINE)
SAMPLES = [
    pytest.param(command, shown, id=f"{path.name}: {command}")
    for path in DOCUMENTS
    for command, shown in SAMPLE.findall(path.read_text(encoding="utf-8"))
]


def is_shown(shown: str, printed: str) -> bool:
    """Return True if the sample matches the output; a line of dots stands for any lines."""
    parts = [re.escape(line) if line != "..." else None for line in shown.split("\n")]
    pattern = "".join(r"(?:.*\n)*?" if part is None else rf"{part} *\n" for part in parts)
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.parametrize(("command", "shown"), SAMPLES)
def test_a_sample_is_what_the_command_prints(monkeypatch, command, shown):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert is_shown(shown, result.stdout)
    assert max(map(len, shown.splitlines())) <= 80


def test_the_readme_has_a_sample():
    assert any("README.md" in str(sample.id) for sample in SAMPLES)


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("a\nb\nc", True),
        ("a\n...", True),
        ("...\nc", True),
        ("a\n...\nc", True),
        ("a\nb\n...\nc", True),
        ("a\nc", False),
        ("a\n...\nd", False),
        ("b\n...", False),
        ("a\nb", False),
    ],
)
def test_dots_stand_for_any_lines(shown, same):
    assert is_shown(shown, "a\nb  \nc\n") == same
