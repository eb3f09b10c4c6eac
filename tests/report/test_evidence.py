"""Evidence behind the documents: those of this checkout, and what is said of made-up ones."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from example_runs import manifest, problem, row
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.configs.fingerprint import shipped_settings_hash
from leanbench.core.errors import UserError
from leanbench.core.paths import KERNELS
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.records.environment import kernels_hash
from leanbench.records.reading import Run
from leanbench.records.row import Row
from leanbench.records.samples import SAMPLES, Samples, pack
from leanbench.report.evidence.documents import Evidence
from leanbench.report.evidence.faults import faults
from leanbench.report.evidence.pages import evidence_page
from leanbench.report.evidence.places import FOLDERS, name_of, place_of
from leanbench.report.evidence.query import FORMATS, Figures
from leanbench.report.evidence.scatter import Point, scatter
from leanbench.report.evidence.sources import Source, boards_of
from leanbench.report.evidence.writing import differing, write, write_pages

H200, H100 = find("h200"), find("h100")
AGAIN = "run `leanbench evidence --write`"
SHORT, LONG = problem(1024), problem(65536)
OTHER = problem(65536, kv_layout="NHD")
#: lean, fa2 and cudnn take so many us.
LATENCIES = {SHORT: (10.0, 12.0, 11.0), LONG: (200.0, 400.0, 190.0), OTHER: (100.0, None, 104.0)}
SCHEDULES = {
    ("lean", SHORT): "equal splits",
    ("lean", LONG): "stream-K",
    ("lean", OTHER): "stream-K",
}
DECLARED = """
own = ["lean", "fa2"]
[seeds]
[sets]
[pages]
[words]
[by_hand]
[purposes]
mine = "what is measured"
[records]
[figures]
mean = "{mine: geomean libraries/lean}"
[tables.all]
title = "all"
run = "mine"
[tables.all.columns]
context = "{context}"
"`lean`" = "lean"
"`fa2`" = "fa2"
over = "fa2/lean"
"""
README = """# Mine

<!-- table: all -->
old
<!-- end -->

It is <!-- figure: mean -->7x<!-- end --> ([run](reports/h200/mine)).
"""
TABLE = """<!-- table: all -->
| context | `lean` | `fa2` | over |
|---|---|---|---|
| 1k | 10.00 | 12.00 | 1.20x |
| 64k | 200.0 | 400.0 | 2.00x |
| 64k | 100.0 |  |  |

Run: [mine](reports/h200/mine), 2026-01-02, one NVIDIA H200, {kernels}. \
An empty cell: the kernel does not take it, or was not run.
<!-- end -->
"""


class Checkout:
    """A checkout with a kernel, a run of it, a README and a declaration."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("kernels", "docs", "reports/h200/mine"):
            (root / folder).mkdir(parents=True)
        (root / "kernels" / "mine.cu").write_text("kernel")
        (root / "README.md").write_text(README)
        self.declare(DECLARED)
        self.run()

    def declare(self, text: str) -> None:
        (self.root / "reports" / "evidence.toml").write_text(text)

    def run(
        self,
        rows: Iterable[dict[str, Any]] | None = None,
        sweep: dict[str, Any] | None = None,
        **changed: str | None,
    ) -> None:
        """Writes the run `mine`, of the kernels and settings as they are but for what `changed`
        says of its environment.
        """
        environment = {
            "gpu_product": "NVIDIA H200",
            "gpu_uuid": "GPU-1",
            "kernels": kernels_hash(self.root / "kernels"),
            "settings": shipped_settings_hash(H200),
        }
        whole = manifest(
            gpu=asdict(H200),
            environments={"env0": environment | changed},
            id="a1",
            sweep=sweep or {"configs": "default"},
            cells=[line["cell"] for line in measured_rows()],
        )
        folder = self.root / "reports" / "h200" / "mine"
        (folder / "manifest.json").write_text(json.dumps(whole))
        taken = list(rows or measured_rows())
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in taken))
        members = [
            pack(
                Samples(cell=line["cell"], samples_us=[us, us, us + 1], rounds=[], sm_clock_mhz=[])
            )
            for line in taken
            if (us := line.get("latency_us"))
        ]
        (folder / SAMPLES).write_bytes(b"".join(members))

    def also_on_an_h100(self) -> Path:
        """Copies the run to the folder of the H100, as if it had been measured there; that."""
        of_h200, of_h100 = (self.root / "reports" / gpu for gpu in ("h200", "h100"))
        shutil.copytree(of_h200 / "mine", of_h100 / "mine")
        path = of_h100 / "mine" / "manifest.json"
        whole = json.loads(path.read_text())
        whole["gpu"] = asdict(H100)
        whole["environments"]["env0"] |= {
            "gpu_product": H100.product,
            "gpu_uuid": "GPU-2",
            "settings": shipped_settings_hash(H100),
        }
        path.write_text(json.dumps(whole))
        return of_h100

    def evidence(self) -> Evidence:
        return Evidence(self.root)

    def readme(self) -> str:
        return self.evidence().rendered()["README.md"]


def measured_rows() -> list[dict[str, Any]]:
    return [
        row(shape, kernel, latency_us, run_id="a1", schedule=SCHEDULES.get((kernel, shape)))
        if latency_us
        else row(shape, kernel, status="unsupported", reason="not taken", run_id="a1")
        for shape, latencies in LATENCIES.items()
        for kernel, latency_us in zip(("lean", "fa2", "cudnn"), latencies, strict=True)
    ]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_documents_are_to_the_byte_what_their_runs_make_of_them() -> None:
    """And say of every run that is of other kernels or settings that it is."""
    evidence = Evidence(KERNELS.parent)
    assert list(differing(evidence)) == [], AGAIN
    assert faults(evidence) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # Of records, which no run replaces.
        ("ping-pong-unit", "0.63"),
        ("ping-pong-torch", "0.71, 0.94 and 1.31"),
        ("ping-pong-way", "0.6 to 0.8"),
        ("generate-before", "1.025x, 1.034x, 1.014x, 1.150x and 1.131x"),
        ("crosscheck-triton", "1.1% at most above 20 us, 0.17 us below"),
        ("grid-ok", "1610"),
        ("grid-noisy", "7"),
        ("sustained-triton", "218.0 µs against 213.8"),
        ("floor-triton-fa2", "1.27 to 1.31"),
        ("compare-twin", "20 same, differences 0.05%"),
        ("compare-processes", "30 same, differences 0.09%"),
        ("plan-flashinfer", "70.3 µs and plans 110"),
        ("peer-calls", "1010"),
        ("memory-graphs", "25.1"),
    ],
)
def test_figures_of_records_are_what_their_logs_say(name: str, text: str) -> None:
    evidence = Evidence(KERNELS.parent)
    published = evidence.published("figure", name)
    assert (published.text, evidence.state(published.sources)) == (text, "record")


