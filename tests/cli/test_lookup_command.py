"""`leanbench lookup`: measured shapes, and the nearest of others."""

import json

import pytest
from cli.running import printed, refusal

from leanbench.records.published import PUBLISHED
from tools import published

MEASURED = ("lookup", "b1", "h64/8", "n32k", "d128", "bf16", "--gpu", "h200")


def kernels_here(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr("leanbench.cli.lookup._kernels_here", lambda: kernels)


def test_a_measured_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_here(monkeypatch, "e7cea2a19921")
    assert [line.rstrip() for line in printed(*MEASURED).splitlines()] == [
        "b1 h64/8 n32768 d128 bf16 HND",
        "NVIDIA H200",
        "kernel                µs    95% interval  floor  run",
        "─" * 60,
        "lean               33.33  33.22 to 33.43    92%  h200/models",
        "fixed_split        34.47   34.29 to 34.6    89%  h200/models",
        "cudnn_best         36.91  36.85 to 37.06    83%  h200/models",
        "flashinfer_xqa     37.99  37.86 to 38.09    81%  h200/models",
        "flashinfer_best    40.11  40.07 to 40.18    77%  h200/models",
        "flash_attn_3_best  42.05   41.9 to 42.11    73%  h200/models",
        "",
        "floor: the time of a kernel that only reads K and V, over the latency.",
        "h200/models: 2026-11-24, kernels e7cea2a19921",
        "cudnn_best: torch 2.11.0; nvidia-cudnn-frontend 1.20.0, cuDNN 91900; flashinfer_xqa:"
        " flashinfer-python 0.6.13; flashinfer_best: flashinfer-python 0.6.13; flash_attn_3_best:"
        " fa3.so sha256 a4a5bdb9",
    ]


def test_rows_of_older_kernels_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_here(monkeypatch, "012345678901")
    assert "kernels e7cea2a19921, older than those here" in printed(*MEASURED)
    alone = printed(*"lookup h32/1 n32k d128 --gpu h200".split())
    assert alone.count("h200/model/gqa, old kernels") == 3
    assert "h200/model/" not in printed(*"lookup h32/8 n4k d128 --gpu h200".split())


def test_the_nearest_shapes() -> None:
    lines = printed(*"lookup b8 h32/8 n5000 d128 p16".split()).splitlines()
    assert lines[0].startswith("b8 h32/8 n5000 d128 p16 was not measured.")
    labels = [line for line in lines[1:] if line.startswith("b8 h32/8 n")]
    assert len(labels) == 3
    assert "b8 h32/8 n4096 d128 bf16 HND" in labels


def test_any_dtype_and_layout_unless_one_is_named() -> None:
    any_of_them = printed(*"lookup b8 h32/8 n4k d128 --gpu h200".split()).splitlines()
    labels = [line for line in any_of_them if line.startswith("b8 ")]
    assert labels == ["b8 h32/8 n4096 d128 bf16 HND", "b8 h32/8 n4096 d128 bf16 NHD"]
    named = printed(*"lookup b8 h32/8 n4k d128 NHD --gpu h200".split()).splitlines()
    assert [line for line in named if line.startswith("b8 ")] == labels[1:]


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_here(monkeypatch, "012345678901")
    found = json.loads(printed(*MEASURED, "--json"))["measured"]
    assert [each["label"] for each in found] == ["b1 h64/8 n32768 d128 bf16 HND"]
    lean, *others = found[0]["rows"]
    assert (lean["kernel"], lean["latency_us"], lean["is_noisy"]) == ("lean", 33.333, False)
    assert lean["run"] == {
        "name": "h200/models",
        "gpu": "h200",
        "day": "2026-11-24",
        "kernels": "e7cea2a19921",
        "kernels_are_older": True,
    }
    assert lean["read_floor_share"] == pytest.approx(0.921, abs=0.001)
    assert [row["library"] is None for row in others] == [True, False, False, False, False]


def test_json_tells_near_shapes_from_measured_ones() -> None:
    near = json.loads(printed(*"lookup b8 h32/8 n5000 d128 --json".split()))
    assert (near["is_measured"], len(near["measured"])) == (False, 3)
    found = json.loads(printed(*MEASURED, "--json"))
    assert (found["shape"], found["is_measured"]) == ("b1 h64/8 n32768 d128 bf16", True)
    # Neither dtype nor layout is named.
    assert near["shape"] == "b8 h32/8 n5000 d128"


def test_one_gpu_is_not_near_several() -> None:
    text = printed(*"lookup b8 h32/8 n4k d128 sel128".split())
    assert "cp:" not in text
    assert "tp:" not in text
    shared = printed(*"lookup b1 h32/8 n5k d128 cp:2".split()).splitlines()
    labels = [line for line in shared[1:] if line.startswith("b1 ")]
    assert len(labels) == 3
    assert all("cp:" in label or "tp:" in label for label in labels)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("h32/8 n4k d128 --gpu a100", "nothing was measured on a100-80gb"),
        ("h32/8 n4k d128 --gpu z100", "there is no GPU 'z100'"),
        ("h32/8 n4k", "needs d (head_dim)"),
        ("h32/9 n4k d128", "needs query heads"),
        ("llama-3-8b --gpu h200", "h32/8 d128"),
    ],
)
def test_refusals(words: str, sentence: str) -> None:
    assert sentence in refusal("lookup", *words.split())


def test_the_published_file_is_what_the_runs_make() -> None:
    assert published.main([]) == 0, "run `python tools/published.py --write`"
    assert PUBLISHED.stat().st_size < 1_000_000


def test_another_file_is_named_and_written(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(published, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(published, "PUBLISHED", tmp_path / "published.jsonl.gz")
    assert published.main([]) == 1
    assert "--write" in capsys.readouterr().out
    assert published.main(["--write"]) == published.main([]) == 0


def test_a_whole_model_is_found_without_its_positions() -> None:
    lines = printed(*"lookup b1 h32/8 n16k d128 bf16 model=llama-3-8b".split()).splitlines()
    assert "b1 h32/8 n16384 d128 model=llama-3-8b:positions=131072 bf16 HND" in lines


def test_nothing_like_it_was_measured() -> None:
    words = "model=opt-6.7b:positions=131072 h32 d128 n1k --gpu h100"
    assert refusal("lookup", *words.split()).endswith("was measured: leave model= out")


def test_long_latencies_have_all_their_digits() -> None:
    words = "b1 h32/8 n16384 d128 bf16 model=llama-3-8b:positions=131072 --gpu h200"
    text = printed("lookup", *words.split())
    assert "17564" in text
    assert "e+0" not in text
