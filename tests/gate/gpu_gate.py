"""The GPU gate: one command that checks this tree's kernels on this GPU.

    make gpu-gate [PART="check fuzz"] [OUT=folder] [SEED=1]
    python tests/gate/gpu_gate.py [PART...] [--out folder] [--seed N]

The second form uses the current environment. Each part takes less than nine minutes and leaves
OUT/PART.txt: GPU, driver, versions, hashes of kernels and settings, and output. OUT/summary.txt has
a line per log. The exit code is 1 if a part fails.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import end_together, run_within

ROOT = Path(__file__).resolve().parents[2]
#: Time limit of a part.
LIMIT_S = 540
#: Processes of a check, which spends most of its time on compiling.
JOBS = max(1, min(20, (os.cpu_count() or 2) - 2))
#: Processes of a tool of compute-sanitizer.
SHARES = 4
_ENVIRONMENT = """
import json
from leanbench.configs.store import settings_hash
from leanbench.gpu.local import spec_of_device
from leanbench.records.environment import measured_environment
import torch
own = {"settings": settings_hash(spec_of_device(0)), "gpus": torch.cuda.device_count()}
print(json.dumps(measured_environment(0) | own))
"""
#: Fields that a header prints on a separate line, or omits.
_NOT_LISTED = ("gpu_product", "gpu_uuid", "driver", "kernels", "gpus")
_KERNELS = re.compile(r"^GPU .*, kernels (\w+)$", re.MULTILINE)
_RESULT = re.compile(r"^(passed|FAILED) in (\d+) s$", re.MULTILINE)
_LAST_LINE = re.compile(r"^(.*)\nexit code", re.MULTILINE)

#: Words after `python`, or of another program.
Command = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Groups of commands: one group after another, the commands of a group concurrently."""

    title: str
    groups: tuple[tuple[Command, ...], ...]
    #: Minimum number of GPUs; with fewer the part is skipped.
    gpus: int = 1


def pytest_on_gpu(*words: str) -> Command:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *words)


def at_once(*commands: Command) -> tuple[tuple[Command, ...], ...]:
    return (commands,)


def leanbench(*words: str) -> Command:
    return ("-m", "leanbench", *words)


#: All kernels of this project with their own sources.
KERNELS = "lean,lean_triton,lean_mla,fa2_cuda,fa2_triton,fixed_split_cuda,fixed_split_triton"
ON_GPU = "tests/gpu_only"
EVERY_BUILD = f"{ON_GPU}/launch_every_build.py"
PADDING = "tests/calls/test_padding.py"
FORMS = f"{ON_GPU}/test_forms_on_gpu.py"
SHARED = f"{ON_GPU}/shared_sequences.py"
PING_PONG = "tools/gpu/ping_pong.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu")


#: Tools of compute-sanitizer.
MEMCHECK, RACECHECK, SYNCCHECK = (
    ("memcheck", "--report-api-errors", "no"),
    ("racecheck",),
    ("synccheck",),
)


def sanitized(tool: tuple[str, ...], kernel: str, *words: str) -> Command:
    """Return a command: launches of launch_every_build.py under a tool that inspects `kernel`."""
    chosen = ("--kernel-regex", f"kns={kernel}", "--error-exitcode", "1")
    return ("compute-sanitizer", "--tool", *tool, *chosen, sys.executable, EVERY_BUILD, *words)


def sanitizers() -> Iterator[Command]:
    """Yield commands with every build under every tool, except mla.cu under racecheck.

    Racecheck knows neither mbarriers nor barriers of a part of a CTA, and each pair of accesses
    that it reports is separated by one.
    """
    yield sanitized(MEMCHECK, "mla", "--latent")
    yield sanitized(SYNCCHECK, "mla", "--latent")
    for share in range(1, SHARES + 1):
        for tool in (MEMCHECK, RACECHECK, SYNCCHECK):
            yield sanitized(tool, "lean", "--share", f"{share}/{SHARES}")


def parts(seed: int, runs: Path) -> dict[str, Part]:
    """Return all parts, with a seed of random problems and a folder for reference sweeps."""
    jobs = str(JOBS)
    fuzz = ("--fuzz", "10000", "--kernels", "lean,lean_mla", "--seed", str(seed))
    sweep = ("--out", str(runs), "--quiet", "--no-report", "--budget", "170s")
    references = (("smoke",), ("variants", "--kernels", "lean"), ("mla", "--kernels", "lean_mla"))
    return {
        "check": Part(
            "the grid of problems against the fp64 reference",
            ((leanbench("check", "--kernels", KERNELS, "--jobs", jobs),),),
        ),
        "fuzz": Part(
            "10,000 random problems of all kinds", ((leanbench("check", *fuzz, "--jobs", jobs),),)
        ),
        "arguments": Part(
            "every value of every argument beside every value of every other",
            ((pytest_on_gpu("-s", "tests/gpu_only/test_every_argument_on_gpu.py"),),),
        ),
        "sanitizers": Part(
            "every build under compute-sanitizer",
            (
                ((EVERY_BUILD, "--compile"), (EVERY_BUILD, "--compile", "--latent")),
                tuple(sanitizers()),
            ),
        ),
        "mutations": Part(
            "mutations of the kernels, each of which a check must notice",
            ((("tests/gate/mutants.py", "gpu"),),),
        ),
        "progress": Part(
            "launches that must end and be right whatever else the GPU does",
            at_once(
                pytest_on_gpu("-vv", "-n", "1", f"{ON_GPU}/test_robust_on_gpu.py"),
                pytest_on_gpu(f"{ON_GPU}/test_on_gpu.py", "-k", "fit_at_once or graph"),
            ),
        ),
        "references": Part(
            "reference sweeps: every cell right",
            tuple((leanbench("sweep", *own, "--name", own[0], *sweep),) for own in references),
        ),
        "kinds": Part(
            "kinds of attention under torch.compile, in graphs and on streams",
            at_once(
                pytest_on_gpu("-n", "7", f"{ON_GPU}/test_kinds_on_gpu.py", PADDING),
                pytest_on_gpu("-n", "7", f"{ON_GPU}/test_mla_on_gpu.py", FORMS),
            ),
        ),
        "decode": Part(
            "steps of whole models, transformers, caches that grow",
            at_once(
                pytest_on_gpu("-v", f"{ON_GPU}/test_decode_on_gpu.py"),
                pytest_on_gpu("-v", f"{ON_GPU}/test_transformers_on_gpu.py"),
                pytest_on_gpu("-v", f"{ON_GPU}/test_attention_on_gpu.py", "-k", "grows"),
            ),
        ),
        "shared": Part(
            "GPUs that share sequences: random problems, chains, a rank that is late",
            (((*TORCHRUN, SHARED, str(seed), "late=1", "chain=3", "fuzz=50"),),),
            gpus=2,
        ),
        "messages": Part("messages between GPUs, one way", (((PING_PONG,),),), gpus=2),
    }


