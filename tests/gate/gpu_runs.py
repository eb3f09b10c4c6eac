"""The published runs of a GPU, made again: each by the command in its manifest.

    make gpu-runs [RUNS="mla fp8"] [OUT=folder] [SEED=1]
    python tests/gate/gpu_runs.py [RUN...] [--out folder] [--seed N] [--limit-s 540] [--list]
    python tests/gate/gpu_runs.py --place [--out folder]

Names are those of the evidence, `peers` or `h100/peers`. Without names: those of the GPU here (of
all where there is none) that are of older kernels or settings. A run on each GPU, the longest
first; runs of several GPUs before all others, alone. What the limit leaves undone goes on in the
next call with the same folder. Drawn runs get new problems: the first of them those of --seed, the
next one those of the number after it. --place copies whole runs that were measured to the folder of
their GPU under reports/.
Exits with 1 while anything is undone.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from processes import end_together, run_within

from leanbench.core.errors import UserError
from leanbench.gpu.catalogue import match_product
from leanbench.gpu.visible import local_gpus
from leanbench.records.environment import kernels_hash
from leanbench.records.manifest import MANIFEST, RESULTS
from leanbench.records.reading import Run, read_run
from leanbench.records.samples import SAMPLES
from leanbench.report.evidence.documents import Evidence
from leanbench.report.evidence.places import (
    FOLDERS,
    below,
    folder_of,
    gpu_of,
    name_of,
    place_of,
)
from leanbench.report.evidence.sources import CURRENT, RECORD, Source

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540.0
#: Seconds beside its cells that a run takes: imports, and a kernel's first build.
START_S = 8.0
#: Seconds after a run's budget in which its last cell may end.
GRACE_S = 60.0
#: Of the second GPU alone, so that it needs both.
SECOND_GPU = "second-gpu"
#: Options of a command that say where its run goes, not what is in it; the first take a value.
_WHERE = {"--out": 1, "--name": 1, "--budget": 1}
_WHERE |= dict.fromkeys(("--no-report", "--quiet", "--resume", "--require-gpu"), 0)
#: Where runs and seeds are declared.
DECLARED = "reports/evidence.toml"


@dataclass(frozen=True)
class Again:
    """A run that is to be made."""

    name: str
    #: After ``leanbench``.
    words: tuple[str, ...]
    gpus: int
    #: As long as its cells took before.
    expected_s: float

    @property
    def folder(self) -> str:
        """Its name in --out, without the GPU, which the manifest says."""
        return below(self.name)


def runs_of(sources: Iterable[Source], seed: int | None) -> list[Again]:
    """Runs by their commands, those of several GPUs first, then the longest.

    Args:
        seed: of the first drawn run.

    Raises:
        SystemExit: there is a drawn one and no seed.
    """
    found: list[Again] = []
    for source in sorted(sources, key=lambda each: each.name):
        words, name = _what(shlex.split(source.manifest["command"])[1:]), source.name
        if any(word.endswith(".toml") for word in words):
            print(f"{name} left out, {shlex.join(words)} names a file of its own: run it by hand")
            continue
        if source.seed:
            if seed is None:
                sys.exit(f"{name} was drawn: give --seed, a number that no problem is from yet")
            words = _with_seed(words, source.seed, seed)
            if name.endswith(f"-{source.seed}"):
                name = f"{name.removesuffix(source.seed)}{seed}"
            seed += 1
        took_s = sum(row.wall_s or 0.0 for row, _ in source.run.results)
        gpus = 2 if below(name) == SECOND_GPU else source.parallel_gpus
        found.append(Again(name, tuple(words), gpus, took_s + START_S))
    return sorted(found, key=lambda run: (-run.gpus, -run.expected_s))


def _what(words: Sequence[str]) -> list[str]:
    """A command without the options that say where its run goes."""
    rest = iter(words)
    kept = []
    for word in rest:
        if word in _WHERE:
            for _ in range(_WHERE[word]):
                next(rest)
        else:
            kept.append(word)
    return kept


def _with_seed(words: Sequence[str], old: str, new: int) -> list[str]:
    """The command with another seed.

    Raises:
        SystemExit: it names none, or not that one.
    """
    words = list(words)
    if "--seed" not in words or words[words.index("--seed") + 1] != old:
        sys.exit(f"`leanbench {shlex.join(words)}` does not say --seed {old}: run it by hand")
    words[words.index("--seed") + 1] = str(new)
    return words


def whole_run(folder: Path) -> Run | None:
    """The run of a folder, or None: it is none, is damaged, or has cells without a row. A run that
    was killed may end in a piece of one.
    """
    try:
        run = read_run(folder)
    except UserError:
        return None
    asked = run.manifest.get("cells")
    done = {row.cell for row, _ in run.results}
    return run if isinstance(asked, list) and done >= {*asked} else None


def kernels_of(folder: Path) -> set[str]:
    """Hashes of the kernels that a run has rows of; none where it cannot be read."""
    try:
        environments = read_run(folder).manifest.get("environments", {})
    except UserError:
        return set()
    return {each["kernels"] for each in environments.values() if "kernels" in each}


def make(runs: Sequence[Again], out: Path, gpus: Sequence[str], limit_s: float) -> list[str]:
    """Makes runs on GPUs, and says of each what came of it; the names of those not whole.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them.

    Raises:
        SystemExit: the folder has one of them of other kernels, or two of them have one folder.
    """
    ends_at = time.monotonic() + limit_s
    by_folder: dict[str, Again] = {}
    for run in runs:
        folder, other = out / run.folder, by_folder.setdefault(run.folder, run)
        if other is not run:
            sys.exit(f"{other.name} and {run.name} are both {folder}: give each its own --out")
        if kernels_of(folder) - {kernels_hash()}:
            sys.exit(f"{folder} is of other kernels: move it away, or give another --out")
    undone = [run for run in runs if whole_run(out / run.folder) is None]
    for run in undone:
        if run.gpus > 1:
            _make(run, out, gpus[: run.gpus], ends_at)
    waiting: queue.SimpleQueue[Again] = queue.SimpleQueue()
    for run in undone:
        if run.gpus == 1:
            waiting.put(run)

    def lane(gpu: str) -> None:
        while time.monotonic() < ends_at:
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            _make(run, out, [gpu], ends_at)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(lane, gpus))
    return [run.name for run in runs if whole_run(out / run.folder) is None]


def _make(run: Again, out: Path, gpus: Sequence[str], ends_at: float) -> None:
    left_s = ends_at - time.monotonic()
    if len(gpus) < run.gpus or left_s < START_S:
        why = f"asks for {run.gpus} GPUs" if len(gpus) < run.gpus else "no time is left"
        print(f"{run.name:<20} not begun: {why}", flush=True)
        return
    resume = ["--resume"] if (out / run.folder / MANIFEST).exists() else []
    where = ["--out", str(out), "--name", run.folder, "--no-report", "--quiet", *resume]
    # A prediction stands for no measurement.
    where += [] if "--gpu" in run.words else ["--require-gpu"]
    visible = gpus[1:] if run.folder == SECOND_GPU else gpus
    words = [*run.words, *where, "--budget", f"{left_s:.0f}s"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(visible)}
    command = [sys.executable, "-m", "leanbench", *words]
    ended = run_within(left_s + GRACE_S, command, ROOT, own)
    state = "not whole" if whole_run(out / run.folder) is None else "whole"
    said = (ended.output.strip().splitlines() or [""])[-1] if ended.code else ""
    took = f"{ended.seconds:.0f} s on GPU {own['CUDA_VISIBLE_DEVICES']}"
    print(f"{run.name:<20} {state}, {took}  {said}".rstrip(), flush=True)


def place(out: Path, names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Copies whole runs to the folders of their GPUs, whose commands say no more where a run went.

    Args:
        names: of the runs; all in the folder unless given.

    Returns:
        A sentence for each: that it was placed, or why not.

    Raises:
        SystemExit: the folder has no run, or not one of these.
    """
    folders = {path.parent.name: path.parent for path in sorted(out.glob(f"*/{MANIFEST}"))}
    for name in names:
        if below(name) not in folders:
            sys.exit(f"there is no run {name!r} in {out}: make it, or give its folder by --out")
    if not folders:
        sys.exit(f"there is no run in {out}: make one, or give their folder by --out")
    return [_placed(folders[below(name)], root) for name in names or folders]


