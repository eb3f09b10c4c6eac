"""`leanbench configs`: what it prints, what it refuses, and what verify makes of times."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from cli.running import invoke as invoke_any
from cli.running import printed, refusal
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
from typer.testing import Result

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
    return invoke_any("configs", *words)


def refused(*words: str) -> str:
    return refusal("configs", *words)


def lines(*words: str) -> list[str]:
    text = printed("configs", *words)
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


def write(path: Path, *families: Any, **fields: Any) -> str:
    """Write a file of tuned configs. Return its path."""
    configs = tuned_configs(*families).model_copy(update=fields)
    path.write_text(configs.model_dump_json())
    return str(path)


#: Of a family whose chosen candidate is CUDA C++.
CUDA = LeanCudaConfig(
    128, 4, 3, 1, 1, True, chunk_tokens=32, tile_rows=8, cluster_size=8, copy="bulk"
)


def of_cuda(chosen: int = 1) -> Any:
    candidates = [candidate(HEURISTIC, 0), candidate(CUDA, 1)]
    return family(candidates=candidates, problems=[tuned(chosen=chosen)])


def test_a_machine_where_nothing_is_tuned(tmp_path):
    folder = tmp_path / "home" / "configs"
    assert lines("list") == [f"Nothing is tuned: run `leanbench tune`, it writes to {folder}."]
    out = str(tmp_path / "out.json")
    said = "nothing is tuned for h200: run `leanbench tune --gpu h200`"
    assert refused("show", "h200").startswith(said)
    assert refused("export", "h200", out).startswith("nothing is tuned for h200")
    assert refused("show", "mine").startswith("nothing is tuned for a GPU 'mine', nor for any")
    assert not Path(out).exists()


def test_a_gpu_that_uses_anothers_settings_shows_them_and_says_whose(shipped, tmp_path):
    nothing = "nothing is tuned for h100-sxm: run `leanbench tune"
    assert refused("show", "h100").startswith(nothing)
    save_families(find("gh200"), [family(source="predicted")], shipped / "gh200.json")
    assert refused("show", "h100").startswith(nothing)
    save_families(find("h200"), [family()], shipped / "h200.json")
    result = invoke("show", "h100")
    assert lines("show", "h100") == lines("show", "h200")
    assert result.stdout.startswith("NVIDIA H200 (shipped) · head_dim 128, group size 4")
    assert result.stderr == (
        "Nothing is tuned for h100-sxm: these are the settings of h200. In Triton, h100-sxm takes"
        " them where their formula, at its own SMs and bandwidth, says that they are faster than"
        " the heuristic's; in CUDA C++ it takes the heuristic's, as times are not carried over."
        " `leanbench tune --gpu h100-sxm` finds its own.\n"
    )
    said = "nothing is tuned for h200 with head_dim 64, there is: head_dim 128, group size 4"
    assert f"Error: {said}" in invoke("show", "h100", "--head-dim", "64").stderr
    # A file that is called one GPU's holds nothing of another.
    assert refused("export", "h100", str(tmp_path / "out.json")) == (
        "nothing is tuned for h100-sxm, the settings of h200 are used on it: run `leanbench tune"
        " --gpu h100-sxm`, or name h200"
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
    assert refused("show", "b200").startswith("nothing is tuned for b200: run `leanbench tune")


def test_a_gpu_with_the_same_figures_has_the_same_settings(shipped, tmp_path):
    save_families(find("h100"), [family()], shipped / "h100-sxm.json")
    save_families(find("h200"), [family(), family(head_dim=64)], shipped / "h200.json")
    said = (
        "h200-nvl uses the settings of h200 as its own: compute capability, SMs, L2 and bandwidth"
        " agree.\n"
    )
    assert invoke("show", "h200-nvl").stderr == said
    assert lines("show", "h200-nvl") == lines("show", "h200")
    out = str(tmp_path / "out.json")
    exported = invoke("export", "h200-nvl", out)
    assert exported.stderr == said
    assert exported.stdout == f"{out}: 2 families of NVIDIA H200\n"


def test_the_list_has_a_line_for_each_file(shipped):
    path = save_families(
        H200, [family(problems=[tuned(), tuned(1024)]), family(source="predicted", head_dim=64)]
    ).path
    write(shipped / "a100-80gb.json", family(time="2026-01-02"), gpu=gpu("a100"))
    (shipped / "broken.json").write_text("{")
    shown = lines("list")
    assert [line for line in shown if "2026-" in line] == [
        "h200 yours lean measured, predicted 2026-11-21 2 2 4",
        "a100-80gb shipped lean measured 2026-01-02 1 0 2",
    ]
    assert shown[-2:] == [f"yours: {path.parent}", f"shipped: {shipped}"]
    broken = f"! {shipped / 'broken.json'} is not a file of tuned configs"
    assert broken in invoke("list").stderr


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
    file = write(tmp_path / "other.json", family(), **fields)
    assert words in refused("import", file)
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
    never = candidate(WIDE, None, shared_bytes=None)
    candidates = [candidate(HEURISTIC, 0), candidate(LARGE, 1), never]
    return family(candidates=candidates, problems=[tuned(), tuned(1024, chosen=0, ties=[0, 1])])


def test_show_has_the_shortlist_and_every_tuned_problem():
    save_families(H200, [three()])
    shown = lines("show", "H200")
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
    save_families(H200, [of_cuda()])
    shown = lines("show", "h200")
    # The settings of Triton's, then chunk_tokens, tile_rows, cluster_size, copy.
    assert "128 4 3 1 1 yes 32 8 8 bulk 96 10 1.0%" in shown
    assert shown[-1] == "1 8 4096 128 4 3 1 1 yes 32 8 8 bulk 9.00 1 10.0%"
    save_families(H200, [of_cuda(chosen=0)])
    assert lines("show", "h200")[-1] == "1 8 4096 64 4 4 1 1 yes - - - - 10.00 1 same"


def test_show_cuts_no_figure_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", 75)
    save_families(H200, [of_cuda()])
    shown = lines("show", "h200")
    assert "…" not in "".join(shown)
    # Two tables for each: what a row is about is in both, everything else in one.
    assert [line for line in shown if line.startswith("1 8 4096")] == [
        "1 8 4096 128 4 3 1 1 yes 32",
        "1 8 4096 8 8 bulk 9.00 1 10.0%",
    ]
    assert any(line.endswith(" 96 10 1.0%") for line in shown)
    assert "tuned problems, continued" in shown


def test_show_does_not_call_predictions_timings_and_has_every_build():
    builds = [build(1.0), build(2.0, points=44, median_error=0.0123)]
    save_families(H200, [family(source="predicted", builds=builds)])
    shown = lines("show", "h200")
    assert "0 problems predicted, 2 candidates" in shown
    assert "128 4 3 1 1 yes 96 44 1.2%" in shown


def test_show_chooses_families():
    save_families(
        H200, [family(), family(group_size=8), family(head_dim=64, dtype="bf16", kv_layout="NHD")]
    )

    def shown(*words: str) -> list[str]:
        found = lines("show", "h200", *words)
        return [line.partition("· ")[2] for line in found if "·" in line]

    assert len(shown()) == 3
    assert shown("--group", "8") == ["head_dim 128, group size 8, fp16, HND"]
    for words in ("--head-dim 64", "--dtype bf16", "--kv-layout NHD"):
        assert shown(*words.split()) == ["head_dim 64, group size 4, bf16, NHD"]
    assert refused("show", "h200", "--group", "5", "--head-dim", "64").startswith(
        "nothing is tuned for h200 with head_dim 64, group_size 5, there is: head_dim 128, group"
    )


def test_a_name_that_is_nearly_right_is_suggested():
    save_families(H200, [family()])
    of = "nothing is tuned for a GPU"
    assert refused("show", "h200x").startswith(f"{of} 'h200x', known: h200")
    assert refused("show", "h2-00").startswith(f"{of} 'h2-00', did you mean 'h200'?")
    for name in ("h200", "NVIDIA H200", "h200-sxm5"):
        assert invoke("show", name).exit_code == 0


def test_what_is_exported_is_imported_again(tmp_path, shipped):
    write(shipped / "h200.json", family(large_us=5.0), family(head_dim=64))
    save_families(H200, [three()])
    file = tmp_path / "out" / "mine.json"
    assert lines("export", "h200", str(file)) == [f"{file}: 2 families of NVIDIA H200"]
    assert list(file.parent.iterdir()) == [file]
    # One's own where there are both.
    both = {128: three(), 64: family(head_dim=64)}
    assert {saved.head_dim: saved for saved in read(file).families} == both
    already = "mine.json is there already: remove it or choose another name"
    assert already in refused("export", "h200", str(file))

    mine = store.path_of("h200")
    save_families(H200, [family(time="2026-11-20")])
    assert lines("import", str(file)) == [
        "replaced head_dim 128, group size 4, fp16, HND: measured 2026-11-20 by measured"
        " 2026-11-21",
        "added head_dim 64, group size 4, fp16, HND: measured 2026-11-21",
        f"{mine}: 2 families of NVIDIA H200 imported",
    ]
    own, exported = ({of.key: of for of in read(path).families} for path in (mine, file))
    assert own == exported
    unchanged = "unchanged head_dim 128, group size 4, fp16, HND: measured 2026-11-21"
    assert lines("import", str(file))[0] == unchanged


def test_an_import_leaves_measured_families_alone(tmp_path):
    save_families(H200, [family()])
    file = write(tmp_path / "predicted.json", family(source="predicted"))
    assert lines("import", file) == [
        "left out head_dim 128, group size 4, fp16, HND: predicted 2026-11-21, yours is measured",
        f"{store.path_of('h200')}: 0 families of NVIDIA H200 imported",
    ]
    assert read(store.path_of("h200")) == tuned_configs()


def test_an_import_without_a_home_warns(tmp_path, monkeypatch):
    def no_home(*args: object, **more: object) -> Path:
        raise RuntimeError

    file = write(tmp_path / "out.json", family())
    assert "LEANBENCH_HOME" not in invoke("import", file).stderr
    monkeypatch.delenv("LEANBENCH_HOME")
    monkeypatch.setattr(platformdirs, "user_data_path", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = invoke("import", file)
    assert result.exit_code == 0
    [warning] = [line for line in result.stderr.splitlines() if "LEANBENCH_HOME" in line]
    assert str(store.path_of("h200")) in warning


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/dev/zero", FileFault.NOT_REGULAR.value),
        ("/proc/self/mem", ""),
        (".", FileFault.FOLDER.value),
        ("none.json", FileFault.MISSING.value),
        ("a\x1b[31m", FileFault.MISSING.value),
    ],
)
def test_an_import_of_what_is_no_file_is_refused(path, fault):
    said = refused("import", path)
    # A terminal is not controlled.
    assert said.startswith(f"cannot read {path} (".replace("\x1b", r"\x1b"))
    assert fault in said


@pytest.mark.parametrize("path", ["/proc/x.json", "/proc/no/x.json", "{file}/x.json"])
def test_an_export_that_cannot_be_written_says_to_choose_another_file(tmp_path, path):
    save_families(H200, [family()])
    (tmp_path / "file").touch()
    path = path.format(file=tmp_path / "file")
    said = refused("export", "h200", path)
    assert said.startswith(f"cannot write {path} (")
    assert said.endswith("): choose a FILE in a folder that can be written")


def test_an_import_reads_a_pipe():
    """As of /dev/stdin, and of a process substitution."""
    reading, writing = os.pipe()
    os.write(writing, tuned_configs().model_dump_json().encode())
    os.close(writing)
    result = invoke("import", f"/dev/fd/{reading}")
    os.close(reading)
    assert result.exit_code == 0
    assert store.path_of("h200").is_file()


@pytest.mark.parametrize("kind", ["pipe", "broken"])
def test_an_import_over_what_is_no_file_of_configs_is_refused(tmp_path, kind):
    file = write(tmp_path / "in.json", family())
    path = store.path_of("h200")
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        # It is not waited for.
        os.mkfifo(path)
        assert "(it is no regular file): move it away, it is not over" in refused("import", file)
        assert invoke("list").exit_code == 0
        return
    path.write_text("mine")
    assert "move it away, it is not overwritten" in refused("import", file)
    assert path.read_text() == "mine"
    # What cannot be read is not imported.
    said = refused("import", str(path))
    assert "is not a file of tuned configs (no JSON at column 1)" in said
    assert said.endswith(": give a file that `leanbench configs export` of this version wrote")


@pytest.mark.usefixtures("no_gpu")
def test_verify_needs_a_gpu():
    save_families(H200, [three()])
    assert refused("verify") == (
        "there is no GPU here, and configs verify times kernels: run it where the GPU is"
    )


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Call with latencies of an H200's configs; it returns the problems that were timed."""

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
                by_name = zip(named.values(), map(latencies_us.get, named), strict=True)
                return {config: us for config, us in by_name if config in configs}

        target = Target(find("h200"), 3)
        monkeypatch.setattr("leanbench.gpu.local.choose", lambda name, require_gpu: target)
        monkeypatch.setattr("leanbench.tune.verify.GpuTimer", Timer)
        return problems

    return set_latencies


def test_verify_says_what_holds(timed):
    problems = timed(heuristic=10.0, large=9.5)
    save_families(H200, [three()])
    assert lines("verify", "--sample", "1") == [
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
    of_64 = family(head_dim=64, problems=[tuned(256)])
    write(shipped / "h200.json", family(problems=[tuned(512)]), of_64)
    save_families(H200, [family(problems=[tuned(2048)])])
    assert lines("verify")[-1] == "2 of 2 choices hold within 1%; median regret 0.00%"
    assert sorted(problem.context for problem in problems) == [256, 2048]


def test_verify_without_anything_to_verify(timed):
    timed()
    said = "no tuned problems are there for NVIDIA H200: run `leanbench tune` first"
    assert refused("verify") == said
    save_families(H200, [three()])
    result = invoke("verify")
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0] == "b1 h32/8 n4096 d128 fp16 HND: not timed, needs 200 GB"
    assert "Error: none of the tuned problems could be timed here" in result.stderr
    assert invoke("verify", "--sample", "0").exit_code == 2
