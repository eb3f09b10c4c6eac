"""Files of timings, from which settings follow: one per GPU, JSON with a line per timed call.

A user's files are in `configs/` of leanbench.core.paths.user_folder(), shipped ones in `SHIPPED`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from leanbench.core.config import read_config
from leanbench.core.errors import UserError
from leanbench.core.files import (
    UnreadableFile,
    locked,
    parse_unchecked_json,
    printable,
    read_file,
    replace_file,
)
from leanbench.core.gpu_spec import GpuSpec, name_fault
from leanbench.core.paths import is_without_home, user_folder
from leanbench.core.problem import AttentionProblem
from leanbench.core.switches import CONFIGS, is_on
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.kernels.mla.configs import MlaConfig

SHIPPED = Path(__file__).resolve().parent / "shipped"
#: Increased if a field changes its meaning or is removed, or signatures change.
SCHEMA_VERSION = 4
#: Kernels with tuned settings: `lean`, and `lean_mla` for latent caches.
KERNEL = "lean"
#: Their settings, distinguished by `implementation`; None is of `lean_mla`.
TunedConfig: TypeAlias = LeanConfig | MlaConfig
_TYPES: tuple[type[TunedConfig], ...] = (*LEAN_CONFIGS, MlaConfig)
OBJECTIVES = ("latency", "energy", "edp")
#: Replaces the hash of settings if there is no file, or if LEANBENCH_CONFIGS turns files off.
HEURISTIC = "heuristic"
_MOST_MB = 100
_MOST_SIZE = 1e9
#: Drivers round the L2 differently. H200, GH200 and H100 NVL differ only in their bandwidth.
_L2_TOLERANCE = 0.02
_BANDWIDTH_TOLERANCE = 0.1
#: Fields of a GPU that decide whether timings hold for it, and its names.
_GPU = ("name", "product", "compute_capability", "sms", "l2_mib", "bandwidth_tb_s")

_saves = 0


@dataclass(frozen=True)
class TimedCall:
    """Timings of one problem's candidates, losers too."""

    problem: AttentionProblem
    signature: str
    #: One of `OBJECTIVES`.
    objective: str
    #: UTC, ISO 8601.
    time: str
    #: Versions of leanbench, torch, triton, driver.
    versions: Mapping[str, str]
    #: Latency (us), energy (mJ) or their product of each candidate; the untuned choice first.
    costs: Mapping[TunedConfig, float]

    @property
    def best(self) -> TunedConfig:
        return min(self.costs, key=self.costs.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; settings are lists in the order of their fields."""
        costs = [[*_settings(config), round(cost, 4)] for config, cost in self.costs.items()]
        about = {name: getattr(self, name) for name in ("signature", "objective", "time")}
        return {
            **about,
            "versions": dict(self.versions),
            "problem": self.problem.to_dict(),
            "costs": costs,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TimedCall:
        """Read `to_dict`.

        Raises:
            ValueError, TypeError, KeyError, UserError: The call is damaged, or has no settings that
                this version knows.
        """
        costs: dict[TunedConfig, float] = {}
        for *settings, cost in values["costs"]:
            if not (isinstance(cost, int | float) and 0 < cost < float("inf")):
                raise ValueError(f"{cost!r} is no cost")
            costs[_read_settings(settings)] = float(cost)
        if not costs or values["objective"] not in OBJECTIVES:
            raise ValueError("no timings")
        problem = AttentionProblem.from_dict(values["problem"])
        about = [str(values[name]) for name in ("signature", "objective", "time")]
        return cls(problem, about[0], about[1], about[2], dict(values["versions"]), costs)


def _settings(config: TunedConfig) -> list[Any]:
    return [config.implementation, *astuple(config)]


def _read_settings(values: Sequence[Any]) -> TunedConfig:
    implementation, *settings = values
    kind = next((each for each in _TYPES if each.implementation == implementation), None)
    if kind is None:
        raise ValueError(f"{implementation!r} is no implementation")
    named = dict(zip([field.name for field in fields(kind)], settings, strict=True))
    return read_config((kind,), named)


@dataclass(frozen=True)
class File:
    """A readable file of timings."""

    path: Path
    #: `yours` or `shipped`.
    where: str
    gpu: Mapping[str, Any]
    #: Constants of the settings model that were measured on this GPU.
    constants: Mapping[str, float]
    #: Calls as JSON, decoded where they are needed.
    lines: tuple[Mapping[str, Any], ...]

    def is_for(self, spec: GpuSpec) -> bool:
        """Return True if timings on the file's GPU hold for another."""
        return _alike(self.gpu, _about(spec))

    def calls(self) -> list[TimedCall]:
        """Return all calls, see `decoded`."""
        return list(decoded(self.path, self.lines))


def _about(spec: GpuSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _GPU}


def _alike(gpu: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        tuple(gpu["compute_capability"]) == tuple(other["compute_capability"])
        and gpu["sms"] == other["sms"]
        and abs(gpu["l2_mib"] / other["l2_mib"] - 1) <= _L2_TOLERANCE
        and abs(gpu["bandwidth_tb_s"] / other["bandwidth_tb_s"] - 1) <= _BANDWIDTH_TOLERANCE
    )


def decoded(path: Path, lines: Sequence[Mapping[str, Any]]) -> Iterator[TimedCall]:
    """Decode lines of a file; those that this version cannot use are left out, with a warning."""
    for line in lines:
        try:
            yield TimedCall.from_dict(line)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, UserError) as error:
            _warn_once(
                f"{path} has timings that this version cannot use ({error}), they are left out:"
                " tune again"
            )


