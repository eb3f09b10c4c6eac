"""`leanbench tune` through Typer's runner; the search itself is tested in tests/tune."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from cli.running import invoke, printed, refusal
from timed_examples import H200, LATENT, OTHERS, OTHERS_OF_LATENT, PROBLEM, RULES

from leanbench.configs import store
from leanbench.core.errors import OutOfMemory
from leanbench.gpu.local import Target
from leanbench.tune import search
from leanbench.tune.stopwatch import Result

LABEL = "h32/8 n4k d128"
#: `LATENT`.
LATENT_LABEL = "b11 h32/1 n431 d576 q2 dv512 bf16 latent"
DEVICE = "b8 h32/8 n4k d128 p16 NHD bf16 device"


@pytest.fixture(autouse=True)
def empty_folder(home: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in an empty folder, without a GPU and without timings."""
    monkeypatch.chdir(home.parent)


def tune(words: str) -> Any:
    return invoke("tune", *words.split())


def rows(stdout: str) -> list[list[str]]:
    return [line.split() for line in stdout.splitlines()]


@pytest.mark.parametrize("words", ["", LABEL, "--check", "--check --gpu h200"])
def test_without_a_gpu_it_is_refused(home, words):
    assert "tune on a machine that has one" in refusal("tune", *words.split())
    assert not home.exists()


def test_the_models_choices_for_a_gpu_that_is_not_here(home):
    result = tune("--gpu a100")
    assert result.exit_code == 0
    assert result.stderr == (
        "No such GPU here: predicted by the model of the settings, nothing is timed or saved.\n"
    )
    title = "predicted for NVIDIA A100-SXM4-80GB: settings without timings, the first 20 of"
    assert result.stdout.startswith(title)
    assert result.stdout.count("tile_tokens=") == 20
    # Triton does not support fp8 caches.
    assert 0 < result.stdout.count("implementation=cuda") < 20
    assert not home.exists()


def test_choices_of_a_problem_and_of_recorded_calls():
    *_, row = rows(printed("tune", "--gpu", "h200", *DEVICE.split()))
    assert row[:8] == "b8 h32/8 n4096 d128 p16 bf16 NHD device".split()
    line = json.dumps({"problem": PROBLEM.to_dict()})
    Path("calls.jsonl").write_text(f'{line}\n{line}\n{{"problem"\n')
    *_, head, row = rows(printed("tune", "--gpu", "h200", "--calls", "calls.jsonl"))
    assert head == ["─" * len(head[0])]
    assert row[:6] == PROBLEM.label.split()


def test_a_latent_problem_is_for_hopper():
    *_, row = rows(printed("tune", "--gpu", "h200", *LATENT_LABEL.split()))
    assert row[-3:] == ["min_tiles_per_cta=2", "align_grid=True", "column_groups=4"]
    assert refusal("tune", "--gpu", "a100", *LATENT_LABEL.split()) == (
        "lean_mla is written for compute capability 9.0, this is 8.0: run it on a Hopper GPU"
    )


@pytest.mark.parametrize("content", ["", "{", '{"problem": {}}\n', "\0"])
def test_a_file_without_calls_is_refused(content):
    Path("calls.jsonl").write_text(content)
    assert refusal("tune", "--gpu", "h200", "--calls", "calls.jsonl") == (
        "calls.jsonl has no recorded calls: give a file that LEANBENCH_RECORD=calls.jsonl wrote"
    )


