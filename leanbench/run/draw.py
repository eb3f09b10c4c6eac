"""Problems drawn at random for a sweep, always the same ones for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanbench.core.axes import AXES, KINDS
from leanbench.core.errors import UserError
from leanbench.core.lengths import as_context, draw_context, is_explicit, read_lengths
from leanbench.core.llm.model import model_named, read_model
from leanbench.core.memory import needed_bytes
from leanbench.core.problem import PLAIN_AXES, AttentionProblem

#: A drawn problem that needs more is drawn again: caches, queries, outputs and the check.
MOST_BYTES = 120e9
#: Problems of a draw; each may have thousands of lengths.
MOST_PROBLEMS = 10_000
#: Draws of a problem at most until one can be and fits.
_ATTEMPTS = 1000


@dataclass(frozen=True)
class Draw:
    """So many problems; every axis takes one of its values, each as likely as the others.

    Raises:
        UserError: a fill with capacities that are no tokens.
    """

    count: int
    seed: int
    #: By axis, in the order of AXES. Where there are models, one of them and a `tp` that shares out
    #: its heads say heads and head_dim.
    values: Mapping[str, tuple[Any, ...]]
    #: The context over the capacity: drawn log-uniformly between these two, in place of `context`.
    fill: tuple[float, float] | None = None
    #: Axes whose values somebody gave; the others have their own.
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.fill is not None:
            _refuse_shares_of_no_tokens(self.values["capacity"])

    @classmethod
    def of(
        cls,
        count: int,
        seed: int,
        given: Mapping[str, tuple[Any, ...]],
        fill: tuple[float, float] | None = None,
    ) -> Draw:
        """The draw with the values of `given`, and the axes' own elsewhere; of the context's own,
        those that a capacity holds.

        Raises:
            UserError: a fill together with contexts, or as the class says.
        """
        values = {name: given.get(name, axis.grid) for name, axis in AXES.items()}
        if fill and "context" in given:
            raise UserError("fill draws the context from the capacity: leave one of them out")
        if fill is None and "context" not in given:
            values["context"] = _held(values["context"], values["capacity"])
        return cls(count, seed, values, fill, frozenset(given))

    def refuse_what_no_capacity_holds(self) -> None:
        """Refuses lengths that were given and are above every capacity: they would be drawn again
        until others come.

        Raises:
            UserError: there is one.
        """
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
        """The problems; the first of them are alike whatever the count.

        Raises:
            UserError: no combination of the values is a problem that fits.
        """
        for number in range(self.count):
            yield self._problem(random.Random(f"{self.seed} {number}"))

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
        """One combination.

        Raises:
            UserError: it is no problem.
        """
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
        # Last: what a seed draws for the others is as it was before there were kinds.
        drawn |= {name: draw.choice(self.values[name]) for name in KINDS}
        if drawn["whole_model"] is not None:
            q_heads, kv_heads, head_dim = read_model(drawn["whole_model"]).heads
        plain = {axis.name: drawn[axis.name] for axis in PLAIN_AXES if axis.name != "head_dim"}
        return AttentionProblem(batch, q_heads, kv_heads, context, head_dim, **plain)

    def to_dict(self) -> dict[str, Any]:
        """The count, the seed and the values in plain JSON types, for the manifest."""
        axes = {
            name: [list(value) if isinstance(value, tuple) else value for value in values]
            for name, values in self.values.items()
            if values
        }
        fill = {} if self.fill is None else {"fill": list(self.fill)}
        return {"count": self.count, "seed": self.seed, **fill, **axes}


def _refuse_shares_of_no_tokens(capacities: Sequence[Any]) -> None:
    """Refuses capacities that a fill is no share of."""
    for capacity in capacities:
        if not isinstance(capacity, int):
            raise UserError(
                "fill is a share of the capacity in tokens, and a capacity is"
                f" {AXES['capacity'].write(capacity)}: give capacity in tokens, as in 4k,32k, or"
                " context in place of fill"
            )


def _largest(capacities: Sequence[Any]) -> int | None:
    """In tokens; None where one of them holds any context."""
    return max(capacities) if all(isinstance(each, int) for each in capacities) else None


def _held(contexts: tuple[int, ...], capacities: Sequence[Any]) -> tuple[int, ...]:
    """The contexts that a capacity holds; all of them where none does, which a problem refuses."""
    most = _largest(capacities)
    return tuple(each for each in contexts if most is None or each <= most) or contexts


@dataclass(frozen=True)
class Sample:
    """So many of a grid's problems, each as likely as the others."""

    count: int
    seed: int

    def of(self, problems: Iterable[AttentionProblem]) -> list[AttentionProblem]:
        """The chosen ones, in the grid's order; a smaller count chooses among the same ones.

        Raises:
            UserError: there are not as many problems.
        """
        all_of_them = list(problems)
        if self.count > len(all_of_them):
            raise UserError(
                f"--draw {self.count} is more than the sweep's {len(all_of_them)} problems: draw"
                " fewer, or leave --draw out for all of them"
            )
        places = list(range(len(all_of_them)))
        random.Random(f"{self.seed}").shuffle(places)
        return [all_of_them[place] for place in sorted(places[: self.count])]

    def to_dict(self) -> dict[str, Any]:
        """The fields, for the manifest."""
        return {"count": self.count, "seed": self.seed}
