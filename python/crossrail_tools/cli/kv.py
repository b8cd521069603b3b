"""`crossrail bench kv`: pages of KV caches between two processes, by lists of rows, beside NIXL and Mooncake."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from crossrail_tools.report.build import Round, as_peer, with_peers, with_samples
from crossrail_tools.report.schema import PeerResult, Report, Row
from crossrail_tools.report.units import format_size

from .failure import Failure
from .kv_ends import TLS, Ends, Place, ends_of, far_end, is_known, listen, peer_of
from .launcher import refuse_launch
from .options import RunOptions, fields_of
from .parsing import ROUNDS, Command, Parser, device_list, names_of, positive, size_list
from .point_to_point.channel import Channel
from .reporting import Progress, make_report, show_report

KNOWN = ("nixl", "mooncake")
ITERS, WARMUP = 8, 2
DEFAULT_ROWS, DEFAULT_COUNTS = "2304", "10000"

Op = Literal["pull", "push"]


@dataclass(frozen=True)
class Work:
    """What one row of the report is about. A group: bytes of a page, layers, pages of each request in every layer."""

    what: Literal["kv", "kv-notice"]
    name: str
    groups: tuple[tuple[int, int, int], ...]
    batch: int = 1
    bulk: bool = False

    @property
    def rows(self) -> int:
        """Of all requests together."""
        return self.batch * sum(layers * pages for _, layers, pages in self.groups)

    @property
    def size(self) -> int:
        """Bytes of all requests together."""
        return self.batch * sum(row * layers * pages for row, layers, pages in self.groups)


def dsv4(tokens: int, page: int, batch: int) -> Work:
    """DeepSeek-V4-Pro as vLLM lays its caches out, as CollectiveX counts: see docs/guides/kv.md."""
    groups = (
        (576 * page // 4, 30, tokens // page),  # compressed by 4
        (132 * page // 4, 30, tokens // page),  # their index
        (576, 31, tokens // 128),  # compressed by 128
        (576 * page, 61, 128 // page),  # the window
    )
    return Work("kv", f"dsv4 {format_size(tokens)} tokens, pages of {page}", groups, batch)


@dataclass(frozen=True, kw_only=True)
class KvOptions(RunOptions):
    """`crossrail bench kv`."""

    works: list[Work]
    transport: str
    ops: list[Op] = field(default_factory=lambda: ["pull", "push"])
    device: list[str] | None = None
    iters: int = ITERS
    warmup: int = WARMUP
    rounds: int = ROUNDS
    compare: list[str] = field(default_factory=list)
    pythons: dict[str, str | None] = field(default_factory=dict)
    listen: str | None = None
    connect: str | None = None

    def run(self) -> None:
        """Measures and shows the report, or serves the end that measures."""
        if self.listen is not None:
            listen(self.listen or "127.0.0.1", self.secret_file, self.pythons, self.settings())
        show_report(self, lambda progress: measure(self, progress))

    def place(self) -> Place:
        """Where the ends of this machine are started."""
        return Place(self.pythons, self.transport, self.device is not None, self.settings())


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.set_defaults(outcome=_outcome)
    parser.add_argument_group("the two ends (with neither option both run here)").add_ends()
    work = parser.add_argument_group("the work")
    work.add_argument("--preset", choices=("dsv4",), help="caches of a model instead of plain rows: DeepSeek-V4-Pro")
    work.add_argument(
        "--row", dest="row_sizes", metavar="SIZES", type=size_list, help=f"bytes per row ({DEFAULT_ROWS})"
    )
    rows = f"random rows per transfer: one number or several A,B,C ({DEFAULT_COUNTS})"
    work.add_argument("--rows", dest="counts", metavar="COUNTS", type=size_list, help=rows)
    work.add_argument("--isl", metavar="TOKENS", type=size_list, help="with --preset: tokens per request (8K)")
    work.add_argument("--page", metavar="TOKENS", type=size_list, help="with --preset: tokens per page (16,64)")
    work.add_argument("--batch", metavar="N", type=positive, default=1, help="requests at a time (1)")
    device = "pages in GPU memory: cuda:0 at both ends, or cuda:0,cuda:1 (initiator, target); takes PyTorch"
    work.add_argument("--device", metavar="GPUS", type=device_list, help=device)
    ops = "pull (read), push (write, with a notification), or both by default"
    work.add_argument("--op", dest="ops", metavar="OPS", type=names_of(("pull", "push"), "operation"), help=ops)
    work.add_argument("--bulk", action="store_true", help="each also as one row of as many bytes")
    notice = "also one row with a notification, until the target sees it"
    work.add_argument("--notice", action="store_true", help=notice)
    work.add_iterations(ITERS, WARMUP)
    how = parser.add_argument_group("how it moves")
    between = f"{', '.join(TLS)} or fabric:PROVIDER (shm; with --device cuda_ipc, with --connect tcp)"
    how.add_argument("--transport", metavar="NAME", type=_transport, help=between)
    how.add_compare(KNOWN)
    for name in KNOWN:
        python = f"the interpreter that imports {name}; by default {name.upper()}_PYTHON, or the one that runs this"
        how.add_argument(f"--{name}-python", metavar="FILE", help=python)
    parser.add_argument_group("what comes out").add_output()


def _transport(text: str) -> str:
    if not is_known(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a transport; known: {', '.join(TLS)}, fabric:PROVIDER")
    return text


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    refuse_launch(parser)
    if parsed.listen is not None and (parsed.connect is not None or parsed.compare or parsed.json or parsed.device):
        parser.error("--listen serves the end that has --connect and says what is measured: give the rest there")
    if parsed.device and (len(parsed.device) > 2 or "cpu" in parsed.device):
        parser.error("--device names one GPU for both ends, or the initiator's and the target's")
    here = "cuda_ipc" if parsed.device else "shm"
    transport: str = parsed.transport or (here if parsed.connect is None else "tcp")
    if (transport == "cuda_ipc") != (parsed.device is not None) and transport in ("shm", "cuda_ipc"):
        parser.error("--transport cuda_ipc and --device belong together; shm is for host memory")
    if "mooncake" in (parsed.compare or ()) and (transport != "tcp" or parsed.connect is not None):
        parser.error("--compare mooncake is over TCP between two processes here: --transport tcp, without --connect")
    works: list[Work] = []
    if parsed.preset is None:
        if parsed.isl or parsed.page:
            parser.error("--isl and --page are for --preset")
        for row in parsed.row_sizes or size_list(DEFAULT_ROWS):
            for count in parsed.counts or size_list(DEFAULT_COUNTS):
                if min(row, count) < 1:
                    parser.error("--row and --rows must be at least 1")
                works.append(Work("kv", f"{count} rows of {format_size(row)}", ((row, 1, count),), parsed.batch))
    else:
        if parsed.row_sizes or parsed.counts:
            parser.error("--row and --rows are for plain rows, without --preset")
        for tokens in parsed.isl or size_list("8K"):
            for page in parsed.page or size_list("16,64"):
                if page not in (4, 8, 16, 32, 64, 128) or tokens < 128 or tokens % 128:
                    parser.error("--page is a power of two from 4 to 128, --isl a multiple of 128")
                works.append(dsv4(tokens, page, parsed.batch))
    if parsed.bulk:
        works += [replace(one, name=f"{one.name}, in one row", bulk=True) for one in works]
    if parsed.notice:
        size = (parsed.row_sizes or size_list(DEFAULT_ROWS))[0]
        works.append(Work("kv-notice", f"1 row of {format_size(size)} with a notification", ((size, 1, 1),)))
    own = ("what", "preset", "row_sizes", "counts", "isl", "page", "batch", "bulk", "notice", "transport")
    pythons = {name: getattr(parsed, f"{name}_python") for name in KNOWN}
    given = fields_of(parsed, *own, *(f"{name}_python" for name in KNOWN))
    return KvOptions(works=works, transport=transport, pythons=pythons, **given)


def measure(options: KvOptions, progress: Progress) -> Report:
    """Runs the bench. Raises Failure, and the library's errors."""
    options.context()
    versions = {name: peer_of(name, options.pythons.get(name)).version for name in options.compare}
    progress.versions = versions
    with contextlib.ExitStack() as stack:
        far = None
        if options.connect is not None:
            far = stack.enter_context(far_end(options.connect, options.secret_file, options.place()))
        for work in options.works:
            for op in options.ops if work.what == "kv" else ["push"]:
                progress.status(f"{work.name}, {op}")
                progress.add([_measured(options, work, op, far)])
    return make_report(options, progress.rows, versions)


