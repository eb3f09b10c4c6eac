"""Definitions and workloads of FlashInfer-Bench as sweeps."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cli.running import invoke, printed

from leanbench.core.errors import UserError
from leanbench.core.files import UnreadableFile
from leanbench.formats.safetensors import read_integers, write_int32
from leanbench.run.cells import expand
from leanbench.run.sweep_file import load_sweep


def tensor(shape: list[str] | None, dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, **more}


def const(value: int) -> dict[str, Any]:
    return {"type": "const", "value": value}


VAR = {"type": "var"}
BATCH = ["batch_size", "num_qo_heads", "head_dim"]
CACHE = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
CACHES = {"k_cache": tensor(CACHE), "v_cache": tensor(CACHE)}
INDEX = ("kv_indptr", ["len_indptr"]), ("kv_indices", ["num_kv_indices"])
GQA = {"num_qo_heads": const(32), "num_kv_heads": const(8), "head_dim": const(128)}


def decode(**changed: Any) -> dict[str, Any]:
    """Return one like FLASHINFER_TRACE_DUMP's: unknown dtypes, a reference without `run`."""
    optional = {"optional": True, "description": "Set during plan()."}
    index = {name: tensor(shape, "unknown", **optional) for name, shape in INDEX}
    lengths = {"num_pages": VAR, "page_size": const(16), "len_indptr": VAR, "num_kv_indices": VAR}
    scalars = {
        "sm_scale": tensor(None, "float32"),
        "return_lse": tensor(None, "int32", optional=True),
    }
    definition = {
        "name": "gqa_paged_decode_h32_kv8_d128_ps16",
        "op_type": "gqa_paged",
        "axes": {"batch_size": VAR, **GQA, **lengths},
        "inputs": {"q": tensor(BATCH), **CACHES, **index, **scalars},
        "outputs": {"output": tensor(BATCH)},
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
        "page_size": const(64),
        "head_dim_ckv": const(512),
        "head_dim_kpe": const(64),
    },
    "inputs": {
        "q_nope": tensor(["batch_size", "num_qo_heads", "head_dim_ckv"]),
        "q_pe": tensor(["batch_size", "num_qo_heads", "head_dim_kpe"]),
        "ckv_cache": tensor(["num_pages", "page_size", "head_dim_ckv"]),
        "kpe_cache": tensor(["num_pages", "page_size", "head_dim_kpe"]),
        **{name: tensor(shape, "unknown") for name, shape in INDEX},
        "sm_scale": tensor(None, "float32"),
    },
}
OF_ONE = tensor(["kv_len", "num_kv_heads", "head_dim"])
SINGLE = {
    "name": "single_decode_h32_kv8_d128",
    "op_type": "single_decode",
    "axes": {**GQA, "kv_len": VAR},
    "inputs": {"q": tensor(BATCH[1:]), "k": OF_ONE, "v": OF_ONE},
}
OF_SINGLE = [f"b1 h32/8 n{n} d128 bf16 NHD" for n in (1024, 4096, 16384)]
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
    ours = ("lean", "fa2", "fixed_split", "lean_mla", "flash_mla", "flashinfer_mla")
    assert (sweep.name, sweep.kernels) == ("fi_trace_out", ours)
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
        f"{dump}: 1 left out: rmsnorm_h4096: its inputs are not those of gqa_paged,"
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
    assert labels(dump) == OF_SINGLE
    assert caplog.messages == [f"{dump}: 1 left out: foreign: it is no definition ({why})"]


def test_flags_say_batch_and_context(tmp_path, monkeypatch):
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)
    write(tmp_path, decode())
    words = ["sweep", str(tmp_path), "--context", "1k,8k", "--batch", "4", "--kernels", "lean"]
    shown = printed(*words, "--dry-run", "--gpu", "h200").splitlines()
    cells = [" ".join(line.split()[1:4]) for line in shown if line.startswith("lean ")]
    assert cells == ["b4 h32/8 n1024", "b4 h32/8 n8192"]


def workload(batch: int, pages: int, **tensors: list[int]) -> dict[str, Any]:
    blob = {"type": "safetensors", "path": "blob/own.safetensors"}
    index = {name: {**blob, "tensor_key": name} for name in tensors}
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
    given = workload(2, 4, **tensors), workload(2, 4, kv_indptr=[0, 3, 4]), workload(3, 12)
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
        (with_inputs(q=tensor(["total_q", *BATCH[1:]])), "not one query token a"),
        (with_inputs(q=tensor(BATCH, "int8")), "q is int8"),
        (with_inputs(k_cache=tensor(CACHE, "float16")), "k_cache is float16 and its q bfloat16"),
        (with_inputs(k_cache=tensor(CACHE[:2])), "its caches are"),
        (decode(axes={**decode()["axes"], "page_size": VAR}), "its axis page_size is null, not a"),
        ({"name": "x", "inputs": {}}, "no definition of FlashInfer-Bench (it has no inputs and"),
        ({"name": "x", "inputs": {"q": 1}, "axes": {}}, "an input or an axis is no object"),
    ],
)
def test_what_is_no_decode_attention_is_refused_in_a_sentence(tmp_path, definition, words):
    folder = write(tmp_path, definition)
    [path] = folder.iterdir()
    result = invoke("sweep", str(path))
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert words in line


