"""`leanbench sweep`: bad input, and what it prints. Nothing here starts a worker."""

import json
import re
import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.running import invoke, printed, refusal
from depth import diagonal
from rich.console import Console

from leanbench.cli import sweep_run
from leanbench.cli.options import RunFlags
from leanbench.cli.progress import SweepProgress
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.measure.options import MeasureOptions
from leanbench.measure.timing import Effort
from leanbench.model import known_error, short_error
from leanbench.records.reading import Run, read_run
from leanbench.report.command import sweep_command
from leanbench.run.cells import Cell, Sweep, expand
from leanbench.run.estimate import estimated_seconds
from leanbench.run.sweep_file import load_sweep, shipped_sweeps
from leanbench.run.worker_process import WorkerTarget

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def started(monkeypatch) -> list[tuple[Sweep, list[Cell], dict[str, Any], list[str]]]:
    """Return sweeps that would have started: sweep, cells, manifest, command."""
    sweeps = []

    requested = []

    def make_manifest(cells, sweep, *others):
        requested.append(sweep)
        return made(cells, sweep, *others)

    def run(path, cells, manifest, machines, limits, command, flags):
        sweeps.append((requested[-1], cells, manifest, command))
        return Run(path, manifest, ())

    made = sweep_run.make_manifest
    monkeypatch.setattr(sweep_run, "make_manifest", make_manifest)
    monkeypatch.setattr(sweep_run, "run_remaining_cells", run)
    return sweeps


@pytest.fixture
def h200_here(monkeypatch) -> None:
    """Pretend that an H200 is here. Nothing runs."""
    monkeypatch.setattr("leanbench.gpu.local.choose", lambda name, require: Target(find("h200"), 0))


@pytest.mark.usefixtures("h200_here")
def test_flags_say_what_is_measured_and_how_hard(started):
    flags = (
        "--cache warm --sustained --energy --window 5s --occupancy --counters --ci 2% --min-samples"
        " 6 --max-samples 20"
    )
    printed("sweep", "--no-report", "--kernels", "lean", *flags.split())
    ((sweep, cells, manifest, command),) = started
    effort = Effort(relative_ci=0.02, min_samples=6, max_samples=20)
    assert sweep.measure == MeasureOptions(effort, "warm", True, True, 5.0, True, True)
    assert {cell.cache for cell in cells} == {"warm"}
    assert manifest["measure"] == json.loads(json.dumps(sweep.measure.to_dict()))
    # The command that --resume repeats.
    assert shlex.join(command) == f"leanbench sweep --kernels lean {flags} --no-report"


@pytest.mark.parametrize(("parallel", "gpus"), [("none", 1), ("none,cp:2,tp:4", 4)])
@pytest.mark.usefixtures("h200_here")
def test_a_worker_knows_the_most_gpus_of_a_problem(monkeypatch, started, parallel, gpus):
    targets: list[WorkerTarget] = []
    target = "leanbench.run.worker_process.WorkerTarget"
    monkeypatch.setattr(target, lambda *fields: targets.append(WorkerTarget(*fields)))
    printed("sweep", "--no-report", "--parallel", parallel)
    assert [target.gpus for target in targets] == [gpus]


@pytest.mark.usefixtures("h200_here")
def test_a_file_says_what_is_measured_and_flags_add_to_it(tmp_path, started):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nkernels = ["lean"]\nenergy = true\ncache = "warm"\n')
    printed("sweep", str(file), "--no-report", "--occupancy")
    printed("sweep", str(file), "--no-report", "--cache", "cold")
    assert [sweep.measure for sweep, *_ in started] == [
        MeasureOptions(energy=True, cache="warm", occupancy=True),
        MeasureOptions(energy=True),
    ]


def test_what_cannot_be_predicted_is_said():
    result = invoke("sweep", "--energy", "--sustained", "--occupancy", "--dry-run")
    assert result.exit_code == 0
    assert "Only a GPU can measure sustained, occupancy: left out." in result.stderr


