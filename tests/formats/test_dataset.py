"""Definitions and workloads of FlashInfer-Bench as sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.core.errors import UserError
from leanbench.formats.safetensors import write_int32
from leanbench.run.cells import expand
from leanbench.run.sweep_file import load_sweep


def tensor(shape: list[str] | None, dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, **more}


def const(value: int) -> dict[str, Any]:
    return {"type": "const", "value": value}


VAR = {"type": "var"}
CACHE = ["num_pages", "page_size", "num_kv_heads", "head_dim"]


def decode(**changed: Any) -> dict[str, Any]:
    """A definition as FLASHINFER_TRACE_DUMP writes it: index tensors of unknown dtype, an optional
    input, and a reference without a function `run`.
    """
    index = {"optional": True, "description": "Set during plan()."}
    definition = {
        "name": "gqa_paged_decode_h32_kv8_d128_ps16",
        "op_type": "gqa_paged",
        "axes": {
            "batch_size": VAR,
            "num_qo_heads": const(32),
            "num_kv_heads": const(8),
            "head_dim": const(128),
            "num_pages": VAR,
            "page_size": const(16),
            "len_indptr": VAR,
            "num_kv_indices": VAR,
        },
        "inputs": {
            "q": tensor(["batch_size", "num_qo_heads", "head_dim"]),
            "k_cache": tensor(CACHE),
            "v_cache": tensor(CACHE),
            "kv_indptr": tensor(["len_indptr"], "unknown", **index),
            "kv_indices": tensor(["num_kv_indices"], "unknown", **index),
            "sm_scale": tensor(None, "float32"),
            "return_lse": tensor(None, "int32", optional=True),
        },
        "outputs": {"output": tensor(["batch_size", "num_qo_heads", "head_dim"])},
        "reference": "def _reference():\n    pass\n",
        "init": "",
    }
    return {**definition, **changed}


def with_inputs(**changed: Any) -> dict[str, Any]:
    return decode(inputs={**decode()["inputs"], **changed})


LATENT = {
    "name": "mla_paged_decode_h16_ckv512_kpe64_ps64",
    "op_type": "mla_paged",
    "axes": {
        "batch_size": VAR,
        "num_qo_heads": const(16),
        "head_dim_ckv": const(512),
        "head_dim_kpe": const(64),
        "page_size": const(64),
    },
    "inputs": {
        "q_nope": tensor(["batch_size", "num_qo_heads", "head_dim_ckv"]),
        "q_pe": tensor(["batch_size", "num_qo_heads", "head_dim_kpe"]),
        "ckv_cache": tensor(["num_pages", "page_size", "head_dim_ckv"]),
        "kpe_cache": tensor(["num_pages", "page_size", "head_dim_kpe"]),
        "kv_indptr": tensor(["len_indptr"], "unknown"),
        "kv_indices": tensor(["num_kv_indices"], "unknown"),
        "sm_scale": tensor(None, "float32"),
    },
}
SINGLE = {
    "name": "single_decode_h32_kv8_d128",
    "op_type": "single_decode",
    "axes": {
        "num_qo_heads": const(32),
        "num_kv_heads": const(8),
        "head_dim": const(128),
        "kv_len": VAR,
    },
    "inputs": {
        "q": tensor(["num_qo_heads", "head_dim"]),
        "k": tensor(["kv_len", "num_kv_heads", "head_dim"]),
        "v": tensor(["kv_len", "num_kv_heads", "head_dim"]),
    },
}
NORM = {"name": "rmsnorm_h4096", "axes": {"hidden_size": const(4096)}, "inputs": {"x": tensor([])}}


def write(folder: Path, *definitions: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for definition in definitions:
        (folder / f"{definition['name']}.json").write_text(json.dumps(definition))
    return folder


def labels(path: Path, **axes: str) -> list[str]:
    sweep = load_sweep(str(path))
    return list(dict.fromkeys(cell.problem.label for cell in expand(sweep)))


def test_a_dumped_folder_is_a_sweep(tmp_path, caplog):
    dump = write(tmp_path / "fi_trace_out", decode(), LATENT, SINGLE, NORM)
    sweep = load_sweep(str(dump))
    assert (sweep.name, sweep.kernels) == (
        "fi_trace_out",
        ("lean", "fa2", "fixed_split", "lean_mla", "flash_mla", "flashinfer_mla"),
    )
    assert labels(dump) == [
        f"b1 {own} n{context} {rest}"
        for own, rest in (
            ("h32/8", "d128 p16 bf16 NHD device"),
            ("h16/1", "d576 p64 dv512 bf16 HND device latent"),
            ("h32/8", "d128 bf16 NHD"),
        )
        for context in (1024, 4096, 16384)
    ]
    assert caplog.messages[0] == (
        f"{dump}: 1 file left out: rmsnorm_h4096: its inputs are not those of gqa_paged,"
        " mla_paged or single_decode"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"kernels": []}', "it has no inputs and axes"),
        ("[1]", "it has no inputs and axes"),
        ("", "it is empty"),
        ('{"inputs": {"q": 1}, "axes": {}}', "an input or an axis is no object"),
    ],
)
def test_a_file_that_is_no_definition_is_left_out_and_named(tmp_path, caplog, text, why):
    dump = write(tmp_path / "dump", SINGLE)
    (dump / "foreign.json").write_text(text)
    assert labels(dump) == [f"b1 h32/8 n{n} d128 bf16 NHD" for n in (1024, 4096, 16384)]
    assert caplog.messages == [f"{dump}: 1 file left out: foreign: it is no definition ({why})"]


def test_flags_say_batch_and_context(tmp_path, monkeypatch):
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)
    write(tmp_path, decode())
    words = ["sweep", str(tmp_path), "--context", "1k,8k", "--batch", "4", "--kernels", "lean"]
    result = CliRunner().invoke(app, [*words, "--dry-run", "--gpu", "h200"])
    assert result.exit_code == 0, result.output
    shown = [line.split() for line in result.stdout.splitlines() if line.startswith("lean ")]
    assert [words[1:4] for words in shown] == [
        ["b4", "h32/8", "n1024"],
        ["b4", "h32/8", "n8192"],
    ]


def workload(batch: int, pages: int, **tensors: list[int]) -> dict[str, Any]:
    index = {
        name: {"type": "safetensors", "path": "blob/own.safetensors", "tensor_key": name}
        for name in tensors
    }
    axes = {"batch_size": batch, "num_pages": 99, "num_kv_indices": pages}
    return {"workload": {"uuid": "u", "axes": axes, "inputs": {"q": {"type": "random"}, **index}}}


def dataset(folder: Path, *workloads: dict[str, Any], **tensors: list[int]) -> Path:
    own = decode()
    write(folder / "definitions" / "gqa_paged", own)
    (folder / "blob").mkdir()
    (folder / "blob" / "own.safetensors").write_bytes(write_int32(tensors))
    path = folder / "workloads" / "gqa_paged" / f"{own['name']}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in workloads))
    return path


def test_workloads_have_their_lengths(tmp_path):
    tensors = {"kv_indptr": [0, 3, 4], "kv_last_page_len": [5, 16]}
    given = (
        workload(2, 4, **tensors),
        workload(2, 4, kv_indptr=[0, 3, 4]),
        workload(3, 12),
    )
    path = dataset(tmp_path, *given, **tensors)
    assert labels(path) == [
        "b2 h32/8 n37+16 d128 p16 bf16 NHD",
        "b2 h32/8 n48+16 d128 p16 bf16 NHD",
        "b3 h32/8 n64 d128 p16 bf16 NHD device",
    ]
    assert labels(tmp_path) == labels(path)


@pytest.mark.parametrize(
    ("changed", "axes"),
    [
        ({"dtype": "float8_e4m3fn"}, "kv-e4m3"),
        ({"shape": [CACHE[0], CACHE[2], CACHE[1], CACHE[3]]}, "HND"),
    ],
)
def test_caches_say_layout_and_dtype(tmp_path, changed, axes):
    cache = {**tensor(CACHE), **changed}
    path = write(tmp_path, with_inputs(k_cache=cache, v_cache=cache))
    assert all(axes in label.split() for label in labels(path))


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (NORM, "rmsnorm_h4096.json cannot be swept: its inputs are not those of gqa_paged, mla_"),
        (with_inputs(mask=tensor(["n"])), "it takes mask, which no axis describes"),
        (with_inputs(q=tensor(["total_q", "num_qo_heads", "head_dim"])), "not one query token a"),
        (with_inputs(q=tensor(["batch_size", "num_qo_heads", "head_dim"], "int8")), "q is int8"),
        (with_inputs(k_cache=tensor(CACHE, "float16")), "k_cache is float16 and its q bfloat16"),
        (with_inputs(k_cache=tensor(CACHE[:2])), "its caches are"),
        (decode(axes={**decode()["axes"], "page_size": VAR}), "its axis page_size has no value"),
        (
            {"name": "x", "inputs": {}},
            "is no definition of FlashInfer-Bench (it has no inputs and axes): give",
        ),
        ({"name": "x", "inputs": {"q": 1}, "axes": {}}, "an input or an axis is no object"),
    ],
)
def test_what_is_no_decode_attention_is_refused_in_a_sentence(tmp_path, definition, words):
    folder = write(tmp_path, definition)
    [path] = folder.iterdir()
    result = CliRunner().invoke(app, ["sweep", str(path)])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert words in line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (workload(2, 4, kv_indptr=[0, 1, 4], gone=[]), "line 1 is no workload"),
        (workload(0, 4), "its axis batch_size is 0, not a number from 1 on"),
        (workload(3, 4, kv_indptr=[]), "it has a batch of 3 and 2 lengths"),
        (workload(3, 2), "a sequence has no token"),
        ({"workload": None}, "it has no axes and inputs"),
    ],
)
def test_a_damaged_workload_is_refused_in_a_sentence(tmp_path, line, words):
    if "gone" in str(line):
        line["workload"]["inputs"]["kv_indptr"]["path"] = "blob/gone.safetensors"
        words = "blob/gone.safetensors, which has its kv_indptr, cannot be read (no such file"
    path = dataset(tmp_path, line, kv_indptr=[0, 3, 4])
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        load_sweep(str(path))


def test_what_is_not_there_is_refused_in_a_sentence(tmp_path):
    lonely = tmp_path / "a" / "b" / "w.jsonl"
    lonely.parent.mkdir(parents=True)
    lonely.write_text("{}\n")
    (tmp_path / "text.json").write_text("no JSON")
    for path, words in (
        (
            Path("gone.json"),
            "there is no sweep file 'gone.json': give a path to a TOML file, to def",
        ),
        (lonely, "has no definition at .*definitions/b/w.json: keep workloads in the dataset"),
        (tmp_path / "text.json", "text.json is no definition of FlashInfer-Bench"),
        (lonely.parent, "holds no decode attention of FlashInfer-Bench: there is no definition"),
        (write(tmp_path / "c", NORM), "holds no decode attention .*: 1 file left out: rmsn"),
    ):
        with pytest.raises(UserError, match=words):
            load_sweep(str(path))
