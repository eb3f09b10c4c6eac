"""Environments of runs."""

import re
import shutil

from leanbench.core.paths import KERNELS
from leanbench.records.environment import kernels_hash, predicted_environment


def test_the_kernels_hash_changes_with_any_source_and_nothing_else(tmp_path):
    room = tmp_path / "kernels"
    shutil.copytree(KERNELS, room)
    present = kernels_hash(room)
    assert re.fullmatch("[0-9a-f]{12}", present)
    assert present == kernels_hash() == predicted_environment()["kernels"]

    (room / "lean" / "notes.txt").write_text("not a source")
    assert kernels_hash(room) == present
    header = room / "lean" / "reduce.cuh"
    text = header.read_text()
    header.write_text(text + "\n")
    changed = kernels_hash(room)
    header.write_text(text)
    header.rename(header.with_name("merge.cuh"))
    assert len({present, changed, kernels_hash(room)}) == 3
