"""Files of tuned configs, merged under a lock and replaced atomically.

A user's files are in `configs/` of leanbench.core.paths.user_folder(), shipped ones in `SHIPPED`.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from leanbench.configs.tuned_file import fault_of, read, text_of
from leanbench.core.errors import UserError
from leanbench.core.files import locked, replace_file
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.paths import is_without_home, user_folder

if TYPE_CHECKING:
    from leanbench.configs.tuned import Family, TunedConfigs, TunedGpu

SHIPPED = Path(__file__).resolve().parent / "shipped"

_saves = 0


@dataclass(frozen=True)
class File:
    """A file of tuned configs, readable or not."""

    path: Path
    #: `yours` or `shipped`.
    where: str
    #: Content, or a sentence that explains why it cannot be used.
    content: TunedConfigs | str

    @property
    def tuned(self) -> TunedConfigs:
        assert not isinstance(self.content, str), self.content
        return self.content

    @property
    def names(self) -> set[str]:
        """Names of its GPU."""
        from leanbench.gpu.catalogue import slug

        named = (
            set()
            if isinstance(self.content, str)
            else {self.content.gpu.name, slug(self.content.gpu.product)}
        )
        return {self.path.stem, *named}


@dataclass(frozen=True)
class Saved:
    """Result of saving families."""

    path: Path
    added: tuple[Family, ...]
    #: Families replaced in the file.
    replaced: tuple[Family, ...]
    #: Predicted families rejected in favor of measured ones.
    refused: tuple[Family, ...]


def saves() -> int:
    """Return the number of saves by this process, which invalidate earlier lookups."""
    return _saves


def configs_folder() -> Path:
    return user_folder() / "configs"


def path_of(gpu_name: str) -> Path:
    """Return the path of the user's file of a GPU, existing or not."""
    return configs_folder() / f"{gpu_name}.json"


def all_files() -> list[File]:
    """Return the user's files, then the shipped ones, each folder sorted by name."""
    places = {"yours": configs_folder(), "shipped": SHIPPED}
    return [_file(path, where) for where, folder in places.items() for path in _files(folder)]


def tuned_for(spec: GpuSpec) -> list[File]:
    """Return the readable files of a GPU: the user's before the shipped.

    In each group, files of the GPU's name come first.
    """
    files = [
        file
        for file in all_files()
        if not isinstance(file.content, str) and file.tuned.gpu.is_like(spec)
    ]
    return sorted(files, key=lambda file: (file.where != "yours", file.path.stem != spec.name))


def save_families(
    spec: GpuSpec, families: Sequence[Family], path: Path | None = None, *, kernel: str = "lean"
) -> Saved:
    """Merge families into the user's file of a GPU, or into `path`; see `merge`."""
    from leanbench.configs.tuned import TunedGpu

    return merge(TunedGpu.of(spec), families, path, kernel=kernel)


def check_target(spec: GpuSpec) -> None:
    """Check that families of a GPU could be saved, before spending a minute on finding them.

    Raises:
        UserError: the existing file is none of tuned configs, or the folder cannot be written.
    """
    from leanbench.configs.tuned import TunedConfigs, TunedGpu

    gpu = TunedGpu.of(spec)
    path = _users_path(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A plain file would leave a lock file behind if the tuning is not saved.
        with tempfile.TemporaryFile(dir=path.parent):
            _before(path, TunedConfigs(kernel="lean", gpu=gpu, families=[]))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): choose a writable folder in LEANBENCH_HOME"
        ) from None


def user_faults() -> list[str]:
    """Return a sentence for each of the user's files that cannot be used."""
    files = [_file(path, "yours") for path in _files(configs_folder())]
    return [file.content for file in files if isinstance(file.content, str)]


