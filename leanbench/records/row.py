"""Row: one line of `results.jsonl`, with request, settings and results.

A field that was not measured is null, never 0, and is not written.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from leanbench.core.errors import UserError
from leanbench.core.files import parse_json, short_json
from leanbench.core.problem import AttentionProblem
from leanbench.core.quantities import EVERY_STATUS, Status, quantities, quantity
from leanbench.records.figures import Figures

#: Raised when a field changes its meaning or goes; a new optional field does not raise it.
SCHEMA_VERSION = 2


#: Declaration of a text that every row has.
_text = partial(quantity, group="row", kind="text", statuses=EVERY_STATUS, default=...)
_data = partial(_text, shown="data")
_origin = partial(_data, group="origin")


class Identity(BaseModel):
    """Fields of every row: its cell and its status."""

    cell: str = _data(
        "cell",
        meaning="problem, kernel and config request within a run; resume skips those with a row",
    )
    #: As `AttentionProblem.to_dict` writes it. Tables have a column for each axis instead.
    problem: dict[str, Any]
    decomposition: str = _data(
        "decomposition",
        meaning="how the kernel deals out the work: one_cta_per_tile, fixed_split, stream_k, other",
    )
    source: Literal["measured", "predicted"] = _text(
        "source", meaning="measured on a GPU, or predicted by the performance model", shown="paper"
    )
    cache: Literal["cold", "warm"] = _text(
        "L2",
        meaning="when a launch starts: cold (buffers rotate, as K and V come in serving) or warm"
        " (one buffer again and again)",
        shown="paper",
        default="cold",
    )
    kernel: str = _text("kernel", meaning="by its name in leanbench list kernels", shown="paper")
    status: Status = _text(
        "status",
        meaning="ok, or how the row ended: see docs/measuring.md",
        kind="outcome",
        shown="paper",
    )
    reason: str | None = _data(
        "reason",
        meaning="one sentence for every status but ok",
        kind="sentence",
        statuses=EVERY_STATUS[1:],
        default=None,
    )
    kv_bytes: int = _text(
        "K and V", "bytes", "bytes of K and V that must be read", group="memory", kind="bytes"
    )
    wall_s: float = _origin(
        "wall time", "s", "that the cell took, everything included", kind="figure"
    )
    time: str = _origin("time", meaning="UTC, ISO 8601")
    environment: str = _origin(
        "environment", meaning="key of the manifest's environment that the row was taken in"
    )
    run_id: str | None = _origin(
        "run id",
        meaning="of the run that took the row, as in its manifest; another in a row that was put in"
        " from elsewhere",
        default=None,
    )


class Row(Figures, Identity):
    """One cell's result.

    Raises:
        ValidationError: A figure is forbidden for the status or missing, or out of range. A field
            is unknown, missing or of another type.
    """

    @model_validator(mode="after")
    def _check_figures(self) -> Self:
        for figure in QUANTITIES:
            name, value = figure.name, getattr(self, figure.name)
            if self.status not in figure.statuses and value is not None:
                raise _fault(f"a row that is {self.status} carries no {name}")
            # An energy of 0 is a counter that stood still. Reports leave it out.
            stood_still = name == "energy_mj" and value == 0
            least = _LEAST if name in _RATIOED else -_MOST if name in _DIFFERENCES else 0
            is_number = isinstance(value, int | float)
            if is_number and not stood_still and not least <= value <= _MOST:
                raise _fault(f"{name}: {value:g} is not between {least:g} and {_MOST:g}")
        if self.status in ("ok", "noisy") and self.latency_us is None:
            raise _fault(f"a row that is {self.status} needs a latency_us")
        low, high = self.latency_ci_low_us, self.latency_ci_high_us
        if low is not None and high is not None and low > high:
            raise _fault(f"the interval of latency_us is reversed: {low:g} to {high:g}")
        return self

    def line(self) -> bytes:
        """Return the row as a line of `results.jsonl`, without its nulls."""
        fields = self.model_dump(mode="json")
        measured = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(measured, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _fault(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("status", "{sentence}", {"sentence": sentence})


#: Every quantity of a row, in the order of tables.
QUANTITIES = quantities(Row)

#: Figures that can be negative.
_DIFFERENCES = ("exchange_us", "energy_above_idle_mj")
#: Figures that ratios are made of, and the limits between which ratios are numbers.
_RATIOED = (
    "latency_us",
    "crosscheck_us",
    "read_floor_us",
    "sustained_us",
    "energy_floor_mj",
    "energy_mj",
)
_LEAST, _MOST = 1e-9, 1e18


def make_row(fields: dict[str, Any]) -> Row:
    """Validate the fields of a row before it is written.

    Raises:
        ValueError: They are no row, or a file cannot hold one of them. The message is one line.
    """
    try:
        row = Row.model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    # A line that cannot be parsed would hide all other rows of its run.
    parse_json(row.line())
    return row


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a row: ``latency_us: Input should be a valid number``."""
    fault = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))


def read_row(line: bytes | str) -> tuple[Row, AttentionProblem]:
    """Read a line of `results.jsonl`.

    Raises:
        ValueError: It is no row. The message is one line.
    """
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise ValueError(f"a row is a JSON object, this is {short_json(fields)}")
    version = fields.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"it has schema version {short_json(version)}, this leanbench reads {SCHEMA_VERSION}"
        )
    try:
        # Leave out the fields of later versions.
        row = Row.model_validate(
            {name: fields[name] for name in fields if name in Row.model_fields},
            # true or "1.5" is no number.
            strict=True,
        )
        return row, AttentionProblem.from_dict(row.problem)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    except KeyError as error:
        raise ValueError(f"problem.{error.args[0]}: Field required") from None
    except (TypeError, UserError) as error:
        raise ValueError(f"problem: {error}") from None
