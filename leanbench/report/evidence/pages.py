"""Pages that are made from the declaration: docs/evidence.md and the index of each GPU's runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from leanbench.report.evidence.documents import Evidence, Quote, typed_passages
from leanbench.report.evidence.places import folder_of, link
from leanbench.report.evidence.sources import EVIDENCE, Source, boards_of

NOT_RECORDED = "not recorded"
_ORIGIN = ("measured", "on", "kernels")

_HEAD = """\
# Evidence

What the documents publish, and what each figure rests on. Written by `leanbench evidence --write`
from `reports/evidence.toml` and the runs; `leanbench evidence` shows the same with the number of
commits to `kernels/` since. A figure is *current* if its run was of the kernels as they are (by the
hash of all sources under `kernels/`) and of the tuned configs that ship; it has *other settings*
where these have changed since or were not recorded. A log that does not name its kernels in its
head is of *older kernels*. A *record* says nothing of the kernels as they are; the reasons are
below. *Held out*: [the rule](measuring.md#held-out-problems). A figure of a sentence is made from
its run, too, or is marked as typed, with a reason; in the performance log and the changelog, which
are history, it is not.

What each run is there for: {indexes}.
"""

_INDEX_HEAD = """\
# Runs and logs on the {gpu}

Written by `leanbench evidence --write`. Which figures of which documents are of them, and what the
states mean: [docs/evidence.md](../../docs/evidence.md). Commands are those that were given: records
may have options and kernels that are gone.
"""
_OF_MODEL = """\
## Runs of the performance model

`model/` has the runs of Triton kernels that the performance model was fitted to and is checked
with; no document quotes a kernel's speed from them.
"""


def evidence_page(evidence: Evidence) -> str:
    """docs/evidence.md."""
    published = [quote for quote in evidence.quotes if quote.kind != "link"]
    linked = [quote for quote in evidence.quotes if quote.kind == "link" and not quote.is_record]
    indexes = [f"[{each.as_posix()}](../{index_of(each)})" for each in evidence.sources.folders]
    return "\n".join(
        [
            _HEAD.format(indexes=", ".join(indexes)),
            "## Tables and figures\n",
            *_table(_published_lines(evidence, published)),
            "\n## Runs and logs that documents link\n",
            *_table(_linked_lines(evidence, linked)),
            "\n## Figures that are typed into sentences\n",
            *_table(_typed_lines(evidence)),
            "\n## Records\n",
            *_table(_record_lines(evidence)),
            "",
        ]
    )


def index_of(folder: Path) -> str:
    """The index of a GPU's folder."""
    return (folder / "README.md").as_posix()


def index_page(evidence: Evidence, folder: Path) -> str:
    """That index as it should be: runs behind the documents, those of the performance model, logs.
    A part that has none is left out.
    """
    there = evidence.sources.by_name.values()
    several = [source for source in there if folder_of(source.name) == folder]
    parts = {
        "## Runs\n": [source for source in several if source.is_run and not source.of_model],
        _OF_MODEL: [source for source in several if source.of_model],
        "## Logs\n": [source for source in several if not source.is_run],
    }
    texts = [_INDEX_HEAD.format(gpu=folder.name.upper())]
    for head, sources in parts.items():
        if sources:
            texts += [head, *_table(_index_lines(evidence, sources)), ""]
    return "\n".join(texts)


def _index_lines(evidence: Evidence, sources: Sequence[Source]) -> list[list[str]]:
    """A line for each, that of a run with its command."""
    lines = [["name", "what it stands for", *_ORIGIN, "state", "quoted in"]]
    lines += [_index_line(evidence, source) for source in sources]
    if not sources[0].is_run:
        return lines
    commands = ["command", *map(_command, sources)]
    return [[*line, command] for line, command in zip(lines, commands, strict=True)]


def _index_line(evidence: Evidence, source: Source) -> list[str]:
    documents = [
        quote.document
        for quote in evidence.quotes
        if source.name in {quoted.name for quoted in quote.sources}
    ]
    return [
        link(source.name, index_of(folder_of(source.name))),
        evidence.declared.purposes.get(source.name, ""),
        *_origin((source,)),
        evidence.sources.state(source),
        ", ".join(f"[{name}](../../{name})" for name in dict.fromkeys(documents)),
    ]


def _command(source: Source) -> str:
    """What makes a run again; empty for a merged one, whose shards have commands."""
    command = source.manifest.get("command")
    return f"`{command}`" if command else ""


def _published_lines(evidence: Evidence, quotes: Iterable[Quote]) -> list[list[str]]:
    """A line for each table, and for the figures of a document that are of the same runs."""
    lines = [["published", "in", "run or log", *_ORIGIN, "state", "held out"]]
    alike: dict[tuple[str, str, tuple[Source, ...]], list[str]] = {}
    for quote in quotes:
        is_table = quote.kind == "table"
        title = f"**{evidence.declared.tables[quote.name].title}**" if is_table else quote.name
        alike.setdefault((quote.document, quote.kind, quote.sources), []).append(title)
    for (document, _, of), titles in alike.items():
        lines.append(
            [
                _several(titles),
                *_where(document, of),
                evidence.state(of),
                _held_out_of_all(evidence, of),
            ]
        )
    return lines


def _held_out_of_all(evidence: Evidence, of: tuple[Source, ...]) -> str:
    """What holds for all of them, or which are held out beside grids, which are not."""
    states = [evidence.held_out(source) for source in of]
    if len(set(states)) == 1:
        return states[0]
    return ", ".join(
        f"{source.name}: {state}" for source, state in zip(of, states, strict=True) if state
    )


def _linked_lines(evidence: Evidence, quotes: Iterable[Quote]) -> list[list[str]]:
    lines = [["in", "run or log", *_ORIGIN, "state"]]
    lines += [
        [*_where(quote.document, quote.sources), evidence.state(quote.sources)] for quote in quotes
    ]
    return lines


def _record_lines(evidence: Evidence) -> list[list[str]]:
    return [
        ["reason", "run or log"],
        *([reason, _links(names)] for reason, names in evidence.declared.records.items()),
    ]


def _typed_lines(evidence: Evidence) -> list[list[str]]:
    """A line for each reason, and the documents that give it."""
    lines = [["reason", "what it means", "in"]]
    for reason, meaning in evidence.declared.typed.items():
        documents = [
            name for name in evidence.documents if reason in dict(typed_passages(evidence, name))
        ]
        lines.append([reason, meaning, _several(map(_to, documents))])
    return lines


def _where(document: str, of: tuple[Source, ...]) -> list[str]:
    links = _links(source.name for source in of)
    return [_to(document), links, *_origin(of)]


def _links(names: Iterable[str]) -> str:
    return ", ".join(link(name, EVIDENCE) for name in names)


def _origin(of: tuple[Source, ...]) -> tuple[str, str, str]:
    """Day, GPUs, kernels."""
    dates = _several(source.date for source in of)
    kernels = _several(hash_ for source in of for hash_ in source.kernels)
    return dates or NOT_RECORDED, boards_of(of), kernels or NOT_RECORDED


def _to(document: str) -> str:
    """A link from a page in docs."""
    in_docs = document.startswith("docs/")
    return f"[{document}]({document.removeprefix('docs/') if in_docs else f'../{document}'})"


def _several(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


def _table(lines: list[list[str]]) -> list[str]:
    head, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return [head, "|" + "---|" * len(lines[0]), *rows]