def test_every_library_took_refused_or_missed_each_drawn_problem() -> None:
    text = Evidence(KERNELS.parent).published("table", "serving-libraries").text
    *libraries, (_, problems, *_) = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]
    ]
    assert {name: sum(map(int, counts[:3])) for name, *counts in libraries} == dict.fromkeys(
        ("FlashAttention-3", "FlashInfer", "cuDNN"), int(problems)
    )


@pytest.mark.parametrize(
    ("parallel", "boards"), [({}, "one H200"), ({"parallel": "cp:2"}, "2 H200s")]
)
def test_a_trace_is_of_the_gpus_that_share_its_problem(
    tmp_path: Path, parallel: dict[str, str], boards: str
) -> None:
    traced = {"problem": problem().to_dict() | parallel, "environment": {"gpu_product": "H200"}}
    assert boards_of([Source("trace", tmp_path, "", (), (), traced)]) == boards


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("peers", "reports/h200/peers"),
        ("check/fuzz.txt", "reports/h200/check/fuzz.txt"),
        ("h100/peers", "reports/h100/peers"),
        ("h100/check/fuzz.txt", "reports/h100/check/fuzz.txt"),
        # No folder is named so.
        ("h100-pcie/peers", "reports/h200/h100-pcie/peers"),
    ],
)
def test_a_name_says_where_a_run_or_log_lies(name: str, place: str) -> None:
    assert place_of(name).as_posix() == place
    assert name_of(Path(place)) == name


def test_what_lies_in_no_folder_of_a_gpu_has_no_name() -> None:
    for place in ("reports/evidence.toml", "reports/h100-pcie/peers", "../reports/h200/peers"):
        assert not name_of(Path(place))
    assert {find(folder.name).name: folder for folder in FOLDERS.values()} == FOLDERS


def test_boards_of_several_products_are_counted_apart(tmp_path: Path) -> None:
    def on(product: str, *uuids: str) -> Source:
        boards = {uuid: {"gpu_product": product, "gpu_uuid": uuid} for uuid in uuids}
        return Source("run", tmp_path, "", (), (), {"environments": boards})

    h200, h100 = on("NVIDIA H200", "a"), on("NVIDIA H100 80GB HBM3", "b")
    assert boards_of([h200, h100]) == "one NVIDIA H200, one NVIDIA H100 80GB HBM3"
    assert boards_of([h200, on("NVIDIA H200", "c", "a"), h100]) == (
        "2 NVIDIA H200s, one NVIDIA H100 80GB HBM3"
    )
    traced = {"problem": problem().to_dict() | {"parallel": "cp:2"}}
    trace = Source("t", tmp_path, "", (), (), traced | {"environment": {"gpu_product": "H200"}})
    assert boards_of([trace, h100]) == "2 H200s, one NVIDIA H100 80GB HBM3"


def test_tables_and_figures_are_made_from_the_rows(checkout: Checkout) -> None:
    made = checkout.readme()
    kernels = kernels_hash(checkout.root / "kernels")
    assert TABLE.format(kernels=f"kernels {kernels}") in made
    # (1.1 x 0.95 x 1.04) ** (1 / 3)
    assert "It is <!-- figure: mean -->1.03x<!-- end --> ([run](reports/h200/mine)).\n" in made


OF_TWO_GPUS = (
    DECLARED.replace("[sets]", '[sets]\nboth = ["mine", "h100/mine"]')
    .replace("[records]", '"h100/mine" = "the same on an H100"\n[records]')
    .replace("{mine: geomean", "{h100/mine: geomean")
    .replace('run = "mine"', 'run = "both"')
)


def test_runs_of_a_second_gpu_have_its_name_links_and_index(checkout: Checkout) -> None:
    write(checkout.evidence())
    assert "What each run is there for: [reports/h200](../reports/h200/README.md).\n" in (
        (checkout.root / "docs" / "evidence.md").read_text()
    )
    folder = checkout.also_on_an_h100()
    checkout.declare(OF_TWO_GPUS)
    (checkout.root / "docs" / "guide.md").write_text(
        "<!-- table: all -->\n<!-- end -->\n\n([run](../reports/h100/mine/results.jsonl))\n"
    )
    (checkout.root / "README.md").write_text(README.replace("h200", "h100"))
    assert sorted(write(checkout.evidence())) == [
        "README.md",
        "docs/evidence.md",
        "docs/guide.md",
        "reports/h100/README.md",
        "reports/h200/README.md",
    ]
    assert differing(checkout.evidence()) == {}
    assert faults(checkout.evidence()) == []
    kernels = kernels_hash(checkout.root / "kernels")
    both = "one NVIDIA H200, one NVIDIA H100 80GB HBM3"
    caption = f"2026-01-02, {both}, kernels {kernels}."
    (readme, guide, page) = (
        (checkout.root / name).read_text()
        for name in ("README.md", "docs/guide.md", "docs/evidence.md")
    )
    assert f"\nRuns: [mine](reports/h200/mine), [h100/mine](reports/h100/mine), {caption}" in readme
    links = "[mine](../reports/h200/mine), [h100/mine](../reports/h100/mine)"
    assert f"\nRuns: {links}, {caption}" in guide
    indexes = "[reports/h200](../reports/h200/README.md), [reports/h100](../reports/h100/README.md)"
    assert f"\nWhat each run is there for: {indexes}.\n" in page
    readme_of = "| [README.md](../README.md)"
    assert f"| **all** {readme_of} | {links} | 2026-01-02 | {both} | {kernels} | current |" in page
    linked = "[h100/mine](../reports/h100/mine) | 2026-01-02 | one NVIDIA H100 80GB HBM3"
    assert f"| mean {readme_of} | {linked} | {kernels} | current |" in page
    assert f"| [docs/guide.md](guide.md) | {linked} | {kernels} | current |" in page
    h100, h200 = ((folder.with_name(gpu) / "README.md").read_text() for gpu in ("h100", "h200"))
    assert h100.startswith("# Runs and logs on the H100\n")
    row_of_h100 = "| [h100/mine](mine) | the same on an H100 | 2026-01-02 | one NVIDIA H100 80GB"
    assert row_of_h100 in h100
    assert "| [README.md](../../README.md), [docs/guide.md](../../docs/guide.md) |" in h100
    assert "(../h200" not in h100
    assert "model/" not in h100
    assert h200.startswith("# Runs and logs on the H200\n")
    assert "| [mine](mine) | what is measured | 2026-01-02 | one NVIDIA H200 |" in h200
    assert "h100/mine" not in h200


def test_runs_of_the_performance_model_have_a_part_in_the_index_of_their_gpu(
    checkout: Checkout,
) -> None:
    folder = checkout.also_on_an_h100()
    (folder / "model").mkdir()
    (folder / "mine").rename(folder / "model" / "mine")
    write(checkout.evidence())
    index = (folder / "README.md").read_text()
    assert "\n## Runs of the performance model\n\n`model/` has the runs of Triton kernels" in index
    assert "\n| [h100/model/mine](model/mine) | " in index
    assert "\n## Runs\n" not in index


