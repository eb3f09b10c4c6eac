import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanbench.core.errors import UserError
from leanbench.gpu.catalogue import find
from leanbench.model import known_error, short_error
from leanbench.model.calibration import (
    SHIPPED,
    Calibration,
    Errors,
    RunErrors,
    calibration_for,
    read_calibration,
    to_json,
    user_file,
    write_calibration,
)
from leanbench.model.constants import Constants
from leanbench.model.error import model_error

H200, A100 = find("h200"), find("a100")


def made(gpu: str, **constants: Any) -> Calibration:
    errors = Errors(10, 0.02, 0.05, 0.1)
    seen = ("head_dim 64", "kv_layout HND")
    kinds = ("grid", "checked", "latency")
    run = RunErrors(*kinds, errors, {"lean_cuda": errors}, 5, 4, {"gpu": "GPU-1"}, seen)
    return Calibration(gpu, Constants(**constants), (run,), "0.1.0", "2026-11-21T00:00:00+00:00")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path))
    return tmp_path


def test_where_the_user_s_own_are(monkeypatch, tmp_path):
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "here"))
    assert user_file("h200") == tmp_path / "here" / "models" / "h200.json"
    monkeypatch.setenv("LEANBENCH_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_file("h200").parent == tmp_path / "data" / "leanbench" / "models"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_file("h200").parent == tmp_path / ".local" / "share" / "leanbench" / "models"


def test_what_is_written_is_read(own):
    calibration = made("l4", tile_us=0.7)
    path = own / "deep" / "l4.json"
    write_calibration(calibration, path)
    assert read_calibration(path) == calibration
    written = json.loads(path.read_text())["constants"]["tile_us"]
    assert written.pop("meaning").startswith("one CTA's arithmetic for a LeanTile")
    assert written == {"value": 0.7, "unit": "us", "fitted": "latency"}
    assert list(path.parent.iterdir()) == [path]


def test_own_before_shipped_before_nearest(own):
    shipped = calibration_for(H200)
    assert (shipped.path, shipped.is_scaled) == (SHIPPED / "h200.json", False)
    scaled = calibration_for(A100)
    assert (scaled.calibration, scaled.is_scaled) == (shipped.calibration, True)
    write_calibration(made("h200", tile_us=0.9), user_file("h200"))
    assert calibration_for(H200).constants.tile_us == 0.9
    assert calibration_for(A100).constants.tile_us == 0.9
    # The same generation is nearer than a similar bandwidth, the own GPU nearest.
    write_calibration(made("a100-40gb", tile_us=0.4), user_file("a100-40gb"))
    assert calibration_for(A100).constants.tile_us == 0.4
    assert calibration_for(H200).constants.tile_us == 0.9
    write_calibration(made("a100-80gb", tile_us=0.3), user_file("a100-80gb"))
    assert calibration_for(A100).constants.tile_us == 0.3
    assert not calibration_for(A100).is_scaled


def broken(change: dict[str, object], drop: str = "", **constants: object) -> str:
    content = to_json(made("h200"))
    content["constants"] |= constants
    content["constants"].pop(drop, None)
    return json.dumps({**content, **change})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is no calibration (no JSON at column 2"),
        ("[]", "is no calibration (a table in it is none)"),
        (broken({"constants": [1]}), "is no calibration (a table in it is none)"),
        (broken({"constants": {"tile_us": 3}}), "is no calibration (a table in it is none)"),
        (broken({"schema_version": 1}), "schema version 1, this leanbench reads 3"),
        (broken({}, drop="tile_us"), "constants without a value: tile_us"),
        (broken({}, tile_us={"value": "x"}), "tile_us"),
        (broken({}, tile_us={"value": -1}), "tile_us is -1"),
        (broken({"runs": [{"run": "r"}]}), "runs.0.role: Field required"),
        (broken({"gpu": "h300"}), "there is no GPU 'h300'"),
    ],
)
def test_a_damaged_file_is_named_passed_over_and_kept(own, text, fault):
    path = user_file("h200")
    path.parent.mkdir()
    path.write_text(text)
    in_use = calibration_for(H200)
    assert in_use.path == SHIPPED / "h200.json"
    [note] = in_use.notes
    assert str(path) in note
    assert fault in note
    assert note in known_error("h200")
    assert calibration_for(A100).notes == ()
    with pytest.raises(UserError, match="is no calibration"):
        write_calibration(made("h200"), path)
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*give another --out"):
        write_calibration(made("h200"), tmp_path / "file" / "h200.json")


def test_the_sentence_beside_a_prediction(own):
    write_calibration(made("h200"), user_file("h200"))
    words = (
        "Model error on h200: lean_cuda 2.0% in the median, 5.0% at the 90th percentile (10 rows of"
        " grid), 10% at worst"
    )
    assert known_error("h200") == known_error("NVIDIA H200") == f"{words}."
    scaled = f"{words}; scaled from h200 and not fitted to"
    assert known_error("a100") == f"{scaled} a100-80gb."
    assert known_error("Imagined X1") == f"{scaled} Imagined X1."
    short = "Model error on h200, median and 90th percentile: lean_cuda 2.0% and 5.0%"
    assert short_error("h200", ["lean"]) == f"{short}. More in docs/model.md."
    assert short_error("h200-nvl", ["lean", "fa2"]) == (
        f"{short}; fa2_cuda unknown; scaled from h200 and not fitted to h200-nvl. More in"
        " docs/model.md."
    )


def test_the_error_is_that_of_the_kernel_that_runs_there(own):
    """`lean` is lean_cuda on an H200 and lean_triton on an A100."""
    write_calibration(made("h200"), user_file("h200"))
    assert known_error("h200", ["lean", "cudnn"]) == known_error("h200")
    # Their decompositions are known, their schedules are not.
    unpredicted = ["flash_attn_3", "flash_mla", "nccl_all_gather"]
    assert known_error("h200", ["lean", *unpredicted]) == known_error("h200")
    assert known_error("a100", ["lean", "fa2"]).startswith(
        "Model error on h200: lean_triton unknown; fa2_triton unknown; scaled"
    )
    assert model_error("h200", ["lean"]) == 0.05
    # Of a kernel that was never compared as much as of the worst.
    assert model_error("h200", ["lean", "fa2"]) == 0.05


def test_errors_of_rows_it_was_fitted_to_are_said_as_such(own):
    fitted = made("h200")
    runs = (replace(fitted.runs[0], role="fitted"),)
    write_calibration(replace(fitted, runs=runs), user_file("h200"))
    assert "(10 rows of grid, which it was fitted to)" in known_error("h200")
    assert "lean_cuda 2.0% and 5.0% of rows it was fitted to. " in short_error("h200")
    write_calibration(replace(fitted, runs=()), user_file("h200"))
    assert known_error("h200") == "Model error on h200: unknown."
