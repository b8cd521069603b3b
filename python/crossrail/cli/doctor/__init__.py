"""`crossrail doctor`: tests this machine by doing; findings with the fix of each."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import crossrail
from crossrail.report import console, counted, write_text

from ..failure import Failure, print_notice
from ..info import usable_info
from ..options import add_json, add_secret_file
from ..parsing import Command, Parser, names_of
from ..reporting import Progress, check_json
from .examine import examine
from .finding import Check, Machine
from .links import find_rails
from .show import as_json, print_findings, problems
from .table import CHECKS, GROUPS, OPTIONAL, selected


@dataclass(frozen=True)
class DoctorOptions:
    """`crossrail doctor`."""

    only: list[str] | None = None
    store: str | None = None
    nccl: bool = False
    launcher: str | None = None
    secret_file: str | None = None
    json: str | None = None
    parent: int | None = None

    @property
    def asked(self) -> set[str]:
        """The optional groups of checks that were asked for."""
        given = {"store": self.store is not None, "nccl": self.nccl, "launcher": self.launcher is not None}
        return {group for group, wanted in given.items() if wanted}

    def run(self) -> None:
        """Prints the findings and, if requested, writes the JSON. Raises Failure if there is a problem."""
        check_json(self.json)
        if self.store:
            crossrail.Context(environment=False, store=self.store)  # an address that is none is bad usage
        machine = self._machine()
        checks = selected(self.only, self.asked, gpus=bool(machine.gpus))
        limit = sum(check.limit_s for check in checks)
        print_notice(f"{counted(len(checks), 'check')}, each with a time limit: {limit:g} s at most, usually far less")
        with Progress() as progress:
            findings = examine(checks, machine, lambda check: progress.status(_title(check)))
        print_findings(findings, console(stderr=self.json == "-"))
        if self.json is not None:
            write_text(as_json(findings, ["crossrail", *sys.argv[1:]], {}), self.json)
        if bad := problems(findings):
            names = ", ".join(dict.fromkeys(finding.id for finding in bad))
            raise Failure(f"{counted(len(bad), 'problem')} found ({names}); the table says what mends each")

    def _machine(self) -> Machine:
        wanted = os.environ.get("CROSSRAIL_NET_DEVICES", "all")
        info, wrong = usable_info()
        return Machine(
            info=info,
            wrong=wrong,
            rails=find_rails(info, wanted),
            store=self.store,
            secret_file=self.secret_file,
            launcher=self.launcher,
        )


def _title(check: Check) -> str:
    return f"{check.group}: {check.id}"


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    named = [*GROUPS, *(check.id for check in CHECKS if check.id not in GROUPS)]
    known = [name for name in named if name not in OPTIONAL]
    what = parser.add_argument_group("what it tests")
    text = f"only these checks, by id or group ({', '.join(g for g in GROUPS if g not in OPTIONAL)})"
    what.add_argument("--only", metavar="NAMES", type=names_of(known, "check"), help=text)
    store = "also the store at URL (CROSSRAIL_STORE)"
    what.add_argument("--store", metavar="URL", nargs="?", const="", help=store)
    what.add_argument("--nccl", action="store_true", help="also Crossrail as NCCL's network")
    launchers = what.add_mutually_exclusive_group()
    for option, name in (("--torchrun", "torchrun"), ("--slurm", "Slurm")):
        text = f"also the variables of {name}"
        launchers.add_argument(option, action="store_const", const=name, dest="launcher", help=text)
    out = parser.add_argument_group("how, and what comes out")
    add_secret_file(out, "the store and its clients")
    add_json(out)
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return DoctorOptions(
        only=parsed.only,
        store=parsed.store,
        nccl=parsed.nccl,
        launcher=parsed.launcher,
        secret_file=parsed.secret_file,
        json=parsed.json,
    )