def test_a_log_is_held_against_the_settings_of_the_gpu_of_its_folder(checkout: Checkout) -> None:
    kernels = kernels_hash(checkout.root / "kernels")
    settings = {gpu.name: shipped_settings_hash(gpu) for gpu in (H200, H100)}
    checkout.also_on_an_h100()
    for gpu in ("h200", "h100"):
        folder = checkout.root / "reports" / gpu / "check"
        folder.mkdir()
        for name, own in settings.items():
            (folder / f"{name}.txt").write_text(f"kernels {kernels}, settings {own}, 2026-01-03")
    sources = checkout.evidence().sources
    names = ("check/h200.txt", "check/h100-sxm.txt")
    assert [sources.state(sources[name]) for name in names] == ["current", "other settings"]
    of_h100 = [sources.state(sources[f"h100/{name}"]) for name in names]
    assert of_h100 == ["other settings", "current"]
    assert sources.state(sources["h100/mine"]) == "current"


def test_what_is_wrong_in_the_folder_of_a_second_gpu_is_named_with_it(checkout: Checkout) -> None:
    folder = checkout.also_on_an_h100()
    (folder / "mine" / SAMPLES).unlink()
    (folder / "other.svg").write_text("<svg/>")
    (folder / "log.txt").write_text("all passed")
    checkout.declare(
        OF_TWO_GPUS.replace("[records]", '"h100/gone" = "away"\n[records]\nold = ["h100/lost"]')
    )
    wrong = faults(checkout.evidence())
    assert [fault for fault in wrong if "no samples" not in fault] == [
        "reports/h100/log.txt: say in [purposes] what it is there for, or delete it",
        "[purposes] has h100/gone, which is not under reports/h100: leave it out",
        "[records] has h100/lost, which is not under reports/h100: leave it out",
        "reports/h100/other.svg is not in [pictures]: declare or delete it",
        "reports/h100/gone is quoted by no document: delete it, or name the file that uses it",
    ]
    lacking = [fault for fault in wrong if "no samples" in fault]
    assert len(lacking) == 8
    assert lacking[0].startswith("reports/h100/mine: b1 h56 n1024 d64 fp16 HND lean has no")
    checkout.declare(OF_TWO_GPUS.replace("geomean libraries/lean", "/took/"))
    with pytest.raises(UserError, match="there is no log reports/h100/mine"):
        checkout.readme()
    checkout.declare(OF_TWO_GPUS.replace('run = "both"', 'run = "h100/gone"'))
    with pytest.raises(UserError, match="there is no run or log reports/h100/gone"):
        checkout.readme()


def test_pages_pictures_and_patterns_may_be_of_a_second_gpu(checkout: Checkout) -> None:
    folder = checkout.also_on_an_h100()
    kernels = kernels_hash(checkout.root / "kernels")
    (folder / "log.txt").write_text(f"kernels {kernels}\ntook 7 us")
    pages = OF_TWO_GPUS.replace("[pages]", '[pages]\n"h100/report.html" = ["h100/mine"]')
    asked = pages.replace("h100/mine: geomean libraries/lean", "h100/log.txt: /took ([0-9]+)/")
    drawn = SCATTER.replace("all.svg", "h100/all.svg").replace("mine", "h100/mine")
    checkout.declare(asked.replace("[records]", '"h100/log.txt" = "a log"\n[records]') + drawn)
    links = "![all](reports/h100/all.svg)\n[page](reports/h100/report.html)\n"
    (checkout.root / "README.md").write_text(README + links)
    assert write_pages(checkout.evidence()) == ["reports/h100/report.html"]
    assert "reports/h100/all.svg" in write(checkout.evidence())
    assert "3 problems" in (folder / "all.svg").read_text()
    assert faults(checkout.evidence()) == []
    assert "It is <!-- figure: mean -->7<!-- end -->" in checkout.readme()
    (checkout.root / "kernels" / "mine.cu").write_text("faster kernel")
    assert checkout.readme().endswith(
        "![all](reports/h100/all.svg) (older kernels)\n"
        "[page](reports/h100/report.html) (older kernels)\n"
    )


CLAIMS = (
    DECLARED
    + """
[tables.claims]
title = "claims"
claims = "mine"
rows = ["7a: LA over FA2 at 512k"]
"""
)


def test_a_table_of_the_papers_claims_has_a_column_for_each_baseline(checkout: Checkout) -> None:
    shape = problem(512 * 1024)
    latencies = {"lean": 100.0, "fa2": 180.0, "fixed_split": 101.0, "torch_flash_no_split": 500.0}
    checkout.run([row(shape, kernel, us, run_id="a1") for kernel, us in latencies.items()])
    checkout.declare(CLAIMS)
    (checkout.root / "README.md").write_text(
        "<!-- table: claims -->\n<!-- end -->\n\nIt is <!-- figure: mean --><!-- end -->."
    )
    figures = CLAIMS.replace("geomean libraries/lean", "verdicts fa2")
    checkout.declare(figures)
    made = checkout.readme()
    library, own = "`torch_flash_no_split`, `torch_flash`", "`fa2`, `fixed_split`"
    assert f"| figure | claim | paper | with {library} | with {own} |\n" in made
    cells = ("more: 5.00x (4.90 to 5.10)", "less: 1.80x (1.76 to 1.84)")
    assert f"| 7a | LA over FA2 at 512k | 2.46x | {' | '.join(cells)} |\n" in made
    # And that of FlashDecoding over FlashAttention-2.
    assert made.endswith("It is <!-- figure: mean -->2 less<!-- end -->.")
    checkout.declare(figures.replace("LA over FA2 at 512k", "LA over FA2 at 1k"))
    with pytest.raises(UserError, match="no run of the table has the claim '7a: LA over FA2 at 1k"):
        checkout.readme()
    checkout.declare(figures.replace("verdicts fa2", "verdicts fa4"))
    with pytest.raises(UserError, match="no baseline of the paper is 'fa4', choose from"):
        checkout.readme()


def test_a_change_of_the_kernels_makes_documents_stale_and_writing_says_so(
    checkout: Checkout,
) -> None:
    assert sorted(write(checkout.evidence())) == [
        "README.md",
        "docs/evidence.md",
        "reports/h200/README.md",
    ]
    assert differing(checkout.evidence()) == {}
    (checkout.root / "kernels" / "mine.cu").write_text("faster kernel")
    assert "README.md" in differing(checkout.evidence())
    write(checkout.evidence())
    made = (checkout.root / "README.md").read_text()
    assert TABLE.format(kernels="**older kernels**") in made
    assert made.endswith("1.03x<!-- end --> ([run](reports/h200/mine) (older kernels)).\n")
    assert differing(checkout.evidence()) == {}
    # Measured again, the words go.
    checkout.run()
    assert "older kernels" not in checkout.readme()


