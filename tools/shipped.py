"""Files that come with leanbench, made from other files of the checkout."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from pathlib import Path


def update(path: Path, text: str, source: str, words: Sequence[str]) -> int:
    """Write a gzip file if `words` include ``--write``; return 1 if it is out of date otherwise.

    Args:
        source: What makes `text`, for the sentence that says so.
    """
    if path.exists() and gzip.decompress(path.read_bytes()).decode() == text:
        return 0
    if "--write" in words:
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        return 0
    print(f"{path.name} is not what {source}: run `python {sys.argv[0]} --write`")
    return 1
