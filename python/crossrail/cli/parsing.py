"""What the command lines of all commands share: the parser, and the types of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, TypeAlias

import crossrail

from .failure import EXIT_USAGE, say_error

EPILOG = """\
exit codes: 0 ok, 1 the run failed or data did not verify, 2 bad usage.
Settings (CROSSRAIL_...) are listed by `crossrail info`."""


class Command(Protocol):
    """A command line, parsed: typed options that can be carried out."""

    @property
    def parent(self) -> int | None:
        """The process that this one must not outlive, if it was started by another of the command's."""

    def run(self) -> None:
        """Carries it out. Raises Failure, WriteError, OSError and the library's errors."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like every other error of the command. Of nested ones the innermost that took
    part is `parser` in what was found.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        say_error(f"{message}; see `{self.prog} --help`")
        raise SystemExit(EXIT_USAGE)


class Outcome(Protocol):
    """Makes a command of what argparse found; tells `parser` what makes no sense."""

    def __call__(self, parser: Parser, parsed: argparse.Namespace) -> Command: ...


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""Where a command adds its parser. A parser that it adds has the default `outcome`: an :class:`Outcome`."""


def size_list(text: str) -> list[int]:
    """Several sizes: `64K`, `A,B,C`, `MIN:MAX`."""
    try:
        return crossrail.parse_sizes(text)
    except crossrail.CrossrailError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number_of(text: str, least: int) -> int:
    """A whole number from `least` to 2^31 - 1."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return number


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return number_of(text, 1)


def count(text: str) -> int:
    """A whole number of at least 0."""
    return number_of(text, 0)


_DEVICE = re.compile(r"cuda(?::([0-9]{1,3}))?")


def device(text: str) -> str:
    """A place of memory: `cpu`, or a GPU as `cuda:0`; `cuda` is the first."""
    found = _DEVICE.fullmatch(text.strip())
    if text.strip() == "cpu":
        return "cpu"
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; known: cpu, cuda, cuda:N (N from 0)")
    return f"cuda:{int(found.group(1) or 0)}"


def device_list(text: str) -> list[str]:
    """Several devices: `cuda:0,cuda:1`."""
    return [device(part) for part in text.split(",")]


def tls_of(transport: str | None) -> str | None:
    """The transports that `--transport` stands for: cuda_ipc shares memory over the Unix socket that shm has."""
    names = (transport or "").split(",")
    return f"shm,{transport}" if "cuda_ipc" in names and "shm" not in names else transport


def without_tcp(parser: Parser, transport: str | None, options: Mapping[str, object]) -> None:
    """Tells the parser which of the options that were given (not None) say how TCP goes, where it is left out."""
    plain = transport is not None and transport != "all" and not transport.startswith("^")
    given = [name for name, value in options.items() if value is not None]
    if given and plain and "tcp" not in str(transport).split(","):
        parser.error(f"{given[0]} is for tcp, which --transport {transport} leaves out")


def required(transport: str | None) -> str | None:
    """What a connection must use, by `--transport`; None when that leaves a choice."""
    plain = transport is not None and transport != "all" and not transport.startswith("^")
    return tls_of(transport) if plain else None


def pin(text: str) -> list[int] | str:
    """Processors, or `auto` or `none`."""
    if text in ("auto", "none"):
        return text
    return [number_of(part, 0) for part in text.split(",")]