def test_settings_that_a_sweep_did_not_look_up_do_not_matter(checkout: Checkout) -> None:
    checkout.run(None, {"configs": "best"}, settings=None)
    sources = checkout.evidence().sources
    assert sources.state(sources["mine"]) == "current"


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"kernels": "000000000000"}, "older kernels"),
        ({"kernels": None}, "older kernels"),
        ({"settings": "000000000000"}, "other settings"),
        ({"settings": None}, "other settings"),
    ],
)
def test_a_run_is_current_with_these_kernels_and_the_shipped_settings_alone(
    checkout: Checkout, changed: dict[str, str | None], state: str
) -> None:
    sources = checkout.evidence().sources
    assert sources.state(sources["mine"]) == "current"
    checkout.run(None, None, **changed)
    sources = checkout.evidence().sources
    assert sources.state(sources["mine"]) == state


def test_a_log_is_current_by_the_kernels_in_its_head(checkout: Checkout) -> None:
    kernels = kernels_hash(checkout.root / "kernels")
    folder = checkout.root / "reports" / "h200" / "check"
    folder.mkdir()
    (folder / "silent.txt").write_text("all passed")
    (folder / "named.txt").write_text(f"NVIDIA H200, kernels {kernels}, 2026-01-03\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "summary.txt").write_text(f"Kernels of this tree: {kernels}\n")
    (folder / "late.txt").write_text("." * 5000 + f"kernels {kernels}")
    differ = "they differ in kernels: {} → {}\n"
    (folder / "compared.txt").write_text(differ.format("0123456789ab", kernels))
    (folder / "back.txt").write_text(differ.format(kernels, "0123456789ab"))
    sources = checkout.evidence().sources
    states = {name: sources.state(sources[f"check/{name}"]) for name in ("silent.txt", "late.txt")}
    assert states == {"silent.txt": "older kernels", "late.txt": "older kernels"}
    assert sources.state(sources["check/parts/summary.txt"]) == "current"
    assert sources.state(sources["check/compared.txt"]) == "current"
    assert sources.state(sources["check/back.txt"]) == "older kernels"
    named = sources["check/named.txt"]
    assert (sources.state(named), named.date, named.kernels) == (
        "current",
        "2026-01-03",
        (kernels,),
    )


def test_no_figure_is_a_negative_nought() -> None:
    assert [FORMATS["more"](ratio) for ratio in (0.9997, 0.998)] == ["0.0%", "-0.2%"]


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("fa2/lean where n64k HND", "2.00x"),
        ("fa2/lean where n64k HND as more", "100.0%"),
        ("lean where n1k as 0", "10"),
        ("min libraries/lean as x3", "0.950x"),
        ("argmin libraries/lean", "1 x 56 x 64k x 64"),
        ("max cudnn,fa2/lean", "1.10x"),
        ("max others/lean", "1.10x"),
        ("count libraries/lean >= 1", "2"),
        ("share libraries/lean >= 1", "67%"),
        ("count lean where !NHD", "2"),
        ("count lean where n6*", "2"),
        ("count lean where !n6*", "1"),
        ("count lean where lean=stream-K", "2"),
        ("lean where lean=equal-*", "10.00"),
        ("count lean where !lean=equal-*", "2"),
        ("mean fa2/lean", "1.60x"),
        ("lean with kv_layout=NHD where n64k HND", "100.0"),
        # Either side may be another problem's row, not the one that it is compared with.
        ("lean/lean with kv_layout=NHD where n64k", "2.00x"),
        ("lean with kv_layout=NHD/lean where n64k", "0.50x"),
        ("count lean/lean with kv_layout=NHD", "1"),
        # 14.7 and 940 MB.
        ("geomean fa2/lean where ..100MB", "1.20x"),
        ("count lean where 100MB..", "2"),
        ("count lean where 56tiles..", "3"),
        ("count lean where 56..57tiles n2k..", "2"),
        ("count lean where n1k..64k", "1"),
        ("problems", "3"),
        ("ended unsupported fa2", "1"),
        ("ended ok", "8"),
        ("interval", "1.00%"),
        ("ran *split* lean", "0"),
        ("schedules lean", "stream-K 2, equal splits 1"),
        ("boards", "1"),
        ("date", "2026-01-02"),
    ],
)
def test_queries(checkout: Checkout, query: str, answer: str) -> None:
    checkout.declare(DECLARED.replace("geomean libraries/lean", query))
    assert checkout.evidence().published("figure", "mean").text == answer


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        # 500 us for the prompt of 1000 tokens, 100 tokens of 10 and of 20 us.
        ("lean.request_us where n1050 h32", "1500"),
        ("fa2.request_us/lean.request_us where n1050", "1.67x"),
        ("lean.request_us where n1000", "500.0"),
        ("count lean.request_us", "2"),
    ],
)
def test_a_request_is_its_prompt_and_its_output(query: str, answer: str) -> None:
    prompt, step = (
        AttentionProblem(1, 32, 32, context, 128, whole_model="opt-6.7b")
        for context in (1000, 1050)
    )
    apart = AttentionProblem(1, 32, 8, 1050, 128, whole_model="llama-3-8b")
    rows = [
        (Row.model_validate(row(prompt, "lean", 9.0, prefill_us=500.0)), prompt),
        (Row.model_validate(row(step, "lean", 10.0)), step),
        (Row.model_validate(row(step, "fa2", 20.0)), step),
        (Row.model_validate(row(apart, "lean", 30.0)), apart),
    ]
    figures = Figures((Run(Path("runs/mine"), manifest(), tuple(rows)),), ("lean",))
    assert figures.answer(query) == answer


@pytest.mark.parametrize(("query", "answer"), [("libraries/lean", "1.20x"), ("others", "12.00")])
def test_the_bound_of_whole_models_is_no_library(query: str, answer: str) -> None:
    took = {"lean": 10.0, "no_attention": 8.0, "sdpa": 12.0}
    rows = [(Row.model_validate(row(SHORT, name, us)), SHORT) for name, us in took.items()]
    figures = Figures((Run(Path("runs/mine"), manifest(), tuple(rows)),), ("lean",))
    assert figures.answer(query) == answer


