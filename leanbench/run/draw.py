"""Problems drawn at random for a sweep, reproducible by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanbench.core.axes import AXES, KINDS
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.lengths import as_context, draw_context, is_explicit, read_lengths
from leanbench.core.llm.model import model_named, read_model
from leanbench.core.memory import needed_bytes
from leanbench.core.problem import PLAIN_AXES, AttentionProblem

#: Memory limit of a drawn problem: caches, queries, outputs and the check.
MOST_BYTES = 120e9
#: Limit of a draw. Each problem can have thousands of lengths.
MOST_PROBLEMS = 10_000
#: Maximum attempts per problem.
_ATTEMPTS = 1000


@dataclass(frozen=True)
class Draw:
    """Random problems: every axis takes one of its values.

    Raises:
        UserError: A fill with capacities that are not in tokens.
    """

    count: int
    seed: int
    #: Values by axis, in the order of AXES. A model and a `tp` set heads and head_dim.
    values: Mapping[str, tuple[Any, ...]]
    #: Range of context over capacity, drawn log-uniformly instead of `context`.
    fill: tuple[float, float] | None = None
    #: Axes with given values.
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for capacity in self.values["capacity"] if self.fill else ():
            if not isinstance(capacity, int):
                raise UserError(
                    "fill is a share of the capacity in tokens, and a capacity is"
                    f" {AXES['capacity'].write(capacity)}: give capacity in tokens, as in 4k,32k,"
                    " or context instead of fill"
                )

    @classmethod
    def of(
        cls,
        count: int,
        seed: int,
        given: Mapping[str, tuple[Any, ...]],
        fill: tuple[float, float] | None = None,
    ) -> Draw:
        """Return the draw with given values, or with defaults that fit a capacity.

        Raises:
            UserError: A fill together with contexts, or as the class.
        """
        values = {name: given.get(name, axis.grid) for name, axis in AXES.items()}
        if fill and "context" in given:
            raise UserError("fill draws the context from the capacity: leave one of them out")
        if fill is None and "context" not in given:
            values["context"] = _held(values["context"], values["capacity"])
        return cls(count, seed, values, fill, frozenset(given))

    def check_capacities(self) -> None:
        """Reject given lengths above every capacity. They would be redrawn forever."""
        most = _largest(self.values["capacity"])
        if most is None or self.fill is not None:
            return
        explicit = [lengths for lengths in self.values["lengths"] if is_explicit(lengths)]
        contexts = [max(read_lengths("lengths", lengths)) for lengths in explicit]
        if "context" in self.given and len(explicit) < len(self.values["lengths"]):
            contexts += self.values["context"]
        longest = max(contexts, default=0)
        if longest > most:
            raise UserError(
                f"context {longest} is above the largest capacity that is drawn, {most} tokens:"
                f" give contexts of at most {most}, or a larger capacity, or exact"
            )

    def problems(self) -> Iterator[AttentionProblem]:
        """Yield different problems, fewer than `count` if there are no more. A larger count only
        adds problems.

        Raises:
            UserError: No combination of the values is a problem that fits.
        """
        found: set[AttentionProblem] = set()
        for number in range(self.count + _ATTEMPTS):
            problem = self._problem(random.Random(f"{self.seed} {number}"))
            if problem not in found:
                found.add(problem)
                yield problem
            if len(found) == self.count:
                return

    def _problem(self, draw: random.Random) -> AttentionProblem:
        refusal = UserError(
            f"none of {_ATTEMPTS} drawn problems fits {MOST_BYTES / 1e9:.0f} GB: draw smaller"
            " capacities or batches"
        )
        for _ in range(_ATTEMPTS):
            try:
                problem = self._one(draw)
            except UserError as error:
                refusal = error
                continue
            if needed_bytes(problem) <= MOST_BYTES:
                return problem
        raise refusal

    def _one(self, draw: random.Random) -> AttentionProblem:
        """Draw one combination; raise UserError if it is no problem."""
        first = [name for name, values in self.values.items() if values and name not in KINDS]
        drawn = {name: draw.choice(self.values[name]) for name in first}
        (q_heads, kv_heads), head_dim = drawn["heads"], drawn["head_dim"]
        if "model" in drawn:
            q_heads, kv_heads, head_dim = model_named(drawn["model"]).shape(drawn["tp"])
        batch, longest, lengths = drawn["batch"], drawn["context"], drawn["lengths"]
        if self.fill is not None:
            low, high = self.fill
            longest = max(1, round(drawn["capacity"] * low * (high / low) ** draw.random()))
        if is_explicit(lengths):
            given = read_lengths("lengths", lengths)
            batch, context = len(given), as_context(given)
        else:
            context = draw_context(lengths, batch, longest, draw)
        # Last, so that kinds do not change what a seed draws for other axes.
        drawn |= {name: draw.choice(self.values[name]) for name in KINDS}
        if drawn["whole_model"] is not None:
            q_heads, kv_heads, head_dim = read_model(drawn["whole_model"]).heads
        plain = {axis.name: drawn[axis.name] for axis in PLAIN_AXES if axis.name != "head_dim"}
        return AttentionProblem(batch, q_heads, kv_heads, context, head_dim, **plain)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types for the manifest."""
        axes = {
            name: [list(value) if isinstance(value, tuple) else value for value in values]
            for name, values in self.values.items()
            if values
        }
        fill = {} if self.fill is None else {"fill": list(self.fill)}
        return {"count": self.count, "seed": self.seed, **fill, **axes}


def _largest(capacities: Sequence[Any]) -> int | None:
    """Return the largest capacity in tokens; None if one holds any context."""
    return max(capacities) if all(isinstance(each, int) for each in capacities) else None


def _held(contexts: tuple[int, ...], capacities: Sequence[Any]) -> tuple[int, ...]:
    """Return the contexts that fit a capacity, or all if none does. A problem rejects those."""
    most = _largest(capacities)
    return tuple(each for each in contexts if most is None or each <= most) or contexts


@dataclass(frozen=True)
class Sample:
    """A random choice of a grid's problems."""

    count: int
    seed: int

    def of(self, problems: Iterable[AttentionProblem]) -> list[AttentionProblem]:
        """Return the chosen problems in the grid's order. A larger count only adds problems.

        Raises:
            InvalidValue: There are too few problems.
        """
        every = list(problems)
        if self.count > len(every):
            fix = "draw fewer, or leave --draw out for all problems"
            raise InvalidValue("--draw", self.count, Reason.ABOVE_MAXIMUM, fix, len(every))
        indices = list(range(len(every)))
        random.Random(f"{self.seed}").shuffle(indices)
        return [every[index] for index in sorted(indices[: self.count])]

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seed": self.seed}
