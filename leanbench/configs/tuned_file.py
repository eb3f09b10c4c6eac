"""Text of a file of tuned configs: checked reading, and writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.files import UnreadableFile, parse_unchecked_json, read_file, short_json

if TYPE_CHECKING:
    from leanbench.configs.tuned import TunedConfigs

#: Fix appended to the message about an unusable file.
_FIX = ": move it away"
_MOST_MB = 100


def read(path: Path, *, or_pipe: bool = False) -> TunedConfigs:
    """Read a file of tuned configs.

    Args:
        or_pipe: As in `leanbench.core.files.read_file`.

    Raises:
        UserError: it cannot be read or is not one; the sentence names the file and the first fault.
    """
    from pydantic import ValidationError

    from leanbench.configs.tuned import TunedConfigs

    content = _json_object(path, or_pipe)
    _check_version(path, content)
    try:
        tuned = TunedConfigs.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    if (fault := tuned.fault()) is not None:
        raise _damaged(path, fault)
    return tuned


def fault_of(error: UserError) -> str:
    """Return the fault found by `read`, without the fix."""
    if isinstance(error, UnreadableFile):
        return f"cannot read {error.path} ({error.reason})"
    return str(error).partition(_FIX)[0]


def _json_object(path: Path, or_pipe: bool) -> dict[str, Any]:
    try:
        content = parse_unchecked_json(read_file(path, _MOST_MB, or_pipe=or_pipe))
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(content, dict) or not {"schema_version", "families"} <= content.keys():
        raise UserError(
            f"{path} is not a file of tuned configs, it has no schema_version and families{_FIX}"
        )
    return content


def _check_version(path: Path, content: dict[str, Any]) -> None:
    from leanbench.configs.tuned import SCHEMA_VERSION

    version = content["schema_version"]
    if version == SCHEMA_VERSION and isinstance(version, int):
        return
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    fix = ", or update leanbench" if newer else " and tune again"
    raise UserError(
        f"{path} has schema version {short_json(version)}, this leanbench reads"
        f" {SCHEMA_VERSION}{_FIX}{fix}"
    )


def _damaged(path: Path, fault: str) -> UserError:
    return UserError(f"{path} is not a file of tuned configs ({fault}){_FIX} and tune again")


def text_of(tuned: TunedConfigs) -> str:
    """Return JSON with a line per candidate, build and problem, without null fields."""
    content = tuned.model_dump(mode="json", exclude_none=True)
    families = [_family_text(family) for family in content.pop("families")]
    head = json.dumps(content)[:-1]
    return f'{head},\n "families": [\n{",".join(families)}]}}\n'


def _family_text(family: dict[str, Any]) -> str:
    parts = {name: family.pop(name) for name in ("candidates", "builds", "problems")}
    lines = [
        f'  "{name}": [\n' + ",\n".join(f"   {json.dumps(item)}" for item in items) + "]"
        for name, items in parts.items()
    ]
    return f" {json.dumps(family)[:-1]},\n" + ",\n".join(lines) + "}\n"