def test_the_fastest_by_the_cross_check_may_be_another_library() -> None:
    took = {"lean": (10.0, 10.0), "fa4": (12.0, 11.5), "cudnn": (13.0, 11.0)}
    rows = [
        (Row.model_validate(row(SHORT, name, us, crosscheck_us=other)), SHORT)
        for name, (us, other) in took.items()
    ]
    figures = Figures((Run(Path("runs/mine"), manifest(), tuple(rows)),), ("lean",))
    assert figures.answer("libraries/lean") == "1.20x"
    assert figures.answer("libraries.crosscheck_us/lean.crosscheck_us") == "1.10x"
    (at,) = figures.problems
    assert figures.cell("name libraries", at) == "fa4"
    assert figures.cell("name libraries.crosscheck_us", at) == "cudnn"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("fa2/lean", "'fa2/lean' has 2 answers (b1 h56 n1024 d64 fp16 HND, b1 h56 n65536 d64"),
        ("geomean gone/lean", "no timed row answers 'geomean gone/lean'"),
        ("the best of fa2", "'the best of fa2' is no query"),
        ("min fa2.latency", "a row has no field 'latency', did you mean 'latency_us'?"),
        ("min fa2/lean as y", "format 'y' is not known, choose from us, ms, x"),
    ],
)
def test_a_query_without_an_answer_is_a_sentence(
    checkout: Checkout, query: str, words: str
) -> None:
    checkout.declare(DECLARED.replace("geomean libraries/lean", query))
    with pytest.raises(UserError) as error:
        checkout.evidence().published("figure", "mean")
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("/took ([0-9.]+) us/", "7"),
        ("/took ([0-9.]+) us/ as 1", "7.0"),
        ("median /took ([0-9.]+) us/ as 1", "11.5"),
        ("max /took ([0-9.]+) us/", "40.00"),
        ("/and ([0-9]+)/s/ as MB", "12 MB"),
        ("/and ([0-9]+)/ as GB", "0.01 GB"),
    ],
)
def test_a_pattern_asks_a_log_or_a_file_of_a_run(
    checkout: Checkout, query: str, answer: str
) -> None:
    folder = checkout.root / "reports" / "h200"
    log = "took 7 us\ntook 11.5 us\ntook 40 us and 12000000/s\n"
    for name in ("log.txt", "mine/trace.json"):
        (folder / name).write_text(log)
        checkout.declare(DECLARED.replace("{mine: geomean libraries/lean}", f"{{{name}: {query}}}"))
        published = checkout.evidence().published("figure", "mean")
        assert published.text == answer
        assert [source.name for source in published.sources] == [name.partition("/")[0]]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("gone.txt: /took ([0-9]+)/", "there is no log reports/h200/gone.txt"),
        ("mine: /took ([0-9]+)/", "there is no log reports/h200/mine"),
        ("log.txt: /took ([0-9]+) s/", "log.txt has no line like 'took ([0-9]+) s': mend the pat"),
        ("log.txt: most /took ([0-9]+)/", "verb 'most' is not known, choose from geomean, mean"),
        ("log.txt: /took ([0-9]+ us)/ as us", "log.txt: 'took ([0-9]+ us)' finds more than number"),
        ("log.txt: max /took ([0-9]+ us)/", "log.txt: 'took ([0-9]+ us)' finds more than number"),
        ("log.txt: /took ([0-9]+)/ as y", "format 'y' is not known, choose from us, ms, x"),
        ("mine: interval nosuch", "'interval nosuch' finds no row of kernel 'nosuch': the runs"),
        (
            "mine: crosscheck nosuch",
            "'crosscheck nosuch' finds no row with a cross-check of kernel",
        ),
        ("mine: crosscheck", "'crosscheck' finds no row with a cross-check of any kernel: the"),
    ],
)
def test_a_pattern_without_an_answer_is_a_sentence(
    checkout: Checkout, query: str, words: str
) -> None:
    (checkout.root / "reports" / "h200" / "log.txt").write_text("took 7 us")
    checkout.declare(DECLARED.replace("mine: geomean libraries/lean", query))
    with pytest.raises(UserError) as error:
        checkout.evidence().published("figure", "mean")
    assert str(error.value).startswith(words)


def test_facts_of_intervals_cross_checks_and_what_ran(checkout: Checkout) -> None:
    rows = [
        row(SHORT, "lean", 10.0, run_id="a1", crosscheck_us=10.25, gpu_kernels=["lean_1", "split"]),
        row(LONG, "lean", 200.0, run_id="a1", crosscheck_us=198.0, latency_ci_low_us=195.0),
        row(OTHER, "fa2", 100.0, run_id="a1", crosscheck_us=103.0, gpu_kernels=["split"]),
        row(OTHER, "lean", status="unsupported", reason="not taken", run_id="a1"),
    ]
    checkout.run(rows)
    figures = {
        "interval": "2.50%",
        "interval fa2": "1.00%",
        "crosscheck": "3.0% at most above 20 us, 0.25 us below",
        "crosscheck lean": "1.0% at most above 20 us, 0.25 us below",
        "crosscheck fa2": "3.0% at most above 20 us",
        "ran spl* lean": "1",
        "ran lean* fa2": "0",
    }
    for query, answer in figures.items():
        checkout.declare(DECLARED.replace("geomean libraries/lean", query))
        assert checkout.evidence().published("figure", "mean").text == answer


def test_a_table_can_be_of_what_is_behind_the_worst_first(checkout: Checkout) -> None:
    behind = """
[tables.all]
title = "behind"
run = "mine"
only = "libraries/lean < 1.1"
sort = "libraries/lean"
[tables.all.columns]
problem = "{size}, {layout}"
over = "libraries/lean"
by = "name libraries"
schedule = "name lean.schedule"
"""
    checkout.declare(DECLARED[: DECLARED.index("[tables.all]")] + behind)
    made = checkout.readme()
    assert (
        "| 1 x 56 x 64k x 64, HND | 0.95x | cudnn | stream-K |\n| 1 x 56 x 64k x 64, NHD | 1.04x |"
        in made
    )
    assert "1k" not in made


PICTURE = """
[pictures."mine/chart.svg"]
title = "Chart"
below = "of two problems"
run = "mine"
where = "HND"
x = ["context", "context"]
y = "us"
limits = ["half"]
[pictures."mine/chart.svg".lines]
lean = "lean"
half = "lean.read_floor_share"
"""


def test_pictures_are_drawn_again_with_their_run(checkout: Checkout) -> None:
    checkout.declare(DECLARED + PICTURE)
    path = checkout.root / "reports" / "h200" / "mine" / "chart.svg"
    assert "reports/h200/mine/chart.svg" in write(checkout.evidence())
    drawn = path.read_text()
    # Two places, 10 and 200 of 200 us over 202 pixels; the limit has no marks.
    assert 'points="245.5,297.9 612.5,106.0"' in drawn
    assert drawn.count("<circle") == 2
    assert drawn.count("stroke-dasharray") == 2
    assert [f">{place}<" in drawn for place in ("1k", "64k")] == [True, True]
    assert [f">{level}<" in drawn for level in ("200", "0.2")] == [True, False]
    checkout.declare(DECLARED + PICTURE.replace('y = "us"', 'y = "ms"\ndivisor = 1000'))
    write(checkout.evidence())
    in_ms = path.read_text()
    assert 'points="245.5,297.9 612.5,106.0"' in in_ms
    assert [f">{level}<" in in_ms for level in ("200", "0.2")] == [False, True]
    checkout.run([row | {"latency_us": 20.0} for row in measured_rows() if "latency_us" in row])
    assert "reports/h200/mine/chart.svg" in differing(checkout.evidence())
    path.with_name("other.svg").write_text("<svg/>")
    assert "reports/h200/mine/other.svg is not in [pictures]: declare or delete it" in faults(
        checkout.evidence()
    )


SCATTER = """
[pictures."all.svg"]
title = "Speed"
below = "{mine: problems} problems"
run = "mine"
x = "KV cache"
y = "speed"
ratio = "cudnn/lean"
colour = "name libraries"
[pictures."all.svg".names]
cudnn = "cuDNN"
"""


