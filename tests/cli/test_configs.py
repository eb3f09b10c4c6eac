"""`leanbench configs`: files of timings listed, shown, explained and moved."""

import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from cli.running import invoke, printed, refusal
from timed_examples import H200, LATENT, OTHERS_OF_LATENT, PROBLEM, RULES, SERVED, timed

from leanbench.configs import store
from leanbench.configs.store import read, save
from leanbench.core.files import FileFault
from leanbench.gpu.catalogue import find

LABEL = "h32/8 n4k d128"
SIGNATURE = "8 tiles d128 g4 2 B HND, 4096 tokens"


@pytest.fixture(autouse=True)
def empty(home: Path, no_gpu: None) -> None:
    """Start without a GPU and without timings."""


def lines(*words: str) -> list[str]:
    text = printed("configs", *words)
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


def refused(*words: str) -> str:
    return refusal("configs", *words)


def explained(*words: str) -> list[str]:
    return lines("explain", *" ".join(words).split())


def test_a_machine_without_timings(home, tmp_path):
    nothing = f"Nothing is tuned: run `leanbench tune`, it writes to {home / 'configs'}."
    assert lines("list") == [nothing]
    file = tmp_path / "out.json"
    for command in (["show", "h200"], ["export", "h200", str(file)]):
        assert refused(*command) == (
            "nothing is tuned for h200: run `leanbench tune` where it is, or `leanbench tune --gpu"
            " h200` for the model's choices"
        )
    assert refused("show", "mine") == (
        "nothing is tuned for a GPU 'mine': run `leanbench tune`, or import a file"
    )
    assert not file.exists()


def test_the_list_has_a_line_for_each_file():
    path = save(H200, [timed(10.0, 8.0), timed(9.0, problem=SERVED)])
    shipped = store.SHIPPED / "a100-80gb.json"
    save(find("a100"), [timed(10.0, time="2026-01-02")], path=shipped)
    (store.SHIPPED / "broken.json").write_text("{")
    result = invoke("configs", "list")
    assert [line.split() for line in result.stdout.splitlines() if "2026-" in line] == [
        ["h200", "yours", "2026-11-28", "2", "2", "3"],
        ["a100-80gb", "shipped", "2026-01-02", "1", "1", "1"],
    ]
    assert result.stdout.splitlines()[-2:] == [
        f"yours: {path.parent}",
        f"shipped: {shipped.parent}",
    ]
    assert f"! {store.SHIPPED}/broken.json is not a file of timings (" in result.stderr


def test_show_has_each_signature_with_its_gain():
    longer = dataclasses.replace(PROBLEM, context=4000)
    save(
        H200,
        [timed(10.0, 8.0), timed(12.0, 10.0, problem=longer), timed(5.0, objective="energy")],
        {"cluster": 1.5, "merge": 0.9},
    )
    shown = lines("show", "H200")
    assert shown[0] == "NVIDIA H200 (yours): cluster 1.50 us, merge 0.90 us"
    (energy,) = (line for line in shown if "(energy)" in line)
    (latency,) = (line for line in shown if line.startswith(SIGNATURE) and line != energy)
    assert latency == f"{SIGNATURE} 2 8.00, 10.00 +22.5%"
    assert shown[shown.index(latency) + 1].startswith("implementation=cuda tile_tokens=")
    assert energy == f"{SIGNATURE} (energy) 1 5.00 +0.0%"


def test_timings_of_latent_calls(tmp_path):
    label = "b11 h32/1 n431 d576 q2 dv512 bf16 latent --gpu h200"
    how, settings, signature, rules = explained(label)
    assert how == f"{LATENT.label} on NVIDIA H200: heuristic, nothing was timed here"
    assert settings == "min_tiles_per_cta=2 align_grid=True column_groups=4"
    words = "11 tiles d576 v512 g32 q2 2 B HND latent, 470 tokens"
    assert signature == f"signature: {words}"
    assert (
        rules == "Without timings rules choose the settings of this kernel, the model ranks none."
    )
    latent = timed(20.0, 16.0, problem=LATENT, configs=[RULES, OTHERS_OF_LATENT[-1]])
    save(H200, [timed(10.0, 8.0), latent])
    how, settings, *_ = explained(label)
    assert how.endswith(f"tuned, timed 2026-11-28 on NVIDIA H200, yours: {words}")
    assert settings == "min_tiles_per_cta=4 align_grid=True column_groups=4"
    shown = lines("show", "h200")
    assert shown[shown.index(f"{words} 1 16.00 +25.0%") + 1] == settings
    assert any("h200 yours 2026-11-28 2 2 4" in line for line in lines("list"))
    assert lines("export", "h200", str(tmp_path / "out.json"))[0].endswith("2 calls of NVIDIA H200")
    assert read(tmp_path / "out.json").calls()[1] == latent
    assert refused("explain", *label.split()[:-1], "a100").endswith("run it on a Hopper GPU")


