"""Options that several commands share, each declared once, and the settings they override."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import crossrail

from .failure import UsageFailure
from .parsing import DEFAULT_PORT, Parser, count, names_of, pin, positive, size_list

Memory = Literal["shared", "ordinary"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["fp8", "bf16"]
Pin = list[int] | Literal["auto", "none"]

ROUNDS = 3
"""Default number of turns of Crossrail and of each peer."""

UNPACK_MODES = ("kernel", "d2d", "host")
"""Methods to unpack chunks from bounce memory into GPU memory."""

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


def add_json(group: argparse._ArgumentGroup | Parser) -> None:
    group.add_argument("--json", metavar="FILE", help="raw samples and the environment to FILE, or to stdout for `-`")


def add_output(group: argparse._ArgumentGroup | Parser) -> None:
    """Adds what every bench can write."""
    add_json(group)
    group.add_argument("--trace", metavar="FILE", help="what each lane carried when, for Perfetto (ui.perfetto.dev)")


def add_no_effect(group: argparse._ArgumentGroup) -> None:
    """Adds options of NIXL's examples that ask for what is so anyway, so that their command lines can be kept."""
    text = "accepted, without effect: of NIXL's examples, and always so here"
    for name in ("--skip-nic-discovery", "--use-tcp-store"):
        group.add_argument(name, action="store_true", default=argparse.SUPPRESS, dest="no_effect", help=text)


def add_ends(ends: argparse._ArgumentGroup) -> None:
    """Declares where the other end is, with what both need to reach each other."""
    where = f"HOST[:PORT], port {DEFAULT_PORT} by default"
    listen = f"wait for the other end at {where}; HOST is loopback by default"
    ends.add_argument("--listen", metavar="ADDR", nargs="?", const="", help=listen)
    ends.add_argument("--connect", metavar="ADDR", help=f"connect to the end that listens at {where}")
    add_secret_file(ends, "both ends")
    add_timeout(ends)


def add_timeout(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--timeout", metavar="TIME", help="maximum duration of any wait: 30s, 500ms, 2m")


def add_secret_file(group: argparse._ArgumentGroup | Parser, owners: str) -> None:
    text = f"the secret that {owners} share; required beyond this machine"
    group.add_argument("--secret-file", metavar="FILE", help=text)


def add_transport(group: argparse._ArgumentGroup, known: str) -> None:
    text = f"use only these, or fail: {known}, or a list A,B"
    group.add_argument("--transport", metavar="NAMES", help=text)


def add_rails(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rails", metavar="DEVICES", help="devices that carry data: eth1,eth2, or 127.0.0.1,127.0.0.2")


def add_links(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `LinkOptions`."""
    add_transport(group, "shm, tcp, cuda_ipc")
    add_rails(group)
    group.add_argument("--chunk", metavar="SIZE", help="bytes that one lane carries at a time")
    group.add_argument("--channels", metavar="N", type=positive, help="connections per rail")
    unpack = "how chunks are copied from bounce memory into GPU memory (kernel)"
    group.add_argument("--unpack", choices=UNPACK_MODES, help=unpack)


def add_sizes(group: argparse._ArgumentGroup, text: str) -> None:
    group.add_argument("--size", "--sizes", dest="sizes", metavar="SIZES", type=size_list, help=text)


def add_memory(group: argparse._ArgumentGroup) -> None:
    text = "host memory: Context.alloc (shared), or the process's own heap (ordinary)"
    group.add_argument("--memory", choices=("shared", "ordinary"), help=text)


def add_iterations(group: argparse._ArgumentGroup, iters: int | None = None, warmup: int | None = None) -> None:
    """Adds ``--iters`` and ``--warmup``. Without defaults here, the command chooses them by size."""
    timed = "timed iterations" if iters is None else f"timed iterations ({iters})"
    before = "iterations before the timed ones" + ("" if warmup is None else f" ({warmup})")
    group.add_argument("--iters", metavar="N", type=positive, default=iters, help=timed)
    group.add_argument("--warmup", metavar="N", type=count, default=warmup, help=before)


def add_window(group: argparse._ArgumentGroup, text: str, default: int | None = None) -> None:
    group.add_argument("--window", metavar="N", type=positive, default=default, help=text)


def add_pin(group: argparse._ArgumentGroup, text: str, default: str | None = None) -> None:
    group.add_argument("--pin", metavar="CPUS", type=pin, default=default, help=text)


def add_device_kind(group: argparse._ArgumentGroup, text: str, default: Device | None = None) -> None:
    group.add_argument("--device", choices=("cpu", "cuda"), default=default, help=text)


def add_tokens(
    group: argparse._ArgumentGroup, least: Callable[[str], int], defaults: Mapping[str, Any], *, preset: bool
) -> None:
    """Adds the shape of an exchange. If a ``preset`` may set it, missing options stay None."""

    def default(name: str) -> Any:
        return None if preset else defaults[name]

    tokens = f"tokens per rank ({defaults['tokens']})"
    group.add_argument("--tokens", metavar="T", type=least, default=default("tokens"), help=tokens)
    hidden = f"elements per token ({defaults['hidden']})"
    group.add_argument("--hidden", metavar="H", type=positive, default=default("hidden"), help=hidden)
    topk = f"experts per token ({defaults['topk']})"
    group.add_argument("--topk", metavar="K", type=positive, default=default("topk"), help=topk)
    dtype = f"type of the rows that dispatch sends ({defaults['dtype']}); combine sends bf16"
    group.add_argument("--dtype", choices=("fp8", "bf16"), default=default("dtype"), help=dtype)


def add_compare(group: argparse._ArgumentGroup, known: Collection[str], more: str = "") -> None:
    """Adds ``--compare`` with the ``known`` peers, and ``--rounds``."""
    text = f"also run these, alternating, and print ratios: {more or ','.join(known)}"
    group.add_argument("--compare", metavar="NAMES", type=names_of(known, "peer"), help=text)
    group.add_argument("--rounds", metavar="N", type=positive, help=f"turns of Crossrail and of each peer ({ROUNDS})")
