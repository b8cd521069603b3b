"""What a check is, what it finds, and what it examines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from crossrail.errors import ConfigError
from crossrail.records import FabricState, Info

from .links import Rail
from .ways import Survey

Severity = Literal["error", "warning", "note", "ok"]

SEVERITIES: dict[Severity, str] = {
    "error": "something does not work",
    "warning": "it works, but slowly or not reliably",
    "note": "worth knowing; nothing needs to be done, or nothing could be tested",
    "ok": "tested, and as it should be",
}

PROBLEMS: frozenset[Severity] = frozenset({"error", "warning"})
"""What makes the command exit with 1."""


Cause = tuple[str, str]
"""The id and the subject of a finding that names the cause of another one."""


@dataclass(frozen=True)
class Found:
    """One result of a check: what was seen, and the command or step that fixes it (empty: there is none).

    ``because``: if that is a problem too, it is the cause of this one.
    """

    severity: Severity
    evidence: str
    fix: str = ""
    subject: str = ""
    because: Cause | None = None


@dataclass(frozen=True)
class Finding:
    """A result with the id of its check, and results of further checks that have the same cause."""

    id: str
    severity: Severity
    subject: str
    evidence: str
    fix: str
    also: list[Finding] = field(default_factory=list)


@dataclass
class Machine:
    """What the checks examine: this machine, this process's settings, and the way to the peer if there is one."""

    info: Info
    wrong: list[ConfigError] = field(default_factory=list)
    rails: list[Rail] = field(default_factory=list)
    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    store: str | None = None
    secret_file: str | None = None
    launcher: str | None = None
    survey: Survey | None = None
    fabric: str | None = None
    fabric_state: FabricState | None = None

    @property
    def gpus(self) -> list[str]:
        """The GPUs that CUDA can use, as ``cuda:N``."""
        return [f"cuda:{device['ordinal']}" for device in self.info["cuda"]["devices"]]


@dataclass(frozen=True)
class Check:
    """One row of the table of checks.

    ``tests``: what is tested and how; ``rule``: conditions of each severity; ``usual_fix``: a command or advice; all
    three are for `docs/doctor.md`. ``run`` may take ``limit_s`` seconds, by default those of its ``group``.
    ``because``: the usual cause of a failure.
    """

    id: str
    tests: str
    rule: str
    usual_fix: str
    run: Callable[[Machine], Iterable[Found]]
    group: str = ""
    limit_s: float = 0.0
    because: Cause | None = None


def text_of(path: Path) -> str:
    """The trimmed text of a file of sysfs or procfs; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """The decimal number in a file; None if there is none."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def mib(nbytes: int) -> str:
    """``16 MiB``, ``4 GiB``."""
    return f"{nbytes >> 30} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"
