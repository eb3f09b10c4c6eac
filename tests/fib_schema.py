"""Schema of FlashInfer-Bench 0.1.2 without its package: `fixtures/flashinfer_bench.json` has the
fields of each model, optional ones with a question mark, and their contents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "fixtures" / "flashinfer_bench.json").read_text()
)
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "number": (int, float),
    "null": (type(None),),
}


def faults(value: Any, kind: Any, where: str = "") -> list[str]:
    """Return the faults of a value, each with its path; `kind` is a model's name or a part of one.

    A list with one kind is a list of such values, a list with several is a choice.
    """
    if isinstance(kind, list) and len(kind) > 1:
        return [] if any(not faults(value, choice) for choice in kind) else [f"{where}: {value!r}"]
    if isinstance(kind, list):
        items = value if isinstance(value, list) else []
        own = [] if isinstance(value, list) else [f"{where} is no list"]
        return own + [fault for item in items for fault in faults(item, kind[0], f"{where}[]")]
    if kind == "nan":
        return [] if value == "nan" else [f"{where}: {value!r}"]
    if isinstance(kind, str) and kind in _KINDS:
        right = isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if right else [f"{where}: {value!r} is no {kind}"]
    fields = MODELS[kind] if isinstance(kind, str) else kind
    return _faults_of_object(value, fields, where)


def _faults_of_object(value: Any, fields: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    kinds = {name.removesuffix("?"): kind for name, kind in fields.items()}
    missing = [name for name in fields if not name.endswith("?") and name not in {*value, "*"}]
    unknown = [name for name in value if name not in kinds and "*" not in kinds]
    return [
        *(f"{where}.{name} is missing" for name in missing),
        *(f"{where}.{name} is unknown" for name in unknown),
        *(
            fault
            for name, item in value.items()
            if name not in unknown
            for fault in faults(item, kinds.get(name, kinds.get("*")), f"{where}.{name}")
        ),
    ]
