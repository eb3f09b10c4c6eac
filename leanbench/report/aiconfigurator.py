"""Tables of decode attention for the planner AIConfigurator: a row for each problem of one kernel.

Its tables have no column for a kernel, so a file holds one. Columns and units are those of its
collectors: latency in milliseconds, tokens as `isl` + `step`, window 0 for none.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leanbench.core import __version__
from leanbench.core.errors import UserError
from leanbench.core.kinds import SAME
from leanbench.core.quantities import TIMED

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

ATTENTION, LATENT = "generation_attention_perf", "generation_mla_perf"
#: Columns by file.
COLUMNS = {
    ATTENTION: (
        *("framework", "version", "device", "op_name", "kernel_source", "batch_size", "isl"),
        *("num_heads", "num_key_value_heads", "head_dim", "window_size", "beam_width"),
        *("attn_dtype", "kv_cache_dtype", "step", "latency"),
    ),
    LATENT: (
        *("framework", "version", "device", "op_name", "kernel_source", "mla_dtype"),
        *("kv_cache_dtype", "num_heads", "batch_size", "isl", "tp_size", "step", "latency"),
    ),
}
#: Names of 16-bit numbers for its readers of CSV (to 0.8) and of Parquet (from 0.10 on).
_CSV_16_BIT, _PARQUET_16_BIT = "float16", "bfloat16"
#: Axes off their defaults that a row can have: those with a column, and a server's own choices.
_AXES = {"dtype", "kv_layout", "kv_dtype", "page_size", "capacity", "lengths_on", "scaled"}
_LATENT_AXES = {*_AXES, "latent", "v_head_dim"}
#: head_dim of latent caches.
_LATENT_DIM = 576
#: Fields that its reader looks rows up by.
_KEY = (
    *("device", "kv_cache_dtype", "num_key_value_heads", "head_dim", "window_size"),
    *("num_heads", "batch_size", "step"),
)
_TAKES = (
    "it takes measured calls with a cold L2, one query token, equal lengths, no variant but windows"
    " and fp8 caches, on one GPU"
)


def planner_files(runs: Sequence[Run], baseline: str | None) -> dict[str, str | bytes]:
    """Render the tables by file name: CSV, and Parquet where pyarrow is installed.

    Args:
        baseline: kernel of the tables; None for `lean` and `lean_mla`.

    Raises:
        UserError: there is no such row, or the rows are of several GPUs.
    """
    rows = _rows(runs, baseline)
    if not rows:
        raise UserError(
            f"no row can be in a table of AIConfigurator: {_TAKES}; name a run that has such rows"
        )
    devices = list(dict.fromkeys(fields["device"] for _, fields in rows))
    if len(devices) > 1:
        raise UserError(
            f"a table of AIConfigurator is of one GPU, these runs are of {' and '.join(devices)}:"
            " report them one by one"
        )
    files: dict[str, str | bytes] = {}
    for name, columns in COLUMNS.items():
        table = [fields for of, fields in rows if of == name]
        # The reader takes a column for all rows or none.
        has_power = all(fields["power"] is not None for fields in table)
        kept = [*columns, *(["power"] if has_power else [])]
        if table:
            files[f"{name}.txt"] = _csv(table, kept)
            if (parquet := _parquet(table, kept)) is not None:
                files[f"{name}.parquet"] = parquet
    return files


def _rows(runs: Sequence[Run], baseline: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return file and fields of each row; of equal sizes, the call that is most like a server's."""
    found: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    timed = [
        (run, row, problem)
        for run in runs
        for row, problem in run.results
        if row.kernel == (baseline or ("lean_mla" if problem.latent else "lean"))
        and row.status in TIMED
    ]
    for run, row, problem in sorted(timed, key=lambda each: _unlike_a_server(each[2])):
        if row.source == "measured" and row.cache == "cold" and _fits(problem):
            file = LATENT if problem.latent else ATTENTION
            fields = _fields(row, problem, run.gpu_name(row.environment))
            found.setdefault((file, *(fields[name] for name in _KEY)), (file, fields))
    if found and (left_out := len(timed) - len(found)):
        logging.getLogger(__name__).warning(
            f"{left_out} of {len(timed)} rows are left out of AIConfigurator's tables: another row"
            f" has the same sizes, or {_TAKES}"
        )
    return list(found.values())


def _unlike_a_server(problem: AttentionProblem) -> tuple[bool, bool]:
    """Rank a call: servers have pages, and lengths on the device."""
    return problem.page_size is None, problem.lengths_on != "device"


def _fits(problem: AttentionProblem) -> bool:
    axes = _LATENT_AXES if problem.latent else {*_AXES, "window_left"}
    return (
        problem.special.keys() <= axes
        and not problem.is_ragged
        and problem.q_len == 1
        and problem.whole_model is None
        and problem.head_dim == (_LATENT_DIM if problem.latent else problem.value_dim)
    )


def _fields(row: Row, problem: AttentionProblem, device: str) -> dict[str, Any]:
    assert row.latency_us is not None
    return {
        "framework": "leanbench",
        "version": __version__,
        "device": device,
        "op_name": "mla_generation" if problem.latent else "generation_attention",
        "kernel_source": row.kernel,
        "batch_size": problem.batch,
        # The new token and those before it.
        "isl": 1,
        "step": problem.max_context - 1,
        "num_heads": problem.q_heads,
        "num_key_value_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "window_size": 0 if problem.window_left < 0 else problem.window_left + 1,
        "beam_width": 1,
        "tp_size": 1,
        "kv_cache_dtype": None if problem.kv_dtype == SAME else "fp8",
        "latency": row.latency_us / 1e3,
        "power": row.sustained_power_w,
    }


def _with_dtypes(fields: Mapping[str, Any], sixteen_bit: str) -> dict[str, Any]:
    """Return the fields with the reader's name of 16-bit numbers."""
    kv_dtype = fields["kv_cache_dtype"] or sixteen_bit
    return {
        **fields,
        "attn_dtype": sixteen_bit,
        "mla_dtype": sixteen_bit,
        "kv_cache_dtype": kv_dtype,
    }


def _csv(table: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_with_dtypes(fields, _CSV_16_BIT) for fields in table)
    return text.getvalue()


def _parquet(table: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bytes | None:
    """Return None if pyarrow is not installed."""
    import pandas as pd

    named = [_with_dtypes(fields, _PARQUET_16_BIT) for fields in table]
    try:
        return pd.DataFrame(named)[[*columns]].to_parquet(index=False)
    except ImportError:
        return None
