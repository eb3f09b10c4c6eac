"""Operators of compiled graphs that C takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leanbench.attention import fast


@pytest.mark.skipif(not fast.is_on, reason=f"no C path: {fast.why_not}")
def test_operators_launch_from_c_what_python_launches():
    script = Path(__file__).with_name("operators_in_c.py")
    folders = (script.parent, script.parents[1], script.parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
