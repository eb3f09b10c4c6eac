"""Integer tensors of one dimension in safetensors files: header length, JSON header, numbers."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence

from leanbench.core.files import parse_foreign_json, short_json

#: Type codes of Python's arrays by the format's dtypes.
_CODES = {"I32": "i", "I64": "q"}
#: Bytes of the header's length, and the boundary at which the numbers start.
_LENGTH_BYTES = 8


def write_int32(tensors: Mapping[str, Sequence[int]]) -> bytes:
    """Return a file of int32 tensors of one dimension."""
    header, data = {}, b""
    for name, values in tensors.items():
        start = len(data)
        data += _little_endian(array(_CODES["I32"], values))
        header[name] = {"dtype": "I32", "shape": [len(values)], "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + data


def read_integers(content: bytes, name: str) -> list[int]:
    """Read a tensor of one dimension or none, int32 or int64.

    Raises:
        ValueError: The content is no such file, or has no such tensor.
    """
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if start > len(content):
        raise ValueError("it is no safetensors file")
    header = parse_foreign_json(content[_LENGTH_BYTES:start])
    tensor = header.get(name) if isinstance(header, dict) else None
    if not isinstance(tensor, dict):
        raise ValueError(f"it has no tensor {name!r}")
    dtype, shape = tensor.get("dtype"), tensor.get("shape")
    code = _CODES.get(dtype) if isinstance(dtype, str) else None
    count = _count(shape)
    if code is None or count is None:
        described = f"{short_json(dtype)} {short_json(shape)}"
        raise ValueError(f"its tensor {name!r} is {described}, not one dimension of I32 or I64")
    values = array(code)
    begin, end = _offsets(tensor)
    data = content[start + begin : start + end] if 0 <= begin <= end else b""
    if len(data) != end - begin or len(data) != count * values.itemsize:
        raise ValueError(f"its tensor {name!r} is cut off")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _count(shape: object) -> int | None:
    """Return the number of values in a tensor of one dimension or none."""
    match shape:
        case []:
            return 1
        case [int(count)]:
            return count
    return None


def _offsets(tensor: Mapping[str, object]) -> tuple[int, int]:
    """Return start and end of the numbers behind the header; (0, -1) if missing."""
    match tensor.get("data_offsets"):
        case [int(begin), int(end)]:
            return begin, end
    return 0, -1


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
