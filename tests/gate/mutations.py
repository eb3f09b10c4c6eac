"""Mutations of single lines of the kernels' sources: a check on a GPU must fail with each.

Some lines look like candidates, but changing them has no visible effect:

- `l == 0.0f ? -INFINITE` of an LSE (partials.cuh): the logarithm of 0 is the same.
- `rank < Build::cluster ? weights.x` (reduce.cuh): clusters merge without teams, so no rank is past
  the last.
- `is_same &= kept[j] == numbers[j]` (kept.cuh): the sum differs, too.
- The lower bound of a length on the device (tiles.cuh), without appended tokens: a negative
  length has no chunk, like 0. With appended tokens, tests/kernels/test_append_on_cpu.py needs it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EVERY_BUILD = "tests/gpu_only/launch_every_build.py"
#: Words after `python`, with paths of the checkout.
Command = tuple[str, ...]


@dataclass(frozen=True)
class Delay:
    """An edit that delays some CTAs or warps on a GPU without changing results. Their data is then
    missing when others ask for it, or overwritten before they read it. The check must pass with
    the delay alone.
    """

    name: str
    #: Path in the checkout.
    file: str
    #: Text that occurs once.
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A changed line, and the checks that fail."""

    name: str
    #: Path in the checkout.
    file: str
    #: Text that occurs once.
    old: str
    new: str
    #: Check that fails on a GPU.
    gpu: Command
    #: Test that fails without a GPU; None if `why_not_cpu` explains why none can.
    cpu: str | None
    why_not_cpu: str = ""
    #: False if a launch does not end on a GPU, so the check is killed.
    ends: bool = True
    #: Delay for an order of CTAs or warps that is otherwise rare.
    delay: Delay | None = None


def by_launches(*names: str) -> Command:
    """Return a command with launches of launch_every_build.py, selected by parts of their names."""
    return EVERY_BUILD, *names


def by_pytest(*tests: str) -> Command:
    """Return tests below tests/; the checkout is not on the path, which would hide the copy."""
    words = "-m pytest -q -x -p no:cacheprovider -o pythonpath=".split()
    return *words, *(f"tests/{test}" for test in tests)


def by_sanitizer(tool: str, name: str) -> Command:
    """Return a command with a launch under compute-sanitizer."""
    return ("compute-sanitizer", tool, *by_launches(name))


LEAN, MLA = "kernels/lean", "kernels/mla"


#: 0.5 ms: partials are stored later by this time.
LATE_PARTIALS = Delay(
    "late partials",
    f"{LEAN}/reduce.cuh",
    "store_partial(slot, quad, piece, epoch);",
    "__nanosleep(500000), store_partial(slot, quad, piece, epoch);",
)
#: The same for latent attention: every other CTA stores its partial later. If it only published
#: later, a reader that does not wait would mostly see new data.
LATE_LATENT_PARTIALS = Delay(
    "late partials of latent attention",
    f"{MLA}/outputs.cuh",
    "  if (!has_rows(first_row)) return;\n  float scale[2];\n",
    "  if (blockIdx.x / Build::cluster % 2) __nanosleep(500000);\n"
    "  if (!has_rows(first_row)) return;\n  float scale[2];\n",
)
#: 2 us: the last warp of four reads a run of bytes later than the others.
LATE_BYTES = Delay(
    "late bytes of a latent cache",
    f"{MLA}/bytes.cuh",
    "mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);",
    "mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);\n"
    "  if (threadIdx.x / 32 % 4 == 3) __nanosleep(2000);",
)
#: The same for Triton: all except host blocks store theirs later.
LATE_TRITON_PARTIALS = Delay(
    "late partials in Triton",
    f"{LEAN}/triton.py",
    "        elif first > 0:\n",
    "        elif first > 0:\n"
    '            tl.inline_asm_elementwise("nanosleep.u32 500000; mov.u32 $0, 0;", "=r", [], '
    "dtype=tl.int32, is_pure=False, pack=1)\n",
)


DELAYS = {
    delay.name: delay
    for delay in (LATE_PARTIALS, LATE_LATENT_PARTIALS, LATE_BYTES, LATE_TRITON_PARTIALS)
}


def read_mutations(text: str) -> Iterator[Mutation]:
    """Yield the mutations of mutations.txt.

    Blocks are separated by empty lines. A block has a name, its checks, and the line before and
    after as in a diff. ``@@`` names the file of all that follow.
    """
    file = ""
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("@@ "):
            file = lines.pop(0).removeprefix("@@ ")
        name, *rest = lines
        old, new = (
            "\n".join(line[1:] for line in rest if line.startswith(sign)) for sign in ("-", "+")
        )
        gpu: list[tuple[str, str]] = []
        fields: dict[str, str] = {}
        for line in rest:
            if line.startswith("  "):
                key, _, value = line.strip().partition(" ")
                fields[key] = value
                if key == "gpu":
                    tool, _, check = value.partition(" ")
                    gpu.append((tool, check))
        yield Mutation(
            name,
            file,
            old,
            new,
            gpu=_command(gpu[0][0], [check for _, check in gpu]),
            cpu=fields.get("cpu"),
            why_not_cpu=fields.get("no", "").removeprefix("cpu: "),
            ends="endless" not in fields,
            delay=DELAYS[fields["delay"]] if "delay" in fields else None,
        )


def _command(tool: str, checks: list[str]) -> Command:
    if tool == "launch":
        return by_launches(*checks)
    return by_pytest(*checks) if tool == "pytest" else by_sanitizer(tool, *checks)


MUTATIONS = tuple(read_mutations(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
