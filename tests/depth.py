"""How deep the tests go: as deep as fits into minutes, or all the way in `make test-deep`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

#: `LEANBENCH_TESTS=deep` runs what is marked `deep` too, and all examples of property tests.
DEEP = os.environ.get("LEANBENCH_TESTS") == "deep"
#: Examples of a property test that names no number: hypothesis' own 100, or a quarter of them.
EXAMPLES = 100 if DEEP else 25


def examples(deep: int) -> int:
    """Examples of a property test, of which `deep` are wanted in a deep run."""
    return deep if DEEP else max(5, deep // 4)


def deep(*values: Any) -> Any:
    """A parameter of a deep run."""
    return pytest.param(*values, marks=pytest.mark.deep)


def diagonal(*axes: Sequence[Any], keep: int) -> list[Any]:
    """Parameters for every combination of the axes, all but every `keep`-th of them marked deep.

    The kept ones lie on diagonals, so that each value of each axis is among them where the axes are
    longer than `keep`.
    """
    places = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(*values, marks=() if sum(place) % keep == 0 else pytest.mark.deep)
        for place, values in zip(places, product(*axes), strict=True)
    ]


def label(value: Any) -> str | None:
    """The id of a problem in a parametrised test; pytest's own for anything else."""
    return getattr(value, "label", None)