def test_a_scatter_chart_has_a_point_for_each_ratio(checkout: Checkout) -> None:
    checkout.declare(DECLARED + SCATTER)
    path = checkout.root / "reports" / "h200" / "all.svg"
    assert "reports/h200/all.svg" in write(checkout.evidence())
    drawn = path.read_text()
    # From 14.7 to twice 940 MB; 1.1, 0.95 and 1.04 between 0.9 and 1.1.
    points = re.findall(r'<circle cx="([0-9.]+)" cy="([0-9.]+)" r="3.4"', drawn)
    assert points == [("78.0", "106.0"), ("780.0", "253.6"), ("780.0", "162.5")]
    shown = ("3 problems", "cuDNN (3)", "20 MB", "500 MB", "0.9x", "1x", "1.1x")
    assert [words for words in shown if f">{words}<" not in drawn] == []
    assert ">10 MB<" not in drawn
    # A picture is no log: it needs no purpose. A link to it is one to its run.
    assert faults(checkout.evidence()) == []
    (checkout.root / "kernels" / "mine.cu").write_text("faster kernel")
    readme = checkout.root / "README.md"
    readme.write_text(f"{README}\n![all](reports/h200/all.svg)\n")
    assert checkout.readme().endswith("\n![all](reports/h200/all.svg) (older kernels)\n")
    readme.write_text(README)
    (checkout.root / "kernels" / "mine.cu").write_text("kernel")
    checkout.declare(DECLARED)
    assert faults(checkout.evidence()) == [
        "reports/h200/all.svg is not in [pictures]: declare or delete it"
    ]


@pytest.mark.parametrize(
    ("others", "levels", "beyond"),
    [
        ([5.07], ["0.9x", "1.6x"], ["5.07x"]),
        # The second is no outlier once the first is gone.
        ([3.02, 1.7], ["0.9x", "1.8x"], ["3.02x"]),
        ([5.07, 0.1], ["0.8x", "1.6x"], ["5.07x", "0.10x"]),
        # Three of 43 are more than a few.
        ([5.07, 5.1, 5.2], ["0.8x", "6x"], []),
        ([], ["0.9x", "1.5x"], []),
    ],
)
def test_a_few_points_far_out_do_not_stretch_a_scatter_chart(
    others: list[float], levels: list[str], beyond: list[str]
) -> None:
    ratios = [0.93 + 0.013 * number for number in range(40)] + others
    points = [Point(10**5 * (1 + place), ratio, "x") for place, ratio in enumerate(ratios)]
    drawn = scatter("title", "below", "x", "y", points)
    shown = re.findall(r'text-anchor="end">([0-9.]+x)<', drawn)
    ticks = [words for words in shown if words not in beyond]
    assert [ticks[0], ticks[-1]] == levels
    assert re.findall(r"<path", drawn) == ["<path"] * len(beyond)
    assert [words for words in beyond if f">{words}<" not in drawn] == []
    assert len(re.findall(r'<circle [^>]* r="3.4"', drawn)) == len(ratios) - len(beyond)


def test_of_few_points_none_is_far_out() -> None:
    points = [Point(10**6, 1.1, "x"), Point(10**7, 1.2, "x"), Point(10**8, 9.0, "x")]
    assert "<path" not in scatter("title", "below", "x", "y", points)


def test_a_page_made_before_a_run_in_it_is_a_fault(checkout: Checkout) -> None:
    checkout.declare(DECLARED.replace("[pages]\n", '[pages]\n"report.html" = ["mine"]\n'))
    page = checkout.root / "reports" / "h200" / "report.html"
    page.write_text("mine, 2026-01-02 03:04 UTC")
    assert not [fault for fault in faults(checkout.evidence()) if "lacks" in fault]
    page.write_text("mine, 2026-01-01 03:04 UTC")
    lacking = "reports/h200/report.html lacks mine of 2026-01-02 03:04: run `leanbench evidence"
    assert [fault for fault in faults(checkout.evidence()) if fault.startswith(lacking)]
    assert write_pages(checkout.evidence()) == ["reports/h200/report.html"]
    assert not [fault for fault in faults(checkout.evidence()) if "lacks" in fault]
    assert "h56 n65536 d64" in page.read_text()


def test_noise_is_marked_in_cells_and_ratios(checkout: Checkout) -> None:
    rows = measured_rows()
    rows[1] |= {"status": "noisy", "reason": "the interval is wide"}
    checkout.run(rows)
    checkout.declare(DECLARED.replace("geomean libraries/lean", "ended noisy fa2"))
    assert "| 1k | 10.00 | 12.00\\* | 1.20x\\* |" in checkout.readme()
    assert "It is <!-- figure: mean -->1<!-- end -->" in checkout.readme()
    assert "\\*: timed with noise." in checkout.readme()


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ("| a | 1.20x |\n", "README.md: a figure typed into a table, '| a | 1.20x |'"),
        ("| a | **1.20** |\n", "README.md: a figure typed into a table, '| a | **1.20** |'"),
        ("| a | 92% | b |\n", "README.md: a figure typed into a table, '| a | 92% | b |'"),
        ("| a | 1,605 us |\n", "README.md: a figure typed into a table, '| a | 1,605 us |'"),
        ("It is 1.39x as fast.\n", "README.md: a figure typed into a sentence, '1.39x'"),
        ("The kernels as they are win.\n", "README.md says 'kernels as they are'"),
        ("<!-- figure: mean -->1.03x<!-- end --> is it.\n", "README.md: a line that starts"),
        ("- It\n  <!-- figure: mean -->1.03x<!-- end --> is.\n", "README.md: a line that starts"),
    ],
)
def test_what_writing_cannot_mend_is_a_fault(checkout: Checkout, added: str, fault: str) -> None:
    readme = checkout.root / "README.md"
    assert faults(checkout.evidence()) == []
    readme.write_text(f"{README}\n{added}")
    [sentence] = faults(checkout.evidence())
    assert sentence.startswith(fault)


@pytest.mark.parametrize(
    ("sentence", "figure"),
    [
        ("It is 1.39x as fast.", "1.39x"),
        ("It costs 1,605.5 us.", "1,605.5 us"),
        ("It reads 4.7 TB/s.", "4.7 TB/s"),
        ("Errors are up to 4.6%.", "4.6%"),
        ("It is ahead on 259 of the 287.", "259 of the 287"),
        ("It took 0.96 to 1.08 times as long.", "1.08 times"),
        ("It is 5% of <!-- typed: rule -->7% or\n9%<!-- end --> here.", "5%"),
        ("A marker <!-- typed: rule --> that does not end, 5%.", "5%"),
        (
            "4 x 40 x 1k, 132 SMs, 42 MB, 0.6.13, 1 of `mine` <!-- figure: mean -->7x<!-- end -->",
            None,
        ),
        ("A 95% interval, `--ci 1%`, [a run](runs/5%).\n\n    in 5 ms\n\n```sh\n5x\n```", None),
    ],
)
def test_a_figure_typed_into_a_sentence_is_a_fault(
    checkout: Checkout, sentence: str, figure: str | None
) -> None:
    checkout.declare(f"{DECLARED}\n[typed]\nrule = 'the code sets it'\n")
    text = f"# Guide\n\n{sentence}\n\nA row is noisy above <!-- typed: rule -->0.5%<!-- end -->.\n"
    (checkout.root / "docs" / "guide.md").write_text(text)
    (checkout.root / "CHANGELOG.md").write_text("It is 1.39x as fast now.\n")
    wanted = (
        f"docs/guide.md: a figure typed into a sentence, {figure!r}: make it from a run, or put"
        " `<!-- typed: REASON -->` and `<!-- end -->` around it, with a reason of [typed]"
    )
    assert faults(checkout.evidence()) == ([wanted] if figure else [])


