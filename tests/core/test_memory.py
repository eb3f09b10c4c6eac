"""Whether a problem fits into memory."""

from dataclasses import replace

import pytest

from leanbench.core.memory import needed_bytes, shortage, shortage_on
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find

LARGE = AttentionProblem(4, 32, 32, 1_000_000, 64)
#: K and V: 2 x 4 x 10^6 x 32 x 64 x 2 bytes. Q, the output and the LSE: 4 x 32 rows of 2 x 64 x 2
#: + 4 bytes. The check: a head in fp64, 10^6 x (2 x 64 + 3) x 8. And 512 MB.
NEEDED_BYTES = 32_768_000_000 + 33_280 + 1_048_000_000 + 512_000_000


@pytest.mark.parametrize(("available", "fits"), [(NEEDED_BYTES - 1, False), (NEEDED_BYTES, True)])
def test_a_shortage_to_the_byte(available, fits):
    assert needed_bytes(LARGE) == NEEDED_BYTES
    assert (shortage(LARGE, available, "the GPU", "free") is None) == fits


def test_ragged_batches_and_gpus_that_are_not_here():
    ragged = replace(LARGE, context=(1, 1, 1, 1_000_000))
    assert "K and V 32.8 GB" in (shortage(ragged, 20e9, "the GPU", "free") or "")
    assert shortage_on(LARGE, find("h200")) is None
    reason = str(shortage_on(LARGE, find("rtx4090")))
    assert reason.startswith("needs 34.3 GB (K and V 32.8 GB, the rest for Q, ")
    assert " and rtx-4090 has 24.0 GB: choose a smaller context, batch or number" in reason