def test_windows_of_a_file_are_checked_as_those_of_flags(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nenergy = true\n')
    refused = refusal("sweep", str(file), "--window", "0.1s", "--dry-run")
    assert "a window of 0.1 s measures no energy" in refused
    printed("sweep", str(file), "--window", "60s", "--dry-run")


@pytest.mark.parametrize(
    "words", ["--lengths zipf --batch 1,8", "--lengths zipf,uniform --batch 8", "--lengths 64kx3"]
)
def test_lengths_on_the_host_may_be_asked_for_where_some_batch_has_one_length(words):
    printed("sweep", "--dry-run", "--lengths-on", "host", *words.split())


def test_a_file_of_lengths_is_cut_at_no_context_unless_asked_for(tmp_path, started, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("300\n700\n20000\n5000\n")
    Path("other").write_text("30000\n")
    for words, context in (
        ("--lengths mine", ""),
        ("smoke --lengths mine,other", ""),
        ("--lengths mine,zipf", "1024, 4096, 16384"),
        ("--lengths mine --context 1k,32k", "1024"),
    ):
        result = invoke("sweep", "--batch", "64", *words.split())
        cut = [line for line in result.stderr.splitlines() if line.startswith("Lengths of ")]
        sentence = (
            f"Lengths of mine reach 20000 tokens and are cut at the context ({context}): --context"
            " 20000 cuts none."
        )
        assert cut == ([sentence] if context else [])
    contexts = [grid["context"] for sweep, *_ in started for grid in sweep.grids]
    assert contexts[0] == (20000,)
    assert {(30000,), (1024, 32768)} < set(contexts)


@pytest.mark.parametrize(
    ("flags", "timeout_s"),
    [
        ([], 120.0),
        (["--energy"], 126.0),
        (["--sustained", "--window", "10s", "--timeout", "60s"], 80.0),
        (["--counters"], 210.0),
    ],
)
def test_what_is_asked_for_comes_on_top_of_the_longest_time(monkeypatch, flags, timeout_s):
    seen: list[float] = []
    limits = sweep_run.limits_from_flags

    def watched(*arguments: Any) -> Any:
        seen.append(limits(*arguments).timeout_s)
        return limits(*arguments)

    monkeypatch.setattr(sweep_run, "limits_from_flags", watched)
    printed("sweep", "--dry-run", *flags)
    assert seen == [timeout_s]


@pytest.mark.parametrize(
    ("words", "say"),
    [
        ("frob", "No such command 'frob'"),
        ("sweep --frob", "--frob"),
        ("sweep --max-samples 1e9", "Error: --max-samples '1e9' is refused: write a"),
        ("sweep smoke --draw=abc", "Error: --draw 'abc' is refused: write a whole number "),
        ("sweep smoke --draw 3 --draw abc", "Error: --draw 'abc' is refused: "),
        ("merge -- --out x", "Missing option '--out'"),
        ("tune --check --problems 0", "Error: --problems '0' is refused: "),
    ],
)
def test_unknown_commands_and_flags_are_usage_errors(words, say):
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert say in result.stderr
    assert "Traceback" not in result.output


def test_a_path_may_end_with_an_equals_sign(tmp_path):
    result = invoke("sweep", f"--out={tmp_path}/a=", "--dry-run", "--kernels", "fa2")
    assert result.exit_code == 0
    assert "is empty" not in result.stderr


def test_a_dry_run_names_the_first_cells_and_counts_the_others():
    shown = printed("sweep", "--dry-run", "--context", "1k:50k:+1k,2000m", "--kernels", "lean")
    lines = shown.splitlines()
    assert sum(line.startswith("lean") for line in lines) == 40
    assert lines[-2] == "and 11 more"
    assert lines[-1].startswith("51 cells (1 do not fit its memory), less than 1 s; ")


@pytest.mark.deep
def test_a_terminal_says_the_models_error_once_and_a_page_all_of_it(tmp_path):
    words = ("--gpu", "a100", "--heads", "8", "--context", "1k", "--out", str(tmp_path))
    result = invoke("sweep", *words, "--name", "said")
    assert result.exit_code == 0, result.output
    kernels = ["lean", "fa2", "fixed_split"]
    [note] = [line for line in result.stdout.splitlines() if line.startswith("Note: ")]
    error = short_error("a100", kernels)
    assert note == f"Note: Predicted by the performance model, nothing was measured. {error}"
    assert len(note) < 300
    assert error.startswith("Model error on h200, median and 90th percentile: lean_triton ")
    assert result.output.count("Model error") == 1
    page = (tmp_path / "said" / "report.html").read_text()
    assert known_error("a100", kernels) in page
    quiet = invoke("sweep", *words, "--name", "quiet", "--quiet")
    [line] = quiet.stderr.splitlines()
    assert "nothing was measured" in line
    assert len(line) < 100
    assert "Model error" not in quiet.stdout


def test_dry_run_lists_cells_bytes_and_time_and_makes_nothing(tmp_path):
    words = "--dry-run --context 1k,8m --kernels lean --out"
    result = invoke("sweep", *words.split(), str(tmp_path / "runs"))
    assert result.exit_code == 0
    assert "No GPU here: the sweep custom would be predicted for NVIDIA H200" in result.stderr
    assert result.stdout.splitlines()[0].rstrip() == "custom: 2 cells for h200"
    assert "Model error" not in result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("lean")]
    small, large = lines[0].split(), lines[1].split()
    assert small[-6:] == ["4.19", "MB", "<", "0.1", "s", "yes"]
    assert large[-6:] == ["34.4", "GB", "<", "0.1", "s", "yes"]
    assert "2 cells, less than 1 s; nothing was run." in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_resumed_sweep_lists_the_cells_that_are_left(tmp_path):
    words = ["smoke", "--kernels", "lean", "--out", str(tmp_path), "--no-report"]
    printed("sweep", *words, "--name", "one", "--quiet")
    results = tmp_path / "one" / "results.jsonl"
    lines = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:6]))
    kept = results.read_bytes()
    for name in (["--name", "one"], []):
        result = invoke("sweep", *words, *name, "--resume", "--dry-run")
        assert result.exit_code == 0
        assert f"{tmp_path / 'one'}: 6 of 8 cells are done, 2 are left.\n" in result.stderr
        listed = [line.split()[1:4] for line in result.stdout.splitlines() if line[:5] == "lean "]
        assert listed == [["b17", "h32/8", "n4096"], ["b16", "h32/8", "n65536+1024x15"]]
        assert "2 cells, less than 1 s; nothing was run." in result.stdout
    assert results.read_bytes() == kept
    other = invoke("sweep", *words, "--name", "one", "--resume", "--dry-run", "--batch", "2")
    assert (other.exit_code, other.stdout) == (2, "")
    assert "has other cells (" in other.stderr