class Watch:
    """Stopwatch by which the second choice is the fastest."""

    error: BaseException | None = None

    def __init__(self, index: int, spec: Any) -> None:
        assert (index, spec) == (3, H200)

    def time(self, problem: Any, configs: Any) -> Result:
        if self.error is not None:
            raise self.error
        best = OTHERS[0], OTHERS_OF_LATENT[0]
        return Result({each: 8.0 if each in best else 10.0 for each in configs}, {})


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> type[Watch]:
    """Pretend that an H200 is here, without compiling."""

    class Here(Watch):
        pass

    monkeypatch.setattr(
        "leanbench.gpu.local.choose", lambda name, require_gpu: Target(H200, 3, None)
    )
    monkeypatch.setattr("leanbench.tune.stopwatch.GpuStopwatch", Here)
    monkeypatch.setattr(search, "versions", lambda index: {"torch": "2"})
    monkeypatch.setattr(search, "build_all", lambda *arguments: None)
    return Here


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_timings_are_saved_and_used(watch, home, quiet):
    result = invoke("tune", *LABEL.split(), *quiet)
    assert result.exit_code == 0, result.stderr
    path = home / "configs" / "h200.json"
    assert result.stderr.splitlines()[-1] == (
        f"Saved in {path}; used from now on where --config and --configs say nothing else."
    )
    if quiet:
        assert result.stdout == ""
    else:
        assert "d128 g4 2 B 1 +25.0% +25.0%".split() in rows(result.stdout)
        assert "all calls were timed" in result.stdout
    (call,) = store.read(path).calls()
    assert (call.problem, len(call.costs)) == (PROBLEM, search.CANDIDATES)
    explained = printed("configs", "explain", *LABEL.split(), "--gpu", "h200")
    assert f"tuned, timed {call.time[:10]} on NVIDIA H200, yours" in explained


def test_recorded_calls_of_both_kernels_are_tuned(watch, home):
    lines = [json.dumps({"problem": each.to_dict()}) for each in (LATENT, PROBLEM)]
    Path("calls.jsonl").write_text("\n".join(lines))
    shown = rows(printed("tune", "--calls", "calls.jsonl"))
    for words in ("d128 g4 2 B 1 +25.0% +25.0%", "d576 v512 g32 q2 2 B 1 +25.0% +25.0%"):
        assert words.split() in shown
    calls = store.read(home / "configs" / "h200.json").calls()
    assert [(call.problem, call.best) for call in calls] == [
        (LATENT, OTHERS_OF_LATENT[0]),
        (PROBLEM, OTHERS[0]),
    ]
    assert next(iter(calls[0].costs)) == RULES


def test_a_latent_problem_is_tuned_and_checked(watch, home):
    check = ("tune", "--check", *LATENT_LABEL.split())
    assert "settings: 80.0% of the best in the mean" in printed(*check)
    tune(f"{LATENT_LABEL} -q")
    assert "settings: 100.0% of the best in the mean" in printed(*check)


def test_a_check_saves_nothing_and_writes_what_it_timed(watch, home):
    shown = printed("tune", "--check", *LABEL.split(), "--out", "check.jsonl")
    assert "settings: 80.0% of the best in the mean, 80.0% at worst, 0 of 1 within 1%" in shown
    (line,) = Path("check.jsonl").read_text().splitlines()
    checked = json.loads(line)
    assert (checked["how"], checked["share"]) == ("heuristic", 0.8)
    assert checked["best"] == OTHERS[0].to_dict()
    assert [each["problem"] for each in checked["timed"]] == [PROBLEM.to_dict()]
    assert not home.exists()
    tune(f"{LABEL} -q")
    assert "settings: 100.0% of the best" in printed("tune", "--check", *LABEL.split())


def test_a_check_that_cannot_write_is_refused_before_it_times(watch):
    watch.error = AssertionError("it was timed")
    error = refusal("tune", "--check", *LABEL.split(), "--out", "none/check.jsonl")
    assert error.startswith("cannot write none/check.jsonl (")


def test_a_check_draws_calls(watch):
    first, again, other = (
        tune(f"--check --seed {seed} --problems 2").stderr.splitlines() for seed in (1, 1, 2)
    )
    assert len(first) == 2
    assert first == again != other


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_timed(watch, home, number):
    watch.error = KeyboardInterrupt(number)
    result = tune(LABEL)
    assert result.exit_code == 128 + number
    assert result.stderr.splitlines()[-1] == (
        f"Stopped: no signatures saved in {home}/configs/h200.json, the same command adds to them."
    )


def test_a_call_that_does_not_fit(watch):
    watch.error = OutOfMemory("needs 200 GB")
    said = refusal("tune", *LABEL.split(), "--quiet")
    assert said == "nothing could be timed on NVIDIA H200: needs 200 GB"


def test_a_foreign_file_is_not_overwritten(watch, home):
    path = home / "configs" / "h200.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"models": []}')
    watch.error = AssertionError("it was timed")
    assert "move it away, it is not overwritten" in refusal("tune", *LABEL.split())
    assert path.read_text() == '{"models": []}'