@pytest.mark.parametrize(
    ("passage", "fault"),
    [
        ("<!-- typed: goal -->5%<!-- end -->", "typed 'goal' is not in [typed], choose from rule"),
        ("<!-- typed: rule -->five<!-- end -->", "'five' has no figure: leave the markers around"),
        (
            "\n<!-- typed: rule -->5%<!-- end -->",
            "a line that starts with a marker is shown as HTML",
        ),
    ],
)
def test_a_typed_figure_has_a_reason_of_the_declaration(
    checkout: Checkout, passage: str, fault: str
) -> None:
    checkout.declare(f"{DECLARED}\n[typed]\nrule = 'the code sets it'\n")
    guide = checkout.root / "docs" / "guide.md"
    guide.write_text(f"# Guide\n\nIt is <!-- typed: rule -->0.5%<!-- end -->, {passage}.\n")
    [sentence] = faults(checkout.evidence())
    assert sentence.startswith(f"docs/guide.md: {fault}")
    typed = "| rule | the code sets it | [docs/guide.md](guide.md) |"
    assert typed in evidence_page(checkout.evidence())
    guide.write_text("# Guide\n")
    assert faults(checkout.evidence()) == [
        "[typed] has rule, for which no document has a figure: leave it out"
    ]


def test_a_stale_figure_without_its_run_beside_it_is_a_fault(checkout: Checkout) -> None:
    readme = checkout.root / "README.md"
    readme.write_text(f"{README}\nSo <!-- figure: mean -->1.03x<!-- end -->.\n")
    assert faults(checkout.evidence()) == []
    (checkout.root / "kernels" / "mine.cu").write_text("faster kernel")
    write(checkout.evidence())
    assert faults(checkout.evidence()) == [
        "README.md: figure mean is of older kernels: link its run beside it"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # 10 us, with samples of 10, 10 and 11: what rounding hides in a document.
        ({"latency_us": 10.001}, "b1 h56 n1024 d64 fp16 HND lean is not the median of its samples"),
        (None, "b1 h56 n1024 d64 fp16 HND lean has no row, cells after it have"),
    ],
)
def test_a_row_that_was_changed_or_taken_out_is_a_fault(
    checkout: Checkout, change: dict[str, float] | None, words: str
) -> None:
    first, *others = measured_rows()
    assert faults(checkout.evidence()) == []
    rows = others if change is None else [first | change, *others]
    path = checkout.root / "reports" / "h200" / "mine" / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert faults(checkout.evidence()) == [f"reports/h200/mine: {words}: put it back"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("reports/evidence.toml", DECLARED.replace('["lean", "fa2"]', "3"), "own is 3, not a list"),
        (
            "reports/evidence.toml",
            DECLARED.replace("[seeds]", "[seeds]\n7 = 3"),
            "seeds 7 is 3, not text",
        ),
        ("reports/h200/mine/manifest.json", "{", "manifest.json is no manifest (no JSON at"),
        ("reports/h200/mine/manifest.json", "[]", "manifest.json is no manifest (it is no object)"),
        ("README.md", b"\xff", "README.md is not UTF-8 text: mend it"),
    ],
)
def test_a_damaged_file_is_a_sentence(
    checkout: Checkout, file: str, content: str | bytes, words: str
) -> None:
    whole = content if isinstance(content, bytes) else content.encode()
    (checkout.root / file).write_bytes(whole)
    with pytest.raises(UserError) as error:
        checkout.readme()
    assert words in str(error.value)


def test_damaged_or_lacking_samples_are_faults(checkout: Checkout) -> None:
    path = checkout.root / "reports" / "h200" / "mine" / SAMPLES
    path.unlink()
    timed = [line["cell"] for line in measured_rows() if "latency_us" in line]
    assert faults(checkout.evidence()) == [
        f"reports/h200/mine: {cell} has no samples: put them back" for cell in timed
    ]
    path.write_bytes(gzip.compress(b"{}"))
    assert faults(checkout.evidence()) == [
        "reports/h200/mine/samples.jsonl.gz is damaged: put it back"
    ]


def test_every_run_is_declared_and_quoted(checkout: Checkout) -> None:
    folder = checkout.root / "reports" / "h200"
    (folder / "log.txt").write_text("all passed")
    checkout.declare(
        DECLARED.replace("[records]", 'gone = "away"\n[records]').replace(
            "[figures]", '[figures]\nunused = "1"'
        )
    )
    assert faults(checkout.evidence()) == [
        "reports/h200/log.txt: say in [purposes] what it is there for, or delete it",
        "[purposes] has gone, which is not under reports/h200: leave it out",
        "figure unused is in no document: leave its declaration out",
        "reports/h200/gone is quoted by no document: delete it, or name the file that uses it",
    ]


def test_a_record_is_not_marked_in_documents_and_is_counted_apart(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout.root / "reports" / "h200" / "log.txt").write_text("kernels 000000000000")
    readme = checkout.root / "README.md"
    readme.write_text(f"{README}\nChosen [by it](reports/h200/log.txt).\n")
    purposes = DECLARED.replace("[records]", '"log.txt" = "trials"\n[records]')
    checkout.declare(purposes)
    assert checkout.readme().endswith("Chosen [by it](reports/h200/log.txt) (older kernels).\n")
    checkout.declare(purposes.replace("[records]", '[records]\n"a choice" = ["log.txt"]'))
    assert checkout.readme().endswith("Chosen [by it](reports/h200/log.txt).\n")
    assert faults(checkout.evidence()) == []
    log = "[log.txt](../reports/h200/log.txt)"
    page = evidence_page(checkout.evidence())
    assert (
        f"| [README.md](../README.md) | {log} | not recorded |  | 000000000000 | record |" in page
    )
    assert page.endswith(f"| reason | run or log |\n|---|---|\n| a choice | {log} |\n")
    monkeypatch.setattr("leanbench.cli.evidence.KERNELS", checkout.root / "kernels")
    lines = CliRunner().invoke(app, ["evidence"]).output.splitlines()
    assert "3 of 3 are current; records: 1." in lines


