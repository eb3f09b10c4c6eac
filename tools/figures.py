"""Render documents with figures, and pictures, from their templates and the published runs.

    python tools/figures.py            # exit 1 if a document is not what its template makes
    python tools/figures.py --write    # write the documents

`docs/results.md.j2` makes `docs/results.md`, `reports/h200/serving.svg.j2` a picture. A template
calls `runs("h200/peers", ...)` and writes what it offers: `Figures`, `Ratios` and the filters of
`FORMATS`. Other tables come from `axes`, `calibration`, `claims`, `costs`, `host_times`,
`libraries`, logs from `table`, and what a command prints from `output`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from leanbench.kernels.lean.cuda_cost import Costs
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.core.axes import AXES, KINDS
from leanbench.core.kernel import Kernel
from leanbench.core.problem import PROBLEM_AXES, AttentionProblem
from leanbench.core.quantities import TIMED
from leanbench.core.registry import kernels
from leanbench.core.syntax import short_count
from leanbench.measure.timing import median_interval
from leanbench.model.calibration import SHIPPED as CALIBRATIONS
from leanbench.model.calibration import Calibration, read_calibration
from leanbench.paper.claim import OWN
from leanbench.paper.measured import claims_of_runs
from leanbench.records.reading import Run, read_run
from leanbench.records.row import Row
from leanbench.records.standing import (
    SPREAD,
    Latency,
    Ratio,
    measured_spread,
    standing,
    standings,
)

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "reports"
#: Stands for the third-party kernels of a run.
LIBRARIES = "libraries"
#: Day, GPU and kernels in a log.
DAY, PRODUCT, HASH = r"\d{4}-\d\d-\d\d", r"NVIDIA \w+( \d+GB \w+)?", r"kernels \w+"


def _microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


FORMATS: dict[str, Callable[[float], str]] = {
    "us": _microseconds,
    "x": lambda ratio: f"{ratio:.2f}x",
    "x3": lambda ratio: f"{ratio:.3f}x",
    "pct": lambda share: f"{share:.0%}",
    "pct1": lambda share: f"{share:.1%}",
    "one": lambda value: f"{value:.1f}",
    "two": lambda value: f"{value:.2f}",
}


@dataclass(frozen=True)
class Problem:
    """A problem of a run and the fastest timed row of each kernel."""

    problem: AttentionProblem
    rows: dict[str, Row]
    ended: dict[str, str]

    @property
    def kv_mb(self) -> float:
        return self.problem.kv_bytes / 1e6

    @property
    def output_tiles(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def schedule(self) -> str:
        """The schedule that `lean` ran."""
        return (self.rows["lean"].schedule or "") if "lean" in self.rows else ""

    @property
    def size(self) -> str:
        """Batch x heads x context x head_dim, and any differences from a contiguous HND cache."""
        problem = self.problem
        heads = f"{problem.q_heads}"
        if problem.kv_heads != problem.q_heads:
            heads += f"/{problem.kv_heads}"
        layout = "" if problem.kv_layout == "HND" else f", {problem.kv_layout}"
        pages = f", pages of {problem.page_size}" if problem.page_size else ""
        queries = f", {problem.q_len} query tokens" if problem.q_len > 1 else ""
        size = f"{problem.batch} x {heads} x {self.context} x {problem.head_dim}"
        return f"{size}{queries}{layout}{pages}"

    @property
    def words(self) -> str:
        """Its size and attention variant."""
        kinds = [word for word in self.kind.split(", ") if word not in ("plain", "latent")]
        return ", ".join([self.size, *kinds])

    @property
    def context(self) -> str:
        """Cached tokens of a sequence: `4k`, or the mean of a ragged batch."""
        problem = self.problem
        if problem.is_ragged:
            return f"{problem.total_context / problem.batch:,.0f} (mean)"
        return short_count(problem.max_context)

    @property
    def kind(self) -> str:
        """The attention variant in words, or `plain`."""
        words = []
        for axis in PROBLEM_AXES:
            value = getattr(self.problem, axis.name)
            shown = axis.name in KINDS and not (axis.name == "v_head_dim" and self.problem.latent)
            if shown and value != axis.default:
                title = axis.describe(axis.write(value)) if axis.values.is_word else axis.title
                words.append(title)
        return ", ".join(words) or "plain"

    def value(self, wanted: str, field: str = "latency_us") -> float | None:
        """Return the lowest value of the kernels, or None if none was timed.

        Args:
            wanted: `libraries`, or names separated by commas.
        """
        row = self.fastest(wanted, field)
        return None if row is None else getattr(row, field)

    def fastest(self, wanted: str, field: str = "latency_us") -> Row | None:
        names = wanted.split(",")
        chosen = [
            row
            for name, row in self.rows.items()
            if (name in names or (wanted == LIBRARIES and kernels()[name].is_peer))
            and getattr(row, field) is not None
        ]
        return min(chosen, key=lambda row: getattr(row, field), default=None)

    def matches(self, name: str, wanted: Any) -> bool:
        """Compare an attribute with a value, or a range (low, high) without its end.

        `not_NAME` inverts the comparison.
        """
        if name.startswith("not_"):
            return not self.matches(name.removeprefix("not_"), wanted)
        value = getattr(self if hasattr(self, name) else self.problem, name)
        if isinstance(wanted, tuple):
            low, high = wanted
            return low <= value < high
        return value == wanted


@dataclass(frozen=True)
class Ratios:
    """One ratio per problem that both sides timed; above 1 means that `under` is faster."""

    pairs: Sequence[tuple[Ratio, Problem]]
    #: Relative difference up to which latencies are level.
    spread: float = SPREAD

    @cached_property
    def values(self) -> list[float]:
        return [ratio.value for ratio, _ in self.pairs]

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def geomean(self) -> float:
        return geometric_mean(self.values)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)

    @property
    def middle(self) -> str:
        """The median with its 95% interval over the problems, for a table."""
        low, high = median_interval(self.values)
        return f"{self.median:.2f}x ({low:.2f} to {high:.2f})"

    @property
    def counts(self) -> str:
        """Format how often `under` is ahead, level and behind, for a table."""
        return " / ".join(
            map(str, standings((ratio for ratio, _ in self.pairs), self.spread).values())
        )

    @property
    def worst(self) -> Problem:
        return min(self.pairs, key=lambda pair: pair[0])[1]

    @property
    def best(self) -> Problem:
        return max(self.pairs, key=lambda pair: pair[0])[1]

    @property
    def behind(self) -> list[tuple[float, Problem]]:
        """Problems on which `under` is behind, worst first."""
        behind = [
            (ratio.value, problem)
            for ratio, problem in self.pairs
            if standing(ratio, self.spread) == "behind"
        ]
        return sorted(behind, key=lambda pair: pair[0])


@dataclass(frozen=True)
class Figures:
    """Problems of one or several runs."""

    runs: tuple[Run, ...]
    problems: list[Problem]

    def where(self, **conditions: Any) -> Figures:
        """Select problems by attributes, such as ``batch=1, kv_mb=(0, 5)``."""
        chosen = [
            problem
            for problem in self.problems
            if all(problem.matches(name, wanted) for name, wanted in conditions.items())
        ]
        return Figures(self.runs, chosen)

    def kinds(self) -> dict[str, Figures]:
        """Group the problems by attention variant."""
        groups: dict[str, list[Problem]] = {}
        for problem in self.problems:
            groups.setdefault(problem.kind, []).append(problem)
        return {kind: Figures(self.runs, problems) for kind, problems in groups.items()}

    def ratio(self, over: str, under: str = "lean", field: str = "latency_us") -> Ratios:
        """Divide the kernels' lowest values, problem by problem."""
        pairs = []
        for problem in self.problems:
            rival, own = problem.fastest(over, field), problem.fastest(under, field)
            if rival and own and getattr(own, field):
                ratio = Ratio.exactly(getattr(rival, field) / getattr(own, field))
                if field == "latency_us":
                    ratio = Latency.of(rival).over(Latency.of(own))
                pairs.append((ratio, problem))
        rows = (row for problem in self.problems for row in problem.rows.values())
        of_machine = (run.manifest.get("process_spread") for run in self.runs)
        spread = measured_spread(
            (row.process_spread for row in rows), max(filter(None, of_machine), default=None)
        )
        return Ratios(pairs, spread)

    def over_floor_us(self, over: str, under: str = "lean") -> tuple[float, float]:
        """Return the medians of latency less read floor of `under` and of the fastest of `over`, on
        the problems that both timed.
        """
        sides = ((problem.fastest(under), problem.fastest(over)) for problem in self.problems)
        both = [(_above_floor(own), _above_floor(rival)) for own, rival in sides if own and rival]
        owns, rivals = zip(*both, strict=True)
        return median(owns), median(rivals)

    def values(self, kernels: str, field: str) -> list[float]:
        values = (problem.value(kernels, field) for problem in self.problems)
        return [value for value in values if value is not None]

    def median(self, kernels: str, field: str) -> float:
        return median(self.values(kernels, field))

    def one(self, kernels: str, field: str = "latency_us", **conditions: Any) -> float:
        """Return the value of the only problem that matches.

        Raises:
            ValueError: no problem or several match.
        """
        (value,) = self.where(**conditions).values(kernels, field)
        return value

    def ended(self, status: str, kernel: str) -> int:
        return sum(problem.ended.get(kernel) == status for problem in self.problems)

    def run_line(self) -> str:
        """Name the runs behind a table: links, days, GPUs, kernels."""
        return run_line(self)


