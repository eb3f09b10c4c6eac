"""Ctrl-C and SIGTERM to the driver of a Ray cluster: the end, no process left on the nodes, and
words on how to go on. Skipped where Ray is missing (pip install '.[ray]').
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drill_sweeps import children, is_gone, rows, run, start, wait_until, whole_rows

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from ray.cluster_utils import Cluster

#: The thirteenth never ends.
CELLS = "--kernels loops --context 1k:50k:+1k"
ASKED = f"sweep {CELLS} --name r --no-report --timeout 1h --executor ray".split()
CONTEXTS = [*range(1024, 51 * 1024, 1024)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start two nodes with a fake GPU each."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    started.add_node(num_cpus=1, num_gpus=1)
    yield started
    started.shutdown()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_driver_says_what_is_done_and_goes_on_as_it_says(cluster, tmp_path, number, code):
    words = [*ASKED, "--ray-address", cluster.address, "--out", str(tmp_path)]
    with start(*words) as process:
        # All but the one that never ends: the driver waits inside of Ray.
        wait_until(lambda: whole_rows(tmp_path / "r") == 49, "the rows of the other cells")
        workers = workers_of(cluster)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == code
    assert "Traceback" not in stderr
    sentence, again = stderr.splitlines()[-2:]
    name = signal.Signals(number).name
    assert sentence == f"Stopped by {name}: 49 of 50 cells are done, 1 are left."
    assert len(workers) == 2
    for worker in workers:
        wait_until(lambda worker=worker: is_gone(worker), "the end of a node's worker")
    done = {row["cell"]: row["time"] for row in rows(tmp_path / "r")}
    assert len(done) == 49
    finished = run(*shlex.split(again.removeprefix("Go on with: leanbench ")), "--timeout", "1s")
    # Its last cell took too long.
    assert finished.returncode == 1, finished.stderr
    every = rows(tmp_path / "r")
    assert [row["problem"]["context"] for row in every] == CONTEXTS
    assert {row["cell"]: row["time"] for row in every if row["cell"] in done} == done
    assert [row["cell"] for row in every if row["status"] == "timeout"] == [
        cell
        for cell in json.loads((tmp_path / "r" / "manifest.json").read_text())["cells"]
        if cell not in done
    ]


def workers_of(cluster: Any) -> list[int]:
    """Return the processes that run kernels, below the raylets of a cluster."""
    below = [
        info.process.pid
        for node in cluster.list_all_nodes()
        for infos in node.all_processes.values()
        for info in infos
    ]
    found = []
    while below:
        pid = below.pop()
        below += children(pid)
        if b"leanbench.run.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found
