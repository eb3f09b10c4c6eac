"""Links of GPUs that shared problems."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from example_runs import manifest, measured_rows

from leanbench.cli.document import show_document
from leanbench.gpu.topology import Pair
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


def shown(capsys: Capture, directory: Path) -> list[str]:
    """The page, the tables in Markdown, and what a terminal shows after the sweep."""
    written = [
        path.read_text(encoding="utf-8")
        for path in write_report(directory, directory, ["html", "markdown"])
    ]
    capsys.readouterr()
    show_document(facts(Results([read_run(directory)]), ENDING))
    return [*written, capsys.readouterr().out]


@pytest.mark.deep
def test_a_run_on_several_gpus_says_how_they_are_linked(write_run, capsys):
    texts = shown(capsys, write_run(measured_rows(), environments=several(PAIR)))
    assert [text.count(SENTENCE) for text in texts] == [1, 1, 1]
    assert all("GPU-a, GPU-b" in text for text in texts[:2])
    assert all("peer_access" not in text for text in texts)


BROKEN = asdict(PAIR) | {"nvlink": "no"}


@pytest.mark.deep
@pytest.mark.parametrize(
    "links", [None, deep([]), deep(5), "nonsense", deep([{}]), [{"first": 0}], [BROKEN]]
)
def test_a_run_without_links_says_nothing_of_them(write_run, capsys, links):
    environments = several()
    environments["env0"]["gpu_links"] = links
    texts = shown(capsys, write_run(measured_rows(), environments=environments))
    assert not any("peer access" in text or "NVLink" in text for text in texts)
