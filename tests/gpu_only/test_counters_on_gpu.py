"""Hardware counters by the real Nsight Compute, and `leanbench doctor` on the GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device
from leanbench.measure.counters import CountedLaunch, count, find_ncu
from leanbench.measure.options import CacheState

pytestmark = pytest.mark.gpu

needs_ncu = pytest.mark.skipif(
    find_ncu() is None, reason="needs Nsight Compute, which is not installed"
)
#: 14.7 MB fits the L2 of every data-centre GPU since the A100.
SMALL = AttentionProblem(1, 56, 56, 1024, 64)


def counted(problem: AttentionProblem, name: str, cache: CacheState = "cold") -> CountedLaunch:
    result = count(problem, name, kernel(name).default_config(problem, spec_of_device(0)), 0, cache)
    assert isinstance(result, CountedLaunch), result
    return result


@needs_ncu
@pytest.mark.parametrize(("name", "gpu_kernels"), [("lean", 1), ("fixed_split_triton", 2)])
def test_a_cold_call_reads_k_and_v_once(name, gpu_kernels):
    problem = AttentionProblem(1, 56, 56, 4096, 64)
    launch = counted(problem, name)
    assert len(launch.kernels) == gpu_kernels
    reads = sum(launched.dram_read_bytes for launched in launch.kernels)
    assert 0.97 * problem.kv_bytes < reads < 1.1 * problem.kv_bytes
    assert launch.dram_bytes < 1.25 * problem.kv_bytes
    assert 0 < launch.warp_occupancy <= 1
    assert 0 < launch.dram_tb_s < 1.05 * spec_of_device(0).bandwidth_tb_s


@needs_ncu
def test_a_warm_call_reads_less():
    if spec_of_device(0).l2_bytes < 2 * SMALL.kv_bytes:
        pytest.skip(
            f"needs an L2 of {2 * SMALL.kv_bytes / 1e6:.0f} MB, this GPU has"
            f" {spec_of_device(0).l2_bytes / 1e6:.0f}"
        )
    cold, warm = counted(SMALL, "lean"), counted(SMALL, "lean", "warm")
    assert warm.dram_bytes < 0.5 * cold.dram_bytes


def test_the_doctor_finds_no_problem_with_the_kernels():
    done = subprocess.run(
        [sys.executable, "-m", "leanbench", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    for name in (
        "torch",
        "gpu",
        "events",
        "timer",
        "kernel lean",
        "kernel fa2",
        "kernel fixed_split",
        "bandwidth",
    ):
        assert findings[name]["status"] == "ok", findings[name]
    assert [
        finding for finding in findings.values() if "this check failed" in finding["text"]
    ] == []
    assert (
        findings["energy"]["values"]["idle_power_w"] is None
        or findings["energy"]["values"]["idle_power_w"] > 0
    )
    assert len(findings["noise"]["values"]["differences"]) == 3
