"""A step of small models of every type on the GPU, through the command."""

from __future__ import annotations

import pytest
from cli.test_sweep import invoke
from decode.tiny_models import CONFIGS, written

from leanbench.records.reading import read_run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CONFIGS)
def test_every_type_of_model_is_measured(tmp_path, name):
    pytest.importorskip("transformers")
    model = written(tmp_path, name)
    command = (
        f"decode {model} --context 100 --batch 2 --kernels lean,fixed_split,eager,no_attention"
        f" --ci 20% --prefill 100 --out {tmp_path} --name one --no-report --quiet"
    )
    assert invoke(*command.split()).exit_code == 0
    rows = {row.kernel: row for row, _ in read_run(tmp_path / "one").results}
    for row in rows.values():
        assert row.status in ("ok", "noisy"), row.reason
        assert (row.gemm_us or 0) > 0
        # The time to first token is measured if every layer sees the whole prompt.
        assert (row.prefill_us is None) == ("sliding_window" in CONFIGS[name])
    assert (rows["lean"].relative_error or 1) < 1e-2
    assert rows["no_attention"].attention_share == 0
