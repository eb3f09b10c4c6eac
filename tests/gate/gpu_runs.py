"""Remake the published runs of a GPU, each by the command in its manifest.

    make gpu-runs [RUNS="mla fp8"] [OUT=folder] [SEED=1]
    python tests/gate/gpu_runs.py [RUN...] [--out folder] [--seed N] [--limit-s 540] [--list]
    python tests/gate/gpu_runs.py --place [--out folder]

A run is a folder below reports/GPU. Without names, all runs of this GPU with older kernels are
made; without a GPU, `--list` has those of all. Runs with several GPUs come first, then the longest;
each GPU makes one run at a time. Call it again with the same folder to continue after the limit.
Drawn runs get new problems: the first uses --seed, the next one the number after it. --place copies
finished runs to reports/. The exit code is 1 while a run is unfinished.
"""

import argparse
import json
import os
import queue
import re
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
from leanbench.run.sweep_file import load_sweep, shipped_sweeps

ROOT = Path(__file__).resolve().parents[2]
#: Folders below reports/, by the GPU's name in the catalogue.
FOLDERS = {"h200": "h200", "h100-sxm": "h100"}
LIMIT_S = 540.0
#: Time of a run in addition to its cells: imports, and a kernel's first build.
START_S = 8.0
#: Time after a run's budget in which its last cell may end.
GRACE_S = 60.0
#: Options for the destination of a run, with the number of their values.
_WHERE = {"--out": 1, "--name": 1, "--budget": 1}
_WHERE |= dict.fromkeys(("--no-report", "--quiet", "--resume", "--require-gpu"), 0)


@dataclass(frozen=True)
class Again:
    """A run to make."""

    name: str
    #: After ``leanbench``.
    words: tuple[str, ...]
    gpus: int
    #: Duration of its cells in the published run.
    expected_s: float


def published(gpus: Iterable[str] = FOLDERS, root: Path = ROOT) -> dict[str, Path]:
    """Return the folders of published runs by name, such as ``h200/peers``."""
    folders = [root / "reports" / FOLDERS[gpu] for gpu in gpus]
    manifests = sorted(path for folder in folders for path in folder.glob(f"*/{MANIFEST}"))
    return {path.parent.relative_to(root / "reports").as_posix(): path.parent for path in manifests}


def runs_of(folders: Iterable[Path], seed: int | None) -> list[Again]:
    """Return the runs to remake; the first drawn one gets `seed`. Exit if it needs one."""
    found: list[Again] = []
    for folder in folders:
        run = read_run(folder)
        words = _without_place(shlex.split(run.manifest["command"])[1:])
        name = folder.name
        if _draws(words):
            if seed is None:
                sys.exit(f"{name} is drawn: give --seed, a number that no problem is from yet")
            if "--seed" in words:
                place = words.index("--seed") + 1
                name = re.sub(rf"-{words[place]}$", f"-{seed}", name)
                words[place] = str(seed)
            else:
                words += ["--seed", str(seed)]
            seed += 1
        took_s = sum(row.wall_s or 0.0 for row, _ in run.results)
        gpus = max(problem.gpus.gpus for _, problem in run.results)
        found.append(Again(name, tuple(words), gpus, took_s + START_S))
    return sorted(found, key=lambda again: (-again.gpus, -again.expected_s))


def _draws(words: Sequence[str]) -> bool:
    """Return True if a command draws its problems; its sweep can have a draw only since the run."""
    named = shipped_sweeps().keys() & {*words}
    return bool({"--draw", "--seed"} & {*words}) or any(load_sweep(name).draw for name in named)


def _without_place(words: Sequence[str]) -> list[str]:
    rest = iter(words)
    kept = []
    for word in rest:
        if word in _WHERE:
            for _ in range(_WHERE[word]):
                next(rest)
        else:
            kept.append(word)
    return kept


def whole_run(folder: Path) -> Run | None:
    """Return the run of a folder, or None if it is damaged or has cells without a row."""
    try:
        run = read_run(folder)
    except UserError:
        return None
    cells = run.manifest.get("cells")
    done = {row.cell for row, _ in run.results}
    return run if isinstance(cells, list) and done >= {*cells} else None


def kernels_of(folder: Path) -> set[str]:
    """Return the hashes of the kernels in a run's rows."""
    try:
        environments = read_run(folder).manifest.get("environments", {})
    except UserError:
        return set()
    return {each["kernels"] for each in environments.values() if "kernels" in each}


def make(runs: Sequence[Again], out: Path, gpus: Sequence[str], limit_s: float) -> list[str]:
    """Make runs, print each result, return the unfinished ones. Exit on other kernels' runs."""
    ends_at = time.monotonic() + limit_s
    for run in runs:
        if kernels_of(out / run.name) - {kernels_hash()}:
            sys.exit(f"{out / run.name} is of other kernels: move it, or give another --out")
    undone = [run for run in runs if whole_run(out / run.name) is None]
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
    return [run.name for run in runs if whole_run(out / run.name) is None]


