"""What all tests share: skips with a reason, and how hypothesis runs."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: the first example of a test pays for imports.
settings.register_profile("leanbench", deadline=None)
settings.load_profile("leanbench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _why_no_gpu()) is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs an NVIDIA GPU that torch can use, there is none here"
