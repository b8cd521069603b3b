"""The argument parser, and the types of option values: sizes, numbers, devices, names, addresses."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias

import crossrail
from crossrail._native import loopback
from crossrail_tools.report.writing import STDOUT

from ..words import a
from .failure import EXIT_USAGE, Failure, UsageFailure, print_error, print_notice

EPILOG = """\
exit codes: 0 success, 1 the run failed or data did not verify, 2 bad usage,
129 terminal closed, 130 interrupted, 143 terminated (a bench then shows what it
has measured, and marks its JSON as partial).
Settings (CROSSRAIL_...) are listed by `crossrail info`."""


DEFAULT_PORT = 18177
STORE_PORT = 18178
_ADDRESS_FORM = "write HOST, HOST:PORT, or [IPV6]:PORT"


Device = Literal["cpu", "cuda"]


class Command(Protocol):
    """A parsed command line: typed options, and how to run them."""

    @property
    def parent(self) -> int | None:
        """The process that started this one and that it must not outlive, if that is another process of the command."""

    def run(self) -> None:
        """Runs the command. Raises Failure, WriteError, OSError and the library's errors."""


ROUNDS = 3
"""Default number of turns of Crossrail and of each peer."""

UNPACK_MODES = ("kernel", "d2d", "host")
"""Methods to unpack chunks from bounce memory into GPU memory."""


def destination(text: str) -> str:
    """The name of a file: ``-`` for stdout by any of its names, so that nothing else is printed there."""
    return STDOUT if text in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else text


class SharedOptions:
    """Options that several commands have, each declared once: methods of parsers and of their groups."""

    if TYPE_CHECKING:

        def add_argument(self, *names: Any, **how: Any) -> Any: ...

    def add_json(self) -> None:
        self.add_argument(
            "--json",
            type=destination,
            metavar="FILE",
            help="raw samples and the environment to FILE, or to stdout for `-`",
        )

    def add_output(self) -> None:
        """Adds what every bench can write."""
        self.add_json()
        self.add_argument("--trace", metavar="FILE", help="what each lane carried when, for Perfetto (ui.perfetto.dev)")

    def add_no_effect(self) -> None:
        """Adds options of NIXL's examples that ask for what is so anyway, so that their command lines can be kept."""
        text = "accepted, without effect: of NIXL's examples, and always so here"
        for name in ("--skip-nic-discovery", "--use-tcp-store"):
            self.add_argument(name, action="store_true", default=argparse.SUPPRESS, dest="no_effect", help=text)

    def add_ends(self) -> None:
        """Declares where the other end is, with what both need to reach each other."""
        where = f"HOST[:PORT], port {DEFAULT_PORT} by default"
        listen = f"wait for the other end at {where}; HOST is loopback by default"
        self.add_argument("--listen", metavar="ADDR", nargs="?", const="", help=listen)
        self.add_argument("--connect", metavar="ADDR", help=f"connect to the end that listens at {where}")
        self.add_secret_file("both ends")
        self.add_timeout()

    def add_timeout(self) -> None:
        self.add_argument("--timeout", metavar="TIME", help="maximum duration of any wait: 30s, 500ms, 2m")

    def add_secret_file(self, owners: str) -> None:
        text = f"the secret that {owners} share; required beyond this machine"
        self.add_argument("--secret-file", metavar="FILE", help=text)

    def add_transport(self, known: str) -> None:
        text = f"use only these, or fail: {known}, or a list A,B"
        self.add_argument("--transport", metavar="NAMES", help=text)

    def add_rails(self) -> None:
        self.add_argument(
            "--rails", metavar="DEVICES", help="devices that carry data: eth1,eth2, or 127.0.0.1,127.0.0.2"
        )

    def add_links(self) -> None:
        """Adds the options of `LinkOptions`."""
        self.add_transport("shm, tcp, cuda_ipc, ucx, fabric, fabric:PROVIDER")
        self.add_rails()
        self.add_argument("--chunk", metavar="SIZE", help="bytes that one lane carries at a time")
        self.add_argument("--channels", metavar="N", type=positive, help="connections per rail")
        unpack = "how chunks are copied from bounce memory into GPU memory (kernel)"
        self.add_argument("--unpack", choices=UNPACK_MODES, help=unpack)

    def add_sizes(self, text: str) -> None:
        self.add_argument("--size", "--sizes", dest="sizes", metavar="SIZES", type=size_list, help=text)

    def add_memory(self) -> None:
        text = "host memory: Context.alloc (shared), or the process's own heap (ordinary)"
        self.add_argument("--memory", choices=("shared", "ordinary"), help=text)

    def add_iterations(self, iters: int | None = None, warmup: int | None = None) -> None:
        """Adds ``--iters`` and ``--warmup``. Without defaults here, the command chooses them by size."""
        timed = "timed iterations" if iters is None else f"timed iterations ({iters})"
        before = "iterations before the timed ones" + ("" if warmup is None else f" ({warmup})")
        self.add_argument("--iters", metavar="N", type=positive, default=iters, help=timed)
        self.add_argument("--warmup", metavar="N", type=count, default=warmup, help=before)

    def add_window(self, text: str, default: int | None = None) -> None:
        self.add_argument("--window", metavar="N", type=positive, default=default, help=text)

    def add_pin(self, text: str, default: str | None = None) -> None:
        self.add_argument("--pin", metavar="CPUS", type=pin, default=default, help=text)

    def add_device_kind(self, text: str, default: Device | None = None) -> None:
        self.add_argument("--device", choices=("cpu", "cuda"), default=default, help=text)

    def add_tokens(self, least: Callable[[str], int], defaults: Mapping[str, Any], *, preset: bool) -> None:
        """Adds the shape of an exchange. If a ``preset`` may set it, missing options stay None."""

        def default(name: str) -> Any:
            return None if preset else defaults[name]

        tokens = f"tokens per rank ({defaults['tokens']})"
        self.add_argument("--tokens", metavar="T", type=least, default=default("tokens"), help=tokens)
        hidden = f"elements per token ({defaults['hidden']})"
        self.add_argument("--hidden", metavar="H", type=positive, default=default("hidden"), help=hidden)
        topk = f"experts per token ({defaults['topk']})"
        self.add_argument("--topk", metavar="K", type=positive, default=default("topk"), help=topk)
        dtype = f"type of the rows that dispatch sends ({defaults['dtype']}); combine sends bf16"
        self.add_argument("--dtype", choices=("fp8", "bf16"), default=default("dtype"), help=dtype)

    def add_compare(self, known: Collection[str], more: str = "") -> None:
        """Adds ``--compare`` with the ``known`` peers, and ``--rounds``."""
        text = f"also run these, alternating, and print ratios: {more or ','.join(known)}"
        self.add_argument("--compare", metavar="NAMES", type=names_of(known, "peer"), help=text)
        self.add_argument(
            "--rounds", metavar="N", type=positive, help=f"turns of Crossrail and of each peer ({ROUNDS})"
        )


