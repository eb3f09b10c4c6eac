"""Boards: the GPUs of the rows of a run, and which rows one run can combine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.records.environment import environment_key

#: Maximum ratio of the calibration cell's latency on two boards of one run. H200s differ by 3 to 4%
#: in bandwidth (docs/model.md).
MOST_APART = 1.05
#: Fields that differ on every board.
_OWN = ("host", "gpu_uuid", "gpu_uuids")
#: Fields of rows of several GPUs, which a part of a run can lack.
_OF_SEVERAL = ("gpu_products", "gpu_links")
#: Fields that rows must share even with --mix-boards.
_SAME_ALWAYS = ("leanbench", "kernels", "settings")


@dataclass(frozen=True)
class Board:
    """A GPU with its software, or the model and the software of a prediction."""

    #: `measured` or `predicted`.
    source: str
    #: Fields of `leanbench.core.gpu_spec.GpuSpec`, clocks and limits as the driver says.
    gpu: dict[str, Any]
    environment: dict[str, Any]
    #: Latency of the calibration cell; None if it was not measured.
    calibration_us: float | None = None

    @property
    def key(self) -> str:
        """Return the key of the environment in rows."""
        return environment_key(self.environment)

    @property
    def label(self) -> str:
        words = [
            self.environment.get("host"),
            self.gpu["product"],
            self.environment.get("gpu_uuid"),
        ]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Difference:
    """A difference between two boards, as a phrase."""

    phrase: str
    #: True if --mix-boards accepts it.
    mixable: bool


def boards_of(manifest: dict[str, Any]) -> Iterator[Board]:
    """Yield the boards of a manifest in order."""
    for key, environment in manifest["environments"].items():
        # Older runs have no boards.
        board = manifest.get("boards", {}).get(key, {"gpu": manifest["gpu"]})
        yield Board(manifest["source"], board["gpu"], environment, board.get("calibration_us"))


def refuse_other_software(path: Path, manifest: dict[str, Any], here: dict[str, Any]) -> None:
    """Reject rows that `merge` would not combine with the rows of the run.

    Args:
        here: Versions of leanbench, kernels and settings of the new rows. Others are not compared.

    Raises:
        UserError: The run has rows of another leanbench, other kernels or settings.
    """
    for environment in manifest["environments"].values():
        for name, value in here.items():
            if name in environment and environment[name] != value:
                raise UserError(
                    f"{path} has rows of {name} {environment[name]}, this command uses {value}:"
                    " start a new run with another --name"
                )


def difference(first: Board, other: Board) -> Difference | None:
    """Return the most important difference of two boards; None if one run can have both."""
    differences = [
        *_of_fields(
            {"source": first.source, "GPU": first.gpu["name"]},
            {"source": other.source, "GPU": other.gpu["name"]},
            always=("source", "GPU"),
        ),
        *_of_fields(
            *_of_as_many_gpus(first.environment, other.environment),
            always=_SAME_ALWAYS,
            never=(*_OWN, *_missing(_OF_SEVERAL, first.environment, other.environment)),
        ),
        *_of_fields(first.gpu, other.gpu),
        *_of_calibration(first, other),
    ]
    return min(differences, key=lambda found: found.mixable, default=None)


def _of_fields(
    first: dict[str, Any],
    other: dict[str, Any],
    always: tuple[str, ...] = (),
    never: tuple[str, ...] = (),
) -> Iterator[Difference]:
    for name in {**first, **other}:
        if name not in never and _plain(first.get(name)) != _plain(other.get(name)):
            phrase = f"{name} is {other.get(name)}, not {first.get(name)}"
            yield Difference(phrase, mixable=name not in always)


def _of_as_many_gpus(first: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two environments with only the GPUs that both have, by rank."""
    both = [first, other]
    # Manifests can contain anything.
    with contextlib.suppress(KeyError, TypeError):
        gpus = min(len(of["gpu_products"]) for of in both)
        return [
            {
                **of,
                "gpu_products": of["gpu_products"][:gpus],
                "gpu_links": [link for link in of["gpu_links"] or () if link["second"] < gpus],
            }
            for of in both
        ]
    return both


def _missing(names: tuple[str, ...], *fields: dict[str, Any]) -> list[str]:
    """Return the names that one of the environments lacks."""
    return [name for name in names if any(of.get(name) is None for of in fields)]


def _of_calibration(first: Board, other: Board) -> Iterator[Difference]:
    if first.calibration_us is None or other.calibration_us is None:
        return
    apart = max(first.calibration_us, other.calibration_us) / min(
        first.calibration_us, other.calibration_us
    )
    if apart > MOST_APART:
        yield Difference(
            f"the calibration cell takes {other.calibration_us:.1f} us, not"
            f" {first.calibration_us:.1f}, {MOST_APART - 1:.0%} apart at most",
            mixable=True,
        )


def _plain(value: Any) -> Any:
    """Return a value like JSON stores it."""
    return list(value) if isinstance(value, tuple) else value
