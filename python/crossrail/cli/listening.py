"""The listening end: waits for a driving end, does its half of each measurement, and ends."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import crossrail

from . import peers
from .addresses import resolve
from .bench_arguments import BenchOptions, Memory
from .failure import Failure, say
from .session import IDLE_LIMIT_S, Message, Session
from .setup import make_buffer, make_context, pin, wanted_cpu

_AGREED = ("sizes", "iters", "warmup", "window", "memory")


def listen(options: BenchOptions) -> None:
    """Serves one driving end. Raises Failure and the library's errors."""
    context = make_context(options)
    pin(wanted_cpu(options, driver=False))
    with crossrail.Worker(context, listen=resolve(options.listen or "")) as worker:
        if options.parent is None:
            say(f"listening on {', '.join(worker.control_addresses())}; start the other end with --connect")
        else:
            print(json.dumps({"address": worker.address().hex(), "control": worker.control_addresses()}), flush=True)
        endpoint = worker.accept(context.timeout if options.timeout or options.parent else IDLE_LIMIT_S)
        session = Session(context, worker, endpoint)
        try:
            serve(session, options)
        except Exception as error:
            with contextlib.suppress(crossrail.CrossrailError):
                session.tell({"error": " ".join(str(error).split())})
            raise
        if options.parent is None:
            say(f"done: {endpoint.peer} has finished")


def serve(session: Session, options: BenchOptions) -> None:
    """Does what the driving end asks for until it says that it is done."""
    _agree(session, options, session.hear())
    while (request := session.hear(IDLE_LIMIT_S)).get("do") != "bye":
        _carry_out(session, request)
    session.endpoint.close()


def _agree(session: Session, options: BenchOptions, hello: Message) -> None:
    if hello.get("version") != crossrail.__version__:
        raise Failure(
            f"the ends run different versions: {crossrail.__version__} listens, {hello.get('version')} connects; "
            "install the same version at both"
        )
    if hello.get("bench") != options.what:
        raise Failure(
            f"this end runs `bench {options.what}` and the other `bench {hello.get('bench')}`; start the same at both"
        )
    for name in _AGREED:
        here, there = getattr(options, name), hello.get(name)
        if here is not None and here != there:
            raise Failure(f"--{name} is {here} at the listening end and {there} at the other; give it there only")
    devices = [device for device in session.context.info()["devices"] if device["chosen"]]
    session.tell({"ok": True, "addresses": {device["name"]: device["address"] for device in devices}})


def _carry_out(session: Session, request: Message) -> None:
    match request.get("do"):
        case "probe":
            _receive(session, *_buffer_of(request), count=_whole(request, "count", 1))
        case "latency" | "bandwidth" | "p2p":
            _measure(session, request)
        case "peer":
            work = peers.Work.from_message(request.get("work") or {})
            with peers.servers(work) as ports:
                session.tell({"ports": ports})
                session.hear(work.timeout + IDLE_LIMIT_S)
            session.tell({"ok": True})
        case other:
            raise Failure(f"the driving end asked for {other!r}, which this version does not know")


def _measure(session: Session, request: Message) -> None:
    size, memory = _buffer_of(request)
    counts: dict[str, Any] = {"iters": _whole(request, "iters", 1), "warmup": _whole(request, "warmup", 0)}
    measure = {
        "latency": crossrail.bench_latency,
        "bandwidth": crossrail.bench_bandwidth,
        "p2p": crossrail.bench_p2p,
    }[request["do"]]
    if request["do"] == "bandwidth":
        counts["window"] = _whole(request, "window", 1)
    measure(session.context, session.worker, session.endpoint, role="echo", size=size, memory=memory, **counts)


def _receive(session: Session, size: int, memory: Memory, count: int) -> None:
    buffer = make_buffer(session.context, size, memory)
    for _ in range(count):
        session.worker.recv(buffer, 0, crossrail.ALL_BITS, source=session.endpoint).wait()


def _buffer_of(request: Message) -> tuple[int, Memory]:
    memory = request.get("memory")
    if memory not in ("shared", "ordinary"):
        raise Failure(f"the driving end asked for {memory!r} memory, which is unknown here")
    return _whole(request, "size", 0), memory


def _whole(request: Message, name: str, least: int) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise Failure(f"the driving end asked for {name} {value!r}, which makes no sense")
    return value
