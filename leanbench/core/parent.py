"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: prctl's option "signal me when my parent dies".
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process with `parent`, which started it, however that ends (Linux).

    To the system the parent is the thread that started it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


#: Environment variable with the parent of a forkserver, which preloads this module. Without it the
#: server would survive its parent for seconds, then fork processes that find their pool gone.
STARTED_BY = "LEANBENCH_POOL_OF"

if _parent := os.environ.pop(STARTED_BY, None):
    die_with_parent(int(_parent))
