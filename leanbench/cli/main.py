"""`leanbench`: the commands, and errors as one sentence and an exit code."""

from __future__ import annotations

import contextlib
import errno
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from leanbench.cli import output
from leanbench.cli.check import check
from leanbench.cli.compare import compare
from leanbench.cli.configs import configs
from leanbench.cli.decode import decode
from leanbench.cli.doctor import doctor
from leanbench.cli.help import Commands
from leanbench.cli.list import list_
from leanbench.cli.lookup import lookup
from leanbench.cli.merge import merge
from leanbench.cli.predict import predict
from leanbench.cli.recommend import recommend
from leanbench.cli.report import report
from leanbench.cli.sweep import sweep
from leanbench.cli.trace import trace
from leanbench.cli.tune import tune
from leanbench.core import __version__
from leanbench.core.axes import AXES
from leanbench.core.errors import UserError
from leanbench.core.switches import CONFIGS, is_on

#: Key of the command line in a context.
_WORDS = "leanbench.words"
#: Typer has no public name for it.
_UsageError: Any = typer.BadParameter.__base__
_DENIED = "change its permissions or choose another place"
#: Fixes of errors that any path or stream may cause.
_FIXES = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "make room or choose another place",
    errno.EDQUOT: "make room or choose another place",
    errno.EFBIG: "make room or choose another place",
}


class _Commands(TyperGroup):
    """The commands, with errors as a sentence on stderr and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        # --help and --version print while the words are parsed.
        with _in_sentences([]):
            return super().make_context(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _in_sentences(ctx.meta[_WORDS]), output.warnings_in_sentences():
            _check_empty(ctx.meta[_WORDS])
            _check_repeated(ctx.meta[_WORDS])
            is_on(CONFIGS, default=True)  # rejects an invalid one before a worker reads it
            return super().invoke(ctx)


@contextlib.contextmanager
def _in_sentences(words: list[str]) -> Iterator[None]:
    """Turn errors into a sentence on stderr and an exit code.

    Args:
        words: The command line.
    """
    try:
        yield
    except typer.BadParameter as error:
        if (message := _message_with_value(error, words)) is None:
            raise
        output.say(f"Error: {message}")
        raise typer.Exit(2) from None
    except _UsageError as error:
        extra = re.fullmatch(r"Got unexpected extra arguments?.* \((.*)\)", error.message)
        if extra is None:
            raise
        output.say(
            f"Error: unexpected argument {extra[1]!r}: leave it out or name its option; values of a"
            " list are separated by commas, without spaces"
        )
        raise typer.Exit(2) from None
    except UserError as error:
        output.say(f"Error: {error}")
        raise typer.Exit(2) from None
    except BrokenPipeError:
        # As in `leanbench list kernels | head -1`. Exit code 1 would be a finding.
        output.mute("stdout")
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        fix = _FIXES.get(error.errno or 0)
        if fix is None or (fix is _DENIED and error.filename is None):
            raise
        if error.filename is None:
            output.mute("stdout")
        where = error.filename or "the output"
        output.say(f"Error: cannot open or write {where} ({error.strerror}): {fix}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        # Commands that can be resumed print how.
        stopped_by = output.signal_of(error)
        output.say(f"Stopped by {stopped_by.name} before it was done.")
        raise typer.Exit(128 + stopped_by) from None


def _check_empty(words: list[str]) -> None:
    """Reject an empty value, such as an unset shell variable."""
    for before, word in pairwise(["", *words]):
        if assigned := re.fullmatch(r"(--[\w-]+)=\s*", word):
            name = assigned[1]
        elif word.strip():
            continue
        else:
            name = before if re.fullmatch(r"--?\w[\w-]*", before) else "an argument"
        raise UserError(f"{name} is empty: give it a value, or leave it out")


def _check_repeated(words: list[str]) -> None:
    """Reject an axis that is given twice. Only the last one would take effect."""
    given: dict[str, list[str]] = {axis.flag: [] for axis in AXES.values()}
    for flag, value in _pairs(words):
        if flag in given:
            given[flag].append(value)
    for flag, values in given.items():
        if len(values) > 1:
            raise UserError(f"{flag} is given twice: write {flag} {','.join(values)}")


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """Return each word with the next. --draw=abc counts as --draw and abc."""
    split = [part for word in words for part in word.split("=", int(word.startswith("--")))]
    return list(pairwise(split))


def _message_with_value(error: typer.BadParameter, words: list[str]) -> str | None:
    """Return Typer's message about an option, with its value; None if it has none."""
    if not error.message:  # a missing option
        return None
    options = getattr(error.param, "opts", ())
    # The last value of a repeated option takes effect.
    for option, value in reversed(_pairs(words)):
        if option in options:
            if "valid integer" in error.message and not re.fullmatch(r"[+-]?\d+", value.strip()):
                return f"{option} {value!r} is refused: write a whole number such as 8"
            return f"{option} {value!r} is refused: {error.message[0].lower()}{error.message[1:]}"
    return None


app = Commands(
    cls=_Commands,
    no_args_is_help=True,
    # Plain usage errors: a box is hard to read in a log.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        output.show(f"leanbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Measure and explain decode attention on GPUs."""


# First sentences of docstrings are too long for a terminal of 80 columns.
app.command("sweep", short_help="Measure (or predict) kernels over a grid of problems.")(sweep)
app.command("decode", short_help="Measure (or predict) a decode step of a whole model.")(decode)
app.command("tune", short_help="Find and save the best launch settings for a GPU.")(tune)
app.command("compare", short_help="Compare two runs or two kernels, cell by cell.")(compare)
app.command("trace", short_help="Draw what every CTA did and when.")(trace)
app.command("recommend", short_help="Name the kernel to take for a model or shape, and why.")(
    recommend
)
app.command("lookup", short_help="Show what was measured for a shape, or near it.")(lookup)
app.command("report", short_help="Write HTML and CSV from the rows of a run.")(report)
app.command("merge", short_help="Join the runs of a sweep's shards.")(merge)
app.command("check", short_help="Compare every kernel with the fp64 reference.")(check)
app.command("doctor", short_help="Report what this machine can measure, and how well.")(doctor)
app.add_typer(
    predict, name="predict", short_help="Show, check or fit the performance model's constants."
)
app.add_typer(
    configs, name="configs", short_help="List, show, explain and move timed launch settings."
)
app.command("list", short_help="List kernels, sweeps, axes, quantities, lengths, models or GPUs.")(
    list_
)


def main() -> None:
    """Run the `leanbench` command."""
    output.prepare_streams()
    app(prog_name="leanbench")
