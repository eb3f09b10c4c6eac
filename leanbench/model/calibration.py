"""Which constants the model uses for a GPU, where they come from, and how wrong they were.

A calibration is a JSON file. Looked for in this order: the user's own for the GPU
(`models/<gpu>.json` in the folder of `LEANBENCH_HOME`, else in `leanbench` under `XDG_DATA_HOME` or
~/.local/share), the shipped one, and the nearest calibrated GPU's, whose shares and times are then
used with this GPU's bandwidth, clock and SMs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.gpu.catalogue import find
from leanbench.model.constants import Constants

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).resolve().parent / "calibrations"


@dataclass(frozen=True)
class Errors:
    """Predicted over measured, minus one, without its sign."""

    rows: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True)
class RunErrors:
    """How wrong a calibration was on the rows of one run."""

    run: str
    #: `fitted`: its constants were chosen on these rows. `checked`: they were not.
    role: Literal["fitted", "checked"]
    #: `latency_us`, or `energy_mj`.
    quantity: Literal["latency", "energy"]
    all: Errors
    by_kernel: dict[str, Errors]
    #: Pairs of kernels of one problem that differ by more than 5%, and how many the model put in
    #: the right order.
    pairs: int
    pairs_right: int
    #: GPU, torch, Triton and driver that the run was measured with.
    environment: dict[str, str]


@dataclass(frozen=True)
class Calibration:
    """The constants of one GPU, and what is known of them."""

    #: Catalogue name of the GPU.
    gpu: str
    constants: Constants
    runs: tuple[RunErrors, ...]
    #: Version of leanbench that fitted it, and when (ISO 8601, UTC).
    leanbench: str
    created: str


@dataclass(frozen=True)
class InUse:
    """A calibration as looked up for a GPU."""

    calibration: Calibration
    path: Path
    #: The GPU it is used for.
    gpu: str
    #: A sentence for every file that was passed over.
    notes: tuple[str, ...] = ()

    @property
    def constants(self) -> Constants:
        return self.calibration.constants

    @property
    def is_scaled(self) -> bool:
        return self.calibration.gpu != self.gpu


def home() -> Path:
    """Where the user's own files are."""
    if own := os.environ.get("LEANBENCH_HOME"):
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification has relative paths ignored.
    return (
        Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    ) / "leanbench"


def user_file(gpu: str) -> Path:
    """Where the user's calibration of a GPU is looked for."""
    return home() / "models" / f"{gpu}.json"


def calibration_for(spec: GpuSpec) -> InUse:
    """The calibration that predictions for this GPU use."""
    own = user_file(spec.name)
    return _look_up(
        spec.name, spec.bandwidth_tb_s, spec.compute_capability[0], own.parent, _stamps(own.parent)
    )


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when a file of the folder does, so that what was looked up before is not used
    then.
    """
    try:
        files = sorted(folder.glob("*.json"))
        return tuple((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)
    except OSError:
        return ()


@lru_cache(maxsize=64)
def _look_up(gpu: str, bandwidth_tb_s: float, generation: int, folder: Path, stamps: Any) -> InUse:
    found: dict[str, tuple[Calibration, Path]] = {}
    notes = []
    for path in (*sorted(SHIPPED.glob("*.json")), *(folder / name for name, _, _ in stamps)):
        try:
            calibration = read_calibration(path)
        except UserError as error:
            # Another GPU's damaged file says nothing about this prediction.
            if path.stem == gpu:
                notes.append(f"{error}; it is passed over")
            continue
        # Later ones are the user's and win.
        found[calibration.gpu] = calibration, path

    def distance(name: str) -> tuple[bool, bool, float]:
        other = find(name)
        ratio = abs(math.log(other.bandwidth_tb_s / bandwidth_tb_s))
        return name != gpu, other.compute_capability[0] != generation, ratio

    calibration, path = found[min(found, key=distance)]
    return InUse(calibration, path, gpu, tuple(notes))


def read_calibration(path: Path) -> Calibration:
    """A calibration file, checked.

    Raises:
        UserError: it cannot be read, or is no calibration; the first thing that is wrong is named.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(content)
    except OSError as error:
        raise UserError(
            f"cannot read the calibration {path} ({(error.strerror or str(error)).lower()})"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(
            f"{path} is no calibration ({_one_line(error)}): move it away or fit it again"
        ) from None


def _from_json(content: dict[str, Any]) -> Calibration:
    from pydantic import TypeAdapter

    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema version {version!r}, this leanbench reads {SCHEMA_VERSION}")
    values = {name: constant["value"] for name, constant in content["constants"].items()}
    missing = {constant.name for constant in fields(Constants)} - values.keys()
    if missing:
        raise ValueError(f"constants without a value: {', '.join(sorted(missing))}")
    calibration = TypeAdapter(Calibration).validate_python({**content, "constants": values})
    find(calibration.gpu)
    return calibration


def _one_line(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return str(error)


def to_json(calibration: Calibration) -> dict[str, Any]:
    """What a calibration file holds; every constant with its unit and meaning."""
    values = asdict(calibration.constants)
    constants = {
        constant.name: {"value": values[constant.name], **constant.metadata}
        for constant in fields(Constants)
    }
    return {"schema_version": SCHEMA_VERSION, **asdict(calibration), "constants": constants}


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Writes it whole or not at all. A file that is there must be a calibration itself.

    Raises:
        UserError: the file there is none, or the folder cannot be written.
    """
    if path.exists():
        read_calibration(path)
    part = path.with_name(path.name + f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(to_json(calibration), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} ({(error.strerror or str(error)).lower()}): give another --out"
        ) from None


def known_error(gpu: str) -> str:
    """What is said with every prediction for a GPU (catalogue or product name): how wrong the model
    was, and where.
    """
    try:
        spec = find(gpu)
    except UserError:
        # Not in the catalogue: no calibration can be its own.
        spec, gpu = find("h200"), gpu or "this GPU"
        in_use = calibration_for(spec)
        return (
            f"{_error_words(in_use.calibration)}; scaled from {in_use.calibration.gpu}, unchecked"
            f" on {gpu}."
        )
    in_use = calibration_for(spec)
    words = _error_words(in_use.calibration)
    if in_use.is_scaled:
        words += f"; scaled from {in_use.calibration.gpu}, unchecked on {spec.name}"
    return " ".join([f"{words}.", *(f"Note: {note}." for note in in_use.notes)])


def _error_words(calibration: Calibration) -> str:
    """The errors on the rows that no constant was chosen on, where there are such."""
    latency = [run for run in calibration.runs if run.quantity == "latency"]
    held_out = [run for run in latency if run.role == "checked"]
    runs = held_out or latency
    rows = sum(run.all.rows for run in runs)
    if not rows:
        return f"Model error on {calibration.gpu}: unknown"
    # Medians of several runs cannot be joined; the one that most rows stand behind is said.
    largest = max(runs, key=lambda run: run.all.rows)
    worst = max(run.all.worst for run in runs)
    which = "was not fitted to" if held_out else "was fitted to"
    return (
        f"Model error on {calibration.gpu}, {rows} rows that it {which}: {largest.all.median:.1%}"
        f" median and {largest.all.p90:.1%} at the 90th percentile ({largest.run}), {worst:.0%}"
        " worst"
    )
