"""The listening end: waits for a driving end, runs its half of each measurement, and ends."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace

import crossrail
from crossrail_tools.report.build import unpack_rates
from crossrail_tools.report.units import format_size

from .. import peers
from ..cases import Case, NetPlugin, Ordered, P2p, RawTcp, Unpack, ordered
from ..failure import Failure, print_notice
from ..launcher import GROUP
from ..parsing import place_to_listen, resolve
from ..placement import check_memory, known_gpus, pin_to
from ..processes import Message
from ..rails import missed
from .channel import IDLE_LIMIT_S, RAW_TCP_FAILURES, Channel
from .options import BenchOptions

_AGREED = ("sizes", "iters", "warmup", "window", "memory", "unpack")


def listen(options: BenchOptions) -> None:
    """Serves one driving end. Raises Failure and the library's errors."""
    if options.launch is not None and len(options.device or []) > 1:
        options = replace(options, device=[(options.device or [])[1]])  # all processes of a job have the same options
    context = options.context()
    if options.gpus:
        known_gpus(context, [options.memory_device])  # fails here rather than when the driving end connects
    pin_to(options.cpu(driver=False))
    if options.launch is None:
        address = place_to_listen(options.listen or "")
    else:
        address = resolve(":0") if options.launch.machines == 1 else "0.0.0.0:0"
    with contextlib.ExitStack() as stack, crossrail.Worker(context, listen=address) as worker:
        if options.launch is not None:
            print_notice(f"{options.launch} listens, process 1 measures")
            group = stack.enter_context(crossrail.Group(name=GROUP, context=context))
            group.publish("address", worker.address())
        elif options.parent is None:
            print_notice(f"listening on {', '.join(worker.control_addresses())}; start the other end with --connect")
        else:
            print(json.dumps({"address": worker.address().hex(), "control": worker.control_addresses()}), flush=True)
        waits = options.timeout is not None or options.parent is not None or options.launch is not None
        endpoint = worker.accept(context.timeout if waits else IDLE_LIMIT_S)
        worker._refuse_peers(
            f"the listening end is busy with {endpoint.peer}, and serves one run: connect once it listens again, or "
            "start another one at another port"
        )
        channel = Channel(context, worker, endpoint)
        try:
            serve(channel, options)
        except Exception as error:
            with contextlib.suppress(crossrail.CrossrailError):
                channel.send({"error": " ".join(str(error).split())})
            raise
        if options.parent is None and options.launch is None:
            print_notice(f"done; {endpoint.peer} has finished")


def serve(channel: Channel, options: BenchOptions) -> None:
    """Carries out the driving end's requests until it is done."""
    _agree(channel, options, channel.receive())
    while (request := channel.receive(IDLE_LIMIT_S)).get("do") != "bye":
        _carry_out(channel, options, request)
    channel.endpoint.close()


def _agree(channel: Channel, options: BenchOptions, hello: Message) -> None:
    if hello.get("version") != crossrail.__version__:
        raise Failure(
            f"the ends run different versions: {crossrail.__version__} at the listening end, {hello.get('version')} at "
            "the connecting end; install the same version at both"
        )
    if hello.get("bench") != options.what:
        raise Failure(
            f"the listening end runs `bench {options.what}` and the connecting end `bench {hello.get('bench')}`; run "
            "the same bench at both"
        )
    if (options.net_plugin is None) != (not hello.get("net_plugin")):
        raise Failure("--net-plugin must be given at both ends, each with the path of its own plugin")
    for name in _AGREED:
        here, there = getattr(options, name), hello.get(name)
        if here is not None and here != there:
            mine, other = _shown(name, here), _shown(name, there)
            raise Failure(
                f"--{name} is {mine} at the listening end and {other} at the connecting end; give it at the latter only"
            )
    devices = [device for device in channel.context.info()["devices"] if device["chosen"]]
    place = _place(channel, options, hello)
    unpack = channel.context.settings()["CROSSRAIL_UNPACK"]
    if place != "cpu" and hello.get("unpack") not in (None, unpack):
        asked = hello["unpack"]
        raise Failure(f"--unpack {asked} must be given at the receiving end too, which now unpacks by {unpack}")
    answer: Message = {"ok": True, "addresses": {device["name"]: device["address"] for device in devices}}
    channel.send({**answer, "device": place, "unpack": unpack, "unused": missed(channel.endpoint)})


def _shown(name: str, value: object) -> str:
    """A value as written on the command line."""
    if name == "sizes" and isinstance(value, list):
        return ",".join(format_size(size) for size in value)
    return "not given" if value is None else str(value)


def _place(channel: Channel, options: BenchOptions, hello: Message) -> str:
    """The device of this end's memory: by its own command line, else as the other end requests. Raises Failure."""
    demanded, suggested = hello.get("other_device"), hello.get("device")
    if options.device is not None and demanded is not None and demanded != options.memory_device:
        raise Failure(
            f"--device is {options.memory_device} at the listening end, but the connecting end requests {demanded}; "
            "give it at the connecting end only"
        )
    place = options.memory_device if options.device is not None else demanded or suggested or "cpu"
    if place != "cpu":
        known_gpus(channel.context, [str(place)])
    return str(place)


def _carry_out(channel: Channel, options: BenchOptions, request: Message) -> None:
    match request.get("do"):
        case "measure":
            _measure(channel, options, request)
        case "unpack-rates":
            channel.send(_unpack_rates(channel, request))
        case "peer":
            work = peers.PeerJob.from_message(request.get("work") or {})
            with peers.servers(work) as ports:
                channel.send({"ports": ports})
                channel.receive(work.timeout + IDLE_LIMIT_S)
            channel.send({"ok": True})
        case other:
            raise Failure(f"the driving end requested {other!r}, which this version does not support")


def _measure(channel: Channel, options: BenchOptions, request: Message) -> None:
    """If the network blocks plain sockets, the driving end notes it in the report, and the run continues."""
    case, memory = _ordered(request)
    mine: Case = case
    if isinstance(case, P2p) and options.net_plugin is not None:
        mine = NetPlugin(options.net_plugin, case)
    with contextlib.suppress(*RAW_TCP_FAILURES if isinstance(case, RawTcp) else ()):
        channel.measure(mine, "echo", memory=memory)


def _ordered(request: Message) -> tuple[Ordered, str]:
    """The requested case, and the memory of this end. Raises Failure."""
    memory = request.get("memory")
    if memory not in ("shared", "ordinary") and not re.fullmatch("cuda:[0-9]{1,3}", str(memory)):
        raise Failure(f"the driving end requested {memory!r} memory, which is unknown here")
    case = ordered(request.get("case"))
    if not str(memory).startswith("cuda"):
        check_memory(case.size, "the buffers of the listening end")
    return case, str(memory)


def _unpack_rates(channel: Channel, request: Message) -> Message:
    """Rates of each mode of unpacking on this end's GPU, from pinned memory, where data from the network arrives.

    A mode that does not work here (for example without a compiler for the kernel) has the reason as a note instead.
    """
    case = ordered(request.get("case"))
    rates: dict[str, float] = {}
    notes: list[str] = []
    if not isinstance(case, Unpack):
        raise Failure(f"the driving end requested rates of {case.what}, which this version does not support")
    for mode in case.modes:
        try:
            rates |= unpack_rates(replace(case, modes=[mode]).run(channel.context), case.size)
        except crossrail.CrossrailError as error:
            notes.append(f"unpacking by {mode} was not measured: {error}")
    return {"rates": rates, "notes": notes}