def test_a_gpu_by_any_of_its_names():
    save(H200, [timed(10.0)])
    # Equal compute capability, SMs, L2 and bandwidth.
    for name in ("h200", "NVIDIA H200", "h200-sxm5", "h200-nvl"):
        assert lines("show", name)[0] == "NVIDIA H200 (yours)"
    assert refused("show", "h100").startswith("nothing is tuned for h100-sxm: run ")
    assert refused("show", "h200x") == "nothing is tuned for a GPU 'h200x', known: h200"
    assert refused("show", "h2-00") == "nothing is tuned for a GPU 'h2-00', did you mean 'h200'?"


def test_explain_has_the_source_of_the_settings():
    model, settings, signature, title, head, _, *candidates = explained(LABEL, "--gpu h200")
    assert model == f"{PROBLEM.label} on NVIDIA H200: heuristic, nothing was timed here"
    assert settings.startswith("implementation=cuda tile_tokens=")
    assert signature == f"signature: {SIGNATURE}"
    assert title == "candidates by predicted latency (us)"
    assert head == "total start memory warps ends merge settings"
    assert len(candidates) == 12
    totals = [float(line.split()[0]) for line in candidates]
    assert totals == sorted(totals)
    assert "tile 128/64/256, chunk" in candidates[0]
    save(H200, [timed(10.0, 8.0)])
    how, best, *_ = explained(LABEL, "--gpu h200")
    where = "tuned, timed 2026-11-28 on NVIDIA H200, yours"
    assert how == f"{PROBLEM.label} on NVIDIA H200: {where}: {SIGNATURE}"
    assert best != settings
    longer, *_ = explained("h32/8 n8k d128 --gpu h200")
    assert "heuristic, not timed here" in longer


def test_explain_of_lengths_on_the_device():
    _, settings, signature, _, _, _, first, *others = explained(
        "b8 h32/8 n3000 d128 p16 NHD bf16 device --gpu h200"
    )
    assert signature == "signature: 64 tiles d128 g4 2 B NHD p16, up to 4096"
    assert len(others) == 11
    chosen = dict(word.split("=") for word in settings.split())
    assert f"tile {chosen['tile_tokens']}, chunk {chosen['chunk_tokens']}, " in first


@pytest.mark.parametrize(
    ("words", "implementation", "has_candidates"),
    [
        (f"{LABEL} --gpu a100", "triton", False),
        (f"{LABEL} kv-e4m3 --gpu a100", "cuda", True),
        ("h32/1 n4k d128 q8 --gpu h200", "cuda", False),
    ],
)
def test_explain_of_other_kernels(words, implementation, has_candidates):
    _, settings, _, *rest = explained(words)
    assert settings.startswith(f"implementation={implementation} ")
    assert (len(rest) > 1) is has_candidates


def test_explain_refuses():
    assert "'h1000'" in refused("explain", *LABEL.split(), "--gpu", "h1000")
    assert refused("explain", "h8", "n4k", "--gpu", "h200").startswith(
        "problem 'h8 n4k' needs d (head_dim): "
    )
    assert "head_dim" in refused("explain", "h8", "n4k", "d520", "--gpu", "h200")


def test_an_exported_file_is_imported_again(home, tmp_path):
    shipped = timed(12.0, 7.0), timed(5.0, 4.0, problem=SERVED)
    save(H200, shipped, {"merge": 2.0}, store.SHIPPED / "h200.json")
    mine = save(H200, [timed(10.0, 8.0)], {"merge": 1.0, "cluster": 1.5})
    file = tmp_path / "out" / "mine.json"
    assert lines("export", "h200", str(file)) == [f"{file}: 2 calls of NVIDIA H200"]
    assert list(file.parent.iterdir()) == [file]
    exported = read(file)
    assert {call.problem: call for call in exported.calls()} == {
        PROBLEM: timed(10.0, 8.0),
        SERVED: shipped[1],
    }
    assert exported.constants == {"merge": 1.0, "cluster": 1.5}
    assert refused("export", "h200", str(file)) == (
        f"{file} is there already: remove it or choose another name"
    )
    mine.unlink()
    save(H200, [timed(3.0), timed(6.0, objective="energy")])
    assert lines("import", str(file)) == [f"{mine}: 2 calls of NVIDIA H200 imported"]
    assert [(call.objective, len(call.costs)) for call in read(mine).calls()] == [
        ("latency", 2),
        ("energy", 1),
        ("latency", 2),
    ]


