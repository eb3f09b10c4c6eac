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
    # Ctrl-C reaches every process of a terminal; the worker decides what becomes of this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, size, port, device = map(int, sys.argv[1:])
    if sys.platform == "linux":
        # "Signal me when my parent dies."
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    from leanbench.measure.instruments import open_instruments
    from leanbench.measure.ranks import FAILED_FOLLOWER, join, leave
    from leanbench.measure.shared import follow

    ranks = join(rank, size, port, device)
    options = MeasureOptions.from_dict(ranks.from_first())
    instruments = open_instruments(device, options)
    try:
        while (request := ranks.from_first()) is not None:
            follow(ranks, instruments, request)
    except Exception as error:
        traceback.print_exc()
        if error is not ranks.refusal:
            # The others do not know, and may wait for this rank's GPU.
            os._exit(FAILED_FOLLOWER)
        # The worker knows, and is about to be ended with all that it started.
        signal.pause()
    leave()
    os._exit(0)


if __name__ == "__main__":
    main()