@pytest.mark.parametrize(
    ("words", "unsupported"),
    [
        # A library, no CUDA C++ known on an A100, and a kernel of whole models.
        ("--context 1k --gpu a100 --kernels lean,cudnn,lean_cuda,fa2_triton,sdpa", 3),
        ("--context 1k --gpu h200 --kernels lean,lean_cuda,fa2_triton --append 4", 3),
        ("--context 1k --gpu h200 --kernels lean,fa2_triton --parallel tp:2", 0),
        ("decode --context 1k --gpu h200 --kernels lean,fa2,eager,no_attention", 1),
    ],
)
def test_a_dry_run_counts_what_the_run_says_is_unsupported(tmp_path, words, unsupported):
    dry = printed("sweep", *words.split(), "--dry-run")
    counted = f" ({unsupported} unsupported), " if unsupported else " cells, "
    assert counted in dry.splitlines()[-1]
    invoke("sweep", *words.split(), "--out", str(tmp_path), "--name", "r", "-q", "--no-report")
    statuses = [row.status for row, _ in read_run(tmp_path / "r").results]
    assert statuses.count("unsupported") == unsupported


def _run_of(rows: list[Any], source: str = "measured") -> Any:
    return SimpleNamespace(results=rows, manifest={"source": source})


PROBLEM = AttentionProblem(1, 16, 1, 4096, 576)
LATENT = replace(PROBLEM, v_head_dim=512, latent=True)


def _row_of(
    kernel: str, status: str, reason: str | None = None, problem: AttentionProblem = PROBLEM
) -> Any:
    return SimpleNamespace(kernel=kernel, status=status, reason=reason), problem


LARGE = _row_of("lean", "out_of_memory", "needs 2 GB")
UNSUPPORTED = _row_of("fa2", "unsupported", "it has no schedule")
LIBRARY = _row_of("cudnn_best", "unsupported", "it is a library")
OK, CRASHED = _row_of("lean", "ok"), _row_of("lean", "crashed", "signal 11")


def test_a_run_with_a_result_is_not_explained_and_a_crash_fails_it():
    for rows in ([], [OK], [UNSUPPORTED, LARGE, OK]):
        assert sweep_run.explain_nothing_ran(_run_of(rows)) == ""
        assert not sweep_run.has_failed(_run_of(rows))
    assert sweep_run.has_failed(_run_of([OK, CRASHED]))


