"""Process that measures together with a worker, on another GPU.

The worker starts it as ``python -m leanbench.measure.follower RANK SIZE PORT DEVICE``.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from leanbench.core.parent import die_with_parent
from leanbench.measure.options import MeasureOptions


def main() -> None:
    # Ctrl-C reaches every process of a terminal. The worker decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, size, port, device = map(int, sys.argv[1:])
    die_with_parent(os.getppid())
    from leanbench.measure.instruments import open_instruments
    from leanbench.measure.ranks import FAILED_FOLLOWER, join, leave
    from leanbench.measure.shared import follow

    ranks = join(rank, size, port, device)
    options = MeasureOptions.from_dict(ranks.broadcast())
    instruments = open_instruments(device, options)
    try:
        while (request := ranks.broadcast()) is not None:
            follow(ranks, instruments, request)
    except Exception as error:
        traceback.print_exc()
        if error is not ranks.refusal:
            # The others do not know and may wait for this rank's GPU.
            os._exit(FAILED_FOLLOWER)
        # The worker knows. It will be ended together with its followers.
        signal.pause()
    leave()
    os._exit(0)


if __name__ == "__main__":
    main()
