"""Predicted sweeps on a local Ray cluster with fake GPUs; skipped without Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leanbench.core.errors import UserError

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from leanbench.cluster.dispatch import Dispatcher
from leanbench.cluster.ray_cluster import RayCluster
from leanbench.run.cluster_executor import SweepAgent

LEANBENCH = [sys.executable, "-m", "leanbench"]
#: 100 problems.
AXES = "--heads 8,16,32,32/8,64/8 --context 1k:512k:x2 --batch 1,8 --head-dim 128"
CELLS = 200
ASKED = f"sweep {AXES} --kernels lean,fa2 --gpu h200 --no-report --quiet --executor ray".split()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start three nodes with a fake GPU each."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    for _ in range(2):
        started.add_node(num_cpus=1, num_gpus=1)
    yield started
    started.shutdown()


def start(cluster: Any, out: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LEANBENCH, *ASKED, "--ray-address", cluster.address, "--out", str(out), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def rows(path: Path) -> list[dict[str, Any]]:
    results = path / "results.jsonl"
    return [json.loads(line) for line in results.read_text().splitlines()]


def wait_for_rows(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    while not ((path / "results.jsonl").is_file() and len(rows(path)) >= count):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def assert_every_cell_once(path: Path, cells: int = CELLS) -> None:
    counted = Counter(row["cell"] for row in rows(path))
    assert list(counted) == json.loads((path / "manifest.json").read_text())["cells"]
    assert len(counted) == cells
    assert set(counted.values()) == {1}
    assert {row["status"] for row in rows(path)} == {"ok"}


def end_a_node(cluster: Any) -> None:
    cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)


def end_an_actor(cluster: Any) -> None:
    _kill_one(b"ray::SweepAgent")


def end_a_worker(cluster: Any) -> None:
    _kill_one(b"leanbench.run.worker")


def _kill_one(words: bytes) -> None:
    """Kill a process of this test's cluster by words of its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if words in (process / "cmdline").read_bytes() and _is_ours(process):
                os.kill(int(process.name), signal.SIGKILL)
                return
        except OSError:
            continue
    raise AssertionError(f"no process has {words!r}")


def _is_ours(process: Path) -> bool:
    """Return True if this process is an ancestor."""
    while process.name not in ("0", "1", str(os.getpid())):
        # After the name, which may hold anything: the state, then the parent.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        process = process.with_name(fields[1])
    return process.name == str(os.getpid())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", [end_a_node, end_an_actor, end_a_worker])
def test_200_cells_on_three_nodes_of_which_something_is_killed(
    cluster, tmp_path, end: Callable[[Any], None]
):
    with start(cluster, tmp_path, "--name", "r") as process:
        wait_for_rows(tmp_path / "r", 20, process)
        end(cluster)
        assert process.wait(timeout=300) == 0
    assert len(rows(tmp_path / "r")) == CELLS
    assert_every_cell_once(tmp_path / "r")


@pytest.mark.timeout(600)
def test_a_driver_that_was_killed_is_resumed_and_shards_are_one_run(cluster, tmp_path):
    with start(cluster, tmp_path, "--name", "r") as process:
        wait_for_rows(tmp_path / "r", 40, process)
        process.kill()
    done = {row["cell"]: row["time"] for row in rows(tmp_path / "r")}
    assert 40 <= len(done) < CELLS
    with start(cluster, tmp_path, "--name", "r", "--resume") as process:
        assert process.wait(timeout=300) == 0, process.communicate()[1]
    assert_every_cell_once(tmp_path / "r")
    kept = {row["cell"]: row["time"] for row in rows(tmp_path / "r") if row["cell"] in done}
    assert kept == done
    for shard in (1, 2):
        with start(cluster, tmp_path, "--name", f"s{shard}", "--shard", f"{shard}/2") as process:
            assert process.wait(timeout=300) == 0, process.communicate()[1]
    shards = [str(tmp_path / "s1"), str(tmp_path / "s2")]
    merge = [*LEANBENCH, "merge", *shards, "--out", str(tmp_path / "both")]
    subprocess.run(merge, check=True, capture_output=True)
    assert_every_cell_once(tmp_path / "both")
    assert _figures(tmp_path / "both") == _figures(tmp_path / "r")
    assert len((tmp_path / "both" / "report.csv").read_text().splitlines()) == CELLS + 1


def _figures(path: Path) -> list[dict[str, Any]]:
    """Return the rows without times and ids."""
    when = ("time", "wall_s", "run_id")
    return [{name: row[name] for name in row if name not in when} for row in rows(path)]


def test_a_handler_of_sigterm_stays(cluster):
    """Ray's own handler ends the process without a message."""
    before = signal.getsignal(signal.SIGTERM)
    connected = RayCluster(cluster.address)
    try:
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        connected.close()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_cluster_of_another_version_is_refused(cluster, monkeypatch, is_named):
    monkeypatch.setattr("ray.__version__", "2.0.0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError) as refused:
        RayCluster(cluster.address if is_named else None)
    named = f"at {cluster.address}" if is_named else "of this machine"
    said = str(refused.value)
    assert said.startswith(f"the Ray cluster {named} is of other versions (The cluster was started")
    assert f"Ray: {ray.__version__} Python" in said
    assert said.endswith("): install the same Ray and Python here")
    assert "\n" not in said
    assert not ray.is_initialized()


def test_an_address_of_rays_client_is_refused():
    with pytest.raises(UserError, match=r"^ray://a:10001 is an address for Ray's client, .*: name"):
        RayCluster("ray://a:10001")


def test_an_agent_that_cannot_be_made_is_told_by_its_own_error(cluster):
    class Unmakeable(SweepAgent):
        def __init__(self) -> None:
            raise FileNotFoundError(2, "No usable temporary directory")

    connected = RayCluster(cluster.address)
    try:
        with pytest.raises(UserError) as refused:
            Dispatcher(connected, Unmakeable, (), lambda text: None).target()
    finally:
        connected.close()
    assert "can work: an agent on " in str(refused.value)
    assert "FileNotFoundError: [Errno 2] No usable temporary directory" in str(refused.value)


def test_a_cluster_without_gpus_and_one_that_does_not_answer_are_refused(tmp_path):
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        with start(started, tmp_path, "--name", "r") as process:
            _, said = process.communicate()
        assert process.returncode == 2
        assert "has no GPUs on its 1 nodes: start them with `ray start --num-gpus N`" in said
    finally:
        started.shutdown()
    with pytest.raises(
        UserError, match=r"the Ray cluster at 127\.0\.0\.1:1 does not answer .*refused"
    ):
        RayCluster("127.0.0.1:1")
