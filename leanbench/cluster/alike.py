"""Which boards may take part in one run."""

from __future__ import annotations

from collections.abc import Callable

from leanbench.gpu.local import Target
from leanbench.records.boards import Board, difference


class Alike:
    """Why a board may not take part beside the first one: a `refusal` of Dispatcher.run.

    Args:
        first: of the run so far; None: the first that comes.
        mix: differences that may be put up with are said, and no refusal.
    """

    def __init__(
        self, target: Target, first: Board | None, mix: bool, say: Callable[[str], None]
    ) -> None:
        self._target, self._first, self._mix, self._say = target, first, mix, say

    def __call__(self, board: Board) -> str | None:
        source = "predicted" if self._target.local_index is None else "measured"
        if (board.source, board.gpu["name"]) != (source, self._target.spec.name):
            return (
                f"its rows would be {board.source} for {board.gpu['name']}, those of this run are"
                f" {source} for {self._target.spec.name}"
            )
        if self._first is None:
            self._first = board
        found = difference(self._first, board)
        if found is None:
            return None
        if not found.mixable or not self._mix:
            hint = ", --mix-boards takes it all the same" if found.mixable else ""
            return f"{found.phrase} as of {self._first.label}{hint}"
        self._say(f"! {board.label} takes part, and {found.phrase} as of {self._first.label}.")
        return None
