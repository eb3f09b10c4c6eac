"""Predictions of `lean_mla`."""

from dataclasses import replace
from statistics import median

import pytest
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.mla.build import LATENTS
from leanbench.kernels.mla.configs import MlaConfig

from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.model.latent import latent_us
from leanbench.model.predict import predict_cell
from leanbench.records.published import published

LATENT = AttentionProblem(2, 16, 1, 100, 576, "bf16", latent=True, v_head_dim=512)
H200, A100 = find("h200"), find("a100-80gb")


@pytest.mark.parametrize(
    ("lengths_on", "count", "middle", "worst"),
    [("host", 48, 0.03, 0.14), ("device", 24, 0.07, 0.25)],
)
def test_published_rows_are_predicted(lengths_on, count, middle, worst):
    errors = []
    for row in published():
        if (row.kernel, row.problem.lengths_on) != ("lean_mla", lengths_on):
            continue
        fields = predict_cell(row.problem, LEAN_MLA, "default", find(row.run.gpu))
        errors.append(abs(fields["latency_us"] / row.latency_us - 1))
        assert "warnings" not in fields or not fields["warnings"]
    assert len(errors) == count
    assert median(errors) < middle
    assert max(errors) < worst


@pytest.mark.parametrize("head_dim", LATENTS)
def test_rows_of_all_widths_are_predicted(head_dim):
    problem = replace(LATENT, head_dim=head_dim, v_head_dim=LATENTS[head_dim], batch=32)
    few, many = (
        predict_cell(replace(problem, context=tokens), LEAN_MLA, "default", H200)
        for tokens in (4096, 65536)
    )
    for fields in (few, many):
        assert fields["status"] == "ok"
        assert fields["latency_us"] > fields["read_floor_us"]
        assert bool(fields.get("warnings")) == (head_dim != 576)
    assert many["latency_us"] > 8 * few["latency_us"]
    best = predict_cell(problem, LEAN_MLA, "best", H200)
    assert best["latency_us"] <= predict_cell(problem, LEAN_MLA, "default", H200)["latency_us"]


def test_single_rows_and_bytes_take_longer():
    """Chosen tokens, and fp8, which is half of the bytes."""

    def latency_us(**axes):
        problem = replace(LATENT, **{"batch": 64, "q_heads": 16, "context": 2048, **axes})
        return predict_cell(problem, LEAN_MLA, "default", H200)["latency_us"]

    pages = latency_us(page_size=64)
    chosen = latency_us(context=9000, select=2048)
    assert chosen == latency_us(page_size=1) > 1.1 * pages
    assert latency_us(page_size=1, kv_dtype="e4m3") > 0.6 * chosen


def test_long_lengths_on_the_device_have_one_column_group():
    problem = replace(LATENT, q_heads=128, page_size=64, lengths_on="device")
    four, one = (MlaConfig(2, align_grid=True, column_groups=groups) for groups in (4, 1))
    long, short = (replace(problem, batch=1, context=tokens) for tokens in (131_072, 1024))
    assert latent_us(long, four, H200) == latent_us(long, one, H200)
    assert latent_us(short, four, H200) < latent_us(short, one, H200)
    on_host = replace(long, lengths_on="host")
    assert latent_us(on_host, four, H200) > 1.5 * latent_us(on_host, one, H200)


def test_other_gpus_have_no_prediction():
    fields = predict_cell(LATENT, LEAN_MLA, "default", A100)
    assert fields["status"] == "unsupported"
    assert "written for compute capability 9.0" in fields["reason"]