def run_line(*figures: Figures) -> str:
    """Name the runs behind a table: links, days, GPUs, kernels."""
    runs = list({run.directory: run for each in figures for run in each.runs}.values())
    parts: dict[str, list[str]] = {}
    for run in runs:
        name = run.directory.relative_to(REPORTS).as_posix()
        parts.setdefault(_provenance(run), []).append(f"[{name}]({{reports}}/{name})")
    lines = [f"{', '.join(links)}: {provenance}" for provenance, links in parts.items()]
    line = f"Run{'s' if len(runs) > 1 else ''}: {'; '.join(lines)}."
    return f"{line} Libraries: {named}." if (named := _libraries(runs)) else line


def _provenance(run: Run) -> str:
    environments = list(run.manifest["environments"].values())
    gpus = max(problem.gpus.gpus for _, problem in run.results)
    products = sorted({environment["gpu_product"] for environment in environments})
    kernels = sorted({environment["kernels"] for environment in environments})
    day = str(run.manifest["created"])[:10]
    gpu = f"{gpus} x {products[0]}" if gpus > 1 else ", ".join(products)
    return ", ".join([day, gpu, f"kernels {', '.join(kernels)}"])


def _libraries(runs: Sequence[Run]) -> str:
    """Name the packages of the libraries that runs timed, with their versions; of several
    versions, the runs of all but the commonest.
    """
    of_package: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        named = {row.library for row, _ in run.results if row.status in TIMED and row.library}
        for each in {name for of_row in named for name in re.split("[;,] ", of_row)}:
            package, _, version = each.partition(" ")
            folder = run.directory.relative_to(REPORTS).as_posix()
            of_package.setdefault(package, {}).setdefault(version, []).append(folder)
    phrases = []
    for package, versions in sorted(of_package.items(), key=lambda item: item[0].lower()):
        commonest, *others = sorted(versions, key=lambda version: -len(versions[version]))
        rest = (f" ({version} in {', '.join(versions[version])})" for version in others)
        phrases.append(f"{package} {commonest}{''.join(rest)}")
    return ", ".join(phrases)


