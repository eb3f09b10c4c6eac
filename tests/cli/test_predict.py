import json
import re
import shutil
from pathlib import Path

import pytest
from cli.running import invoke

from leanbench.gpu.catalogue import find
from leanbench.model import calibration
from leanbench.model.calibration import calibration_for, read_calibration, user_file

RUNS = Path(__file__).parents[2] / "reports/h200/model"
FIG_7A = str(RUNS / "paper-fig7a")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    result = invoke("predict", *arguments)
    return result.exit_code, result.stdout, result.stderr


def test_show_has_every_constant_with_its_unit() -> None:
    code, out, err = run("show", "--gpu", "h200")
    costs = calibration_for(find("h200")).constants
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("sm_bytes_per_clock"))
    assert line.split()[1:4] == [f"{costs.sm_bytes_per_clock:.5g}", "bytes/clock", "held"]
    assert "mha-grid" in out
    fitted = r"fitted by leanbench \S+ on 20\d\d-\d\d-\d\d: \S+/h200\.json\.\n"
    assert re.match(rf"Constants of NVIDIA H200, {fitted}", err)
    assert "None were fitted" not in err
    assert out.splitlines()[0].rstrip() == "Constants of NVIDIA H200"
    assert "How far predictions are from rows measured on NVIDIA H200\n" in out
    assert "held: a fit leaves it as it is, as no run tells it apart from the others." in out
    content = json.loads(run("show", "--gpu", "a100", "--json")[1])
    assert (content["gpu"], content["gpu_asked"]) == ("h200", "a100-80gb")
    assert content["constants"]["tile_us"]["value"] == costs.tile_us
    assert "scaled from h200 and not fitted to a100-80gb" in run("show", "--gpu", "a100")[2]


def test_another_gpus_constants_say_whose_they_are() -> None:
    by_name, by_option = run("show", "a100"), run("show", "--gpu", "a100")
    assert by_name == by_option
    code, out, err = by_name
    assert code == 0
    named = "Constants of NVIDIA H200, used for NVIDIA A100-SXM4-80GB"
    assert out.splitlines()[0].rstrip() == named
    assert err.splitlines()[1] == (
        "None were fitted to NVIDIA A100-SXM4-80GB: for it, shares and times stay as they are,"
        " rates go by its own bandwidth, clock and SMs, idle power by its power limit."
    )
    # The errors are of the GPU that was measured.
    assert "How far predictions are from rows measured on NVIDIA H200\n" in out


@pytest.mark.parametrize("has_its_own", [True, False])
def test_a_check_says_whose_constants_are_held_against_runs(tmp_path, monkeypatch, has_its_own):
    if not has_its_own:
        only_h200 = tmp_path / "shipped"
        only_h200.mkdir()
        shutil.copy(calibration.SHIPPED / "h200.json", only_h200)
        monkeypatch.setattr(calibration, "SHIPPED", only_h200)
    code, out, err = run("check", str(RUNS.parents[1] / "h100" / "peers"))
    assert code == 0
    source, *scaled, error = err.splitlines()
    # Only of the kernels that are checked.
    said = re.fullmatch(
        r"Model error on (\S+), median and 90th percentile: (?:lean_\w+ \S+ and [\d.]+%(?:; )?){2}"
        r"(.*)\. More in docs/model\.md\.",
        error,
    )
    assert said is not None
    if has_its_own:
        assert source.startswith("Constants of NVIDIA H100 80GB HBM3, fitted by ")
        assert scaled == []
        assert said.groups() == ("h100-sxm", "")
    else:
        assert source.startswith("Constants of NVIDIA H200, fitted by ")
        [line] = scaled
        assert line.startswith("None were fitted to NVIDIA H100 80GB HBM3:")
        assert said.groups() == ("h200", "scaled from h200 and not fitted to h100-sxm")
    title = "How far predictions are from rows measured on NVIDIA H100 80GB HBM3"
    assert out.splitlines()[0].rstrip() == title


