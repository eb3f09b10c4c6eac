"""Parts of the GPU gate, their logs and their summary, with commands that need no GPU."""

from pathlib import Path

import gpu_gate
import pytest
from gpu_gate import Part, parts, row_of, run_part, summary

HASH = "0123456789ab"
ENVIRONMENT = {"python": "3.12.3", "torch": "2.11.0", "driver": "580.1", "commit": None}
ENVIRONMENT |= {"gpu_product": "NVIDIA H200", "gpu_uuid": "GPU-1", "kernels": HASH, "gpus": 1}
HEADER = gpu_gate.header_of(ENVIRONMENT)
GOOD = ("-c", "print('seen'); print('3 passed')")
BAD = ("-c", "import sys; print('1 failed'); sys.exit(3)")
ENDLESS = ("-c", "import time; print('begun', flush=True); time.sleep(60)")


def test_a_log_says_what_ran_where_and_how_it_ended(tmp_path):
    assert run_part("check", Part("a grid", ((GOOD,), (GOOD,))), HEADER, tmp_path, 60)
    log = (tmp_path / "check.txt").read_text()
    assert log.startswith(
        f"check: a grid\nGPU NVIDIA H200, driver 580.1, kernels {HASH}\n"
        "python 3.12.3, torch 2.11.0\n"
    )
    assert log.count("seen\n3 passed\nexit code 0 after 0 s\n") == 2
    assert log.endswith("\npassed in 0 s\n")
    assert row_of("check", log, HASH) == ("check", "passed", "0 s", HASH, "3 passed (2 times)")


@pytest.mark.parametrize(("bad", "code", "said"), [(BAD, 3, "1 failed"), (ENDLESS, 124, "begun")])
def test_one_command_that_fails_is_the_parts_failure(tmp_path, bad, code, said):
    """It fails while others run concurrently, and later commands still run."""
    assert not run_part("fuzz", Part("", ((GOOD, bad), (GOOD,))), HEADER, tmp_path, 2)
    log = (tmp_path / "fuzz.txt").read_text()
    assert f"{said}\nexit code {code} after" in log
    assert log.count("exit code 0 after") == (2 if code == 3 else 1)
    assert row_of("fuzz", log, HASH)[1] == "FAILED"


def test_the_summary_tells_old_and_unfinished_logs(tmp_path):
    for name, header, result in (
        ("check", HEADER, "passed in 7 s\n"),
        ("fuzz", HEADER.replace(HASH, "f" * 12), "passed in 8 s\n"),
        ("mutations", HEADER, ""),
    ):
        text = f"{name}: title\n{header}\n\n$ python\nall passed\nexit code 0 after 7 s\n\n{result}"
        (tmp_path / f"{name}.txt").write_text(text)
    assert summary(tmp_path, parts(0, tmp_path), HASH).splitlines() == [
        f"Kernels of this tree: {HASH}",
        f"check      passed      7 s  {HASH}  all passed",
        "fuzz       STALE       8 s  ffffffffffff  all passed",
        f"mutations  UNFINISHED  ? s  {HASH}  all passed",
    ]


@pytest.mark.parametrize(("command", "code"), [(GOOD, 0), (BAD, 1)])
def test_the_gates_exit_code(tmp_path, monkeypatch, capsys, command, code):
    seeds: list[int] = []

    def own_parts(seed: int, runs: Path) -> dict[str, Part]:
        seeds.append(seed)
        return {
            "check": Part("", ((GOOD,),)),
            "fuzz": Part("", ((command,),)),
            "shared": Part("", ((BAD,),), gpus=2),
        }

    monkeypatch.setattr(gpu_gate, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(gpu_gate, "parts", own_parts)
    assert gpu_gate.main(["--out", str(tmp_path)]) == code
    assert gpu_gate.main(["check", "--out", str(tmp_path), "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "fuzz" in said
    assert "shared: left out, it asks for 2 GPUs\n" in said
    assert {*seeds} == {0, 5, int(HASH[:5], 16)}
    assert (tmp_path / "summary.txt").read_text().count("\n") == 3
    with pytest.raises(SystemExit):
        gpu_gate.main(["chek"])
    assert "there is no part 'chek': take check, fuzz" in capsys.readouterr().err


def test_every_file_of_a_part_is_there():
    groups = [group for part in parts(0, Path("x")).values() for group in part.groups]
    words = {word for group in groups for command in group for word in command}
    files = {word for word in words if word.endswith(".py")}
    assert {"tests/gate/mutants.py", "tools/gpu/ping_pong.py"} <= files
    assert [file for file in files if not (gpu_gate.ROOT / file).is_file()] == []
    assert "\ngpu-gate: " in (gpu_gate.ROOT / "Makefile").read_text()
    guide = (gpu_gate.ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in parts(0, Path()) if f"`{name}`" not in guide] == []
