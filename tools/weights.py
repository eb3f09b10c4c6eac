"""Make the file of weights that comes with leanbench, for models that transformers has to build.

    python tools/weights.py            # exit 1 if the file is not what transformers builds
    python tools/weights.py --write    # write it

Importing transformers takes seconds, so the models of the registry are counted once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.llm.config import registry
from leanbench.core.llm.model import count_weights
from leanbench.core.llm.weights import COUNTED, Weights, is_common
from leanbench.core.parallel import MOST_GPUS
from tools.shipped import update


def text() -> str:
    """Return the file: a line for each model."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(by_tp)}"
        for name, config in registry().items()
        if config.is_whole and not is_common(config) and (by_tp := _by_tp(name))
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _by_tp(name: str) -> dict[int, Any]:
    by_tp = {}
    for tp in range(1, MOST_GPUS + 1):
        try:
            by_tp[tp] = _fields(count_weights(name, tp))
        except UserError:
            # Its heads cannot be shared so.
            continue
    return by_tp


def _fields(weights: Weights) -> dict[str, Any]:
    layers = groupby((each.dense, each.experts) for each in weights.layers)
    return asdict(weights) | {"layers": [[len([*same]), *sizes] for sizes, same in layers]}


def main(words: Sequence[str]) -> int:
    return update(COUNTED, text(), "transformers builds", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
