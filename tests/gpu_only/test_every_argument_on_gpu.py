"""20,000 calls of `lean_attn_with_kvcache` with every pair of values of its arguments, against an
fp64 reference with flash-attn's criterion. `pytest -s` prints the numbers of right, wrong and
rejected calls.

tests/argument_grid.py has the values.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

import pytest
import torch
from argument_calls import draw_call, run_call
from argument_grid import COMPILED, Row, calls_of, pairwise_rows
from argument_reference import Errors, errors

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.errors import UserError
from leanbench.records.environment import kernels_hash

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, method="thread")]

#: Sets of rows, each with every pair.
COVERINGS = 3
CALLS_OF_ROW = 60
MOST_PROCESSES = 16
RIGHT = "right"


def run_row(row: Row, seed: int) -> list[tuple[str, str]]:
    """Return (`right`, `wrong` or `refused`, what and why) of each call of a row.

    There is one synchronization with the GPU.
    """
    results, made = [], []
    for number, call in enumerate(calls_of(row, CALLS_OF_ROW, seed)):
        drawn = draw_call(call, seed * CALLS_OF_ROW + number, "cuda")
        try:
            made.append((call, errors(drawn, *run_call(drawn, lean_attn_with_kvcache))))
        except (NotImplementedError, ValueError, UserError) as refusal:
            results.append(("refused", str(refusal)))
        except Exception as error:
            reason = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            results.append(("wrong", f"{reason}: {call}"))
    for call, own in made:
        wrong = Errors(*own.tolist()).failure
        results.append((RIGHT, "") if wrong is None else ("wrong", f"{wrong}: {call}"))
    return results


@pytest.mark.parametrize("seed", [0])
def test_every_argument_beside_every_other(seed):
    rows = [
        row for part in range(COVERINGS) for row in pairwise_rows(COMPILED, COVERINGS * seed + part)
    ]
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    counts: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    print(f"{torch.cuda.get_device_name()}, kernels {kernels_hash()}", flush=True)
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        # Unique numbers for each row, from which its calls draw.
        jobs = [pool.submit(run_row, row, seed * len(rows) + at) for at, row in enumerate(rows)]
        for done, job in enumerate(as_completed(jobs)):
            for status, sentence in job.result():
                counts[status] += 1
                if status != RIGHT:
                    sentences[f"{status}: {sentence}"] += 1
            if done % 50 == 49:
                print(f"{done + 1} of {len(rows)} rows: {dict(counts)}", flush=True)
    for sentence, count in sentences.most_common():
        print(count, sentence)
    print(f"{counts.total()} calls: {dict(counts)}")
    assert counts.total() >= 20_000
    assert counts["wrong"] == 0
    assert counts["refused"] < counts.total() / 50
