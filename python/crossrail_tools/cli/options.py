"""Options that several commands share, each declared once, and the settings they override."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import crossrail

from .failure import UsageFailure
from .parsing import Parser

Memory = Literal["shared", "ordinary"]
Dtype = Literal["fp8", "bf16"]
Pin = list[int] | Literal["auto", "none"]

_SETTINGS = {
    "tls": "tls",
    "rails": "net_devices",
    "chunk": "chunk",
    "channels": "channels",
    "unpack": "unpack",
    "timeout": "timeout",
    "secret_file": "secret_file",
    "trace_parts": "trace",
}
"""Attributes of options, and the settings they override, by their field names in the settings declaration."""


def _option_of(setting: str) -> str:
    """The option that overrides a setting, as typed."""
    typed = {"tls": "transport"} | {of: name for name, of in _SETTINGS.items() if of != "tls"}
    return f"--{typed.get(setting, setting).replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every bench. None stands for an option that is not on the command line."""

    timeout: str | None = None
    secret_file: str | None = None
    json: str | None = None
    trace: str | None = None
    parent: int | None = None

    @property
    def trace_parts(self) -> str | None:
        """The folder into which the workers write what becomes the file of ``--trace``."""
        return None if self.trace is None else f"{self.trace}.parts"

    def settings(self) -> dict[str, str]:
        """The settings on the command line, by their field names in the settings declaration."""
        found = {setting: getattr(self, name, None) for name, setting in _SETTINGS.items()}
        return {setting: str(value) for setting, value in found.items() if value is not None}

    def pinning(self) -> str | None:
        """How the processes of the bench are pinned to processors, for its report; None if that makes no difference."""
        return None

    def context(self) -> crossrail.Context:
        """A context with the settings of the command line and the environment, in that order of precedence.

        Raises the library's errors.
        """
        given = self.settings()
        settings: dict[str, Any] = dict(given)
        try:
            return crossrail.Context(**settings)
        except crossrail.CrossrailError as error:
            name = error.operation.removeprefix("CROSSRAIL_").lower()
            if name not in given:
                raise
            why = "; ".join(part for part in (error.detail, error.hint) if part)
            raise UsageFailure(f"{_option_of(name)}: {why}") from None


@dataclass(frozen=True, kw_only=True)
class LinkOptions(RunOptions):
    """Options that select the links and configure how they carry data."""

    transport: str | None = None
    rails: str | None = None
    chunk: str | None = None
    channels: int | None = None
    unpack: str | None = None

    @property
    def tls(self) -> str | None:
        """The transports that ``--transport`` selects."""
        return tls_of(self.transport)


def tls_of(transport: str | None) -> str | None:
    """The transports that ``--transport`` selects: cuda_ipc needs the Unix socket of shm to share memory."""
    names = (transport or "").split(",")
    return f"shm,{transport}" if "cuda_ipc" in names and "shm" not in names else transport


def required(transport: str | None) -> str | None:
    """The transports that a connection must use because of ``--transport``; None if it leaves a choice."""
    chosen = transport is not None and transport != "all" and not transport.startswith("^")
    return tls_of(transport) if chosen else None


def check_tcp(parser: Parser, transport: str | None, options: Mapping[str, object]) -> None:
    """Rejects options of TCP if ``--transport`` excludes it."""
    given = [name for name, value in options.items() if value is not None]
    names = required(transport)
    if given and names is not None and "tcp" not in names.split(","):
        parser.error(f"{given[0]} is for tcp, which --transport {transport} leaves out")


def fields_of(parsed: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """The parsed arguments that are not None, without argparse's own and those ``left_out``."""
    own = ("command", "outcome", "parser", "no_effect", *left_out)
    return {name: value for name, value in vars(parsed).items() if name not in own and value is not None}