def _above_floor(row: Row) -> float:
    assert row.latency_us is not None
    assert row.read_floor_us is not None
    return row.latency_us - row.read_floor_us


_read = cache(read_run)


def runs(*names: str) -> Figures:
    """Read runs below `reports/`, such as ``h200/peers``."""
    read = tuple(_read(REPORTS / name) for name in names)
    problems: dict[tuple[int, AttentionProblem], Problem] = {}
    for number, run in enumerate(read):
        for row, problem in run.results:
            entry = problems.setdefault((number, problem), Problem(problem, {}, {}))
            entry.ended[row.kernel] = row.status
            best = entry.rows.get(row.kernel)
            if row.status in TIMED and (best is None or row.latency_us < best.latency_us):  # type: ignore[operator]
                entry.rows[row.kernel] = row
    return Figures(read, list(problems.values()))


def libraries() -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """Return third-party kernels: axes that all support, titles, and names by further axes.

    Kernels that only run in whole models are left out.
    """
    peers = [peer for peer in kernels().values() if peer.is_peer and not peer.only_in_whole_models]
    shared = frozenset.intersection(*(peer.axes for peer in peers))
    by_axes: dict[str, list[str]] = {}
    for peer in peers:
        by_axes.setdefault(_supported(peer, shared), []).append(f"`{peer.name}`")
    return sorted(shared), {peer.name: peer.title for peer in peers}, by_axes


def _supported(kernel: Kernel[Any], shared: frozenset[str]) -> str:
    sizes = {
        "head_dim": _sizes(kernel.head_dims),
        "page_size": _sizes(kernel.page_sizes),
        "q_len": f"to {kernel.max_q_len:,}",
    }
    names = ["head_dim", *(name for name in AXES if name in kernel.axes - shared)]
    return ", ".join(f"{name} {sizes[name]}" if name in sizes else name for name in names)