def tensor_at(
    path: str, key: str = "kv_indptr", name: str = "kv_indptr", batch: int = 1
) -> dict[str, Any]:
    """Return a workload with index tensors in another file."""
    line = workload(batch, 4)
    given = {"type": "safetensors", "path": path, "tensor_key": key}
    line["workload"]["inputs"][name] = given
    return line


_HEADER = b'{"kv_indptr":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}'
FAR = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8) + (2**40).to_bytes(8, "little")
BAD = [
    (workload(0, 4), "its axis batch_size is 0, not a number from 1 on"),
    (workload(2**40, 4), "above the limit of 4096"),
    (workload(3, 4, kv_indptr=[]), "it has a batch of 3 and 2 lengths"),
    (workload(2, 4, kv_last_page_len=[]), "it has a batch of 2 and 1 lengths"),
    (workload(1, 4, kv_last_page_len=[]), "a last page has 17 tokens, not from 1 to 16"),
    (workload(3, 2), "a sequence has no token"),
    (workload(1, 2**60), "K and V bytes"),
    ({"workload": None}, "it has no axes and inputs"),
    ({"workload": {"axes": [], "inputs": {}}}, "it has no axes and inputs"),
    ([1], "it has no axes and inputs"),
    (tensor_at("blob/own.safetensors", "empty"), "it has a batch of 1 and 0 lengths"),
    (tensor_at("blob/own.safetensors", "none"), "it has no tensor 'none'"),
    (tensor_at("blob/far.safetensors"), "its kv_indptr is [0, 1099511627776], which does not asc"),
    (workload(1, 2**40), "above the maximum of 2147483647"),
    (workload(2, 5, kv_indptr=[]), "[0, 3, 4], which does not ascend from 0 to its num_kv_indic"),
    (tensor_at("blob/index.safetensors", "from_1"), "its kv_indptr is [1, 4], which does not"),
    (tensor_at("blob/index.safetensors", "falls", batch=2), "its kv_indptr is [0, 5, 4], which"),
    (
        tensor_at("blob/index.safetensors", "zero", "kv_last_page_len"),
        "a last page has 0 tokens, not from 1 to 16",
    ),
    (workload(1, 4) | {"definition": "other"}, "it is for another definition, 'other'"),
    (tensor_at("../../own.safetensors"), "it lies outside of"),
    (tensor_at("/etc/hostname"), "it lies outside of"),
    (tensor_at("blob/device"), "it lies outside of"),
    (tensor_at("blob/gone.safetensors"), "there is no such file"),
    (tensor_at("blob/fifo"), "it is no regular file"),
    (tensor_at("blob"), "it is a folder"),
    (tensor_at("a\0b"), "no file can have this name"),
    (json.loads(json.dumps(tensor_at("")).replace("safetensors", "text")), "its kv_indptr is"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_left_out_and_named(tmp_path, caplog, line, words):
    good = workload(2, 4, kv_indptr=[])
    path = dataset(tmp_path, good, line, good, kv_indptr=[0, 3, 4], kv_last_page_len=[17], empty=[])
    os.mkfifo(tmp_path / "blob" / "fifo")
    (tmp_path / "blob" / "device").symlink_to("/dev/zero")
    (tmp_path / "blob" / "far.safetensors").write_bytes(FAR)
    index = write_int32({"from_1": [1, 4], "falls": [0, 5, 4], "zero": [0]})
    (tmp_path / "blob" / "index.safetensors").write_bytes(index)
    for place in (path, tmp_path):
        caplog.clear()
        assert labels(place) == ["b2 h32/8 n48+16 d128 p16 bf16 NHD"]
        [message] = caplog.messages
        assert message.startswith(f"{place}: 1 left out: {path.name} line 2: ")
        assert words in message
    path.write_text(json.dumps(line))
    with pytest.raises(UserError, match=re.escape(words)):
        load_sweep(str(path))


def test_numbers_that_are_not_read_may_be_anything(tmp_path):
    line = json.dumps(workload(1, 4))
    line = line.replace('{"q":', '{"sm_scale": {"type": "scalar", "value": Infinity}, "q":')
    definition = json.dumps(decode()).replace('"init": ""', f'"init": [NaN, -Infinity, {10**40}]')
    path = dataset(tmp_path)
    path.write_text(line)
    [own] = (tmp_path / "definitions").rglob("*.json")
    own.write_text(definition)
    assert labels(path) == ["b1 h32/8 n64 d128 p16 bf16 NHD device"]
    for number in ("Infinity", "NaN", str(10**40), "4.0", "true"):
        path.write_text(line.replace('"num_kv_indices": 4', f'"num_kv_indices": {number}'))
        with pytest.raises(UserError, match="its axis num_kv_indices is"):
            load_sweep(str(path))
    own.write_text(definition.replace('"value": 128', '"value": Infinity'))
    with pytest.raises(UserError, match="its axis head_dim is Infinity, not a whole number"):
        load_sweep(str(own))


@pytest.mark.parametrize(
    ("axis", "value"), [("num_kv_heads", 5), ("num_qo_heads", 0), ("head_dim", 5000)]
)
def test_a_definition_of_no_problem_is_left_out(tmp_path, caplog, axis, value):
    own = decode(name="own", axes={**decode()["axes"], axis: const(value)})
    write(tmp_path, own, SINGLE)
    assert labels(tmp_path) == OF_SINGLE
    assert caplog.messages[0].startswith(f"{tmp_path}: 1 left out: own: ")


OF_BATCH = tensor(["batch_size", "capacity", "num_kv_heads", "head_dim"])
CONTIGUOUS = {
    "name": "gqa_decode_h32_kv8_d128",
    "axes": {name: axis for name, axis in decode()["axes"].items() if name != "page_size"},
    "inputs": {
        "q": tensor(BATCH),
        "k_cache": OF_BATCH,
        "v_cache": OF_BATCH,
        "cache_seqlens": tensor(None, "int32"),
    },
}
TAKEN = "d128 c1024 bf16 NHD"


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ({"type": "scalar", "value": 300}, f"b2 h32/8 n300 {TAKEN}"),
        ({"type": "tensor", "value": [300]}, f"b2 h32/8 n300 {TAKEN}"),
        ({"type": "tensor", "value": [300, 300]}, f"b2 h32/8 n300 {TAKEN}"),
        ({"type": "tensor", "value": [300, 7]}, f"b2 h32/8 n300+7 {TAKEN}"),
        *((random, "b2 h32/8 n1024 d128 bf16 NHD") for random in ({"type": "random"}, None)),
        ({"type": "tensor", "value": []}, "it has a batch of 2 and 0 lengths"),
        ({"type": "tensor", "value": [3, 3, 3]}, "it has a batch of 2 and 3 lengths"),
        ({"type": "tensor", "value": [1025]}, "capacity 1024"),
        ({"type": "scalar", "value": 300.0}, "its cache_seqlens is"),
        ({"type": "scalar", "value": True}, "its cache_seqlens is"),
        ({"type": "scalar"}, "its cache_seqlens is"),
        ({"type": "other"}, "its cache_seqlens is"),
        (300, "its cache_seqlens is 300"),
    ],
)
def test_lengths_of_a_uniform_definition(tmp_path, given, label):
    write(tmp_path / "definitions" / "gqa", CONTIGUOUS)
    (tmp_path / "blob").mkdir()
    if isinstance(given, dict) and given["type"] == "tensor":
        (tmp_path / "blob" / "a").write_bytes(write_int32({"x": given["value"]}))
        given = {"type": "safetensors", "path": "blob/a", "tensor_key": "x"}
    inputs = {} if given is None else {"cache_seqlens": given}
    line = {"workload": {"axes": {"batch_size": 2, "capacity": 1024}, "inputs": inputs}}
    path = tmp_path / "workloads" / "gqa" / f"{CONTIGUOUS['name']}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(line))
    if label.startswith("b2"):
        assert labels(path) == [label]
    else:
        with pytest.raises(UserError, match=re.escape(label)):
            load_sweep(str(path))