def test_check_lists_the_worst_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("check", FIG_7A)
    assert code == 0
    runs = calibration_for(find("h200")).calibration.runs
    stated = next(run for run in runs if run.run == "paper-fig7a")
    words = [f"{share:.1%}" for share in (stated.all.median, stated.all.p90, stated.all.worst)]
    row = next(line for line in out.splitlines() if line.startswith("paper-fig7a  all"))
    head, order = ["paper-fig7a", "all", "30"], f"{stated.pairs_right} of 20 right"
    assert row.split() == [*head, *words, "checked", "latency", *order.split()]
    assert "were measured more than 5% apart, those whose faster kernel is predicted" in out
    worst = out[out.index("The worst 15 of 30 cells") :]
    assert f"{stated.all.worst:.1%}" in worst.splitlines()[3]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run("check", FIG_7A)[1]
    assert set(re.findall(r"[\d.]+%", narrow)) == set(re.findall(r"[\d.]+%", out))
    content = json.loads(run("check", FIG_7A, "--json")[1])
    assert content["runs"][0]["all"]["rows"] == 30
    assert abs(content["worst"][0]["error"]) == pytest.approx(stated.all.worst, abs=1e-6)


@pytest.mark.deep
def test_fit_writes_what_is_used_from_then_on(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One evaluation of each constant's slope is enough to see everything but how well it fits.
    monkeypatch.setattr("leanbench.model.fit._MOST_EVALUATIONS", 2)
    code, out, err = run("fit", FIG_7A, "--check", str(RUNS / "occupancy"))
    assert code == 0, err
    path = user_file("h200")
    assert path == own / "models" / "h200.json"
    assert f"Wrote {path}: predictions go by it from now on; remove it to go back" in err
    row = next(line for line in out.splitlines() if line.startswith("paper-fig7a"))
    before, after, *_ = row.split("30  ")[1].split("  ")
    assert before != after
    in_use = calibration_for(find("h200"))
    assert in_use.path == path
    # lean_cuda, of which these runs have no row, stays as it was.
    others = [run for run in in_use.calibration.runs if "lean_cuda" not in run.by_kernel]
    roles = {run.run: run.role for run in others}
    assert roles == {"paper-fig7a": "fitted", "occupancy": "checked"}
    assert others[0].environment["torch"].startswith("2.11")
    assert read_calibration(path) == in_use.calibration
    shown = run("show", "--gpu", "h200")[1].splitlines()
    row = next(number for number, line in enumerate(shown) if line.startswith("occupancy"))
    assert shown[row + 1].split()[:2] == ["fa2_triton", "4"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", FIG_7A, "--gpu", "a100"], "was measured on h200, not on a100-80gb"),
        (["fit", FIG_7A, "--check", FIG_7A], "paper-fig7a is among the runs to fit to and to chec"),
        (["fit", str(RUNS / "ragged")], "8 rows are too few to fit the model to"),
        (["check", str(RUNS / "nothing")], "there is no folder"),
        (["check", FIG_7A, "--gpu", "h300"], "there is no GPU 'h300' in the catalogue"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("Error:") == 1
    assert "Traceback" not in err


def test_a_file_that_cannot_be_replaced_is_refused_before_the_fit(own, monkeypatch):
    def fit(*arguments: object, **options: object) -> None:
        raise AssertionError("fitted")

    monkeypatch.setattr("leanbench.model.calibrate.calibrate", fit)
    (own / "folder").mkdir()
    (own / "other.json").write_text("[1]")
    for name, sentence in (
        ("folder", "(is a directory): give another --out"),
        ("other.json", "is no calibration ("),
    ):
        code, out, err = run("fit", FIG_7A, "--out", str(own / name))
        assert (code, out) == (2, "")
        assert sentence in err
    assert (own / "other.json").read_text() == "[1]"


def test_claims_say_what_they_rest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from leanbench.paper.claims import claims

    chosen = tuple(claim for claim in claims() if claim.figure == "7a")
    monkeypatch.setattr("leanbench.paper.predicted.claims", lambda: chosen)
    code, out, err = run("claims", "--gpu", "a100-80gb")
    assert code == 0
    assert "nothing was measured" in err
    assert "not fitted to a100-80gb" in err
    content = json.loads(run("claims", "--json")[1])
    # Libraries are not predicted.
    own = [claim.words for claim in chosen if "FI" not in (claim.of, claim.over)]
    assert len(own) < len(chosen)
    assert [entry["words"] for entry in content] == own
    line = next(line for line in out.splitlines() if "LA over FA2 at 512k" in line)
    [over_fa2] = [entry for entry in content if entry["words"] == "LA over FA2 at 512k"]
    predicted, single_stage = over_fa2["predicted"], over_fa2["single_stage"]
    words = [
        "{value:.2f}x ({low:.2f} to {high:.2f})".format(**figure)
        for figure in (predicted, single_stage)
    ]
    _, after = line.split("2.46x")
    assert after.startswith(f"     {words[0]}  {over_fa2['verdict']}  ")
    assert words[1] in after
