"""The ends of `crossrail bench kv`: processes of this machine, or at another one that listens."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import crossrail
from crossrail._native import host_memory
from crossrail_tools.report.units import format_bytes

from .control_link import connected, listening, serve_each
from .ends import ANSWER_S, End
from .failure import Failure, UsageFailure, print_notice
from .parsing import place_to_listen, resolve
from .point_to_point.channel import IDLE_LIMIT_S, Channel
from .processes import Message

PROGRAM = Path(__file__).parents[1] / "peers" / "kv.py"
UCX_TLS = {"tcp": "tcp,self", "shm": "sm,self,tcp", "cuda_ipc": "cuda_ipc,sm,self,tcp"}
"""UCX_TLS for NIXL by transport, or by provider of libfabric: UCX needs TCP to connect. UCX finds NICs, which other
providers have, by itself."""
MODULES = {
    "nixl": {"nixl": "nixl", "nixl_cu13": "nixl_cu13", "nixl_cu12": "nixl_cu12"},
    "mooncake": {"mooncake.engine": "mooncake_transfer_engine"},
}
"""Modules of a peer, and the prefixes of their distributions' names. NVIDIA's package also has a name per CUDA
version."""
INSTALL = {"nixl": "nixl==1.5.1 numpy", "mooncake": "mooncake-transfer-engine-non-cuda numpy"}
TLS = {"tcp": "tcp,self", "shm": "shm,self", "cuda_ipc": "cuda_ipc,shm,self", "fabric": "fabric,self"}
_FABRIC = re.compile("fabric:([a-z][a-z_;-]*)")
ORDERS = frozenset({"start", "peer", "prepare", "run", "turns", "cpu", "paint", "check"})
"""Requests that a connected machine may send to an end here."""
LISTEN = "crossrail bench kv --listen"


def is_known(transport: object) -> bool:
    """True for a transport that ends may be started over."""
    return isinstance(transport, str) and (transport in TLS or _FABRIC.fullmatch(transport) is not None)


class LocalEnd(End):
    """An end in a child process. ``module``: the library's module that it imports."""

    module: str


class RemoteEnd:
    """An end on the machine that listens."""

    def __init__(self, channel: Channel, library: str) -> None:
        self._channel, self._library = channel, library

    def do(self, what: str, **arguments: Any) -> Message:
        self.order(what, **arguments)
        return self.answer()

    def order(self, what: str, **arguments: Any) -> None:
        self._channel.send({"library": self._library, "do": what, **arguments})

    def answer(self) -> Message:
        answer = self._channel.receive(ANSWER_S)
        if "failed" in answer:
            raise Failure(f"at the listening end: {answer['failed']}")
        return answer

    def pause(self, paused: bool) -> None:
        self.order("pause", paused=paused)


KvEnd: TypeAlias = LocalEnd | RemoteEnd


@dataclass(frozen=True)
class Ends:
    """The two ends of a library. ``rests``: they are stopped while another library is measured."""

    initiator: KvEnd
    target: KvEnd
    rests: bool

    def both(self, what: str, **arguments: Any) -> None:
        self.initiator.do(what, **arguments)
        self.target.do(what, **arguments)

    def cpu_s(self) -> float:
        """Processor time of both processes so far."""
        return float(sum(end.do("cpu")["seconds"] for end in (self.initiator, self.target)))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which both ends run; outside of it they are stopped if ``rests``."""
        ends = (self.initiator, self.target) if self.rests else ()
        for end in ends:
            end.pause(False)
        try:
            yield
        finally:
            for end in ends:
                end.pause(True)


@dataclass(frozen=True)
class Place:
    """Where ends are started: the peers' interpreters, over which transport, with which settings of Crossrail's."""

    pythons: Mapping[str, str | None]
    transport: str
    gpus: bool
    settings: Mapping[str, str]

    def start(self, stack: contextlib.ExitStack, library: str, role: str) -> LocalEnd:
        """Starts a process with one end. Raises Failure."""
        python, module = sys.executable, "crossrail.nixl"
        environment = {"NIXL_LOG_LEVEL": "ERROR"}
        if library == "crossrail":
            environment |= {f"CROSSRAIL_{name.upper()}": value for name, value in self.settings.items()}
            tls = TLS.get(self.transport, f"{self.transport},self")
            environment |= {"CROSSRAIL_TLS": tls, "PYTHONPATH": str(PROGRAM.parents[2])}
        else:
            peer = peer_of(library, self.pythons.get(library))
            python, module = peer.python, peer.module
            environment["MC_LOG_LEVEL"] = "ERROR"
            ucx = UCX_TLS.get(self.transport.removeprefix("fabric:"))
            if ucx is not None:
                environment["UCX_TLS"] = ucx + (",cuda_copy" if self.gpus else "")
        end = LocalEnd(f"{library}, {role}", [python, str(PROGRAM)], environment=environment)
        stack.callback(end.end)
        end.module = module
        return end


@contextlib.contextmanager
def ends_of(
    place: Place, library: str, shape: Mapping[str, Any], gpus: list[int | None], far: Channel | None
) -> Iterator[Ends]:
    """Starts both ends of a library, each other's peers; the target at ``far``, if given. Raises Failure."""
    refuse_too_much(shape, "this")
    with contextlib.ExitStack() as stack:
        initiator = place.start(stack, library, "initiator")
        target: KvEnd = place.start(stack, library, "target") if far is None else RemoteEnd(far, library)
        if far is not None:
            stack.callback(target.order, "end")
        ends = (initiator, target)
        for seed, (end, name) in enumerate(zip(ends, ("initiator", "target"), strict=True)):
            how = {"module": initiator.module, "work": shape, "gpu": gpus[seed % len(gpus)]}
            end.order("start", name=name, seed=seed, **how)
        told = [end.answer() for end in ends]
        for seed, end in enumerate(ends):
            end.do("peer", **told[1 - seed], seed=1 - seed, work=shape)
        yield Ends(initiator, target, rests=library != "crossrail")


