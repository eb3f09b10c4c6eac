"""Sources of published figures: runs and logs under `reports`, with the kernels and settings that
they are of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.strict_json import parse
from leanbench.records.environment import kernels_hash
from leanbench.report.evidence.places import FOLDER, FOLDERS, below, gpu_of, name_of, place_of

if TYPE_CHECKING:
    from leanbench.records.reading import Run

#: The page of all figures, made from them.
EVIDENCE = "docs/evidence.md"
CURRENT, RECORD = "current", "record"
OLDER, OTHER_SETTINGS = "older kernels", "other settings"
#: Files of a GPU's folder that are made from the others, beside its pictures.
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

    #: As `places` has it: ``peers``, ``check/fuzz.txt``, ``h100/peers``.
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
        return self.is_run and below(self.name).startswith("model/")

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
    def of_grid(self) -> bool:
        """Whether its problems were drawn from a grid's, not from a distribution."""
        return bool(_mapping(self.manifest.get("sweep")).get("sample"))

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
        self.kernels = kernels_hash(root / "kernels")
        if not (root / FOLDER).is_dir():
            raise UserError(f"there is no folder {root / FOLDER}: put the runs back")
        #: Those of GPUs that have runs or logs, relative to the checkout.
        self.folders = tuple(folder for folder in FOLDERS.values() if (root / folder).is_dir())
        found = (source for folder in self.folders for source in self._all(root / folder))
        self.by_name = {source.name: source for source in found}

    def __getitem__(self, name: str) -> Source:
        """Raises UserError where there is none of that name."""
        if name not in self.by_name:
            raise UserError(f"there is no run or log {place_of(name)}")
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
            wanted = {shipped_settings(source), *source.settings}
            return CURRENT if len(wanted) == 1 and source.settings else OTHER_SETTINGS
        return CURRENT

    def of_file(self, name: str) -> tuple[Source, ...]:
        """The source that a file or folder is, or is part of; none for what is made from them."""
        names = [name, *(folder.as_posix() for folder in Path(name).parents)]
        return tuple(self.by_name[known] for known in names if known in self.by_name)

    def _all(self, folder: Path) -> Iterator[Source]:
        """Folders with a manifest are runs, all other files logs."""
        for path in sorted(folder.iterdir()):
            name = name_of(path.relative_to(self.root))
            manifests = [path / manifest for manifest in _MANIFESTS if (path / manifest).exists()]
            if manifests:
                yield _run(path, name, _manifest(manifests[0]))
            elif path.is_dir():
                yield from self._all(path)
            elif below(name) not in _MADE and path.suffix != ".svg":
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
    """GPUs that runs were measured on, together: ``one NVIDIA H200``, ``4 NVIDIA H200s``, those of
    each product apart; empty where that is not recorded.
    """
    by_product: dict[str, list[tuple[Source, Any]]] = {}
    for source in sources:
        for of in source.environments:
            if product := of.get("gpu_product"):
                by_product.setdefault(str(product), []).append((source, of.get("gpu_uuid")))
    return ", ".join(_boards(product, several) for product, several in by_product.items())


def _boards(product: str, several: Sequence[tuple[Source, Any]]) -> str:
    """Those of one product: the boards of the runs, or as many as share a problem."""
    boards = {uuid for _, uuid in several}
    gpus = max(len(boards), *(source.parallel_gpus for source, _ in several))
    return f"one {product}" if gpus == 1 else f"{gpus} {product}s"


@cache
def _settings_of(gpu: GpuSpec) -> str:
    from leanbench.configs.fingerprint import shipped_settings_hash

    return shipped_settings_hash(gpu)


def shipped_settings(source: Source) -> str:
    """The hash of the settings that ship for a run's GPU; for a log, for the GPU of its folder."""
    from leanbench.gpu.catalogue import find

    gpu = source.manifest.get("gpu")
    return _settings_of(GpuSpec.from_dict(gpu) if gpu else find(gpu_of(source.name)))


def _environments(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    several = manifest.get("environments")
    return tuple(several.values()) if several else (_mapping(manifest.get("environment")),)


def _each(name: str, environments: tuple[Mapping[str, Any], ...]) -> tuple[str, ...]:
    """What the environments have, each value once; nothing where one of them lacks it."""
    values = [environment.get(name) for environment in environments]
    return () if None in values else tuple(dict.fromkeys(map(str, values)))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
