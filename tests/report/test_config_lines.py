"""Where the launch settings of a run came from."""

from __future__ import annotations

from typing import Any

from leanbench.report.facts.config_lines import config_lines

FILE = "measured 2026-11-21 on NVIDIA H200, shipped"


def rows(
    kernel: str, choice: str | None, reason: str | None, count: int = 1
) -> list[dict[str, Any]]:
    return [{"kernel": kernel, "config_choice": choice, "config_reason": reason}] * count


KEPT = f"{FILE}: predicted 3.1% faster than the heuristic here"
NO_GAIN = f"{FILE}: no tuned config is predicted at least 0.5% faster than the heuristic here"


def test_tuned_and_heuristic():
    of_lean = [*rows("lean", "tuned", KEPT, 9), *rows("lean", "heuristic", NO_GAIN, 3)]
    assert config_lines(of_lean) == [
        f"lean: 9 of 12 cells with tuned configs ({FILE}), 3 by the heuristic."
    ]
    assert config_lines(of_lean[:9]) == [f"lean: all 9 cells with tuned configs ({FILE})."]
    assert config_lines(of_lean[:1]) == [f"lean: 1 cell with tuned configs ({FILE})."]
    assert config_lines(of_lean[9:]) == [f"lean: all 3 cells by the heuristic ({FILE})."]


def test_several_files_and_given_settings():
    mine = "measured 2026-12-01 on NVIDIA H200, yours: timed on this problem"
    of_lean = [
        *rows("lean", "tuned", KEPT, 2),
        *rows("lean", "tuned", mine),
        *rows("lean", "given", "the settings were given"),
    ]
    assert config_lines(of_lean) == [
        f"lean: 3 of 4 cells with tuned configs ({FILE}; measured 2026-12-01 on NVIDIA H200,"
        " yours), 1 with the given config."
    ]


def test_who_had_no_choice_is_not_named():
    assert config_lines([*rows("fa2", "heuristic", None), *rows("reference", None, None)]) == []
    # Where all candidates were timed.
    assert config_lines(rows("lean", "best of 3", "fastest")) == []
    assert config_lines([]) == []
