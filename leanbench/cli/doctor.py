"""`leanbench doctor`: what this machine can measure, and how well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.options import option, switch

if TYPE_CHECKING:
    from leanbench.doctor.machine import Finding, Machine

#: Checks of folders. They affect no figure.
_FOLDERS = {"runs", "triton cache"}

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[
        bool, switch("--json", "Print the findings and their figures as JSON.")
    ] = False,
    quick: Annotated[bool, switch("--quick", "Leave out what takes seconds.")] = False,
    deep: Annotated[
        bool,
        switch(
            "--deep",
            "Also every kernel and library, hardware counters, and processes; takes minutes.",
        ),
    ] = False,
    out: Annotated[Path, option("--out", "DIR", "Folder that will hold run directories.")] = Path(
        "runs"
    ),
) -> None:
    """Examine this machine: software, GPU, timers, energy counter, bandwidth, noise, kernels,
    links between GPUs. Changes no settings.

    Each finding is ok, a note (worth knowing) or a problem (nothing can be measured, or figures
    would mislead), with what to do about it. A machine without a GPU is no problem: sweeps predict
    there.

    Exit code 1 means that there is a problem.
    """
    from leanbench.core.errors import UserError
    from leanbench.doctor.checks import examine
    from leanbench.doctor.machine import Machine

    if quick and deep:
        raise UserError(
            "--deep takes minutes and --quick leaves out what takes seconds: give one of them"
        )
    machine = Machine(out, deep)
    findings = list(examine(machine, quick, lambda what: output.say(f"{what}...")))
    if as_json:
        _show_json(findings, machine)
    else:
        _show_table(findings, machine)
    if any(finding.status == "problem" for _, finding in findings):
        raise typer.Exit(1)


def _show_json(findings: list[tuple[str, Finding]], machine: Machine) -> None:
    import json
    from dataclasses import asdict

    listed = [{"check": name, **asdict(finding)} for name, finding in findings]
    output.show_whole(json.dumps({"can_measure": machine.can_launch, "findings": listed}, indent=2))


def _show_table(findings: list[tuple[str, Finding]], machine: Machine) -> None:
    from rich.text import Text

    table = output.table()
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for name, finding in findings:
        text = finding.text if finding.fix is None else f"{finding.text}\n-> {finding.fix}"
        table.add_row(name, Text(finding.status, _STYLES[finding.status]), Text(text))
    output.show_table(table)
    output.show(_verdict(findings, machine))


def _verdict(findings: list[tuple[str, Finding]], machine: Machine) -> str:
    counted = Counter(finding.status for _, finding in findings)
    problems = output.counted(counted["problem"], "problem")
    notes = output.counted(counted["note"], "note")
    if counted["problem"]:
        failed = {name for name, finding in findings if finding.status == "problem"}
        before = "sweep here" if failed <= _FOLDERS else "trust a figure of this machine"
        return f"{problems}, {notes}: solve the problems before you {before}."
    if machine.can_launch:
        more = "" if machine.deep else " --deep looks at every kernel, library and counter."
        return f"{problems}, {notes}: this machine can measure.{more}"
    return f"{problems}, {notes}: nothing can be measured here, sweeps predict."