def read(path: Path, where: str = "yours", *, or_pipe: bool = False) -> File:
    """Read a file of timings.

    Raises:
        UserError: it cannot be read or is not one; the sentence names the file and the fault.
    """
    try:
        content = parse_unchecked_json(read_file(path, _MOST_MB, or_pipe=or_pipe))
        version = content["schema_version"]
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema version {version!r}, this leanbench reads {SCHEMA_VERSION}")
        if content["kernel"] != KERNEL:
            raise ValueError(f"kernel {content['kernel']!r}, timings are of {KERNEL!r}")
        gpu = {name: content["gpu"][name] for name in _GPU}
        if (fault := name_fault(gpu["name"])) is not None:
            raise ValueError(fault)
        file = File(path, where, gpu, _constants(content["constants"]), tuple(content["calls"]))
        _check_gpu(gpu)
        if any(not isinstance(line.get("signature"), str) for line in file.lines):
            raise ValueError("a call has no signature")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        fault = str(error)
        if not isinstance(error, ValueError):
            fault = f"no {error}" if isinstance(error, KeyError) else "its structure is another"
        raise UserError(
            f"{path} is not a file of timings ({fault}): move it away and tune again"
        ) from None
    return file


def _check_gpu(gpu: Mapping[str, Any]) -> None:
    sizes = (*gpu["compute_capability"], *(gpu[name] for name in _GPU[3:]))
    if len(sizes) != 5 or not all(isinstance(size, int | float) for size in sizes):
        raise ValueError("gpu has no compute capability, SMs, L2 and bandwidth")
    if not all(0 < size < _MOST_SIZE for size in (sizes[0], *sizes[2:])):
        raise ValueError("gpu has a size out of range")
    if not isinstance(gpu["product"], str) or printable(gpu["product"]) != gpu["product"]:
        raise ValueError("gpu has no printable product")


def _constants(values: Mapping[str, Any]) -> dict[str, float]:
    for name, value in values.items():
        if name not in Costs._fields or not 0 < float(value) < 1000:
            raise ValueError(f"constant {name} is {value!r}")
    return {name: float(value) for name, value in values.items()}


def fault_of(error: UserError) -> str:
    """Return the fault found by `read`, without the fix."""
    if isinstance(error, UnreadableFile):
        return f"cannot read {error.path} ({error.reason})"
    return str(error).partition(": move it away")[0]


def saves() -> int:
    """Return the number of saves by this process, which invalidate earlier look-ups."""
    return _saves


def configs_folder() -> Path:
    return user_folder() / "configs"


def all_files() -> list[File]:
    """Return the readable files, yours first; warn of each of the others once."""
    places = {"yours": configs_folder(), "shipped": SHIPPED}
    files: list[File] = []
    for where, folder in places.items():
        for path in _paths(folder):
            content = _content(path, where, *_state(path))
            if isinstance(content, str):
                _warn_once(f"{content}; it is not used")
            else:
                files.append(content)
    return files


def files_of(spec: GpuSpec) -> list[File]:
    """Return a GPU's files, yours first; none if LEANBENCH_CONFIGS turns them off."""
    if not is_on(CONFIGS, default=True):
        return []
    return [file for file in all_files() if file.is_for(spec)]


def user_faults() -> list[str]:
    """Return a sentence for each of the user's files that cannot be used."""
    contents = (_content(path, "yours", *_state(path)) for path in _paths(configs_folder()))
    return [content for content in contents if isinstance(content, str)]


