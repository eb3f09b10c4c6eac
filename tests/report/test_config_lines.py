"""Where the launch settings of a run came from."""

from example_runs import as_rows, problem, row

from leanbench.records.row import Row
from leanbench.report.facts.trust import config_lines

FILE = "measured 2026-11-21 on NVIDIA H200, shipped"


def rows(kernel: str, choice: str | None, reason: str | None, count: int = 1) -> list[Row]:
    fields = {"config_choice": choice, "config_reason": reason}
    return as_rows([row(problem(), kernel, 10.0, **fields)] * count)


KEPT = f"{FILE}: predicted 3.1% faster than the heuristic here"
NO_GAIN = f"{FILE}: no tuned config is predicted at least 0.5% faster than the heuristic here"


def test_tuned_and_heuristic():
    of_lean = [*rows("lean", "tuned", KEPT, 9), *rows("lean", "heuristic", NO_GAIN, 3)]
    assert config_lines(of_lean) == [
        f"lean: 9 of 12 cells with tuned configs ({FILE}), 3 by the heuristic."
    ]
    assert config_lines(of_lean[:9]) == [f"lean: all 9 cells with tuned configs ({FILE})."]
    assert config_lines(of_lean[:1]) == [f"lean: 1 cell with tuned configs ({FILE})."]


def test_the_heuristic_alone_says_why_no_file_chose():
    assert config_lines(rows("lean", "heuristic", NO_GAIN, 3)) == [
        f"lean: all 3 cells by the heuristic (not with tuned configs, {FILE}: no tuned config is"
        " predicted at least 0.5% faster than the heuristic here)."
    ]
    file = "measured 2026-11-26 on NVIDIA H100 80GB HBM3, shipped"
    not_carried = rows("lean", "heuristic", f"{file}: times of another GPU are not carried over")
    assert config_lines(not_carried) == [
        f"lean: 1 cell by the heuristic (not with tuned configs, {file}: times of another GPU are"
        " not carried over)."
    ]
    of_lean = [
        *rows("lean", "heuristic", f"{FILE}: timed at 8 x 4096 tokens, where nothing was faster"),
        *rows("lean", "heuristic", f"{FILE}: this size was not timed", 3),
        *rows("lean", "heuristic", f"{FILE}: timed at 32 x 1024 tokens, where nothing was faster"),
        *rows("lean", "heuristic", "configs are tuned for no window, not for window 128"),
        *rows("lean", "given", "the settings were given"),
    ]
    assert config_lines(of_lean) == [
        f"lean: 6 of 7 cells by the heuristic (not with tuned configs, {FILE}: this size was not"
        " timed (3), timed, where nothing was faster (2); configs are tuned for no window, not for"
        " window 128), 1 with the given config."
    ]
    asked = rows("lean", "heuristic", "the heuristic was asked for", 2)
    assert config_lines(asked) == [
        "lean: all 2 cells by the heuristic (the heuristic was asked for)."
    ]


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