class Group(SharedOptions, argparse._ArgumentGroup):
    """A group of options under a title of the help page."""


class Parser(SharedOptions, argparse.ArgumentParser):
    """A parser that reports errors as one line, like every other error of the command.

    ``fill`` declares its options when it is first used, so that only the module of the chosen command is loaded. The
    attribute `parser` of the parsed arguments is the innermost parser that took part.
    """

    def __init__(self, *, fill: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._fill = fill
        self.set_defaults(parser=self)

    def add_argument_group(self, *title: Any, **how: Any) -> Group:
        group = Group(self, *title, **how)
        self._action_groups.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        return super().parse_known_args(args, namespace)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the value of `--option=--` for the separator of options and arguments, and leaves none.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Reports arguments that no parser knows, with the options that they were probably meant to be."""
        meant = [f"for {word} did you mean {near}?" for word in words if (near := self._nearest(word)) is not None]
        self.error("; ".join([f"unrecognized arguments: {' '.join(words)}", *meant]))

    def options(self) -> list[str]:
        """The long options that help pages show."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [option for action in shown for option in action.option_strings if option.startswith("--")]

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The groups of arguments that help pages show: each one's title, and how an argument is typed and its text."""
        formatter = argparse.HelpFormatter(self.prog)
        sections = []
        for group in self._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            rows = [(_typed(action), formatter._expand_help(action) if action.help else "") for action in shown]
            sections += [(group.title or "", rows)] if rows else []
        return sections

    def values(self) -> dict[str, list[str]]:
        """The values of those options that have few, or that take a list of few."""
        known = [(action, action.choices or getattr(action.type, "names", ())) for action in self._actions]
        chosen = [(action, names) for action, names in known if names and action.option_strings]
        return {option: list(map(str, of)) for action, of in chosen for option in action.option_strings}

    def _nearest(self, word: str) -> str | None:
        """The option that ``word`` was probably meant to be: few letters differ, or one begins with the other."""
        word = word.partition("=")[0].lower().replace("_", "-")
        if not word.startswith("--"):
            return None
        known = [option for option in self._option_string_actions if option.startswith("--")]
        begins = [option for option in known if option.startswith(word) or word.startswith(f"{option}-")]
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
        return next(iter([*near, *begins]), None)

    def error(self, message: str) -> NoReturn:
        print_error(f"{message}; see `{self.prog} --help`")
        raise SystemExit(EXIT_USAGE)


def _typed(action: argparse.Action) -> str:
    """An argument as it is typed: ``--size SIZE``, ``--json FILE``, ``FILE...``."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    names = action.metavar or choices or (action.dest.upper() if action.option_strings else action.dest)
    value = " ".join(names) if isinstance(names, tuple) else names
    forms = {"?": f"[{value}]", "*": f"[{value}...]", "+": f"{value}...", 0: "", argparse.REMAINDER: "..."}
    value = forms.get(action.nargs, value) if action.nargs is not None else value
    if not action.option_strings:
        return value
    return f"{', '.join(action.option_strings)} {value}".rstrip()


class Outcome(Protocol):
    """Makes a command of the parsed arguments; reports to `parser` which of them are invalid together."""

    def __call__(self, parser: Parser, parsed: argparse.Namespace) -> Command: ...


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""Parsers of commands are added here. Each has the default `outcome`, an :class:`Outcome`."""


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


def seconds_up_to(most: float) -> Callable[[str], float]:
    """The type of a duration from 0.1 to ``most`` seconds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to {most:g}")
        return value

    return parse


_DEVICE = re.compile(r"cuda(?::([0-9]{1,3}))?")


def device(text: str) -> str:
    """A device that has memory: `cpu`, or a GPU such as `cuda:0`; `cuda` is the first GPU."""
    found = _DEVICE.fullmatch(text.strip())
    if text.strip() == "cpu":
        return "cpu"
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; known: cpu, cuda, cuda:N (N from 0)")
    return f"cuda:{int(found.group(1) or 0)}"


def device_list(text: str) -> list[str]:
    """Several devices: `cuda:0,cuda:1`."""
    return [device(part) for part in text.split(",")]


@dataclass(frozen=True)
class _Names:
    """The type of an option that takes a list of ``names``, which shells complete."""

    parse: Callable[[str], list[str]]
    names: tuple[str, ...]

    def __call__(self, text: str) -> list[str]:
        return self.parse(text)


def names_of(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """The type of a list `A,B` of ``known`` names, without duplicates; ``what`` is the word for one in errors."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.7)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not {a(what)}{meant}; known: {', '.join(known)}")
        return list(dict.fromkeys(names))

    return _Names(parse, tuple(known))


