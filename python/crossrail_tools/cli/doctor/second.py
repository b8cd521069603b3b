"""The second process of the local checks: a transport, a memory call or a plugin is only tested by two processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import crossrail

from ..cases import NetPlugin, P2p
from ..ends import End
from ..failure import Failure
from ..processes import Message
from ..rank_process import START_S, Parent
from ..ranks import rank_process

KIND = "doctor"
WAIT_S = 10.0
"""How long each wait of a check between two processes may take."""

SECRET_LEN = 16
"""Random bytes that the second process shows to have reached the first one's memory, or the other way round."""


@contextlib.contextmanager
def second_process(job: Message) -> Iterator[End]:
    """Starts the process with ``job``, waits until it runs, and ends it with the block. Raises Failure."""
    end = rank_process("the second process", KIND)
    try:
        end.send(job)
        end.wait_for("started", START_S)
        yield end
    finally:
        end.end()


def context_for(**settings: Any) -> crossrail.Context:
    """A context that tests the machine: the settings of the environment have a check of their own."""
    return crossrail.Context(environment=False, timeout=WAIT_S, log="off", **settings)


def pattern(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that are wrong when shifted, truncated or zero."""
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)


def serve(parent: Parent, job: Message) -> None:
    """Runs the other process's part of ``job``. Raises Failure and the library's errors."""
    parent.send("started")
    match job.get("do"):
        case "transfer":
            _transfer(parent, job)
        case "memory":
            _memory(parent, job)
        case "net-plugin":
            _net_plugin(job)
        case "fabric":
            from .fabric import serve_test  # it starts processes of this module itself

            serve_test(parent, job)
        case other:
            raise Failure(f"the doctor asked its second process for {other!r}")


def _transfer(parent: Parent, job: Message) -> None:
    """Connects over the requested transport, sends the pattern back and forth, and shares memory for mapping."""
    context = context_for(tls=job["tls"])
    place, size = str(job["place"]), int(job["size"])
    with crossrail.Worker(context) as worker:
        endpoint = worker.connect(bytes.fromhex(job["address"]))
        here = context.alloc(size, None if place == "cpu" else place)
        whole = np.zeros(size, np.uint8) if place == "cpu" else here
        for _ in range(int(job["rounds"])):
            worker.recv(whole, tag=1).wait()
            endpoint.send(whole, tag=2).wait()
        if job.get("map"):
            here.fill_from(pattern(size).data)
            parent.send("shared", memory=endpoint.share(here).hex())
        parent.receive(WAIT_S)  # its memory and the endpoint must outlive what the other end does with them


def _memory(parent: Parent, job: Message) -> None:
    """Passes a descriptor of shared memory over a Unix socket, and reads what the other process wrote into it."""
    memory = os.memfd_create("crossrail-doctor", os.MFD_CLOEXEC)
    os.ftruncate(memory, mmap.PAGESIZE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to, mmap.mmap(memory, mmap.PAGESIZE) as seen:
        to.settimeout(WAIT_S)
        to.connect(f"\0{job['socket']}")
        seen[:SECRET_LEN] = bytes.fromhex(job["secret"])
        socket.send_fds(to, [b"m"], [memory])
        if to.recv(1) != b"d":
            raise Failure("the first process ended before it had mapped the memory")
        parent.send("answered", answer=bytes(seen[SECRET_LEN : 2 * SECRET_LEN]).hex())
        parent.send("held", descriptor=memory)
        parent.receive(WAIT_S)


def _net_plugin(job: Message) -> None:
    """Moves data through a network plugin of NCCL, as the receiving end."""
    context = context_for(tls="tcp", net_devices="lo")
    with crossrail.Worker(context) as worker:
        endpoint = worker.connect(bytes.fromhex(job["address"]))
        NetPlugin(job["path"], P2p(job["size"], 1, 0)).run(context, worker, [endpoint], role="echo")


class Rounds(NamedTuple):
    """The shortest time of a send in seconds, and the protocols and transports that carried the data."""

    seconds: float
    protocols: frozenset[str]
    transports: frozenset[str]


def timed_rounds(worker: crossrail.Worker, endpoint: crossrail.Endpoint, mine: Any, back: Any, rounds: int) -> Rounds:
    """Sends ``mine`` and receives ``back``, ``rounds`` times."""
    best, receipts = float("inf"), []
    for _ in range(rounds):
        receiving = worker.recv(back, tag=2)
        began = time.perf_counter()
        receipts.append(endpoint.send(mine, tag=1).wait())
        best = min(best, time.perf_counter() - began)
        receipts.append(receiving.wait())
    lanes = (lane["name"] for receipt in receipts for lane in receipt.lanes if lane["bytes"])
    return Rounds(
        best,
        frozenset(receipt.protocol for receipt in receipts),
        frozenset(lane.partition("/")[0] for lane in lanes),
    )
