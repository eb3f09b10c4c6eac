"""Depth of the tests: limited to some minutes, or complete in `make test-deep`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

#: `LEANBENCH_TESTS=deep` also runs tests marked `deep`, and all examples of property tests.
DEEP = os.environ.get("LEANBENCH_TESTS") == "deep"
#: Examples of a property test without a number: hypothesis' default of 100, or a quarter.
EXAMPLES = 100 if DEEP else 25


def examples(deep: int) -> int:
    """Return the number of examples of a property test, given the number in a deep run."""
    return deep if DEEP else max(5, deep // 4)


def deep(*values: Any) -> Any:
    """Return a parameter of a deep run."""
    return pytest.param(*values, marks=pytest.mark.deep)


def diagonal(*axes: Sequence[Any], keep: int) -> list[Any]:
    """Return parameters for every combination of the axes.

    All but every `keep`-th are marked deep. The kept ones are on diagonals, so they include each
    value of each axis if the axes are longer than `keep`.
    """
    places = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(*values, marks=() if sum(place) % keep == 0 else pytest.mark.deep)
        for place, values in zip(places, product(*axes), strict=True)
    ]


def label(value: Any) -> str | None:
    """Return the id of a problem in a parametrised test; pytest's default for other values."""
    return getattr(value, "label", None)
