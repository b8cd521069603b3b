"""The command line, parsed once into typed options. Every command declares its own options and runs itself."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn

from .failure import EXIT_USAGE, print_error
from .parsing import EPILOG, Command, Outcome, Parser
from .rank_process import RANK, add_rank

COMMANDS = {
    "info": (".info:add_arguments", "devices, transports, what each can do; what is unusable, why, and the fix"),
    "doctor": (".doctor:add_arguments", "runs real transfers on this machine; reports faults and their fixes"),
    "top": (".top:add_arguments", "what runs on this machine or in a job, live: rates, stalls, who waits for whom"),
    "trace": (".trace:add_arguments", "merge the traces of workers (CROSSRAIL_TRACE) into one file for Perfetto"),
    "bench": (None, "measure two ends, or the ranks of a group"),
    "store": (".store:add_arguments", "runs the built-in store until SIGINT or SIGTERM"),
    "plan": (".plan:add_arguments", "predicted bytes and times of expert parallelism on a cluster"),
    "nccl-plugin": (".nccl_plugin:add_arguments", "the variables by which NCCL uses Crossrail as its network"),
    "sweep": (".sweep:add_arguments", "one bench with every combination of settings, and which is best"),
    "report": (".report:add_arguments", "results as a page with charts, as Markdown, as CSV, or as tables"),
    "completion": (".completion:add_arguments", "a script by which a shell completes commands and options"),
}
"""Commands: the function that declares the options of each, as `module:function`, and its summary."""

BENCHES = {
    "latency": (".point_to_point:add_latency", "half a round trip, every size (as osu_latency counts)"),
    "bandwidth": (".point_to_point:add_bandwidth", "a window of sends, every size (as osu_bw counts)"),
    "p2p": (".point_to_point:add_p2p", "one big transfer over every rail, and where its time goes"),
    "mesh": (".mesh:add_arguments", "every GPU (or rank) with every other: each pair alone, then all at once"),
    "unpack": (".unpack:add_arguments", "kernel, d2d and host: the ways into GPU memory, on identical scatter lists"),
    "kv": (".kv:add_arguments", "pages of KV caches: lists of rows between two processes; compares with NVIDIA's nixl"),
    "ep": (".ep:add_arguments", "dispatch and combine between the ranks of a group, verified first"),
    "control": (".control:add_arguments", "init, connect, disconnect, reconnect, destroy of expert buffers"),
}
"""The same for the benches of `crossrail bench`."""

EXAMPLES = {
    "": ("crossrail info", "crossrail bench latency", "crossrail bench p2p --size 1G"),
    "info": ("crossrail info", "crossrail info --json info.json"),
    "doctor": (
        "crossrail doctor",
        "crossrail doctor --only network,shm --json doctor.json",
        "crossrail doctor --listen 10.0.0.1 --secret-file secret   # on one machine",
        "crossrail doctor --peer 10.0.0.1 --secret-file secret     # on the other",
        "crossrail doctor --store tcp://10.0.0.1:18178 --nccl",
    ),
    "bench": ("crossrail bench latency", "crossrail bench p2p --listen 10.0.0.1", "crossrail bench ep --preset decode"),
    "top": (
        "crossrail top",
        "crossrail top --once --json top.json",
        "crossrail top --job --store tcp://10.0.0.1:18178 --secret-file secret",
    ),
    "trace": ("crossrail trace merge --output trace.json traces/",),
    "store": ("crossrail store --listen 10.0.0.1:7400 --secret-file secret",),
    "plan": (
        "crossrail plan --cluster h200 --model deepseek-v3",
        "crossrail plan --cluster cluster.toml --model model.toml --ep 8:256 --send node",
        "crossrail plan --calibrate ep.json --ep 8,16 --phase decode",
        "crossrail plan --calibrate ep-2.json --check ep-4.json --within 15",
        "crossrail plan --published",
    ),
    "sweep": (
        "crossrail sweep p2p --chunk 512K,1M,2M --window 8,16,32 --channels 1,2,4",
        "crossrail sweep bandwidth --memory shared,ordinary --json sweep.json",
        "crossrail sweep p2p --size 64M --set CROSSRAIL_CHUNK=1M,2M --repeats 9",
    ),
    "report": (
        "crossrail report latency.json p2p.json --html report.html --open",
        "crossrail report iperf3.json ucx_perftest.txt p2p.json --markdown -",
        "crossrail report benches/results/*.json --csv results.csv",
        "crossrail report after.json --baseline before.json --html page.html",
    ),
    "completion": ("crossrail completion bash > ~/.local/share/bash-completion/completions/crossrail",),
    "bench kv": (
        "crossrail bench kv --row 2304 --rows 10000,50000 --notice --compare nixl --nixl-python nixl/bin/python",
        "crossrail bench kv --preset dsv4 --isl 8K,32K --page 16,64 --bulk --transport tcp",
    ),
    "bench latency": ("crossrail bench latency --sizes 1:4K", "crossrail bench latency --op both --compare ucx"),
    "bench bandwidth": (
        "crossrail bench bandwidth --sizes 4K:16M --window 16",
        "crossrail bench bandwidth --json out.json",
    ),
    "bench p2p": (
        "crossrail bench p2p --size 1G",
        "crossrail bench p2p --transport tcp --rails 127.0.0.1,127.0.0.2",
        "crossrail bench p2p --listen 10.0.0.1 --secret-file secret    # on one machine",
        "crossrail bench p2p --connect 10.0.0.1 --secret-file secret   # on the other",
        "crossrail bench p2p --device cuda:0,cuda:1 --compare ucx",
    ),
    "bench mesh": ("crossrail bench mesh --ranks 4", "crossrail bench mesh --devices all --size 256M"),
    "bench unpack": ("crossrail bench unpack --device cuda:0 --fragments 4K:64K",),
    "bench ep": (
        "crossrail bench ep --num-processes 4",
        "crossrail bench ep --preset decode --num-processes 2 --compare mpi",
        "crossrail bench ep --device cuda --preset prefill --compare deepep",
        "crossrail bench ep --plan plan.json --tokens 64 --hidden 2048",
    ),
    "bench control": (
        "crossrail bench control --num-processes 8",
        "crossrail bench control --op reconnect --store etcd",
    ),
}
"""Command lines shown at the end of each help page."""


def parse_arguments(arguments: Sequence[str] | None) -> Command:
    """Parses the command line. Raises SystemExit as argparse does: 0 after --help or --version, 2 for bad usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    made = _rank_parser() if words[:1] == [RANK] else _parser()
    parsed, unknown = made.parse_known_args(words)
    parser: Parser = parsed.parser
    if getattr(parsed, "takes_rest", False):
        parsed.rest = unknown
    elif unknown:
        parser.unknown(unknown)
    outcome: Outcome = parsed.outcome
    return outcome(parser, parsed)


