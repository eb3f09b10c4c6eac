"""The axes of a sweep, in one table: the fields of AttentionProblem, and what only sweeps have.

Flags, the keys of sweep files, grids, repeat commands and `leanbench list axes` follow from it.
"""

from __future__ import annotations

from leanbench.core.axis import Axis
from leanbench.core.axis_values import HeadPairs, Values, Whole
from leanbench.core.language_models import parse_models
from leanbench.core.lengths import UNIFORM, Lengths
from leanbench.core.problem import PROBLEM_AXES


class ModelNames(Values):
    """Names and paths of leanbench.core.language_models."""

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return parse_models(text)

    def check(self, name: str, value: str) -> None:
        parse_models(value)


HEADS = Axis(
    "heads", HeadPairs(), "h", swept=((32, 8),), help="Query heads, or query/KV heads: 56,32/8."
)
#: Over the context, which is then the longest that a sequence may be.
LENGTHS = Axis(
    "lengths",
    Lengths(),
    default=UNIFORM,
    help="Of a batch, up to the context: uniform, one-long, zipf, mean-0.25, azure-code,"
    " azure-conversation, mooncake, mooncake-synthetic, FILE, FILE:COLUMN, or one by one:"
    " 64k+16x3.",
    label="batch lengths",
    refusal="takes no ragged batch",
)
#: Models say heads and head_dim in place of those axes.
MODEL = Axis(
    "model",
    ModelNames(),
    swept=(),
    help="Attention of models, names from `leanbench list models` or a config.json:"
    " llama-3-70b,gpt-oss-20b.",
)
TP = Axis(
    "tp",
    Whole(),
    default=1,
    help="GPUs that share out a model's heads (tensor parallelism): 1,8; one of them is measured.",
)


#: Names of the axes of leanbench.core.kinds, and of those that came after them.
KINDS = tuple(axis.name for axis in PROBLEM_AXES)[
    [axis.name for axis in PROBLEM_AXES].index("causal") :
]


def _table() -> dict[str, Axis]:
    own = {axis.name: axis for axis in PROBLEM_AXES if not axis.part_of}
    of_problems = {"heads": HEADS, "context": own["context"], **own}
    of_sweeps = {axis.name: axis for axis in (LENGTHS, MODEL, TP)}
    kinds = {name: of_problems.pop(name) for name in KINDS}
    return {**of_problems, **of_sweeps, **kinds}


#: Every axis that a sweep can have, by name; heads and context first, kinds of attention last.
AXES: dict[str, Axis] = _table()
