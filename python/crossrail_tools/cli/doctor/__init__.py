"""`crossrail doctor`: runs real transfers on this machine and reports findings with their fixes."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import crossrail
from crossrail_tools.report.tables import console
from crossrail_tools.report.units import counted
from crossrail_tools.report.writing import write_text

from ..failure import Failure, print_notice
from ..info import usable_info
from ..options import fields_of
from ..parsing import Command, Parser, names_of, seconds_up_to
from ..reporting import Progress, check_json
from .examine import examine, within
from .finding import Check, Machine
from .links import find_rails
from .listener import listen
from .show import as_json, print_findings, print_survey, problems
from .survey import DOCTOR_PORT, as_record, longest_s, survey
from .table import CHECKS, GROUPS, OPTIONAL, selected
from .ways import Survey

SECONDS = 1.0
MOST_SECONDS = 10.0


@dataclass(frozen=True)
class DoctorOptions:
    """`crossrail doctor`."""

    only: list[str] | None = None
    peer: str | None = None
    listen: str | None = None
    seconds: float = SECONDS
    store: str | None = None
    nccl: bool = False
    fabric: str | None = None
    launcher: str | None = None
    secret_file: str | None = None
    json: str | None = None
    parent: int | None = None

    @property
    def asked(self) -> set[str]:
        """The optional groups of checks that were asked for."""
        given = {"rails": self.peer is not None, "store": self.store is not None, "nccl": self.nccl}
        given["launcher"] = self.launcher is not None
        given["fabric"] = self.fabric is not None
        return {group for group, wanted in given.items() if wanted}

    def run(self) -> None:
        """Listens for another doctor; or prints the findings and, if requested, writes the JSON.

        Raises Failure if there is a problem, or if the peer cannot be asked.
        """
        check_json(self.json)
        wanted = os.environ.get("CROSSRAIL_NET_DEVICES", "all")  # before `usable_info` removes what is wrong
        if self.store:
            crossrail.Context(environment=False, store=self.store)  # an address that is none is bad usage
        if self.listen is not None:
            listen(self.listen, self.secret_file, lambda: self._machine(wanted).rails)
        machine = self._machine(wanted)
        checks = selected(self.only, self.asked, gpus=bool(machine.gpus))
        limit = sum(check.limit_s for check in checks)
        if self.peer is not None:
            limit += longest_s(len(machine.rails), self.seconds)
        print_notice(f"{counted(len(checks), 'check')}, each with a time limit: {limit:g} s at most, usually far less")
        with Progress() as progress:
            if self.peer is not None:
                machine.survey = self._survey(self.peer, machine, progress)
            findings = examine(checks, machine, lambda check: progress.status(_title(check)))
        if self.json is not None:
            more = {} if machine.survey is None else {"survey": as_record(machine.survey)}
            write_text(as_json(findings, ["crossrail", *sys.argv[1:]], more), self.json)
        to = console(stderr=self.json == "-")
        if machine.survey is not None:
            print_survey(machine.survey, to)
        print_findings(findings, to)
        if bad := problems(findings):
            names = ", ".join(dict.fromkeys(finding.id for finding in bad))
            raise Failure(f"{counted(len(bad), 'problem')} found ({names}); the table has the fix of each")

    def _survey(self, peer: str, machine: Machine, progress: Progress) -> Survey:
        limit = longest_s(len(machine.rails), self.seconds)
        asked = (peer, self.secret_file, machine, self.seconds, progress.status)
        return within(limit, f"the conversation with {peer}", lambda: survey(*asked))

    def _machine(self, wanted: str) -> Machine:
        info, wrong = usable_info()
        return Machine(
            info=info,
            wrong=wrong,
            rails=find_rails(info, wanted),
            store=self.store,
            secret_file=self.secret_file,
            launcher=self.launcher,
            fabric=self.fabric,
        )


def _title(check: Check) -> str:
    return f"{check.group}: {check.id}"


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    known = [*GROUPS, *(check.id for check in CHECKS if check.id not in GROUPS)]
    what = parser.add_argument_group("what it tests")
    text = f"only these checks, by id or group ({', '.join(g for g in GROUPS if g not in OPTIONAL)})"
    what.add_argument("--only", metavar="NAMES", type=names_of(known, "check"), help=text)
    where = f"HOST[:PORT], port {DOCTOR_PORT} by default"
    text = f"also every rail to the machine where `crossrail doctor --listen` runs, at {where}"
    what.add_argument("--peer", metavar="ADDR", help=text)
    text = f"answer the probes of other machines at {where}, until interrupted; HOST is loopback by default"
    what.add_argument("--listen", metavar="ADDR", nargs="?", const="", help=text)
    text = f"duration of each load of a rail ({SECONDS:g})"
    what.add_argument("--seconds", metavar="S", type=seconds_up_to(MOST_SECONDS), help=text)
    store = "also the store at URL (CROSSRAIL_STORE)"
    what.add_argument("--store", metavar="URL", nargs="?", const="", help=store)
    what.add_argument("--nccl", action="store_true", help="also Crossrail as NCCL's network")
    text = "also libfabric's devices, by writing over them: those of PROVIDER (efa, cxi, verbs, tcp, shm), or of NICs"
    what.add_argument("--fabric", metavar="PROVIDER", nargs="?", const="", help=text)
    launchers = what.add_mutually_exclusive_group()
    for option, name in (("--torchrun", "torchrun"), ("--slurm", "Slurm")):
        text = f"also the variables of {name}"
        launchers.add_argument(option, action="store_const", const=name, dest="launcher", help=text)
    out = parser.add_argument_group("how, and what comes out")
    out.add_secret_file("both ends, or the store and its clients,")
    out.add_json()
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    alone = ("peer", "only", "store", "nccl", "launcher", "seconds", "json")
    given = any(getattr(parsed, name) for name in alone) or parsed.fabric is not None
    if parsed.listen is not None and given:
        parser.error("--listen answers other machines and tests nothing itself: give the other options there")
    if parsed.seconds is not None and parsed.peer is None:
        parser.error("--seconds is for the loads of --peer, which is not given")
    options = DoctorOptions(**fields_of(parsed))
    for check in CHECKS:
        if check.group in OPTIONAL and check.group not in options.asked:
            for name in {check.id, check.group}.intersection(parsed.only or ()):
                parser.error(f"--only {name} needs {OPTIONAL[check.group]}")
    return options