def settings_hash(spec: GpuSpec) -> str:
    """Return 12 characters that depend on this GPU's files, or `HEURISTIC` without any.

    The model belongs to the kernels' sources, see leanbench.records.environment.kernels_hash.
    """
    digest = hashlib.sha256()
    files = files_of(spec)
    for file in files:
        text = file.path.read_bytes()
        digest.update(f"{file.where} {file.path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12] if files else HEURISTIC


def path_for(spec: GpuSpec) -> Path:
    """Return the user's file of a GPU.

    If a namesake has it, as for a MIG instance, return another.
    """
    return _path_of(_about(spec))


def _path_of(gpu: Mapping[str, Any]) -> Path:
    path = configs_folder() / f"{gpu['name']}.json"
    content = _content(path, "yours", *_state(path)) if path.is_file() else None
    if isinstance(content, File) and not _alike(content.gpu, gpu):
        return (
            configs_folder() / f"{gpu['name']}-{gpu['sms']}sms-{gpu['bandwidth_tb_s']:.3g}tb.json"
        )
    return path


def check_target(spec: GpuSpec) -> None:
    """Check that timings could be saved, before spending a minute on them.

    Raises:
        UserError: The existing file is another GPU's or damaged, or the folder cannot be written.
    """
    path = path_for(spec)
    _before(File(path, "yours", _about(spec), {}, ()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path} ({error.strerror}): choose a writable folder in LEANBENCH_HOME"
    )


def save(
    spec: GpuSpec,
    calls: Sequence[TimedCall],
    constants: Mapping[str, float] | None = None,
    path: Path | None = None,
) -> Path:
    """Add calls to the user's file of a GPU, or to `path`, under a lock; return the path.

    A call replaces an earlier one of the same problem and objective, constants replace all earlier
    ones, None leaves them. Readers find the old or the new file.

    Raises:
        UserError: The existing file is another GPU's or damaged, or cannot be written. It is
            unchanged then.
    """
    new = File(path or path_for(spec), "yours", _about(spec), constants or {}, ())
    return _write(new, [call.to_dict() for call in calls], keeps_constants=constants is None)


def merge(file: File) -> Path:
    """Add another machine's file to the user's file of the same GPU; return its path."""
    lines = [call.to_dict() for call in file.calls()]
    target = replace(file, path=_path_of(file.gpu), lines=())
    return _write(target, lines, keeps_constants=not file.constants)


def export(path: Path, files: Sequence[File]) -> int:
    """Write all calls of a GPU's files to another file; return their number.

    Earlier files win, and those of a namesake of the first file's GPU are left out.
    """
    files = [file for file in files if _alike(file.gpu, files[0].gpu)]
    merged = {_identity(line): line for file in reversed(files) for line in file.lines}
    constants = {name: us for file in reversed(files) for name, us in file.constants.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _text(files[0].gpu, constants, list(merged.values())))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): choose a FILE in a folder that can be written"
        ) from None
    return len(merged)


def _write(new: File, lines: Sequence[Mapping[str, Any]], *, keeps_constants: bool = False) -> Path:
    global _saves
    path = new.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            before = _before(new)
            merged = {_identity(line): line for line in (*before.lines, *lines)}
            constants = before.constants if keeps_constants else new.constants
            replace_file(path, _text(new.gpu, constants, list(merged.values())))
    except OSError as error:
        raise _unwritable(path, error) from None
    _saves += 1
    if is_without_home(path):
        warnings.warn(
            f"{path} is temporary, because this user has no home folder: set LEANBENCH_HOME to a"
            " folder that stays, and repeat",
            stacklevel=2,
        )
    return path


def _before(new: File) -> File:
    if not new.path.exists():
        return new
    try:
        before = read(new.path)
    except UserError as error:
        raise UserError(f"{fault_of(error)}: move it away, it is not overwritten") from None
    if not _alike(before.gpu, new.gpu):
        raise UserError(
            f"{new.path} is of {before.gpu['product']} ({before.gpu['sms']} SMs), not of"
            f" {new.gpu['product']} ({new.gpu['sms']} SMs): move it away, it is not overwritten"
        )
    return before


def _identity(line: Mapping[str, Any]) -> str:
    return json.dumps([line.get("objective"), line.get("problem")], sort_keys=True)


def _text(gpu: Mapping[str, Any], constants: Mapping[str, float], lines: Sequence[Any]) -> str:
    head = {"schema_version": SCHEMA_VERSION, "kernel": KERNEL, "gpu": dict(gpu)}
    calls = ",\n".join(json.dumps(line) for line in lines)
    about = json.dumps({**head, "constants": dict(constants)})
    return f'{about[:-1]}, "calls": [\n{calls}]}}\n'


@lru_cache(maxsize=8)
def _content(path: Path, where: str, mtime_ns: int, size: int) -> File | str:
    """Parse a file once until it changes."""
    try:
        return read(path, where)
    except UserError as error:
        return str(error)


def _state(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def _paths(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.glob("*.json") if path.is_file())
    except OSError:
        return []


_warned: set[str] = set()


def _warn_once(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        warnings.warn(sentence, stacklevel=3)
