import json
import re
from pathlib import Path

import pytest
from cli.running import printed

import leanbench
from leanbench.core.axes import AXES
from leanbench.core.lengths import DISTRIBUTIONS, traces
from leanbench.core.llm.model import models
from leanbench.core.registry import kernels
from leanbench.gpu.catalogue import CATALOGUE
from leanbench.records.row import Row
from leanbench.report.columns import ROW_COLUMNS
from leanbench.run.sweep_file import shipped_sweeps


def first_words(what: str) -> list[str]:
    # The heading and its rule come first, and wrapped lines start with spaces; what is not
    # installed comes last.
    lines = printed("list", what).partition("─\n")[2].splitlines()
    table = [line for line in lines if "is not installed here" not in line]
    return [line.split()[0] for line in table if re.match(r"\S", line)]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("sweeps", shipped_sweeps),
        ("axes", lambda: [axis.flag for axis in AXES.values()]),
        ("quantities", lambda: [column.name for column in ROW_COLUMNS]),
        ("lengths", lambda: [*DISTRIBUTIONS, *traces()]),
        ("models", models),
        ("gpus", lambda: [gpu.name for gpu in CATALOGUE]),
    ],
)
def test_list_names_everything(what, names):
    assert first_words(what) == list(names())


def test_the_project_s_own_kernels_are_listed_first():
    names = first_words("kernels")
    assert (names[0], sorted(names)) == ("lean", sorted(kernels()))


def test_names_and_figures_are_whole_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", 60)
    for what, names in (
        ("gpus", {gpu.name for gpu in CATALOGUE}),
        ("models", set(models())),
        ("kernels", set(kernels())),
        ("quantities", {column.name for column in ROW_COLUMNS}),
    ):
        lines = printed("list", what).splitlines()
        assert {line.split()[0] for line in lines if line.strip()} >= names
        assert "…" not in "".join(lines)
        assert max(len(line) for line in lines if " is not " not in line) <= 60
    assert {"1.555", "a100-sxm4-80gb"} <= {*printed("list", "gpus").split()}


def test_models_are_listed_with_their_figures():
    text = printed("list", "models")
    lines = text.splitlines()
    [gemma] = [line for line in lines if line.startswith("gemma-3-12b")]
    assert gemma.split() == [
        *"gemma-3-12b 16/8 256 48 40: window_left 1023 google/gemma-3-12b-it".split()
    ]
    [at] = [number for number, line in enumerate(lines) if line.startswith("llama-3-8b")]
    assert lines[at].split() == [
        *("llama-3-8b", "32/8", "128", "32"),
        "yes",  # of `leanbench decode`
        "meta-llama/Meta-Llama-3-8B",
    ]
    assert lines[at + 1].split() == ["llama-3.1-8b"]


def test_names_that_people_copy_stay_in_one_piece_at_100_columns(monkeypatch):
    monkeypatch.setattr("leanbench.cli.output.PIPED_COLUMNS", 100)
    hub = {name for model in models().values() for name in (model.config.hub, *model.config.also)}
    for what, whole in (
        ("kernels", {*kernels(), "scaled_dot_product_attention", "flash_attn_with_kvcache,"}),
        ("models", {*(model.name for model in models().values()), *hub}),
    ):
        text = printed("list", what)
        assert "…" not in text
        assert {*text.replace(";", " ").split()} >= whole


def test_what_cannot_run_here_is_said_below_the_table(monkeypatch):
    monkeypatch.setattr(
        type(kernels()["flashinfer"]), "unavailable_reason", lambda self: f"{self.name} is absent"
    )
    [line] = [line for line in printed("list", "kernels").splitlines() if "is absent" in line]
    names, _, reason = line.partition(": ")
    assert ("flashinfer" in names.split(", "), reason) == (True, "is absent")


def test_sweeps_are_listed_with_their_cells():
    lines = printed("list", "sweeps").splitlines()
    assert any(line.split()[:2] == ["paper-fig7a", "60"] for line in lines)


def test_version():
    assert printed("--version") == f"leanbench {leanbench.__version__}\n"


def test_quantities_are_documented_as_they_are_declared():
    printed_ = printed("list", "quantities", "--format", "markdown")
    file = Path(__file__).parents[2] / "docs" / "quantities.md"
    # `leanbench list quantities --format markdown >docs/quantities.md` mends it.
    assert file.read_text(encoding="utf-8") == printed_


def test_quantities_are_a_json_schema():
    fields = json.loads(printed("list", "quantities", "--format", "json"))["properties"]
    assert list(fields) == list(Row.model_fields)
    assert (fields["latency_us"]["unit"], fields["latency_us"]["heading"]) == ("us", "latency")