class _Version(argparse.Action):
    """Prints the installed version, which is looked up only for this."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        from crossrail_tools.report.environment import package_version

        print(f"{parser.prog} {package_version()}")
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="crossrail",
        description="Moves bytes between processes over every link of the machine, and measures it.",
        epilog=_epilog(""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the installed version and exit")
    _add_choice(parser, "COMMAND", COMMANDS)
    return parser


def _add_choice(parser: Parser, placeholder: str, known: Mapping[str, tuple[str | None, str]]) -> None:
    """Adds a parser for each of ``known``. A command line that names none of them is an error that lists them all."""

    def none_chosen(parser: Parser, parsed: argparse.Namespace) -> NoReturn:
        print_error(f"{parser.prog} needs a {placeholder}, one of those below; see `{parser.prog} --help`")
        width = max(map(len, known))
        sys.stderr.writelines(f"  {name:{width}}  {summary}\n" for name, (_, summary) in known.items())
        raise SystemExit(EXIT_USAGE)

    parser.set_defaults(outcome=none_chosen)
    parsers = parser.add_subparsers(dest=placeholder.lower(), metavar=placeholder)
    for name, (declared_by, summary) in known.items():
        parsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_epilog(f"{parser.prog} {name}".partition(" ")[2]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            fill=partial(_fill, declared_by),
        )


def _epilog(command: str) -> str:
    """The end of the help page of ``command``: examples, and what holds for all commands."""
    lines = EXAMPLES.get(command, ())
    return "\n".join(["examples:", *(f"  {line}" for line in lines), "", EPILOG]) if lines else EPILOG


def command_words() -> dict[str, list[str]]:
    """What can follow each command: the names of its own commands, or its options, or one of a few values of an option.

    A ``*`` stands for any words between.
    """
    words = {"": [*COMMANDS, "--help", "--version"], "bench": [*BENCHES, "--help"]}
    for name, parser in command_parsers():
        words[name] = parser.options()
        # The values of an option, where it is the last word so far.
        words |= {f"{name}* {option}": values for option, values in parser.values().items()}
    return words


def command_parsers() -> Iterator[tuple[str, Parser]]:
    """Every command with options of its own, such as ``bench p2p``, and its parser; in the order of the help pages."""
    for prefix, known in (("", COMMANDS), ("bench ", BENCHES)):
        for name, (declared_by, summary) in known.items():
            if declared_by is not None:
                parser = Parser(prog=f"crossrail {prefix}{name}", description=summary, allow_abbrev=False)
                _fill(declared_by, parser)
                yield prefix + name, parser


def _fill(declared_by: str | None, parser: Parser) -> None:
    """Loads the module of the command that was chosen, which declares its options."""
    if declared_by is None:
        _add_choice(parser, "WHAT", BENCHES)
        return
    module, _, function = declared_by.partition(":")
    getattr(importlib.import_module(module, __package__), function)(parser)


def _rank_parser() -> Parser:
    """The parser of the processes that the command itself starts: no help or error mentions them."""
    parser = Parser(prog="crossrail", allow_abbrev=False)
    add_rank(parser.add_subparsers(dest="command", required=True))
    return parser