@pytest.mark.parametrize(
    ("declared", "shown"),
    [
        (DECLARED, "README.md: figure mean"),
        (DECLARED + PICTURE, "picture mine/chart.svg"),
        (DECLARED.replace("[pages]", '[pages]\n"report.html" = ["mine"]'), "page report.html"),
    ],
)
def test_a_record_is_there_and_shown_as_no_result(
    checkout: Checkout, declared: str, shown: str
) -> None:
    records = '[records]\n"a choice" = ["gone", "mine"]'
    checkout.declare(declared.replace("[records]", records))
    about = [fault for fault in faults(checkout.evidence()) if "[records]" in fault]
    assert about == [
        "[records] has gone, which is not under reports/h200: leave it out",
        f"[records] has mine, which {shown} shows as a result: leave it out",
    ]


def test_a_record_that_is_declared_as_shown_has_figures_and_counts_as_one(
    checkout: Checkout,
) -> None:
    shown = DECLARED.replace("[records]", '[records]\n"a choice" = ["mine"]')
    write(checkout.evidence())
    checkout.declare('shown_records = ["mine"]\n' + shown)
    evidence = checkout.evidence()
    assert not [fault for fault in faults(evidence) if "records" in fault]
    assert {evidence.state(quote.sources) for quote in evidence.quotes} == {"record"}
    assert ", 2026-01-02, one NVIDIA H200, **record**." in checkout.readme()
    checkout.declare('shown_records = ["mine", "gone"]\n' + DECLARED)
    about = [fault for fault in faults(checkout.evidence()) if "shown_records" in fault]
    assert about == [
        f"shown_records has {name}, which is no record that is shown: leave it out"
        for name in ("mine", "gone")
    ]


@pytest.mark.parametrize(
    ("seeds", "run_ids", "words"),
    [
        ('7 = "{kernels} {settings}"', ("a1",), "yes"),
        ('7 = "tuning"', ("a1",), "no: in sample, settings were chosen on the problems of seed 7"),
        ('7 = "0123456789ab"', ("a1",), "no: seed 7 was used before, with 0123456789ab"),
        (
            '7 = "{kernels} 0123456789ab"',
            ("a1",),
            "no: seed 7 was used before, with {kernels} 0123456789ab",
        ),
        ('7 = "{kernels} {settings}"', ("a1", "b2"), "no: rows of 2 runs"),
        ('7 = "{kernels} {settings}"', (None,), "not shown: rows without a run id"),
    ],
)
def test_held_out_is_said_of_a_fresh_seed_and_rows_of_one_run_alone(
    checkout: Checkout, seeds: str, run_ids: tuple[str | None, ...], words: str
) -> None:
    rows = measured_rows()
    for number, line in enumerate(rows):
        line["run_id"] = run_ids[number % len(run_ids)]
    checkout.run(rows, {"draw": {"seed": 7}})
    hashes = {
        "kernels": kernels_hash(checkout.root / "kernels"),
        "settings": shipped_settings_hash(H200),
    }
    listed = seeds.format(**hashes)
    checkout.declare(DECLARED.replace("[seeds]\n", f"[seeds]\n{listed}\n"))
    page = evidence_page(checkout.evidence())
    state = words.format(**hashes)
    assert f"| current | {state}" in page
    # Whoever publishes it all the same is refused.
    quotes = ("table all", "figure mean") if state != "yes" else ()
    assert faults(checkout.evidence()) == [
        f"README.md: {quote} is of mine, held out: {state}: draw from a new seed, or say that it is"
        " in sample"
        for quote in quotes
    ]
    checkout.declare(DECLARED)
    assert "reports/h200/mine was drawn from seed 7: add it to [seeds]" in faults(
        checkout.evidence()
    )


@pytest.mark.parametrize(
    ("drawn_from", "kernels", "date", "state"),
    [
        ("sample", "older", "2026-01-01", "no: in sample, runs of earlier kernels have 2 of the"),
        # Kernels that came after it were not chosen on its problems.
        ("sample", "newer", "2026-01-03", "yes"),
        ("sample", None, "2026-01-01", "yes"),
        ("draw", "older", "2026-01-01", "yes"),
    ],
)
def test_a_new_seed_makes_no_new_problems_of_a_grid(
    checkout: Checkout, drawn_from: str, kernels: str | None, date: str, state: str
) -> None:
    """`kernels` of another run with two of the problems; None: the same as of the drawn one."""
    rows = [line | {"run_id": "a1"} for line in measured_rows()]
    checkout.run(rows, {drawn_from: {"seed": 7}})
    own = kernels_hash(checkout.root / "kernels")
    seeds = f'7 = "{own} {shipped_settings_hash(H200)}"'
    checkout.declare(DECLARED.replace("[seeds]\n", f"[seeds]\n{seeds}\n"))
    other = checkout.root / "reports" / "h200" / "other"
    shutil.copytree(other.with_name("mine"), other)
    whole = json.loads((other / "manifest.json").read_text())
    whole["created"] = f"{date}T03:04:05Z"
    whole["sweep"] = {}
    whole["environments"]["env0"]["kernels"] = kernels or own
    (other / "manifest.json").write_text(json.dumps(whole))
    shared = [line for line in rows if line["problem"] != OTHER.to_dict()]
    (other / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shared))

    evidence = checkout.evidence()
    assert evidence.held_out(evidence.sources["mine"]).startswith(state)

    def untold() -> list[str]:
        return [fault for fault in faults(checkout.evidence()) if "held out: " in fault]

    assert len(untold()) == (0 if state == "yes" else 2)
    (checkout.root / "README.md").write_text(README.replace("It is", "It is, in sample,"))
    assert untold() == []


def test_rows_of_all_shards_of_a_merged_run_are_of_one_run(checkout: Checkout) -> None:
    rows = measured_rows()
    for number, line in enumerate(rows):
        line["run_id"] = ("b1", "b2")[number % 2]
    checkout.run(rows, {"draw": {"seed": 7}})
    hashes = f"{kernels_hash(checkout.root / 'kernels')} {shipped_settings_hash(H200)}"
    listed = f'7 = "{hashes}"'
    checkout.declare(DECLARED.replace("[seeds]\n", f"[seeds]\n{listed}\n"))
    assert "| current | no: rows of 2 runs |" in evidence_page(checkout.evidence())
    path = checkout.root / "reports" / "h200" / "mine" / "manifest.json"
    merged = {"merged": [{"id": "b1"}, {"id": "b2"}]}
    path.write_text(json.dumps(json.loads(path.read_text()) | merged))
    assert "| current | yes |" in evidence_page(checkout.evidence())


def test_the_command_lists_writes_and_answers_whether_all_is_well(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*flags: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(app, ["evidence", *flags])
        return result.exit_code, result.output.splitlines()

    monkeypatch.setattr("leanbench.cli.evidence.KERNELS", checkout.root / "kernels")
    code, lines = answer()
    assert code == 1
    assert "3 of 3 are current; records: 0." in lines
    assert lines[-1] == "reports/h200/README.md is not as `leanbench evidence --write` makes it"
    written = ["README.md", "docs/evidence.md", "reports/h200/README.md"]
    assert answer("--write") == (0, written)
    assert answer()[0] == 0
    (checkout.root / "reports" / "evidence.toml").unlink()
    code, [sentence] = answer()
    assert code == 2
    assert sentence.endswith("`leanbench evidence` runs in a checkout of leanbench")
