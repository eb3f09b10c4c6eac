"""A process that measures along with a worker, on another GPU.

Started as ``python -m leanbench.measure.follower RANK SIZE PORT DEVICE``, by the worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback

from leanbench.measure.options import MeasureOptions


def main() -> None:
    rank, size, port, device = map(int, sys.argv[1:])
    if sys.platform == "linux":
        # "Signal me when my parent dies."
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    from leanbench.measure.instruments import open_instruments
    from leanbench.measure.ranks import join, leave
    from leanbench.measure.shared import follow

    ranks = join(rank, size, port, device)
    options = MeasureOptions.from_dict(ranks.from_first())
    instruments = open_instruments(device, options)
    try:
        while (request := ranks.from_first()) is not None:
            follow(ranks, instruments, request)
    except Exception:
        # The worker knows, and is about to be ended with all that it started.
        traceback.print_exc()
        signal.pause()
    leave()
    os._exit(0)


if __name__ == "__main__":
    main()