@contextlib.contextmanager
def far_end(address: str, secret_file: str | None, place: Place) -> Iterator[Channel]:
    """A channel to the machine that listens at ``address``, after announcing the work. Raises Failure."""
    with connected(resolve(address), secret_file, ANSWER_S, LISTEN) as channel:
        asked = {"kv": 1, "version": crossrail.__version__, "transport": place.transport, "gpus": place.gpus}
        channel.request(asked, ANSWER_S)
        yield channel
        channel.leave()


def listen(
    address: str, secret_file: str | None, pythons: Mapping[str, str | None], settings: Mapping[str, str]
) -> NoReturn:
    """Has targets here for one connected machine after the other, until it is interrupted.

    Raises UsageFailure and the library's errors if it cannot listen.
    """
    with listening(place_to_listen(address), secret_file, ANSWER_S) as (context, worker):
        places = ", ".join(worker.control_addresses())
        print_notice(f"listening on {places}; run `crossrail bench kv --connect` with it on the other machine")
        serve_each(context, worker, partial(_serve, pythons, settings))


def _serve(pythons: Mapping[str, str | None], settings: Mapping[str, str], channel: Channel) -> None:
    """One run of the other end. Raises Failure and the library's errors."""
    hello = channel.receive(ANSWER_S)
    if "kv" not in hello:
        raise Failure(f"this end runs `{LISTEN}`; the other end must run `crossrail bench kv --connect`")
    if hello.get("version") != crossrail.__version__ or not is_known(hello.get("transport")):
        raise Failure(f"the ends run different versions: {crossrail.__version__} at the listening end")
    place = Place(pythons, hello["transport"], bool(hello.get("gpus")), settings)
    channel.send({})
    ends: dict[str, LocalEnd] = {}
    with contextlib.ExitStack() as stack:
        while (order := channel.receive(IDLE_LIMIT_S)).get("do") != "bye":
            if (answer := _answer(place, stack, ends, order)) is not None:
                channel.send(answer)


def _answer(place: Place, stack: contextlib.ExitStack, ends: dict[str, LocalEnd], order: Message) -> Message | None:
    """Executes a request; `end` and `pause` have no answer."""
    library, what = str(order.pop("library", None)), str(order.pop("do", None))
    if what == "end" and library in ends:
        ends.pop(library).end()
    elif what == "pause" and library in ends:
        ends[library].pause(bool(order.get("paused")))
    if what in ("end", "pause"):
        return None
    try:
        if what == "start" and library in ("crossrail", "nixl") and library not in ends:  # Mooncake's end is local
            ends[library] = place.start(stack, library, "target")
            order["module"] = ends[library].module
        if library not in ends or what not in ORDERS:
            raise Failure(f"request {what[:40]!r} of {library[:40]!r} is not supported from another machine")
        if "work" in order:
            refuse_too_much(order["work"], "the listening")
        answer = ends[library].do(what, **order)
        answer.pop("samples_us", None)  # the connecting end has its own
        return answer
    except Failure as error:
        return {"failed": str(error)}


def refuse_too_much(work: Any, end: str) -> None:
    """Raises Failure if ``end`` has no memory for two pools and, to compare them, two copies."""
    try:
        size = 5 * int(work["batch"]) * sum(row * layers * pages for row, layers, pages in work["groups"])
    except (KeyError, TypeError, ValueError):
        raise Failure("the other end sent work of another form") from None
    free = memory["available"] if (memory := host_memory()) is not None else 1 << 62
    if not 0 < size <= free:
        raise Failure(f"pools and copies of {format_bytes(size)} do not fit into {format_bytes(free)} at {end} end")


@dataclass(frozen=True)
class Peer:
    """Another library: an interpreter that imports it, the module, and its version."""

    python: str
    module: str
    version: str


IMPORT = """
import importlib, importlib.metadata as metadata
assert "crossrail" not in importlib.import_module("{0}").__name__
own = (one for one in metadata.distributions() if one.metadata["Name"].replace("-", "_").startswith("{1}"))
print(next((one.version for one in own), "of unknown version"))
"""


def peer_of(library: str, given: str | None) -> Peer:
    """The library that is compared with. Raises UsageFailure."""
    python = given or os.environ.get(f"{library.upper()}_PYTHON") or sys.executable
    found = shutil.which(python)
    for module, distribution in MODULES[library].items() if found is not None else ():
        part = f"{module}._bindings" if library == "nixl" else module
        command = [str(found), "-c", IMPORT.format(part, distribution)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0:
                return Peer(str(found), module, done.stdout.strip())
    hint = (
        f"pip install {INSTALL[library]} in an environment of its own, and name its interpreter with --{library}-python"
    )
    whose = {"nixl": "NVIDIA's nixl", "mooncake": "Mooncake's transfer engine"}[library]
    raise UsageFailure(f"--compare {library}: {python} does not import {whose}; {hint}")