def test_a_run_without_a_result_is_explained(snapshot):
    runs = [
        *([UNSUPPORTED], 2 * [UNSUPPORTED], 2 * [LARGE], [UNSUPPORTED, LARGE]),
        *([LIBRARY], [LIBRARY, UNSUPPORTED, LARGE]),
    ]
    assert "\n".join(sweep_run.explain_nothing_ran(_run_of(rows)) for rows in runs) == snapshot


@pytest.mark.parametrize(
    ("kernel", "problem", "is_named"),
    [
        ("fa2", LATENT, True),
        ("fa2", PROBLEM, False),
        ("fa2", replace(LATENT, softcap=30.0), False),
        ("lean_mla", LATENT, False),
    ],
)
def test_latent_caches_have_a_kernel_of_their_own(kernel, problem, is_named):
    run = _run_of([_row_of(kernel, "unsupported", "it takes none", problem)])
    hint = " lean_mla takes latent caches: --kernels lean_mla."
    assert sweep_run.explain_nothing_ran(run).endswith(hint) == is_named


def test_missing_libraries_are_named_with_what_installs_them(monkeypatch, snapshot):
    absent = "is not installed here (no module flashinfer): pip install a b"
    missing = {
        **dict.fromkeys(("flashinfer_best", "flashinfer"), absent),
        "flash_attn_3": "is not installed here: pip install vllm, or set PATH_OF_IT",
        "flash_attn": "needs another torch",
    }
    for name, kernel in kernels().items():
        monkeypatch.setattr(kernel, "unavailable_reason", lambda name=name: missing.get(name))

    def message(names: str, source: str = "measured", ran: str = "lean") -> str:
        refused = [_row_of(name, "unsupported", "x") for name in names.split()]
        timed = [_row_of(name, "ok") for name in ran.split()]
        return sweep_run.explain_missing_kernels(_run_of([*timed, *refused], source))

    assert message("") == message("cudnn_best", ran="lean fa2") == ""
    # What ran somewhere is not missing there.
    assert message("", ran="lean flashinfer") == ""
    messages = [
        message("flashinfer_best flash_attn_3"),
        message("flashinfer_best flashinfer flash_attn_3", ran="lean fa2"),
        message("flash_attn", ran="lean fa2"),
        *(message(names, "predicted") for names in ("flashinfer_best cudnn_best", "cudnn_best")),
        message("fa2", "predicted"),
    ]
    assert "\n".join(messages) == snapshot


@pytest.mark.parametrize("flags", [[], ["--energy"]])
def test_energy_is_predicted_if_asked_for(tmp_path, flags):
    words = ["--gpu", "h200", "--heads", "8", "--context", "1k", "--out", str(tmp_path)]
    shown = printed("sweep", *words, "--name", "r", "--no-report", *flags)
    run = read_run(tmp_path / "r")
    assert {row.energy_mj is not None for row, _ in run.results} == {bool(flags)}
    assert ("energy of one launch" in shown) == bool(flags)
    commands = [sweep_command(row, problem, run) for row, problem in run.results]
    assert {"--energy" in command for command in commands} == {bool(flags)}


@pytest.mark.deep
def test_a_model_that_no_kernel_is_predicted_for_gets_one_reason(tmp_path):
    words = "--model gpt-oss-120b --tp 8 --context 4k --batch 1 --gpu a100"
    result = invoke("sweep", *words.split(), "--out", str(tmp_path), "--name", "r")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [f"{tmp_path}/r/report.{kind}" for kind in ("html", "csv")]
    reasons = [line for line in result.stderr.splitlines() if "--gpu h200" in line]
    assert reasons == [result.stderr.splitlines()[-1]]
    assert "pip install" not in result.stderr


def test_a_dry_run_of_models_says_whose_shapes_it_takes():
    words = (
        "sweep --model Llama-3.3-70B,qwen2.5-72b --tp 1,8 --context 4k --batch 1 --kernels lean"
        " --dry-run"
    ).split()
    result = invoke(*words)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[:2] == [
        "h64/8 d128: llama-3-70b, qwen2.5-72b",
        "h8/1 d128: llama-3-70b tp 8, qwen2.5-72b tp 8",
    ]
    cells = [line.split()[1:5] for line in result.stdout.splitlines() if line.startswith("lean")]
    assert cells == [["b1", "h64/8", "n4096", "d128"], ["b1", "h8/1", "n4096", "d128"]]
    assert " d128: " not in invoke(*words, "--quiet").stderr