def _placed(folder: Path, root: Path) -> str:
    run = whole_run(folder)
    if run is None:
        return f"{folder.name} is not whole: left"
    manifest = run.manifest
    source, gpu = manifest.get("source"), manifest.get("gpu", {}).get("name")
    if source != "measured" or gpu not in FOLDERS:
        known = " or ".join(FOLDERS)
        return f"{folder.name} was {source} on {gpu}, not measured on {known}: left"
    if kernels_of(folder) != {kernels_hash(root / "kernels")}:
        return f"{folder.name} is of other kernels than these: left"
    place = FOLDERS[gpu] / folder.name
    to = root / place
    new = not to.exists()
    to.mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, SAMPLES):
        shutil.copyfile(folder / name, to / name)
    first, *words = shlex.split(manifest["command"])
    manifest = {**manifest, "command": shlex.join([first, *_what(words)])}
    (to / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    name_it = f", new: name it in {DECLARED}, and its seed where it was drawn" if new else ""
    return f"{name_of(place)} placed{name_it}"


def _gpus() -> list[str]:
    """Those that this process may use."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        sys.exit("runs are made on a GPU, and nvidia-smi names none: --list says what there is")
    return [str(number) for number in range(len(listed.stdout.strip().splitlines()))]


def _here() -> set[str]:
    """Those of `FOLDERS` that are in this machine; all where none is."""
    specs = [match_product(gpu.product) for gpu in local_gpus()]
    here = {spec.name for spec in specs if spec}
    return here & FOLDERS.keys() or {*FOLDERS}


def _chosen(names: Sequence[str]) -> Iterator[Source]:
    """The runs of these names, or else all of a GPU here that documents quote and that are not
    current.
    """
    evidence = Evidence(ROOT)
    sources = evidence.sources
    for name in names:
        if name not in sources.by_name or "sweep" not in sources[name].manifest:
            index = folder_of(name) / "README.md"
            sys.exit(f"there is no run {place_of(name)}: take names of {index}")
        yield sources[name]
    if not names:
        here = _here()
        for source in sources.by_name.values():
            of_cells = "sweep" in source.manifest and not source.of_model
            stale = sources.state(source) not in (CURRENT, RECORD)
            if of_cells and stale and gpu_of(source.name) in here:
                yield source


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(usage="gpu_runs.py [RUN...] [--out FOLDER] [--seed N]")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="a name of the evidence: peers, h100/peers"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "again")
    parser.add_argument("--seed", type=int, help="of the first drawn run")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--place", action="store_true", help="copy whole runs to reports/")
    options = parser.parse_intermixed_args(arguments)
    out = options.out.absolute()
    if options.place:
        print("\n".join(place(out, options.runs)))
        return 0
    # Of drawn runs a list has what the first call could be.
    seed = 0 if options.list and options.seed is None else options.seed
    runs = runs_of(_chosen(options.runs), seed)
    if options.list:
        for run in runs:
            line = f"{run.name:<20} {run.gpus} x {run.expected_s:4.0f} s"
            print(f"{line}  leanbench {shlex.join(run.words)}")
        return 0
    end_together()
    out.mkdir(parents=True, exist_ok=True)
    undone = make(runs, out, _gpus(), options.limit_s)
    print(f"{len(runs) - len(undone)} of {len(runs)} runs are whole, in {out}")
    return 1 if undone else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
