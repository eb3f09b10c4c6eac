"""The manifest of a run: its request and target, and checks before a sweep resumes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.files import FileFault, UnreadableFile, parse_json, read_file, short_json

MANIFEST, RESULTS = "manifest.json", "results.jsonl"
#: Limit of each file of a run.
MOST_MB = 1000


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory.

    Raises:
        UserError: `path` is no run directory, or one of another schema version.
    """
    from leanbench.records.row import SCHEMA_VERSION

    try:
        manifest = parse_json(read_file(path / MANIFEST, MOST_MB))
        version = manifest["schema_version"]
    except UnreadableFile as error:
        if error.fault is not FileFault.MISSING:
            raise
        if (path / "trace-manifest.json").exists():
            raise UserError(f"{path} is a trace, not a run: open its trace.html") from None
        raise UserError(
            f"{path} is not a run directory, it has no {MANIFEST}: name one that `leanbench sweep`"
            " wrote"
        ) from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    except KeyError:
        raise _damaged(path, "it has no schema_version") from None
    except TypeError:
        raise _damaged(path, "it holds no keys and values") from None
    if type(version) is not int or version != SCHEMA_VERSION:
        newer = type(version) is int and version > SCHEMA_VERSION
        fix = (
            "update leanbench"
            if newer
            else "use the leanbench version that wrote it or start a new run"
        )
        raise UserError(
            f"{path} was written with schema version {short_json(version)}, this leanbench reads"
            f" {SCHEMA_VERSION}: {fix}"
        )
    return manifest


def _damaged(path: Path, fault: str) -> UserError:
    kept = f"; the rows are still in {RESULTS}" if (path / RESULTS).is_file() else ""
    return UserError(
        f"{path / MANIFEST} is damaged ({fault}): put back a copy of it, or sweep again under"
        f" another --name{kept}"
    )


def refuse_unlike_a_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Reject a manifest without the keys that resuming needs. Reports do without."""
    kinds: dict[str, type] = {"gpu": dict, "measure": dict, "environments": dict, "cells": list}
    given = {"measure": {}, **manifest}
    for key, kind in kinds.items():
        if key not in given:
            raise _damaged(path, f"it has no {key}")
        if not isinstance(given[key], kind):
            what = "list" if kind is list else "table"
            raise _damaged(path, f"{key} is {short_json(given[key])}, not a {what}")
    for environment in manifest["environments"].values():
        if not isinstance(environment, dict):
            raise _damaged(path, f"environments has {short_json(environment)}, not a table")
    for cell in manifest["cells"]:
        if not isinstance(cell, str):
            raise _damaged(path, f"cells has {short_json(cell)}, not the key of a cell")


def refuse_differences(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Reject resuming a run of another target, other settings or other cells."""
    advice = "repeat the command it was started with, or start a new run without --resume"
    if _target(before) != _target(now):
        raise UserError(f"{path} has rows {_target(before)}, not {_target(now)}: {advice}")
    measured, requested = before.get("measure", {}), now.get("measure", {})
    if measured != requested:
        names = ", ".join(
            name for name in {**measured, **requested} if measured.get(name) != requested.get(name)
        )
        raise UserError(f"{path} was measured with other settings ({names}): {advice}")
    recorded = dict.fromkeys(before.get("cells", ()))
    wanted = dict.fromkeys(now.get("cells", ()))
    missing = [key for key in recorded if key not in wanted]
    added = [key for key in wanted if key not in recorded]
    differences = []
    if missing:
        differences.append(
            f"{len(missing)} of its {len(recorded)} cells are not requested, such as {missing[0]}"
        )
    if added:
        differences.append(
            f"{len(added)} of {len(wanted)} requested cells are not in it, such as {added[0]}"
        )
    if differences:
        raise UserError(f"{path} has other cells ({'; '.join(differences)}): {advice}")


def _target(manifest: dict[str, Any]) -> str:
    """Return the target of rows: ``measured for h200``."""
    return f"{manifest.get('source')} for {manifest.get('gpu', {}).get('name')}"
