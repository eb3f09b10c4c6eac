"""Calibrations: constants of the model for a GPU, and their errors.

A calibration is a JSON file. The look-up takes the user's file for the GPU (`models/<gpu>.json` in
`user_folder`), else the shipped one, else the nearest calibrated GPU's, with this GPU's bandwidth,
clock and SMs. The nearest is that of the closest bandwidth in the same generation, else the user's
own, else the one with most rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from leanbench.core.errors import UserError
from leanbench.core.files import (
    UnreadableFile,
    parse_unchecked_json,
    read_file,
    replace_file,
    short_json,
)
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.paths import user_folder
from leanbench.gpu.catalogue import find
from leanbench.model.constants import Calibrated, Constants, LeanCudaConstants, declared

SCHEMA_VERSION = 3
SHIPPED = Path(__file__).resolve().parent / "calibrations"


@dataclass(frozen=True)
class Errors:
    """Statistics of |predicted / measured - 1|."""

    rows: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True)
class RunErrors:
    """Errors of a calibration on the rows of one run."""

    run: str
    #: Role of the rows in the fit.
    role: Literal["fitted", "checked"]
    #: `latency_us`, or `energy_mj`.
    quantity: Literal["latency", "energy"]
    all: Errors
    by_kernel: dict[str, Errors]
    #: Kernel pairs of one problem that differ by more than 5%, and pairs in the predicted order.
    pairs: int
    pairs_right: int
    #: GPU, torch, Triton and driver of the run.
    environment: dict[str, str]
    #: `leanbench.model.error.features` of its problems.
    features: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """Constants of one GPU, and their errors."""

    #: Catalogue name of the GPU.
    gpu: str
    constants: Constants
    runs: tuple[RunErrors, ...]
    #: Version of leanbench that fitted it, and when (ISO 8601, UTC).
    leanbench: str
    created: str

    @property
    def rows(self) -> int:
        """Rows that it was fitted to or checked with."""
        return sum(run.all.rows for run in self.runs)


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


def user_file(gpu: str) -> Path:
    """Return the path of the user's calibration of a GPU."""
    return user_folder() / "models" / f"{gpu}.json"


def calibration_for(spec: GpuSpec) -> InUse:
    """Return the calibration that predictions for this GPU use."""
    folder = user_file(spec.name).parent
    generation = spec.compute_capability[0]
    versions = _file_versions(folder)
    return _look_up(spec.name, spec.bandwidth_tb_s, generation, folder, versions)


def _file_versions(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return a cache key that changes with the files of the folder."""
    try:
        files = sorted(folder.glob("*.json"))
        return tuple((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)
    except OSError:
        return ()


@lru_cache(maxsize=64)
def _look_up(
    gpu: str, bandwidth_tb_s: float, generation: int, folder: Path, versions: Any
) -> InUse:
    readable: dict[str, tuple[Calibration, Path]] = {}
    notes = []
    for path in (*sorted(SHIPPED.glob("*.json")), *(folder / name for name, _, _ in versions)):
        try:
            calibration = read_calibration(path)
        except UserError as error:
            # Another GPU's damaged file does not affect this prediction.
            if path.stem == gpu:
                notes.append(f"{error}; it is passed over")
            continue
        # Later ones are the user's and win.
        readable[calibration.gpu] = calibration, path

    def distance(name: str) -> tuple[bool, bool, bool, int, float]:
        spec, (calibration, path) = find(name), readable[name]
        ratio = abs(math.log(spec.bandwidth_tb_s / bandwidth_tb_s))
        if spec.compute_capability[0] == generation:
            return name != gpu, False, False, 0, ratio
        # Bandwidths of other generations are never near: prefer the user's, then the most rows.
        return True, True, path.parent == SHIPPED, -calibration.rows, ratio

    calibration, path = readable[min(readable, key=distance)]
    return InUse(calibration, path, gpu, tuple(notes))


def read_calibration(path: Path) -> Calibration:
    """Read and check a calibration file.

    Raises:
        UserError: The file cannot be read or is invalid.
    """
    try:
        return _from_json(parse_unchecked_json(read_file(path, 10)))
    except UnreadableFile as error:
        raise UserError(f"cannot read the calibration {path} ({error.reason})") from None
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(
            f"{path} is no calibration ({_one_line(error)}): move it away or fit it again"
        ) from None


def _from_json(content: dict[str, Any]) -> Calibration:
    from pydantic import TypeAdapter

    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema version {short_json(version)}, this leanbench reads {SCHEMA_VERSION}"
        )
    values = _values(content["constants"], Constants)
    if content["lean_cuda"] is not None:
        values["lean_cuda"] = _values(content["lean_cuda"], LeanCudaConstants)
    calibration = TypeAdapter(Calibration).validate_python({**content, "constants": values})
    find(calibration.gpu)
    return calibration


def _values(content: dict[str, Any], of: type[Calibrated]) -> dict[str, Any]:
    values = {name: constant["value"] for name, constant in content.items()}
    missing = {constant.name for constant in declared(of)} - values.keys()
    if missing:
        raise ValueError(f"constants without a value: {', '.join(sorted(missing))}")
    return values


def _one_line(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    if isinstance(error, (AttributeError, TypeError)):
        return "a table in it is none"
    return str(error)


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Return the content of a calibration file; every constant has its unit and meaning."""
    lean_cuda = calibration.constants.lean_cuda
    values = asdict(calibration)
    del values["constants"]
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": calibration.gpu,
        "constants": _described(calibration.constants),
        "lean_cuda": None if lean_cuda is None else _described(lean_cuda),
        **values,
    }


def _described(constants: Calibrated) -> dict[str, Any]:
    return {
        constant.name: {"value": getattr(constants, constant.name), **constant.metadata}
        for constant in declared(constants)
    }


def refuse_to_overwrite(path: Path) -> None:
    """Raise UserError if `path` is a folder or a file other than a calibration."""
    if path.is_dir():
        raise UserError(f"cannot write {path} (is a directory): give another --out")
    if path.exists():
        read_calibration(path)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file whole or not at all. An existing file must be a calibration.

    Raises:
        UserError: The file there is none, or the folder cannot be written.
    """
    refuse_to_overwrite(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(to_json(calibration), indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({(error.strerror or str(error)).lower()}): give another --out"
        ) from None
