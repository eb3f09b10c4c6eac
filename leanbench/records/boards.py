"""Boards: the GPUs that the rows of a run were taken on, and whether rows of two may stand in one
run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.records.environment import environment_key

#: The calibration cell's latency on two boards of one run, the larger over the smaller, at most:
#: H200s differ by 3 to 4% in bandwidth (docs/model.md).
MOST_APART = 1.05
#: Fields of environments in which boards always differ.
_OWN = ("host", "gpu_uuid", "gpu_uuids")
#: Fields of environments in which rows of several GPUs were taken; a part of a run may have none.
_OF_SEVERAL = ("gpu_products", "gpu_links")
#: Fields without which rows are of another question, whatever --mix-boards says.
_SAME_ALWAYS = ("leanbench", "kernels", "settings")


@dataclass(frozen=True)
class Board:
    """A GPU with its software, as rows stand for it; of a prediction, the model and the software
    alone.
    """

    #: `measured` or `predicted`.
    source: str
    #: Fields of `leanbench.core.gpu_spec.GpuSpec`, clocks and limits as the driver says.
    gpu: dict[str, Any]
    environment: dict[str, Any]
    #: Latency of the calibration cell; None where it was not measured.
    calibration_us: float | None = None

    @property
    def key(self) -> str:
        """Of the environment, as rows name it."""
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
    """Why two boards are not alike, as a phrase."""

    phrase: str
    #: Whether --mix-boards may put up with it.
    mixable: bool


def boards_of(manifest: dict[str, Any]) -> Iterator[Board]:
    """The boards of a manifest, in the order in which they came."""
    for key, environment in manifest["environments"].items():
        # A run from before boards were noted was taken on the manifest's GPU.
        board = manifest.get("boards", {}).get(key, {"gpu": manifest["gpu"]})
        yield Board(manifest["source"], board["gpu"], environment, board.get("calibration_us"))


def refuse_other_software(path: Path, manifest: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses rows beside those that the run of `path` has, where `merge` would.

    Args:
        here: of leanbench, kernels and settings of the rows to come those that matter to them, as
            environments have them; what an environment lacks is not compared.

    Raises:
        UserError: the run's rows are of another leanbench, of other kernels or settings.
    """
    for environment in manifest["environments"].values():
        for name, own in here.items():
            if name in environment and environment[name] != own:
                raise UserError(
                    f"{path} has rows of {name} {environment[name]}, this command's would be of"
                    f" {own}: start a run of its own with another --name"
                )


def difference(first: Board, other: Board) -> Difference | None:
    """The weightiest difference of two boards; None where their rows may stand in one run."""
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
    """Two environments, both with the GPUs alone, by rank, that the one with fewer has: parts of a
    run may have problems for other numbers of GPUs.
    """
    both = [first, other]
    # Manifests are read as they were written: anything may stand there, or nothing.
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
    """The names that one of them lacks."""
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
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value