def _measured(options: KvOptions, work: Work, op: str, far: Channel | None) -> Row:
    device = ",".join(options.device) if options.device else None
    row = Row(
        work.what,
        options.transport,
        work.size,
        part=f"{op}: {work.name}",
        pieces=1 if work.bulk else work.rows,
        device=device,
    )
    # Mooncake has no notifications behind a transfer.
    peers_here = [name for name in options.compare if work.what == "kv" or name != "mooncake"]
    libraries = ["crossrail", *peers_here]
    rounds: dict[str, list[Round]] = {library: [] for library in libraries}
    errors: dict[str, str] = {}
    notes: list[str] = []
    shape = {"groups": [list(group) for group in work.groups], "batch": work.batch}
    gpus: list[int | None] = [int(gpu.removeprefix("cuda:")) for gpu in options.device or ()] or [None]
    with contextlib.ExitStack() as stack:
        ready: dict[str, Ends] = {}

        @contextlib.contextmanager
        def peers_may_fail(library: str) -> Iterator[None]:
            try:
                yield
            except Failure as error:
                if library == "crossrail":
                    raise
                errors[library] = str(error)
                ready.pop(library, None)

        for library in libraries:
            with peers_may_fail(library):
                ready[library] = stack.enter_context(ends_of(options.place(), library, shape, gpus, far))
                with ready[library].turn():
                    notes += _prepare(ready[library], library, work, op)
        for _ in range(options.rounds):
            for library, ends in list(ready.items()):
                with peers_may_fail(library), ends.turn():
                    rounds[library].append(_round(options, ends, work))
        for library, ends in list(ready.items()) if work.what == "kv" else ():
            with peers_may_fail(library), ends.turn():
                _check(ends, library, work, op)
    row = with_samples(replace(row, verified=True if work.what == "kv" else None, notes=notes), rounds["crossrail"])
    peers = {}
    for library in peers_here:
        if library in errors:
            peers[library] = PeerResult(work.what, error=errors[library])
        else:
            peers[library] = as_peer(with_samples(row, rounds[library]), work.what)
    return with_peers(row, peers)


