"""The example of CONTRIBUTING.md works as described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import leanbench.kernels
from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel, kernels

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def plain(tmp_path, monkeypatch):
    example = re.search(
        r"Save this as `mine/plain/__init__.py`.*?```python\n(.*?)```", TEXT, re.DOTALL
    )
    assert example is not None
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "__init__.py").write_text(example[1], encoding="utf-8")
    monkeypatch.setattr(leanbench.kernels, "__path__", [*leanbench.kernels.__path__, str(tmp_path)])
    kernels.cache_clear()
    yield kernel("plain")
    monkeypatch.undo()
    kernels.cache_clear()


@pytest.mark.parametrize(
    "problem",
    [AttentionProblem(2, 4, 4, 100, 64), AttentionProblem(1, 3, 3, 77, 128, "bf16", "NHD")],
)
def test_the_example_is_right(plain, problem, device):
    assert plain.unsupported_reason(problem) is None
    inputs = make_inputs(problem, device)
    plain.prepare(inputs, plain.default_config(problem, None))()
    assert Reference(inputs).check(inputs, plain.lse_base).failure(problem.dtype) is None


def test_it_says_what_it_does_not_take(plain):
    reason = plain.unsupported_reason(AttentionProblem(1, 8, 2, 100, 64))
    assert reason.startswith("plain takes multi-head attention")
