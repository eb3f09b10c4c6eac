"""Links of GPUs that shared problems."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from example_runs import WriteRun, manifest, measured_rows

from leanbench.cli.document import show_document
from leanbench.gpu.topology import Pair
from leanbench.records.boards import Board, difference
from leanbench.records.reading import read_run
from leanbench.report import write_report
from leanbench.report.facts import ENDING, facts
from leanbench.report.facts.results import Results

Capture = pytest.CaptureFixture[str]

PAIR = Pair(0, 1, True, True, 18, 478.116)
SENTENCE = "GPUs 0 and 1: 18 NVLinks, 478 GB/s one way, peer access."


def several(*pairs: Pair) -> dict[str, Any]:
    """The environment of an example run, of two GPUs."""
    own = manifest()["environments"]["env0"]
    links = [asdict(pair) for pair in pairs]
    names = {"gpu_products": ["NVIDIA H200"] * 2, "gpu_uuids": ["GPU-a", "GPU-b"]}
    return {"env0": own | names | {"gpu_links": links}}


def shown(capsys: Capture, directory: Path, *others: Path) -> list[str]:
    """The page, the tables in Markdown, and what a terminal shows after the sweep."""
    written = [
        path.read_text(encoding="utf-8")
        for path in write_report(directory, directory, ["html", "markdown"], others)
    ]
    capsys.readouterr()
    show_document(facts(Results([read_run(directory)]), ENDING))
    return [*written, capsys.readouterr().out]


@pytest.mark.deep
def test_a_run_on_several_gpus_says_how_they_are_linked(
    write_run: WriteRun, capsys: Capture
) -> None:
    texts = shown(capsys, write_run(measured_rows(), environments=several(PAIR)))
    assert [text.count(SENTENCE) for text in texts] == [1, 1, 1]
    assert all("GPU-a, GPU-b" in text for text in texts[:2])
    assert all("peer_access" not in text for text in texts)


@pytest.mark.deep
def test_many_pairs_alike_are_one_sentence(write_run: WriteRun, capsys: Capture) -> None:
    pairs = [Pair(0, 1, True, True, 18), Pair(0, 2, True, True, 18), Pair(1, 2, True, True, 18)]
    texts = shown(capsys, write_run(measured_rows(), environments=several(*pairs)))
    assert all("All pairs of GPUs: 18 NVLinks, peer access." in text for text in texts)


@pytest.mark.deep
def test_of_several_runs_each_has_its_own(write_run: WriteRun, capsys: Capture) -> None:
    first = write_run(measured_rows(), environments=several(PAIR))
    other = write_run(measured_rows(), folder="other")
    html, markdown, _ = shown(capsys, first, other)
    assert html.count(SENTENCE) == markdown.count(SENTENCE) == 1


BROKEN = asdict(PAIR) | {"nvlink": "no"}


@pytest.mark.deep
@pytest.mark.parametrize(
    "links", [None, deep([]), deep(5), "nonsense", deep([{}]), [{"first": 0}], [BROKEN]]
)
def test_a_run_without_links_says_nothing_of_them(
    write_run: WriteRun, capsys: Capture, links: Any
) -> None:
    environments = several()
    environments["env0"]["gpu_links"] = links
    texts = shown(capsys, write_run(measured_rows(), environments=environments))
    assert not any("peer access" in text or "NVLink" in text for text in texts)


def board(**environment: Any) -> Board:
    return Board("measured", {"name": "h200", "product": "NVIDIA H200"}, environment)


def test_links_that_differ_are_other_boards() -> None:
    first = board(gpu_uuids=["a", "b"], gpu_links=[asdict(PAIR)])
    assert difference(first, board(gpu_uuids=["c", "d"], gpu_links=[asdict(PAIR)])) is None
    # A part of a run may have no row of several GPUs.
    assert difference(first, board()) is None
    found = difference(first, board(gpu_links=[asdict(Pair(0, 1, True, False))]))
    assert found is not None
    assert found.phrase.startswith("gpu_links is [{'first': 0")
    assert found.mixable