def test_an_import_without_a_home_warns(tmp_path, monkeypatch):
    def no_home(*args: object, **more: object) -> Path:
        raise RuntimeError

    file = save(H200, [timed(10.0)], path=tmp_path / "out.json")
    assert "LEANBENCH_HOME" not in invoke("configs", "import", str(file)).stderr
    monkeypatch.delenv("LEANBENCH_HOME")
    monkeypatch.setattr(platformdirs, "user_data_path", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = invoke("configs", "import", str(file))
    assert result.exit_code == 0
    [warning] = [line for line in result.stderr.splitlines() if "LEANBENCH_HOME" in line]
    assert str(store.configs_folder() / "h200.json") in warning


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
def test_import_rejects_paths_without_a_file(path, fault):
    said = refused("import", path)
    # A terminal is not controlled.
    assert said.startswith(f"cannot read {path} (".replace("\x1b", r"\x1b"))
    assert fault in said


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"schema_version": 3}, "schema version 3, this leanbench reads 4"),
        ({"kernel": "fa2"}, "kernel 'fa2', timings are of 'lean'"),
        ({"constants": {"merge": 0}}, "constant merge is 0"),
        ({"constants": {"speed": 1.0}}, "constant speed is 1.0"),
        ({"calls": [{}]}, "a call has no signature"),
        # A file of that name would lie outside the folder.
        ({"gpu": {"name": "../../x"}}, "'../../x' is no GPU name"),
        ({"gpu": {"sms": 0}}, "gpu has a size out of range"),
    ],
)
def test_import_rejects_invalid_files(home, tmp_path, fields: Any, fault):
    file = save(H200, [timed(10.0)], path=tmp_path / "in.json")
    content = json.loads(file.read_text())
    if "gpu" in fields:
        fields = {"gpu": content["gpu"] | fields["gpu"]}
    file.write_text(json.dumps(content | fields))
    said = refused("import", str(file))
    assert said.startswith(f"{file} is not a file of timings ({fault}")
    assert said.endswith("): give a file that `leanbench configs export` of this version wrote")
    assert not home.exists()
    assert not list(tmp_path.parent.glob("**/x.json"))


def test_import_rejects_a_file_without_calls(home, tmp_path):
    file = save(H200, [], path=tmp_path / "in.json")
    assert refused("import", str(file)).startswith(f"{file} holds no timings: ")
    assert not home.exists()


@pytest.mark.parametrize("path", ["/proc/x.json", "/proc/no/x.json", "{file}/x.json"])
def test_an_export_that_cannot_be_written_says_to_choose_another_file(tmp_path, path):
    save(H200, [timed(10.0)])
    (tmp_path / "file").touch()
    path = path.format(file=tmp_path / "file")
    said = refused("export", "h200", path)
    assert said.startswith(f"cannot write {path} (")
    assert said.endswith("): choose a FILE in a folder that can be written")


def test_an_import_reads_a_pipe(home, tmp_path):
    """Import from /dev/stdin, and from a process substitution."""
    file = save(H200, [timed(10.0)], path=tmp_path / "in.json")
    reading, writing = os.pipe()
    os.write(writing, file.read_bytes())
    os.close(writing)
    result = invoke("configs", "import", f"/dev/fd/{reading}")
    os.close(reading)
    assert result.exit_code == 0
    assert read(home / "configs" / "h200.json").calls() == [timed(10.0)]


@pytest.mark.parametrize("kind", ["pipe", "broken"])
def test_import_overwrites_no_other_file(home, tmp_path, kind):
    file = save(H200, [timed(10.0)], path=tmp_path / "in.json")
    path = home / "configs" / "h200.json"
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        # It is not waited for.
        os.mkfifo(path)
        said = refused("import", str(file))
        assert "(it is no regular file): move it away, it is not over" in said
        assert invoke("configs", "list").exit_code == 0
        return
    path.write_text("mine")
    assert "move it away, it is not overwritten" in refused("import", str(file))
    assert path.read_text() == "mine"