def merge(
    gpu: TunedGpu, families: Sequence[Family], path: Path | None = None, *, kernel: str = "lean"
) -> Saved:
    """Add families to the file, replacing those with the same key.

    A predicted family never replaces a measured one. Concurrent saves wait, and a reader finds the
    old or the new file.

    Raises:
        UserError: the existing file is none of tuned configs, or belongs to another kernel or GPU;
            a family is inconsistent; or the file cannot be written. The file is unchanged then.
    """
    global _saves
    from leanbench.configs.tuned import TunedConfigs

    path = path or _users_path(gpu)
    new = TunedConfigs(kernel=kernel, gpu=gpu, families=list(families))
    if (fault := new.fault()) is not None:
        raise UserError(f"these configs are not saved in {path}, {fault}: tune again")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            before = _before(path, new)
            merged, saved = _merged(path, before, new)
            replace_file(path, text_of(merged))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): choose a writable folder in LEANBENCH_HOME"
        ) from None
    _saves += 1
    if is_without_home(path):
        warnings.warn(
            f"{path} is temporary, because this user has no home folder: set LEANBENCH_HOME to a"
            " folder that stays, and repeat",
            stacklevel=2,
        )
    return saved


def export(path: Path, gpu: TunedGpu, families: Sequence[Family], *, kernel: str = "lean") -> None:
    """Write families to a separate file, atomically.

    Raises:
        UserError: the file cannot be written.
    """
    from leanbench.configs.tuned import TunedConfigs

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text_of(TunedConfigs(kernel=kernel, gpu=gpu, families=list(families))))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): choose a FILE in a folder that can be written"
        ) from None


def _merged(
    path: Path, before: TunedConfigs | None, new: TunedConfigs
) -> tuple[TunedConfigs, Saved]:
    families = {family.key: family for family in before.families} if before else {}
    added: list[Family] = []
    replaced: list[Family] = []
    refused: list[Family] = []
    for family in new.families:
        existing = families.get(family.key)
        if existing is not None and (existing.source, family.source) == ("measured", "predicted"):
            refused.append(family)
            continue
        families[family.key] = family
        if existing is None:
            added.append(family)
        else:
            replaced.append(existing)
    merged = (before or new).model_copy(update={"families": list(families.values())})
    return merged, Saved(path, tuple(added), tuple(replaced), tuple(refused))


def _before(path: Path, new: TunedConfigs) -> TunedConfigs | None:
    """Return the existing content; raise UserError if the file may not be overwritten.

    That is a file of another GPU or kernel, or none of tuned configs.
    """
    if not path.exists():
        return None
    try:
        before = read(path)
    except UserError as error:
        raise UserError(f"{fault_of(error)}: move it away, it is not overwritten") from None
    if not before.gpu.is_like(new.gpu):
        raise UserError(
            f"{path} is of {_figures(before.gpu)}, not of {_figures(new.gpu)}: move it away, it is"
            " not overwritten"
        )
    if before.kernel != new.kernel:
        raise UserError(
            f"{path} is of kernel {before.kernel!r}, not of {new.kernel!r}: move it away, it is not"
            " overwritten"
        )
    return before


def _users_path(gpu: TunedGpu) -> Path:
    """Return the file of the GPU's name.

    If that belongs to a namesake, as for a MIG instance, return another.
    """
    path = path_of(gpu.name)
    with contextlib.suppress(UserError):
        if path.is_file() and not read(path).gpu.is_like(gpu):
            return path_of(f"{gpu.name}-{gpu.sms}sms-{gpu.bandwidth_tb_s:.3g}tb")
    return path


def _figures(gpu: TunedGpu) -> str:
    return f"{gpu.product} ({gpu.sms} SMs, {gpu.bandwidth_tb_s:.3g} TB/s)"


def _file(path: Path, where: str) -> File:
    try:
        stat = path.stat()
    except OSError as error:
        return File(path, where, f"cannot read {path}: {error.strerror}")
    return File(path, where, _content(path, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=256)
def _content(path: Path, mtime_ns: int, size: int) -> TunedConfigs | str:
    """Parse a file once until it changes."""
    try:
        return read(path)
    except UserError as error:
        return str(error)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.glob("*.json") if path.is_file())
    except OSError:
        return []