def test_one_length_stands_for_a_uniform_batch_alone(tmp_path):
    inputs = {**CONTIGUOUS["inputs"], "cache_seqlens": tensor(["batch_size"], "int32")}
    path = dataset(tmp_path, x=[300])
    [own] = (tmp_path / "definitions").rglob("*.json")
    own.write_text(json.dumps({**CONTIGUOUS, "inputs": inputs}))
    given = {"type": "safetensors", "path": "blob/own.safetensors", "tensor_key": "x"}
    axes = {"batch_size": 2, "capacity": 1024}
    line = {"workload": {"axes": axes, "inputs": {"cache_seqlens": given}}}
    path.write_text(json.dumps(line))
    with pytest.raises(UserError, match="it has a batch of 2 and 1 lengths"):
        load_sweep(str(path))


def test_a_single_sequence_has_the_length_of_its_tensors(tmp_path):
    path = dataset(tmp_path)
    [own] = (tmp_path / "definitions").rglob("*.json")
    own.write_text(json.dumps(SINGLE))
    inputs = {name: {"type": "random"} for name in "qkv"}
    lines = [{"workload": {"axes": {"kv_len": length}, "inputs": inputs}} for length in (77, 0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert labels(path) == ["b1 h32/8 n77 d128 bf16 NHD"]


LENGTHS = ["b2 h32/8 n48+16 d128 p16 bf16 NHD"]


def test_every_folder_of_a_dataset_stands_for_its_workloads(tmp_path, caplog):
    line = workload(2, 4, kv_indptr=[])
    path = dataset(tmp_path / "all" / "set", line, kv_indptr=[0, 3, 4])
    root = tmp_path / "all" / "set"
    (root / "solutions").mkdir()
    (root / "solutions" / "one.json").write_text('{"name": "a solution"}')
    folders = [root / "definitions", root / "definitions" / "gqa_paged", root / "workloads"]
    for folder in (tmp_path, root.parent, root, *folders, path.parent, path):
        assert labels(folder) == LENGTHS, folder
    assert caplog.messages == []
    # A file next to the dataset is also read. Workloads without a definition are named.
    write(root.parent, SINGLE)
    path.with_name("more.jsonl").write_text(json.dumps(line))
    assert {*LENGTHS, "b1 h32/8 n1024 d128 bf16 NHD"} < {*labels(tmp_path)}
    assert "1 left out: more.jsonl: " in caplog.messages[0]


def test_workloads_that_are_not_read_are_named(tmp_path, caplog):
    path = dataset(tmp_path, workload(2, 4))
    [definition] = (tmp_path / "definitions").rglob("*.json")
    assert len(labels(definition)) == 3
    assert str(path) in caplog.text
    caplog.clear()
    path.write_text("\n")
    write(tmp_path / "definitions", SINGLE)
    assert len(labels(tmp_path)) == 3
    assert f"1 left out: {path.name}: it is empty" in caplog.text
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnreadableFile):
        load_sweep(str(path))
    caplog.clear()
    assert len(labels(tmp_path)) == 3
    assert f"1 left out: {path.name}: it is no regular file" in caplog.text


def test_a_dataset_in_the_cache_of_hugging_face(tmp_path):
    made, cache = tmp_path / "made", tmp_path / "datasets--x--y"
    root = cache / "snapshots" / "0123abc"
    dataset(made, workload(2, 4, kv_indptr=[]), kv_indptr=[0, 3, 4])
    (cache / "blobs").mkdir(parents=True)
    for number, file in enumerate(path for path in sorted(made.rglob("*")) if path.is_file()):
        blob = file.rename(cache / "blobs" / str(number))
        link = root / file.relative_to(made)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    [path] = root.rglob("*.jsonl")
    for place in (cache, root, path):
        assert labels(place) == LENGTHS
    (root / "blob" / "own.safetensors").unlink()
    (root / "blob" / "own.safetensors").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="it lies outside of"):
        load_sweep(str(path))


