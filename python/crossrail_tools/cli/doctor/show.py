"""The findings as a table and as JSON, and `docs/doctor.md` from the table of checks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.tables import table
from crossrail_tools.report.units import counted

from .finding import PROBLEMS, SEVERITIES, Finding
from .probes import Load
from .table import CHECKS, GROUPS, OPTIONAL
from .ways import Survey

SCHEMA = "crossrail-doctor/1"

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def print_findings(findings: Sequence[Finding], to: Console) -> None:
    """Prints the findings, the worst first, each followed by its fix, and a line that counts them."""
    order = list(SEVERITIES)
    columns = ["severity", "check", "on", "what was found, and its fix"]
    made = table("findings", columns, left=4, keys=2, prose=columns[2:])
    for finding in sorted(findings, key=lambda finding: order.index(finding.severity)):
        severity = Text(finding.severity, style=_STYLES[finding.severity])
        made.add_row(severity, finding.id, finding.subject, finding.evidence)
        if finding.fix:
            made.add_row("", "", "", Text(f"fix: {finding.fix}", style="bold"))
        if finding.also:
            seen = dict.fromkeys(" on ".join(filter(None, (one.id, one.subject))) for one in finding.also)
            made.add_row("", "", "", f"also seen by {', '.join(seen)}")
    to.print(made)
    to.print(summary(findings))


def print_survey(survey: Survey, to: Console) -> None:
    """Prints a row per rail that transfers use, and which rail here reaches which there."""
    columns = ["rail", "reachable", "path MTU", "alone, there", "alone, back", "at once, there", "at once, back"]
    made = table(f"rails to {survey.peer}, in Gbit/s", columns, left=2, keys=1, prose=["reachable"])
    for way in survey.used:
        sizes = [size for size in (way.mtu_there, way.mtu_back) if size is not None]
        rates = [*_rates(way.alone), *_rates(way.together)]
        made.add_row(way.name, "yes" if way.open else f"no: {way.why}", str(min(sizes)) if sizes else "-", *rates)
    to.print(made)
    theirs = list(dict.fromkeys(way.theirs.name for way in survey.ways))
    matrix = table("every rail here to every rail there", ["here", *theirs], left=1 + len(theirs), keys=1, prose=theirs)
    cells = {(way.mine.name, way.theirs.name): "yes" if way.open else way.why for way in survey.ways}
    for mine in dict.fromkeys(way.mine.name for way in survey.ways):
        matrix.add_row(mine, *(cells.get((mine, name), "-") for name in theirs))
    if len(survey.ways) > len(survey.used):
        to.print(matrix)


def _rates(loads: tuple[Load, Load] | None) -> tuple[str, str]:
    if loads is None:
        return ("-", "-")
    there, back = (f"{one.gbit_per_s:.3g}" if not one.why else "-" for one in loads)
    return there, back


def summary(findings: Sequence[Finding]) -> str:
    """``41 findings: 2 errors, 1 warning, 3 notes, 35 ok``."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    parts = [f"{count} ok" if severity == "ok" else counted(count, severity) for severity, count in counts.items()]
    return f"{counted(len(findings), 'finding')}: {', '.join(parts)}"


def problems(findings: Sequence[Finding]) -> list[Finding]:
    """Those that make the command exit with 1."""
    return [finding for finding in findings if finding.severity in PROBLEMS]


def as_json(findings: Sequence[Finding], command: Sequence[str], more: Mapping[str, Any]) -> str:
    """The JSON of a run: every finding, and the environment."""
    whole = {
        "schema": SCHEMA,
        "environment": dataclasses.asdict(capture_environment()),
        "command": list(command),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        **more,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def page() -> str:
    """`docs/doctor.md`."""
    severities = "\n".join(f"| {name} | {meaning} |" for name, meaning in SEVERITIES.items())
    text = f"""# crossrail doctor

<!-- Written by `python -m crossrail_tools.cli.doctor.page` from crossrail_tools/cli/doctor/table.py. Do not edit. -->

`crossrail doctor` runs real tests: it moves data over each transport between two processes, opens, locks and maps what
a job needs, and queries the kernel's routes. Each finding has the id of its check, a severity, the evidence, and the
command that fixes it. If several checks see the same fault, such as a device that is down, they are merged into one
finding, which names the others. `--only` selects checks by id or group, `--json` writes everything.
[Why is it slow?](guides/slow.md) begins with it.

    crossrail doctor                           # this machine
    crossrail doctor --only network,shm        # some checks
    crossrail doctor --listen 10.0.0.1 --secret-file secret   # on one machine ...
    crossrail doctor --peer 10.0.0.1 --secret-file secret     # ... and on the other: every rail
    crossrail doctor --store tcp://10.0.0.1:18178 --nccl
    crossrail doctor --fabric efa              # libfabric's devices; without a name those of all NICs

With `--peer` every rail here is tested against every rail of the other machine: reachability, path MTU, bandwidth alone
in each direction, and bandwidth of all rails at once. The other machine answers at the
port after its own (TCP and UDP; another one if that is taken), to this run only. Listening beyond loopback needs the
secret of all ends; without one, only the rails of loopback are tried.

With `--fabric` every device of libfabric is written over, between two endpoints of a process of its own: a provider
that ends the process, as some do, is a finding. [On the first day with a NIC](guides/first-day-with-a-nic.md) has the
order of commands, and what each must print.

It exits with 0 if there is neither an error nor a warning, with 1 if there is one, and with 2 for bad usage. A check
that fails itself, or does not end within its limit, is a finding like any other.

The JSON is `{{"schema": "{SCHEMA}", "environment": ..., "command": [...], "findings": [...]}}`. A finding
has `id`, `severity`, `subject` (a device, a rail, a setting; may be empty), `evidence`, `fix`, and the findings of
other checks with the same cause as `also`. With `--peer` there is a `survey` too: the rails there, the clocks, and
every way from a rail here to one there, with routes, packet sizes, and rates in Gbit/s.

| severity | meaning |
|---|---|
{severities}
"""
    for group, meaning in GROUPS.items():
        optional = " Runs only with that option." if group in OPTIONAL else ""
        text += f"\n## {group}\n\n{meaning[0].upper()}{meaning[1:]}.{optional}\n\n"
        text += "| id | what is tested | severity | what usually helps | limit |\n|---|---|---|---|---|\n"
        for check in CHECKS:
            if check.group == group:
                cells = (f"`{check.id}`", check.tests, check.rule, check.usual_fix, f"{check.limit_s:g} s")
                text += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return text