def _make(run: Again, out: Path, gpus: Sequence[str], ends_at: float) -> None:
    left_s = ends_at - time.monotonic()
    if len(gpus) < run.gpus or left_s < START_S:
        why = f"needs {run.gpus} GPUs" if len(gpus) < run.gpus else "no time is left"
        print(f"{run.name:<20} not started: {why}", flush=True)
        return
    resume = ["--resume"] if (out / run.name / MANIFEST).exists() else []
    where = ["--out", str(out), "--name", run.name, "--no-report", "--quiet", *resume]
    # A prediction must not replace a measurement.
    where += [] if "--gpu" in run.words else ["--require-gpu"]
    words = [*run.words, *where, "--budget", f"{left_s:.0f}s"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    ended = run_within(left_s + GRACE_S, [sys.executable, "-m", "leanbench", *words], ROOT, own)
    state = "unfinished" if whole_run(out / run.name) is None else "whole"
    last = (ended.output.strip().splitlines() or [""])[-1] if ended.code else ""
    print(f"{run.name:<20} {state}, {ended.seconds:.0f} s  {last}".rstrip(), flush=True)


def place(out: Path, root: Path = ROOT) -> list[str]:
    """Copy finished, measured runs to the folders of their GPUs; return a sentence for each."""
    folders = sorted(path.parent for path in out.glob(f"*/{MANIFEST}"))
    if not folders:
        sys.exit(f"there is no run in {out}: make one, or give their folder by --out")
    return [_placed(folder, root) for folder in folders]


def _placed(folder: Path, root: Path) -> str:
    run = whole_run(folder)
    if run is None:
        return f"{folder.name} is unfinished: left"
    source, gpu = run.manifest.get("source"), run.manifest.get("gpu", {}).get("name")
    if source != "measured" or gpu not in FOLDERS:
        return f"{folder.name} was {source} on {gpu}, not measured on {' or '.join(FOLDERS)}: left"
    if kernels_of(folder) != {kernels_hash(root / "kernels")}:
        return f"{folder.name} is of other kernels than these: left"
    place = Path("reports") / FOLDERS[gpu] / folder.name
    (root / place).mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, SAMPLES):
        shutil.copyfile(folder / name, root / place / name)
    first, *words = shlex.split(run.manifest["command"])
    manifest = {**run.manifest, "command": shlex.join([first, *_without_place(words)])}
    text = json.dumps(manifest, indent=2) + "\n"
    (root / place / MANIFEST).write_text(text, encoding="utf-8")
    return f"{place.as_posix()} placed"


def _gpus() -> list[str]:
    """Return the GPUs that this process may use."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        sys.exit("runs are made on a GPU, and nvidia-smi names none: --list says what there is")
    return [str(number) for number in range(len(listed.stdout.strip().splitlines()))]


def _chosen(names: Sequence[str]) -> Iterator[Path]:
    """Yield the named runs, or all of this GPU with older kernels."""
    specs = [match_product(gpu.product) for gpu in local_gpus()]
    here = {spec.name for spec in specs if spec} & FOLDERS.keys() or {*FOLDERS}
    folders = published(here)
    for name in names:
        found = [folder for full, folder in folders.items() if name in (full, folder.name)]
        if not found:
            sys.exit(f"there is no run {name!r}: choose from {', '.join(folders)}")
        yield from found
    if not names:
        for folder in folders.values():
            if kernels_of(folder) != {kernels_hash()}:
                yield folder


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(usage="gpu_runs.py [RUN...] [--out FOLDER] [--seed N]")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a folder's name: peers, h100/peers")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "again")
    parser.add_argument("--seed", type=int, help="of the first drawn run")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--place", action="store_true", help="copy finished runs to reports/")
    options = parser.parse_intermixed_args(arguments)
    out = options.out.absolute()
    if options.place:
        print("\n".join(place(out)))
        return 0
    seed = 0 if options.list and options.seed is None else options.seed
    runs = runs_of(_chosen(options.runs), seed)
    if options.list:
        for run in runs:
            line = f"{run.name:<20} {run.gpus} x {run.expected_s:4.0f} s"
            print(f"{line}  leanbench {shlex.join(run.words)}")
        print(f"{sum(run.expected_s for run in runs):.0f} s in all")
        return 0
    end_together()
    out.mkdir(parents=True, exist_ok=True)
    undone = make(runs, out, _gpus(), options.limit_s)
    print(f"{len(runs) - len(undone)} of {len(runs)} runs are whole, in {out}")
    return 1 if undone else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