def environment() -> dict[str, Any]:
    """Return software, driver and GPU, from a process that ends; exit where there is no GPU."""
    words, own = [sys.executable, "-c", _ENVIRONMENT], os.environ | with_checkout()
    done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"the gate needs a GPU that torch can use: {last}")
    return json.loads(done.stdout)


def with_checkout() -> dict[str, str]:
    """Return the environment of commands in addition to this process's."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "COLUMNS": "160"}


def words_of(command: Command) -> tuple[str, ...]:
    return command if command[0] == "compute-sanitizer" else (sys.executable, *command)


def run_command(command: Command, limit_s: float) -> str:
    """Return the command, its output, and its exit code: 124 if it was killed at the limit."""
    code, output, took_s = run_within(limit_s, words_of(command), ROOT, with_checkout())
    code = 124 if code is None else code
    words = command if command[0] == "compute-sanitizer" else ("python", *command)
    shown = shlex.join("python" if word == sys.executable else word for word in words)
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return "\n".join([f"$ {shown}", *lines, f"exit code {code} after {took_s:.0f} s", ""])


def run_part(name: str, part: Part, header: str, out: Path, limit_s: float) -> bool:
    """Run a part and write its log; return True if all commands passed."""
    began_s = time.monotonic()
    log = out / f"{name}.txt"
    sections = [f"{name}: {part.title}\n{header}\n"]
    for group in part.groups:
        left_s = limit_s - (time.monotonic() - began_s)
        with ThreadPoolExecutor(len(group)) as pool:
            sections += pool.map(lambda command, left_s=left_s: run_command(command, left_s), group)
        log.write_text("\n".join(sections), encoding="utf-8")
    passed = all("\nexit code 0 after" in section for section in sections[1:])
    result = f"{'passed' if passed else 'FAILED'} in {time.monotonic() - began_s:.0f} s"
    log.write_text("\n".join([*sections, f"{result}\n"]), encoding="utf-8")
    print(f"{name}: {result}", flush=True)
    return passed


def header_of(found: dict[str, Any]) -> str:
    """Return the first lines of every log: software and hardware."""
    listed = {name: value for name, value in found.items() if name not in _NOT_LISTED}
    rest = ", ".join(f"{name} {value}" for name, value in listed.items() if value is not None)
    gpu = f"GPU {found['gpu_product']}, driver {found['driver']}, kernels {found['kernels']}"
    return f"{gpu}\n{rest}\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def summary(out: Path, names: Iterable[str], kernels: str) -> str:
    """Return a line for each part with a log."""
    logs = {name: path for name in names if (path := out / f"{name}.txt").exists()}
    rows = [row_of(name, log.read_text(encoding="utf-8"), kernels) for name, log in logs.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:4]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows]
    return "\n".join([f"Kernels of this tree: {kernels}", *lines, ""])


def row_of(name: str, log: str, kernels: str) -> tuple[str, str, str, str, str]:
    """Return part, result, seconds, kernels, and last lines; a log of other kernels is stale."""
    of_log, result = _KERNELS.search(log), _RESULT.findall(log)
    hashed = of_log[1] if of_log else "?"
    outcome, took_s = result[-1] if result else ("UNFINISHED", "?")
    if hashed != kernels:
        outcome = "STALE"
    last = Counter(line.strip("= ") for line in _LAST_LINE.findall(log))
    said = [f"{line} ({count} times)" if count > 1 else line for line, count in last.items()]
    return name, outcome, f"{took_s} s", hashed, "; ".join(said)


def main(arguments: list[str]) -> int:
    known = parts(0, Path())
    parser = argparse.ArgumentParser(usage="gpu_gate.py [PART...] [--out FOLDER] [--seed N]")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(known))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gate")
    parser.add_argument("--seed", type=int, help="of the random problems; by the kernels' hash")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a part")
    options = parser.parse_intermixed_args(arguments)
    unknown = [name for name in options.parts if name not in known]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: take {', '.join(known)}")
    end_together()
    found = environment()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # New problems for new kernels.
    seed = int(found["kernels"][:5], 16) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="leanbench-gate-") as runs:
        passed = []
        for name, part in parts(seed, Path(runs)).items():
            if name not in (options.parts or known):
                continue
            if found["gpus"] < part.gpus:
                print(f"{name}: left out, it asks for {part.gpus} GPUs", flush=True)
                continue
            passed.append(run_part(name, part, header_of(found), out, options.limit_s))
    table = summary(out, known, found["kernels"])
    (out / "summary.txt").write_text(table, encoding="utf-8")
    print(table, end="")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
