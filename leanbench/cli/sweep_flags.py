"""Measurement flags of `leanbench sweep` and `leanbench decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.core.errors import OptionWithoutEffect, UserError

if TYPE_CHECKING:
    from leanbench.measure.options import MeasureOptions
    from leanbench.run.limits import Limits


def measure_flags(
    *,
    ci: str,
    window: str | None = None,
    energy: bool = False,
    sustained: bool = False,
    occupancy: bool = False,
    counters: bool = False,
    cache: str | None = None,
    min_samples: int = 10,
    max_samples: int = 200,
    prefill: str | None = None,
) -> dict[str, Any]:
    """Return the fields of MeasureOptions that the flags set; a sweep file keeps the others."""
    from leanbench.core.syntax import choose, parse_number, parse_percent, parse_seconds
    from leanbench.measure.timing import Effort

    relative_ci = parse_percent("--ci", ci, most=50, above_zero=True)
    if not 6 <= min_samples <= max_samples <= 10_000:
        raise UserError(
            f"--min-samples {min_samples} and --max-samples {max_samples} must be 6 (fewer give no"
            " 95% interval) to 10000, the first not above the second"
        )
    # 250 samples of 4 ms fill a second. More samples need more time.
    max_seconds = max(1.0, max_samples / 200)
    fields: dict[str, Any] = {
        "effort": Effort(
            relative_ci, min_samples=min_samples, max_samples=max_samples, max_seconds=max_seconds
        )
    }
    switches = {
        "sustained": sustained,
        "energy": energy,
        "occupancy": occupancy,
        "counters": counters,
    }
    fields |= {name: True for name, is_on in switches.items() if is_on}
    if window is not None:
        fields["window_s"] = parse_seconds("--window", window)
    if prefill is not None:
        fields["prefill"] = parse_number("--prefill", prefill, "a number of tokens such as 8k")
    if cache is not None:
        fields["cache"] = choose("cache", cache, ["cold", "warm"])
    return fields


def check_window_is_used(
    window: str | None, measure: MeasureOptions, options: str = "--energy or --sustained"
) -> None:
    """Reject --window if nothing is measured over a window.

    Args:
        options: Options of the command that use the window.
    """
    if window is not None and not (measure.energy or measure.sustained):
        raise OptionWithoutEffect(f"--window {window}", options, "sliding windows: --window-left")


def limits_from_flags(timeout: str, budget: str | None, measure: MeasureOptions) -> Limits:
    """Return the time limits of a cell and of the sweep. Extra measurements extend --timeout."""
    from leanbench.core.syntax import parse_seconds
    from leanbench.measure.counters import TIMEOUT_S
    from leanbench.measure.energy import check_window
    from leanbench.run.limits import Limits

    timeout_s = parse_seconds("--timeout", timeout)
    if measure.sustained or measure.energy:
        check_window(measure.window_s)
        # The first kernel of a problem also measures the read floor over a window.
        timeout_s += 2 * measure.window_s
    if measure.counters:
        timeout_s += TIMEOUT_S
    return Limits(timeout_s, None if budget is None else parse_seconds("--budget", budget))