def pin(text: str) -> list[int] | str:
    """A list of processors, or `auto` or `none`."""
    if text in ("auto", "none"):
        return text
    return [number_of(part, 0) for part in text.split(",")]


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of ``text`` (HOST, HOST:PORT, :PORT or [IPV6]:PORT); without a host, that of loopback.

    Raises UsageFailure for anything else.
    """
    host, port_text = _split(text.strip())
    if host.isdigit():
        form = _ADDRESS_FORM.removeprefix("write ")
        raise UsageFailure(f"{text!r}: {host} is a number, not a host; for a port write :{host}, else {form}")
    if not port_text:
        return host or loopback(), permitted(default_port)
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) < 1 << 16):
        raise UsageFailure(f"{text!r}: {port_text!r} is not a port; {_ADDRESS_FORM}, port 0 to 65535")
    return host or loopback(), int(port_text)


def ports() -> range:
    """The ports that CROSSRAIL_PORTS names; none without it. The library reports what is wrong with it."""
    first, dash, last = os.environ.get("CROSSRAIL_PORTS", "").partition("-")
    try:
        return range(int(first), int(last if dash else first) + 1)
    except ValueError:
        return range(0)


def ports_at(host: str) -> range:
    """Those of `ports` that apply to a numeric address: none at loopback, where no firewall is in the way."""
    return range(0) if ipaddress.ip_address(host.partition("%")[0]).is_loopback else ports()


def permitted(port: int) -> int:
    """Where a command listens whose port by default is ``port``: of CROSSRAIL_PORTS the first is for `bench`, the next
    for the store, the third for the doctor, each the last one of a shorter range."""
    named = ports()
    return port if port in named or not named else named[min(max(port - DEFAULT_PORT, 0), len(named) - 1)]


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not host or (rest and not rest.startswith(":")):
            raise UsageFailure(f"{text!r} is not an address; {_ADDRESS_FORM}")
        return host, rest[1:]
    if text.count(":") > 1:
        return text, ""
    host, _, port = text.partition(":")
    return host, port


def resolve(text: str, default_port: int = DEFAULT_PORT) -> str:
    """The numeric ``host:port`` of ``text``. Raises Failure when the name does not resolve."""
    host, port = parse_address(text, default_port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Failure(f"{host} does not resolve: {error.strerror}; check the name, or give an address") from error
    address = found[0][4]
    zone = f"%{socket.if_indextoname(int(address[3]))}" if len(address) == 4 and address[3] else ""
    return join(str(address[0]).partition("%")[0] + zone, port)


def place_to_listen(text: str, default_port: int = DEFAULT_PORT) -> str:
    """As `resolve`, for an address to listen at; warns if a name resolves to loopback, as a host's own often does."""
    place, host = resolve(text, default_port), _split(text.strip())[0]
    where = ipaddress.ip_address(_split(place)[0].partition("%")[0])
    if where.is_loopback and host not in ("", "localhost") and not _is_numeric(host):
        hint = "name another of its addresses, or [::] for all"
        print_notice(f"{host} resolves to {where} on this machine, which others cannot reach; {hint}")
    return place


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def join(host: str, port: int) -> str:
    """The text ``host:port``, with brackets around IPv6."""
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        version = 4
    return f"[{host}]:{port}" if version == 6 else f"{host}:{port}"
