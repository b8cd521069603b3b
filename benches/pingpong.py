"""An 8-byte ping-pong over shared memory, both ends driven from Python: prints half a round trip as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import crossrail
from crossrail_tools.cli.ends import End

TAG = 1
WARMUP = 1000
START_S = 30.0


def main() -> int:
    """The driver starts the echo end and stops with it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--trips", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    trips = WARMUP + arguments.trips
    if arguments.echo:
        echo(trips, arguments.size)
        return 0
    command = [sys.executable, __file__, "--echo", "--trips", str(arguments.trips), "--size", str(arguments.size)]
    end = End("the echo", command)
    try:
        address = bytes.fromhex(end.answer(START_S)["address"])
        print(json.dumps({"avg_us": drive(address, trips, arguments.size), "trips": arguments.trips}))
        end.end(START_S)
    finally:
        end.end()
    return 0


def pin(position: int) -> None:
    """Driver on the first processor allowed, echo on the second, as `crossrail bench` does."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > 1:
        os.sched_setaffinity(0, {allowed[position]})


def drive(address: bytes, trips: int, size: int) -> float:
    """Microseconds of half a round trip, averaged over all but the first WARMUP."""
    pin(0)
    context = crossrail.Context(tls="shm")
    with crossrail.Worker(context) as worker:
        endpoint = worker.connect(address, require="shm")
        out, into = bytearray(b"x" * size), bytearray(size)
        start = 0.0
        for trip in range(trips):
            if trip == WARMUP:
                start = time.perf_counter()
            ping = endpoint.send(out, TAG)
            worker.recv(into, TAG).wait()
            ping.wait()
        return (time.perf_counter() - start) / (trips - WARMUP) / 2 * 1e6


def echo(trips: int, size: int) -> None:
    """Answers every message with one like it."""
    if len(os.sched_getaffinity(0)) > 1:
        pin(1)
    context = crossrail.Context(tls="shm")
    with crossrail.Worker(context) as worker:
        print(json.dumps({"address": worker.address().hex()}), flush=True)
        endpoint = worker.accept(START_S)
        out, into = bytearray(size), bytearray(size)
        last = None
        for _ in range(trips):
            worker.recv(into, TAG).wait()
            pong = endpoint.send(out, TAG)
            if last is not None:
                last.wait()
            last = pong
        if last is not None:
            last.wait()


if __name__ == "__main__":
    sys.exit(main())
