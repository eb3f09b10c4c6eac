"""Where the launch settings of a run came from."""

from example_runs import as_rows, problem, row

from leanbench.report.facts.trust import config_lines

FILE = "measured 2026-11-21 on NVIDIA H200, shipped"
KEPT = f"{FILE}: predicted 3.1% faster than the heuristic here"
NO_GAIN = f"{FILE}: no tuned config is predicted at least 0.5% faster than the heuristic here"
MINE = "measured 2026-12-01 on NVIDIA H200, yours: timed on this problem"
OTHER = "measured 2026-11-26 on NVIDIA H100 80GB HBM3, shipped: times of another GPU"
GIVEN = ("given", "the settings were given", 1)
#: Choice, reason and number of rows; the snapshot has the line of each.
RUNS: dict[str, list[tuple[str | None, str | None, int]]] = {
    "tuned and by the heuristic": [("tuned", KEPT, 9), ("heuristic", NO_GAIN, 3)],
    "tuned": [("tuned", KEPT, 9)],
    "tuned, one": [("tuned", KEPT, 1)],
    "by the heuristic, as no file chose": [("heuristic", NO_GAIN, 3)],
    "times of another GPU": [("heuristic", OTHER, 1)],
    "several reasons": [
        ("heuristic", f"{FILE}: timed at 8 x 4096 tokens, where nothing was faster", 1),
        ("heuristic", f"{FILE}: this size was not timed", 3),
        ("heuristic", f"{FILE}: timed at 32 x 1024 tokens, where nothing was faster", 1),
        ("heuristic", "configs are tuned for no window, not for window 128", 1),
        GIVEN,
    ],
    "the heuristic on request": [("heuristic", "the heuristic was asked for", 2)],
    "several files": [("tuned", KEPT, 2), ("tuned", MINE, 1), GIVEN],
    "no choice": [("heuristic", None, 1), (None, None, 1)],
    "all candidates were timed": [("best of 3", "fastest", 1)],
    "no rows": [],
}


def test_config_lines(snapshot):
    lines = []
    for name, choices in RUNS.items():
        rows = [
            row(problem(), "lean", 10.0, config_choice=choice, config_reason=reason)
            for choice, reason, count in choices
            for _ in range(count)
        ]
        lines += [f"# {name}", *config_lines(as_rows(rows))]
    assert "\n".join(lines) == snapshot
