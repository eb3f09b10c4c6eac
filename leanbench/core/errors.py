"""Errors that more than one room tells apart."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message is one sentence: the value, the limit and the fix. The CLI prints it
    and exits with 2.
    """


class DoesNotFit(UserError):
    """Launch settings that the GPU at hand cannot run."""


class OutOfMemory(UserError):
    """A problem that needs more memory than the GPU has free."""


class SuspectResult(Exception):
    """A kernel did what makes its figures meaningless. The message is the sentence for its row."""


class GpuUnusable(Exception):
    """The GPU answers no further call of this process; another process may have more luck."""


def nearest(name: str, known: Iterable[str], all_of_them: str = "") -> str:
    """A phrase that suggests the nearest known name, or lists what there is: ``did you mean
    'lean'?``.

    Args:
        all_of_them: what lists them, as in "`leanbench list kernels`".
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    # A folder of runs can hold hundreds.
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    listed = f" ({all_of_them})" if all_of_them else ""
    return f"known: {', '.join(known[:20])}{more}{listed}"
