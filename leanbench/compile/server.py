"""What the server that forks a pool's processes loads first: it ends with the process that started
it.

By itself it would go on loading for seconds, and then fork every process that was asked for
meanwhile: each finds the semaphores of the pool gone, and prints a traceback.
"""

from __future__ import annotations

import os

from leanbench.core.parent import die_with_parent

#: The variable that tells a server who started it. Nobody else has it.
STARTED_BY = "LEANBENCH_POOL_OF"

if _parent := os.environ.pop(STARTED_BY, None):
    die_with_parent(int(_parent))
