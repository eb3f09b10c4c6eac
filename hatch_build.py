"""Compile the C path of calls into wheels and editable installs, where there is a C compiler.

Without one, or without Python's headers, the wheel is pure and Python makes all calls.
`python hatch_build.py` compiles into the checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "leanbench/attention/fast.c"
#: One file for all versions of Python from 3.11 on.
LIBRARY = "leanbench/attention/_fast.abi3.so"
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-fexceptions", "-fvisibility=hidden", "-Wall")


def refusal(source: Path, library: Path) -> str | None:
    """Compile the library; return why not, or None."""
    # Python without a global lock has no stable interface for extensions before 3.15.
    if sys.platform != "linux" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "the C path needs Linux and a Python with a global lock"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return "there is no C compiler"
    include = f"-I{sysconfig.get_path('include')}"
    command = [compiler, *FLAGS, include, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{compiler} failed: {done.stderr.strip()[:300]}"


class CustomBuildHook(BuildHookInterface):
    """Hook of hatchling; see `[tool.hatch.build.targets.wheel.hooks.custom]`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        library = root / LIBRARY
        if version != "editable":
            self._folder = tempfile.TemporaryDirectory()
            library = Path(self._folder.name, library.name)
        reason = refusal(root / SOURCE, library)
        if reason is not None:
            self.app.display_warning(f"{reason}: Python makes all calls")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = LIBRARY


if __name__ == "__main__":
    root = Path(__file__).parent
    sys.exit(refusal(root / SOURCE, root / LIBRARY))