def _prepare(ends: Ends, library: str, work: Work, op: str) -> list[str]:
    """Lists and transfers, one of each posted; a note of how long the lists took."""
    if work.what == "kv-notice":
        ends.both("prepare", op="WRITE", bulk=False, notice="turn")
        ends.initiator.do("run", iterations=1)
        ends.target.do("run", iterations=1)
        ends.both("prepare", op="WRITE", bulk=False, notice="turn")
        return []
    kind = {"pull": "READ", "push": "WRITE"}[op]
    told = ends.initiator.do("prepare", op=kind, bulk=work.bulk, notice="" if op == "pull" else "done")
    (ends.initiator if op == "pull" else ends.target).do("paint")
    ends.initiator.do("run", iterations=1)
    _check(ends, library, work, op)
    times = ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in told["us"].items())
    return [f"{op}, {work.name}: {library} made lists and transfers in: {times}"]


def _check(ends: Ends, library: str, work: Work, op: str) -> None:
    receiver = ends.initiator if op == "pull" else ends.target
    if not receiver.do("check", bulk=work.bulk)["same"]:
        raise Failure(f"{work.name}, {op}: the data of {library} is wrong")


def _round(options: KvOptions, ends: Ends, work: Work) -> Round:
    if work.what == "kv-notice":
        count = 10 * (options.iters + options.warmup)
        ends.target.order("turns", count=count, first=False)
        samples = ends.initiator.do("turns", count=count, first=True)["samples_us"]
        ends.target.answer()
        return Round(samples[10 * options.warmup :])
    ends.initiator.do("run", iterations=options.warmup)
    before = ends.cpu_s()
    samples = ends.initiator.do("run", iterations=options.iters)["samples_us"]
    return Round(samples, work.size, ends.cpu_s() - before)