def test_what_is_not_there_is_refused_in_a_sentence(tmp_path):
    lonely = tmp_path / "workloads" / "b" / "w.jsonl"
    lonely.parent.mkdir(parents=True)
    lonely.write_text("{}\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "text.json").write_text("no JSON")
    nothing = "holds no decode attention of FlashInfer-Bench"
    for path, words in (
        (Path("gone.json"), "there is no sweep file 'gone.json': give a path to a TOML file, to d"),
        (lonely, "has no definition at .*definitions/b/w.json: keep workloads in the dataset"),
        (tmp_path / "text.json", "text.json is no definition of FlashInfer-Bench"),
        (lonely.parent, f"{nothing}: 1 left out: w.jsonl: "),
        (tmp_path / "d", f"{nothing}: there is no definition"),
        (write(tmp_path / "c", NORM), "holds no decode attention .*: 1 left out: rmsn"),
    ):
        with pytest.raises(UserError, match=words):
            load_sweep(str(path))


def test_ten_lines_that_are_left_out_are_named(tmp_path, caplog):
    path = dataset(tmp_path, workload(1, 4), *[workload(0, 4)] * 12)
    labels(path)
    assert caplog.messages[0].startswith(f"{path}: 12 left out: ")
    assert [f"line {number}: " in caplog.text for number in (2, 11, 12)] == [True, True, False]
    assert caplog.messages[0].endswith("; and 2 more")


@pytest.mark.parametrize("part", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("value", [None, [], {}, ["I32"], [-1], ["a"], [1e3], "I32", "I64", 3])
def test_any_header_is_read_or_a_sentence(part, value):
    tensor = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8], part: value}
    if (part, value) == ("dtype", "I32"):
        tensor["shape"] = [-2]
    header = json.dumps({"x": tensor}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    with pytest.raises(ValueError, match="its tensor 'x' is"):
        read_integers(content, "x")
