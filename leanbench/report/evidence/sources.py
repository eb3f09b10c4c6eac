"""Sources of published figures: runs and logs under `reports/h200`, with the kernels and settings
that they are of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.strict_json import parse
from leanbench.records.environment import kernels_hash

if TYPE_CHECKING:
    from leanbench.records.reading import Run

FOLDER = Path("reports") / "h200"
#: The page of all figures, made from them.
EVIDENCE = "docs/evidence.md"
CURRENT, RECORD = "current", "record"
OLDER, OTHER_SETTINGS = "older kernels", "other settings"
#: Files of the folder that are made from the others, beside its pictures.
_MADE = ("README.md", "report.html")
_MANIFESTS = ("manifest.json", "trace-manifest.json")
#: A log says in its first characters of which kernels, settings and day it is.
_HEAD_CHARACTERS = 2000
_KERNELS = re.compile(r"\bkernels\b[^\n]{1,16}?\b([0-9a-f]{12})\b", re.IGNORECASE)
#: The base of `leanbench compare`, of whose new side the log is.
_BASE = re.compile(r"\b[0-9a-f]{12} → (?=[0-9a-f]{12}\b)")
_SETTINGS = re.compile(r"\bsettings\W{1,4}([0-9a-f]{12}|heuristic)\b")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
#: What `--configs` must be for tuned configs to be looked up.
_LOOKED_UP = ("default", "energy", "edp")


@dataclass(frozen=True, eq=False)
class Source:
    """A run, or a log."""

    #: Relative to `FOLDER`: ``peers``, ``check/fuzz.txt``.
    name: str
    path: Path
    #: Empty where it is not recorded.
    date: str
    #: Hashes; empty where they are not recorded.
    kernels: tuple[str, ...]
    settings: tuple[str, ...]
    #: Empty for a log.
    manifest: Mapping[str, Any]

    @property
    def is_run(self) -> bool:
        return bool(self.manifest)

    @property
    def has_rows(self) -> bool:
        """Whether it is a run of a sweep; a trace has none."""
        return self.is_run and (self.path / "results.jsonl").is_file()

    @property
    def of_model(self) -> bool:
        """Whether it is there for the performance model alone."""
        return self.is_run and self.name.startswith("model/")

    @cached_property
    def run(self) -> Run:
        """With its rows.

        Raises:
            UserError: it is no run of a sweep.
        """
        from leanbench.records.reading import read_run

        return read_run(self.path)

    @cached_property
    def environments(self) -> tuple[Mapping[str, Any], ...]:
        """Those that its rows were taken in."""
        return _environments(self.manifest)

    @cached_property
    def parallel_gpus(self) -> int:
        """GPUs that share a problem, the most of any."""
        if "problem" in self.manifest:  # of a trace, which has one and no rows
            return AttentionProblem.from_dict(self.manifest["problem"]).gpus.gpus
        if not self.has_rows:
            return 1
        return max((problem.gpus.gpus for _, problem in self.run.results), default=1)

    @property
    def seed(self) -> str:
        """That its problems were drawn from; empty for a grid."""
        sweep = _mapping(self.manifest.get("sweep"))
        drawn = _mapping(sweep.get("draw")) or _mapping(sweep.get("sample"))
        return str(drawn.get("seed", ""))

    @property
    def needs_settings(self) -> bool:
        """Whether tuned configs were looked up."""
        sweep = _mapping(self.manifest.get("sweep"))
        return bool(sweep) and sweep.get("configs", "default") in _LOOKED_UP


class Sources:
    """All runs and logs of a checkout; `records` are the names of those that do not go stale."""

    def __init__(self, root: Path, records: Iterable[str] = ()) -> None:
        self.root = root
        self.records = frozenset(records)
        self.folder = root / FOLDER
        self.kernels = kernels_hash(root / "kernels")
        self.by_name = {source.name: source for source in self._all(self.folder)}

    def __getitem__(self, name: str) -> Source:
        """Raises UserError where there is none of that name."""
        if name not in self.by_name:
            raise UserError(f"there is no run or log {FOLDER}/{name}")
        return self.by_name[name]

    def state(self, source: Source) -> str:
        """`RECORD`, `CURRENT`, `OLDER` or `OTHER_SETTINGS`; what does not say of which kernels it
        is, is of older ones.
        """
        if source.name in self.records:
            return RECORD
        if set(source.kernels) != {self.kernels}:
            return OLDER
        if source.needs_settings or source.settings:
            wanted = {shipped_settings(source.manifest.get("gpu")), *source.settings}
            return CURRENT if len(wanted) == 1 and source.settings else OTHER_SETTINGS
        return CURRENT

    def of_path(self, path: Path) -> tuple[Source, ...]:
        """The source that a file or folder is, or is part of; none for what is made from them."""
        name = path.relative_to(self.folder).as_posix()
        names = [name, *(folder.as_posix() for folder in Path(name).parents)]
        return tuple(self.by_name[known] for known in names if known in self.by_name)

    def _all(self, folder: Path) -> Iterator[Source]:
        """Folders with a manifest are runs, all other files logs."""
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: put the runs back")
        for path in sorted(folder.iterdir()):
            name = path.relative_to(self.folder).as_posix()
            manifests = [path / manifest for manifest in _MANIFESTS if (path / manifest).exists()]
            if manifests:
                yield _run(path, name, _manifest(manifests[0]))
            elif path.is_dir():
                yield from self._all(path)
            elif name not in _MADE and path.suffix != ".svg":
                yield _log(path, name)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = parse(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is no manifest ({error}): put it back") from None
    if not isinstance(manifest, dict):
        raise UserError(f"{path} is no manifest (it is no object): put it back")
    return manifest


def _run(path: Path, name: str, manifest: dict[str, Any]) -> Source:
    environments = _environments(manifest)
    return Source(
        name,
        path,
        str(manifest.get("created", ""))[:10],
        _each("kernels", environments),
        _each("settings", environments),
        manifest,
    )


def _log(path: Path, name: str) -> Source:
    try:
        head = _BASE.sub("", path.read_text(encoding="utf-8")[:_HEAD_CHARACTERS])
    except UnicodeDecodeError:
        head = ""
    date = _DATE.search(head)
    return Source(
        name,
        path,
        date[0] if date else "",
        tuple(dict.fromkeys(_KERNELS.findall(head))),
        tuple(dict.fromkeys(_SETTINGS.findall(head))),
        {},
    )


def boards_of(sources: Iterable[Source]) -> str:
    """GPUs that runs were measured on, together: ``one NVIDIA H200``, ``4 NVIDIA H200s``; empty
    where that is not recorded.
    """
    several = list(sources)
    boards = {
        (of["gpu_product"], of.get("gpu_uuid"))
        for source in several
        for of in source.environments
        if of.get("gpu_product")
    }
    if not boards:
        return ""
    gpus = max(len(boards), *(source.parallel_gpus for source in several))
    product = str(next(iter(boards))[0])
    return f"one {product}" if gpus == 1 else f"{gpus} {product}s"


@cache
def _settings_of(gpu: GpuSpec) -> str:
    from leanbench.configs.fingerprint import shipped_settings_hash

    return shipped_settings_hash(gpu)


def shipped_settings(gpu: Any) -> str:
    """The hash of the settings that ship for a manifest's GPU; of an H200 for a log."""
    from leanbench.gpu.catalogue import find

    return _settings_of(GpuSpec.from_dict(gpu) if gpu else find("h200"))


def _environments(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    several = manifest.get("environments")
    return tuple(several.values()) if several else (_mapping(manifest.get("environment")),)


def _each(name: str, environments: tuple[Mapping[str, Any], ...]) -> tuple[str, ...]:
    """What the environments have, each value once; nothing where one of them lacks it."""
    values = [environment.get(name) for environment in environments]
    return () if None in values else tuple(dict.fromkeys(map(str, values)))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
