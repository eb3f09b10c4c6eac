"""Output that every locale takes: what the encoding of stdout or stderr lacks is written in
ASCII.
"""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

_NAME = "leanbench-ascii"

#: What Unicode does not decompose into ASCII.
_ASCII = {
    "µ": "u",
    "×": "x",
    "·": "-",
    "°": "",
    "−": "-",
    "–": "-",
    "—": "-",
    "…": ".",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "±": "+/-",
    "‖": "||",
    "─": "-",
    "━": "-",
    "│": "|",
}


def write_ascii_where_needed() -> None:
    """Makes stdout and stderr replace what they cannot encode, where they would raise
    UnicodeEncodeError.
    """
    codecs.register_error(_NAME, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_NAME)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written in the place of characters that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    try:
        # The bytes of a file name that are not UTF-8.
        return text.encode("ascii", "surrogateescape"), error.end
    except UnicodeEncodeError:
        return "".join(map(_in_ascii, text)), error.end


def _in_ascii(character: str) -> str:
    if character in _ASCII:
        return _ASCII[character]
    decomposed = unicodedata.normalize("NFKD", character)
    return decomposed.encode("ascii", "ignore").decode() or "?"
