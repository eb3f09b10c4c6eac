"""The kernels room, importable as `leanbench.kernels.<family>` in a checkout and in a wheel alike.

`LEANBENCH_KERNEL_PATH` (folders separated like `PATH`) adds families of your own.
"""

import os

from leanbench.core.paths import KERNELS

__path__ = [
    str(KERNELS),
    *filter(None, os.environ.get("LEANBENCH_KERNEL_PATH", "").split(os.pathsep)),
]