def _sizes(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"


def calibration(gpu: str) -> Calibration:
    """Read a shipped calibration of the performance model."""
    return read_calibration(CALIBRATIONS / f"{gpu}.json")


def claims(figures: Figures) -> list[tuple[str, str, str, str, str]]:
    """Return the paper's claims that runs of one GPU measured.

    Each has the figure, the claim and the value of the paper, and the verdict with the measured
    value over the libraries and over this project's kernels.
    """
    ((_, _, measured),) = claims_of_runs(figures.runs)
    results: dict[tuple[str, str, str], dict[bool, str]] = {}
    for result in measured:
        if result.figure is not None:
            key = result.claim.figure, result.claim.words, result.claim.paper_words
            is_own = result.baselines == OWN
            results.setdefault(key, {})[is_own] = f"{result.verdict}: {result.words}"
    return [
        (*key, verdicts.get(False, ""), verdicts.get(True, "")) for key, verdicts in results.items()
    ]


def host_times(log: str) -> dict[str, float]:
    """Read the medians over all rounds of a log of tests/gpu_only/host_time.py, in us."""
    text = (REPORTS / log).read_text(encoding="utf-8")
    times = re.findall(r"^all +(.*?) +([0-9.]+) +[0-9.]+$", text, re.MULTILINE)
    times += re.findall(r"(1000 new shapes, .*?): median ([0-9.]+)", text)
    by_call: dict[str, list[float]] = {}
    for call, microseconds in times:
        by_call.setdefault(call, []).append(float(microseconds))
    return {call: median(values) for call, values in by_call.items()}


def table(log: str, pattern: str) -> list[tuple[str, ...]]:
    """Return the groups of every match in a log below `reports/`."""
    return re.findall(pattern, (REPORTS / log).read_text(encoding="utf-8"))


def log_line(*logs: str) -> str:
    """Name the logs behind a table: links, day, GPU, kernels."""
    parts: dict[str, list[str]] = {}
    for log in logs:
        text = (REPORTS / log).read_text(encoding="utf-8")
        found = [re.search(pattern, text) for pattern in (DAY, PRODUCT, HASH)]
        provenance = ", ".join(match[0].strip() for match in found if match)
        parts.setdefault(provenance, []).append(f"[{log}]({{reports}}/{log})")
    lines = [f"{', '.join(links)}: {provenance}" for provenance, links in parts.items()]
    return f"Log{'s' if len(logs) > 1 else ''}: {'; '.join(lines)}."


def output(command: str, *labels: str) -> str:
    """Return a block with a command and the parts of its output with these labels.

    Dots stand for the parts before and between them. A part lasts up to the next label or empty
    line; without labels the output is whole.
    """
    with TemporaryDirectory() as home:
        # Settings as shipped: tests switch them off, and this machine may have timed its own.
        env = {"COLUMNS": "80", "LEANBENCH_HOME": home, "LEANBENCH_CONFIGS": None}
        result = CliRunner().invoke(app, shlex.split(command), env=env)
    assert result.exit_code == 0, result.output
    kept, is_kept = [f"$ leanbench {command}"], True
    for line in map(str.rstrip, result.stdout.splitlines()):
        label = re.match(r"[A-Z][a-z]+(?=: )", line)
        if labels and (label or not line):
            is_kept = label is not None and label[0] in labels
        if is_kept:
            kept.append(line)
        elif kept[-1] != "...":
            kept.append("...")
    return "\n".join(["```text", *kept, "```"])


def rendered(template: Path) -> str:
    """Render one document."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters.update({name: _or_empty(write) for name, write in FORMATS.items()})
    environment.filters["log10"] = math.log10
    environment.globals.update(
        log_line=log_line,
        output=output,
        runs=runs,
        run_line=run_line,
        axes=AXES,
        calibration=calibration,
        claims=claims,
        libraries=libraries,
        host_times=host_times,
        table=table,
        costs=Costs(),
    )
    text = environment.get_template(template.name).render()
    return text.replace("{reports}", os.path.relpath(REPORTS, template.parent))


def _or_empty(write: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else write(value)


def templates() -> Iterable[Path]:
    pictures = (ROOT / "reports").glob("*/*.svg.j2")
    return sorted([*ROOT.glob("*.md.j2"), *(ROOT / "docs").glob("*.md.j2"), *pictures])


def main(words: Sequence[str]) -> int:
    differing = []
    for template in templates():
        document, text = template.with_suffix(""), rendered(template)
        if not document.exists() or document.read_text(encoding="utf-8") != text:
            differing.append(document)
            if "--write" in words:
                document.write_text(text, encoding="utf-8")
    verb = "wrote" if "--write" in words else "differs from its template:"
    for document in differing:
        print(verb, document.relative_to(ROOT))
    return int(bool(differing) and "--write" not in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