@pytest.mark.parametrize("name", diagonal([*shipped_sweeps()], keep=4))
def test_every_shipped_sweep_can_be_run_dry(name):
    shown = printed("sweep", name, "--gpu", "h200", "--dry-run")
    cells = len(expand(load_sweep(name)))
    assert re.search(rf"^{cells} cells.*; nothing was run\.$", shown, re.MULTILINE)


def test_the_banner_says_why_a_gpu_that_is_here_is_not_used(monkeypatch):
    note = "there is an NVIDIA H200 here, but torch is built without CUDA"
    target = Target(find("h200"), None, note=note)
    monkeypatch.setattr("leanbench.gpu.local.choose", lambda name, require: target)
    said = invoke("sweep", "--dry-run").stderr
    assert f"{note}: the sweep smoke would be predicted" in said


H200 = find("h200")


def test_best_configs_take_longer_than_default_ones():
    best_s, default_s = (
        estimated_seconds(expand(sweep)[0], H200, predicted=False)
        for sweep in (Sweep("s", kernels=("lean",), configs="best"), Sweep("s", kernels=("lean",)))
    )
    assert best_s > 2 * default_s > 0


def test_what_is_measured_beside_latency_takes_its_time():
    cell = expand(Sweep("s", kernels=("lean",)))[0]

    def seconds(predicted: bool = False, **options: Any) -> float:
        options_ = MeasureOptions(**options)
        return estimated_seconds(cell, H200, predicted=predicted, options=options_)

    def added_s(**options: Any) -> float:
        return seconds(**options) - seconds()

    # The windows, and seconds around them; that of the read floor is shared by three kernels.
    assert 10 < added_s(sustained=True, window_s=10.0) < 12
    sustained_s = added_s(sustained=True, window_s=10.0)
    assert added_s(energy=True, window_s=10.0) == pytest.approx(4 / 3 * sustained_s)
    occupancy_s, counters_s = added_s(occupancy=True), added_s(counters=True)
    both_s = added_s(occupancy=True, counters=True)
    assert both_s == pytest.approx(occupancy_s + counters_s)
    assert counters_s > occupancy_s > 0
    assert added_s(window_s=10.0, cache="warm") == 0
    assert seconds(predicted=True, energy=True) == seconds(predicted=True)


def test_default_names_never_collide(tmp_path, monkeypatch):
    class Clock(sweep_run.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(sweep_run, "datetime", Clock)
    target = Target(find("a100"), None)
    paths = [sweep_run.run_path(RunFlags(out=tmp_path), [], Sweep("s"), target) for _ in range(3)]
    assert all(path.is_dir() for path in paths)
    base = "s-a100-80gb-20300102-030405"
    assert [path.name for path in paths] == [base, f"{base}-2", f"{base}-3"]


def test_progress_in_a_narrow_terminal_cuts_the_cells_name_alone(monkeypatch):
    console = Console(file=StringIO(), force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr("leanbench.cli.output.console", lambda stderr: console)
    progress = SweepProgress(1680, quiet=False)
    cell: Any = SimpleNamespace(label="fixed_split · b16 h128/16 nragged20000x93211 " * 3)
    progress.starts(cell)
    with console.capture() as shown:
        console.print(progress._bar.get_renderable())
    [line] = shown.get().splitlines()
    assert len(line) <= 80
    assert re.search(r"   0/1680 ETA -:--:-- fixed_split · b16 h128/16 nrag.*…", line)


def test_repeats_need_a_gpu_and_a_number_of_processes(tmp_path):
    words = ["sweep", "--context", "1k", "--out", str(tmp_path)]
    assert refusal(*words, "--repeat", "0") == "--repeat 0 is not 1 to 100 processes: write 3"
    ray = refusal(*words, "--repeat", "3", "--executor", "ray")
    assert ray == "--repeat 3 has no effect without --executor local"
    shown = invoke(*words, "--repeat", "3", "--gpu", "h200", "--dry-run").output
    assert "Only a GPU can measure repeats: left out." in shown
