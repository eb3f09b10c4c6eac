"""`leanbench configs`: what it prints of tuned configs, what it refuses, and what verify makes of
times.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from leanbench.kernels.lean.configs import LeanCudaConfig
from tuned_examples import (
    H200,
    HEURISTIC,
    LARGE,
    WIDE,
    build,
    candidate,
    family,
    gpu,
    tuned,
    tuned_configs,
)
from typer.testing import CliRunner, Result

from leanbench.cli.main import app
from leanbench.configs import store
from leanbench.configs.store import save_families
from leanbench.configs.tuned_file import read
from leanbench.core.files import FileFault
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing tuned, nothing shipped; the folder for what is."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(store, "SHIPPED", folder)
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    return folder


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["configs", *words])


def assert_refused(result: Result, words: str) -> None:
    assert result.exit_code == 2, result.output
    [error] = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert words in error
    assert result.stdout == ""


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [re.sub(r"\s+", " ", line).strip() for line in result.stdout.splitlines()]


def test_a_machine_where_nothing_is_tuned(tmp_path):
    folder = tmp_path / "home" / "configs"
    assert lines(invoke("list")) == [
        f"Nothing is tuned: run `leanbench tune`, it writes to {folder}."
    ]
    assert_refused(
        invoke("show", "h200"), "nothing is tuned for h200: run `leanbench tune --gpu h200`"
    )
    assert_refused(
        invoke("export", "h200", str(tmp_path / "out.json")), "nothing is tuned for h200"
    )
    assert_refused(invoke("show", "mine"), "nothing is tuned for a GPU 'mine', nor for any other")
    assert not (tmp_path / "out.json").exists()


def test_a_gpu_that_uses_anothers_settings_shows_them_and_says_whose(shipped, tmp_path):
    assert_refused(invoke("show", "h100"), "nothing is tuned for h100-sxm: run `leanbench tune")
    save_families(find("gh200"), [family(source="predicted")], shipped / "gh200.json")
    assert_refused(invoke("show", "h100"), "nothing is tuned for h100-sxm: run `leanbench tune")
    save_families(find("h200"), [family()], shipped / "h200.json")
    result = invoke("show", "h100")
    assert lines(result) == lines(invoke("show", "h200"))
    assert lines(result)[0].startswith("NVIDIA H200 (shipped) · head_dim 128, group size 4")
    assert result.stderr == (
        "Nothing is tuned for h100-sxm: these are the settings of h200. In Triton, h100-sxm takes"
        " them where their formula, at its own SMs and bandwidth, says that they are faster than"
        " the heuristic's; in CUDA C++ it takes the heuristic's, as times are not carried over."
        " `leanbench tune --gpu h100-sxm` finds its own.\n"
    )
    assert_refused(
        invoke("show", "h100", "--head-dim", "64"),
        "nothing is tuned for h200 with head_dim 64, there is: head_dim 128, group size 4",
    )
    # A file that is called one GPU's holds nothing of another.
    assert_refused(
        invoke("export", "h100", str(tmp_path / "out.json")),
        "nothing is tuned for h100-sxm, the settings of h200 are used on it: run `leanbench tune"
        " --gpu h100-sxm`, or name h200",
    )
    assert not (tmp_path / "out.json").exists()
    # A file that cannot be read is said, and said once.
    broken = tmp_path / "home" / "configs" / "h100-sxm.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    said = invoke("show", "h100").stderr.splitlines()
    assert said[0].startswith(f"! {broken} is not a file of tuned configs")
    assert [line[:37] for line in said[1:]] == ["Nothing is tuned for h100-sxm: these "]
    # Another architecture's are not used.
    assert_refused(invoke("show", "b200"), "nothing is tuned for b200: run `leanbench tune --gpu")


def test_a_gpu_with_the_same_figures_has_the_same_settings(shipped, tmp_path):
    save_families(find("h100"), [family()], shipped / "h100-sxm.json")
    save_families(find("h200"), [family(), family(head_dim=64)], shipped / "h200.json")
    result = invoke("show", "h200-nvl")
    assert lines(result) == lines(invoke("show", "h200"))
    said = (
        "h200-nvl uses the settings of h200 as its own: compute capability, SMs, L2 and bandwidth"
        " agree.\n"
    )
    assert result.stderr == said
    exported = invoke("export", "h200-nvl", str(tmp_path / "out.json"))
    assert (exported.exit_code, exported.stderr) == (0, said)
    assert lines(exported) == [f"{tmp_path / 'out.json'}: 2 families of NVIDIA H200"]


def test_the_list_has_a_line_for_each_file(shipped):
    path = save_families(
        H200, [family(problems=[tuned(), tuned(1024)]), family(source="predicted", head_dim=64)]
    ).path
    (shipped / "a100-80gb.json").write_text(
        tuned_configs(family(time="2026-01-02"), of=gpu("a100")).model_dump_json()
    )
    (shipped / "broken.json").write_text("{")
    result = invoke("list")
    table = [line for line in lines(result) if "2026-" in line]
    assert table == [
        "h200 yours lean measured, predicted 2026-11-21 2 2 4",
        "a100-80gb shipped lean measured 2026-01-02 1 0 2",
    ]
    assert lines(result)[-2:] == [f"yours: {path.parent}", f"shipped: {shipped}"]
    assert f"! {shipped / 'broken.json'} is not a file of tuned configs" in result.stderr


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"families": []}, "holds no families"),
        ({"kernel": "fa2"}, "is of kernel 'fa2', configs are tuned for lean only"),
        # It was written to, outside the folder.
        (
            {"gpu": tuned_configs(family()).gpu.model_copy(update={"name": "../../x"})},
            "gpu.name: value error, '../../x' is no GPU name",
        ),
    ],
)
def test_import_refuses_what_nothing_would_use(tmp_path, fields, words):
    file = tmp_path / "other.json"
    file.write_text(tuned_configs(family()).model_copy(update=fields).model_dump_json())
    assert_refused(invoke("import", str(file)), words)
    assert not (tmp_path / "home").exists()
    assert not list(tmp_path.parent.glob("**/x.json"))


def test_a_slice_of_the_gpu_is_not_mixed_with_it(tmp_path):
    whole = save_families(H200, [family()]).path
    slice_of_it = dataclasses.replace(H200, sms=16, bandwidth_tb_s=0.6)
    save_families(slice_of_it, [family(head_dim=64)])
    exported = tmp_path / "out.json"
    assert invoke("export", "h200", str(exported)).exit_code == 0
    assert read(exported).families == read(whole).families


def three() -> Any:
    """A family with a candidate that was never timed, and two tuned problems."""
    candidates = [
        candidate(HEURISTIC, 0),
        candidate(LARGE, 1),
        candidate(WIDE, None, shared_bytes=None),
    ]
    return family(candidates=candidates, problems=[tuned(), tuned(1024, chosen=0, ties=[0, 1])])


def test_show_has_the_shortlist_and_every_tuned_problem():
    save_families(H200, [three()])
    shown = lines(invoke("show", "H200"))
    assert shown[:4] == [
        "NVIDIA H200 (yours) · head_dim 128, group size 4, fp16, HND",
        "measured 2026-11-21T09:30:00+00:00 with leanbench 0.1.0, torch 2.12",
        "2 problems timed, 3 candidates",
        "stopped: the plan was done",
    ]
    # tile_tokens, warps, stages, CTAs per SM, least tiles, align; shared KiB, timings,
    # median error.
    assert "128 4 3 1 1 yes 96 10 1.0%" in shown
    # batch, KV heads, context, settings; µs, ties, gain.
    assert shown[-2:] == [
        "1 8 1024 64 4 4 1 1 yes 10.00 2 same",
        "1 8 4096 128 4 3 1 1 yes 9.00 1 10.0%",
    ]


def test_show_has_the_settings_of_cuda_where_there_are_any():
    cuda = LeanCudaConfig(
        128, 4, 3, 1, 1, True, chunk_tokens=32, tile_rows=8, cluster_size=8, copy="bulk"
    )
    save_families(
        H200, [family(candidates=[candidate(HEURISTIC, 0), candidate(cuda, 1)], problems=[tuned()])]
    )
    shown = lines(invoke("show", "h200"))
    # The settings of Triton's, then chunk_tokens, tile_rows, cluster_size, copy.
    assert "128 4 3 1 1 yes 32 8 8 bulk 96 10 1.0%" in shown
    assert shown[-1] == "1 8 4096 128 4 3 1 1 yes 32 8 8 bulk 9.00 1 10.0%"
    save_families(
        H200,
        [
            family(
                candidates=[candidate(HEURISTIC, 0), candidate(cuda, 1)], problems=[tuned(chosen=0)]
            )
        ],
    )
    assert lines(invoke("show", "h200"))[-1] == "1 8 4096 64 4 4 1 1 yes - - - - 10.00 1 same"


def test_show_cuts_no_figure_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", 75)
    cuda = LeanCudaConfig(
        128, 4, 3, 1, 1, True, chunk_tokens=32, tile_rows=8, cluster_size=8, copy="bulk"
    )
    save_families(
        H200, [family(candidates=[candidate(HEURISTIC, 0), candidate(cuda, 1)], problems=[tuned()])]
    )
    shown = lines(invoke("show", "h200"))
    assert "…" not in "".join(shown)
    # Two tables for each: what a row is about is in both, everything else in one.
    assert [line for line in shown if line.startswith("1 8 4096")] == [
        "1 8 4096 128 4 3 1 1 yes 32",
        "1 8 4096 8 8 bulk 9.00 1 10.0%",
    ]
    assert any(line.endswith(" 96 10 1.0%") for line in shown)
    assert "tuned problems, continued" in shown


def test_show_does_not_call_predictions_timings():
    save_families(H200, [family(source="predicted")])
    assert "0 problems predicted, 2 candidates" in lines(invoke("show", "h200"))


def test_show_chooses_families():
    save_families(
        H200, [family(), family(group_size=8), family(head_dim=64, dtype="bf16", kv_layout="NHD")]
    )

    def shown(*words: str) -> list[str]:
        return [
            line.partition("· ")[2] for line in lines(invoke("show", "h200", *words)) if "·" in line
        ]

    assert len(shown()) == 3
    assert shown("--group", "8") == ["head_dim 128, group size 8, fp16, HND"]
    expected = ["head_dim 64, group size 4, bf16, NHD"]
    assert (
        shown("--head-dim", "64")
        == shown("--dtype", "bf16")
        == shown("--kv-layout", "NHD")
        == expected
    )
    refused = invoke("show", "h200", "--group", "5", "--head-dim", "64")
    assert_refused(
        refused,
        "nothing is tuned for h200 with head_dim 64, group_size 5, there is: head_dim 128, group",
    )


def test_a_name_that_is_nearly_right_is_suggested():
    save_families(H200, [family()])
    assert_refused(invoke("show", "h200x"), "nothing is tuned for a GPU 'h200x', known: h200")
    assert_refused(
        invoke("show", "h2-00"), "nothing is tuned for a GPU 'h2-00', did you mean 'h200'?"
    )
    for name in ("h200", "NVIDIA H200", "h200-sxm5"):
        assert invoke("show", name).exit_code == 0


def test_what_is_exported_is_imported_again(tmp_path, shipped):
    (shipped / "h200.json").write_text(
        tuned_configs(family(large_us=5.0), family(head_dim=64)).model_dump_json()
    )
    save_families(H200, [three()])
    file = tmp_path / "out" / "mine.json"
    assert lines(invoke("export", "h200", str(file))) == [f"{file}: 2 families of NVIDIA H200"]
    assert list(file.parent.iterdir()) == [file]
    # One's own where there are both.
    assert {saved.head_dim: saved for saved in read(file).families} == {
        128: three(),
        64: family(head_dim=64),
    }
    assert_refused(
        invoke("export", "h200", str(file)),
        "mine.json is there already: remove it or choose another name",
    )

    mine = store.path_of("h200")
    save_families(H200, [family(time="2026-11-20")])
    assert lines(invoke("import", str(file))) == [
        "replaced head_dim 128, group size 4, fp16, HND: measured 2026-11-20 by measured"
        " 2026-11-21",
        "added head_dim 64, group size 4, fp16, HND: measured 2026-11-21",
        f"{mine}: 2 families of NVIDIA H200 imported",
    ]
    assert {saved.key: saved for saved in read(mine).families} == {
        saved.key: saved for saved in read(file).families
    }
    assert (
        lines(invoke("import", str(file)))[0]
        == "unchanged head_dim 128, group size 4, fp16, HND: measured 2026-11-21"
    )


def test_an_import_leaves_measured_families_alone(tmp_path):
    save_families(H200, [family()])
    file = tmp_path / "predicted.json"
    file.write_text(tuned_configs(family(source="predicted")).model_dump_json())
    assert lines(invoke("import", str(file))) == [
        "left out head_dim 128, group size 4, fp16, HND: predicted 2026-11-21, yours is measured",
        f"{store.path_of('h200')}: 0 families of NVIDIA H200 imported",
    ]
    assert read(store.path_of("h200")) == tuned_configs()


def test_an_import_without_a_home_warns(tmp_path, monkeypatch):
    def no_home(*args: object, **more: object) -> Path:
        raise RuntimeError

    file = tmp_path / "out.json"
    file.write_text(tuned_configs(family()).model_dump_json())
    assert "LEANBENCH_HOME" not in invoke("import", str(file)).stderr
    monkeypatch.delenv("LEANBENCH_HOME")
    monkeypatch.setattr(platformdirs, "user_data_path", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = invoke("import", str(file))
    assert result.exit_code == 0
    [warning] = [line for line in result.stderr.splitlines() if "LEANBENCH_HOME" in line]
    assert str(store.path_of("h200")) in warning


def test_a_terminal_is_not_controlled(tmp_path):
    refused = invoke("import", f"{tmp_path}/a\x1b[31m")
    assert_refused(refused, r"/a\x1b[31m")


def test_foreign_files_are_not_imported(tmp_path):
    file = tmp_path / "in.json"
    file.write_text("{")
    refused = invoke("import", str(file))
    assert_refused(refused, "is not a file of tuned configs (no JSON at column 2)")
    assert refused.stderr.endswith(
        ": give a file that `leanbench configs export` of this version wrote\n"
    )
    assert not store.path_of("h200").exists()


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/dev/zero", FileFault.NOT_REGULAR),
        ("/dev/urandom", FileFault.NOT_REGULAR),
        ("/proc/self/mem", FileFault.SYSTEM),
        (".", FileFault.FOLDER),
        ("none.json", FileFault.MISSING),
    ],
)
def test_an_import_of_what_is_no_file_is_refused(path, fault):
    refused = invoke("import", path)
    assert_refused(refused, f"cannot read {path} (")
    assert fault.value in refused.stderr or fault is FileFault.SYSTEM


@pytest.mark.parametrize("path", ["/proc/x.json", "/proc/no/x.json", "{file}/x.json"])
def test_an_export_that_cannot_be_written_says_to_choose_another_file(tmp_path, path):
    save_families(H200, [family()])
    (tmp_path / "file").touch()
    path = path.format(file=tmp_path / "file")
    assert_refused(invoke("export", "h200", path), f"cannot write {path} (")
    refused = invoke("export", "h200", path).stderr
    assert refused.endswith("): choose a FILE in a folder that can be written\n")


def test_an_import_reads_a_pipe():
    """As of /dev/stdin, and of a process substitution."""
    reading, writing = os.pipe()
    os.write(writing, tuned_configs().model_dump_json().encode())
    os.close(writing)
    result = invoke("import", f"/dev/fd/{reading}")
    os.close(reading)
    assert result.exit_code == 0
    assert store.path_of("h200").is_file()


def test_a_named_pipe_in_the_place_of_your_file_is_not_waited_for(tmp_path):
    file = tmp_path / "in.json"
    file.write_text(tuned_configs().model_dump_json())
    store.configs_folder().mkdir(parents=True)
    os.mkfifo(store.path_of("h200"))
    assert_refused(
        invoke("import", str(file)), "(it is no regular file): move it away, it is not over"
    )
    assert invoke("list").exit_code == 0


def test_an_import_over_a_broken_file_is_refused(tmp_path):
    file = tmp_path / "in.json"
    file.write_text(tuned_configs().model_dump_json())
    path = store.path_of("h200")
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert_refused(invoke("import", str(file)), "move it away, it is not overwritten")
    assert path.read_text() == "mine"


def test_verify_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)
    save_families(H200, [three()])
    assert_refused(
        invoke("verify"),
        "there is no GPU here, and configs verify times kernels: run it where the GPU is",
    )


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """An H200 on which configs take what they are said to take; returns the problems that were
    timed.
    """

    def set_latencies(**latencies_us: float) -> list[Any]:
        named = {"heuristic": HEURISTIC, "large": LARGE}
        problems: list[Any] = []

        class Timer:
            def __init__(self, kernel: Any, index: int, spec: Any) -> None:
                assert (kernel.name, index, spec) == ("lean", 3, find("h200"))

            def __call__(self, problem: Any, configs: Any) -> Any:
                problems.append(problem)
                if not latencies_us:
                    return "needs 200 GB"
                return {
                    config: latencies_us[name]
                    for name, config in named.items()
                    if config in configs
                }

        monkeypatch.setattr(
            "leanbench.gpu.local.choose", lambda name, require_gpu: Target(find("h200"), 3)
        )
        monkeypatch.setattr("leanbench.tune.verify.GpuTimer", Timer)
        return problems

    return set_latencies


def test_verify_says_what_holds(timed):
    problems = timed(heuristic=10.0, large=9.5)
    save_families(H200, [three()])
    assert lines(invoke("verify", "--sample", "1")) == [
        "b1 h32/8 n4096 d128 fp16 HND: 9.50 µs, 0.0% over the fastest: holds",
        "1 of 1 choices hold within 1%; median regret 0.00%",
    ]
    result = invoke("verify")
    assert result.exit_code == 1
    # The second problem's choice is the heuristic.
    settings = (
        "implementation=triton tile_tokens=128 num_warps=4 num_stages=3 ctas_per_sm=1"
        " min_tiles_per_cta=1 align_grid=True"
    )
    assert result.stdout.splitlines()[1:] == [
        "b1 h32/8 n1024 d128 fp16 HND: 10.00 µs, 5.3% over the fastest: does not hold,"
        f" {settings} is faster",
        "1 of 2 choices hold within 1%; median regret 2.63%",
    ]
    assert "The median regret is above 2%: run `leanbench tune` again." in result.stderr
    assert [problem.context for problem in problems] == [4096, 4096, 1024]


def test_verify_takes_ones_own_before_the_shipped(timed, shipped):
    problems = timed(heuristic=10.0, large=10.0)
    (shipped / "h200.json").write_text(
        tuned_configs(
            family(problems=[tuned(512)]), family(head_dim=64, problems=[tuned(256)])
        ).model_dump_json()
    )
    save_families(H200, [family(problems=[tuned(2048)])])
    assert lines(invoke("verify"))[-1] == "2 of 2 choices hold within 1%; median regret 0.00%"
    assert sorted(problem.context for problem in problems) == [256, 2048]


def test_verify_without_anything_to_verify(timed):
    timed()
    assert_refused(
        invoke("verify"), "no tuned problems are there for NVIDIA H200: run `leanbench tune` first"
    )
    save_families(H200, [three()])
    result = invoke("verify")
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0] == "b1 h32/8 n4096 d128 fp16 HND: not timed, needs 200 GB"
    assert "Error: none of the tuned problems could be timed here" in result.stderr
    assert invoke("verify", "--sample", "0").exit_code == 2


def test_builds_are_what_the_shortlist_shows():
    save_families(H200, [family(builds=[build(1.0), build(2.0, points=44, median_error=0.0123)])])
    assert "128 4 3 1 1 yes 96 44 1.2%" in lines(invoke("show", "h200"))
