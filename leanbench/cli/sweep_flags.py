"""What `leanbench sweep`'s flags say of how it measures, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.cli import output
from leanbench.core.errors import UserError

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
    """The fields of MeasureOptions that flags set.

    Raises:
        UserError: a value outside its limits.
    """
    from leanbench.core.syntax import choose, parse_number, parse_percent, parse_seconds
    from leanbench.measure.timing import Effort

    relative_ci = parse_percent("--ci", ci, most=50, above_zero=True)
    if not 6 <= min_samples <= max_samples <= 10_000:
        raise UserError(
            f"--min-samples {min_samples} and --max-samples {max_samples} must be 6 (fewer give no"
            " 95% interval) to 10000, the first not above the second"
        )
    # A second is 250 samples of 4 ms: more take longer.
    max_seconds = max(1.0, max_samples / 200)
    effort = Effort(
        relative_ci, min_samples=min_samples, max_samples=max_samples, max_seconds=max_seconds
    )
    flags: dict[str, Any] = {"effort": effort}
    if window is not None:
        flags["window_s"] = parse_seconds("--window", window)
    requested = {
        "sustained": sustained,
        "energy": energy,
        "occupancy": occupancy,
        "counters": counters,
    }
    flags |= {name: True for name, value in requested.items() if value}
    if prefill is not None:
        flags["prefill"] = parse_number("--prefill", prefill, "a number of tokens such as 8k")
    if cache is not None:
        flags["cache"] = choose("cache", cache, ["cold", "warm"])
    return flags


def refuse_window_without_use(
    window: str | None, measure: MeasureOptions, options: str = "--energy or --sustained"
) -> None:
    """Refuses a window where nothing is measured over one.

    Args:
        options: of the command, that measure over one.
    """
    if window is not None and not (measure.energy or measure.sustained):
        raise UserError(
            f"--window {window} says nothing, latency is not measured over a window: add {options},"
            " or leave it out; sliding windows of attention are --window-left"
        )


def limits_of(timeout: str, budget: str | None, measure: MeasureOptions) -> Limits:
    """What a cell and the sweep may take; what the options ask for comes on top of --timeout."""
    from leanbench.core.syntax import parse_seconds
    from leanbench.measure.counters import TIMEOUT_S
    from leanbench.measure.energy import check_window
    from leanbench.run.limits import Limits

    timeout_s = parse_seconds("--timeout", timeout)
    if measure.sustained or measure.energy:
        check_window(measure.window_s)
        # The first kernel of a problem has the read floor's window too.
        timeout_s += 2 * measure.window_s
    if measure.counters:
        timeout_s += TIMEOUT_S
    return Limits(timeout_s, None if budget is None else parse_seconds("--budget", budget))


def refuse_what_cannot_be_predicted(measure: MeasureOptions) -> None:
    """Refuses options that a prediction would contradict.

    Raises:
        UserError: there is one.
    """
    if measure.cache == "warm":
        raise UserError(
            "--cache warm cannot be predicted, the model reads K and V from memory: leave it out"
        )


def say_what_is_not_predicted(measure: MeasureOptions) -> None:
    """A line on stderr that names the options which only a GPU can follow."""
    names = ("sustained", "energy", "occupancy", "counters", "prefill")
    requested = [name for name in names if getattr(measure, name)]
    if requested:
        output.say(f"Only a GPU can measure {', '.join(requested)}: left out.")
