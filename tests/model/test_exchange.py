"""Predictions of problems that GPUs share."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.model.predict import exchange_us, predict_cell
from leanbench.records.reading import read_run

RUNS = Path(__file__).resolve().parents[2] / "reports"
WHOLE = AttentionProblem(1, 32, 8, 131072, 128)


def predicted(parallel: str, gpu: str = "h200", name: str = "lean") -> dict[str, Any]:
    return predict_cell(replace(WHOLE, parallel=parallel), kernel(name), "default", find(gpu))


def test_shards_and_heads_with_their_exchanges():
    half = AttentionProblem(1, 32, 8, 65536, 128)
    alone = predict_cell(half, kernel("lean"), "default", find("h200"))
    row = predicted("cp:2")
    # 32 rows x 128 numbers x 8 bytes to one other GPU at 450 GB/s.
    assert row["exchange_us"] == pytest.approx(1.4 + 32768 / 450e3)
    assert row["shard_us"] == alone["latency_us"]
    assert row["latency_us"] == pytest.approx(alone["latency_us"] + row["exchange_us"])
    assert row["energy_mj"] == pytest.approx(2 * alone["energy_mj"])
    assert row["kv_bytes"] == half.kv_bytes
    share = AttentionProblem(1, 8, 2, 131072, 128)
    alone = predict_cell(share, kernel("fa2"), "default", find("h200"))
    row = predicted("tp:4", name="fa2")
    assert row["latency_us"] == alone["latency_us"]
    assert row["exchange_us"] == 0.0
    expected = {"cp:8": 1.4 + 6 * 0.2 + 7 * 32768 / 450e3, "cp:2xtp:4": 1.4 + 8192 / 450e3}
    for parallel, us in expected.items():
        assert exchange_us(replace(WHOLE, parallel=parallel), find("h200")) == pytest.approx(us)


@pytest.mark.parametrize(("gpu", "run"), [("h200", "h200/scaling"), ("h100-sxm", "h100/scaling")])
def test_exchanges_add_what_was_measured_in_the_median(gpu, run):
    off_us = [
        (exchange_us(problem, find(gpu)) or 0.0) - row.exchange_us
        for row, _ in read_run(RUNS / run).results
        if row.kernel == "lean" and row.exchange_us is not None
        if (problem := AttentionProblem.from_dict(row.problem)).batch == 1
    ]
    assert len(off_us) > 10
    assert abs(median(off_us)) < 0.5


def test_unknown_links_and_exchanges_are_not_predicted():
    row = predicted("cp:2", "a100-80gb")
    assert row["status"] == "unsupported"
    assert "does not know the links between GPUs of a100-80gb" in row["reason"]
    assert predicted("tp:2", "a100-80gb")["status"] == "ok"
    row = predicted("cp:2", name="nccl_all_gather")
    assert row["status"] == "unsupported"
    assert row["reason"].endswith("does not know the exchange of nccl_all_gather: measure")
    assert predicted("tp:2", name="nccl_all_gather")["reason"].endswith("give parallel cp:2")
