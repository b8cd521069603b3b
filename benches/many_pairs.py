"""Pairs of processes that send to each other at the same time: the bytes of each, while all of them send.

All pairs connect, wait for one moment, and count the messages that were delivered in the same few seconds, so that none
of them has the machine for itself. Prints JSON: bytes of each pair, and the seconds.

    python benches/many_pairs.py --pairs 8 --transport shm --size 65536
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack

import crossrail
from crossrail_tools.cli.ends import End

TAG = 1
WINDOW = 16
START_S = 60.0
WARMUP_S = 0.3


def main() -> int:
    """Starts both ends of every pair, and stops with them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--size", type=int, default=64 << 10, help="bytes of a message")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(arguments.transport, arguments.size)
    elif arguments.send:
        send(bytes.fromhex(arguments.send), arguments.transport, arguments.size, arguments.seconds)
    else:
        counts = measure(arguments.pairs, arguments.transport, arguments.size, arguments.seconds)
        print(json.dumps({"bytes": [count * arguments.size for count in counts], "seconds": arguments.seconds}))
    return 0


def measure(pairs: int, transport: str, size: int, seconds: float) -> list[int]:
    """Messages of each pair in the same ``seconds``."""
    common = [f"--transport={transport}", f"--size={size}", f"--seconds={seconds}"]
    with ExitStack() as stack:

        def start(*options: str) -> End:
            end = End(f"an end of {pairs} pairs over {transport}", [sys.executable, __file__, *common, *options])
            stack.callback(end.end)
            return end

        receivers = [start("--receive") for _ in range(pairs)]
        senders = [start(f"--send={receiver.answer(START_S)['address']}") for receiver in receivers]
        for sender in senders:
            sender.answer(START_S)
        moment = time.monotonic() + 0.5
        for sender in senders:
            sender.send({"begin": moment})
        return [int(sender.answer(START_S + seconds)["count"]) for sender in senders]


def say(**message: object) -> None:
    """A message to the process that started this one."""
    print(json.dumps(message), flush=True)


def receive(transport: str, size: int) -> None:
    """Receives until it is killed."""
    with crossrail.Worker(crossrail.Context(tls=transport)) as worker:
        say(address=worker.address().hex())
        worker.accept(START_S)
        into = bytearray(size)
        while True:
            for request in [worker.recv(into, TAG) for _ in range(WINDOW)]:
                request.wait(START_S)


def send(address: bytes, transport: str, size: int, seconds: float) -> None:
    """Sends windows until all pairs are done, and prints how many messages were delivered in the ``seconds``."""
    with crossrail.Worker(crossrail.Context(tls=transport)) as worker:
        endpoint = worker.connect(address)
        out = bytearray(b"x" * size)

        def window() -> int:
            for request in [endpoint.send(out, TAG) for _ in range(WINDOW)]:
                request.wait(START_S)
            return WINDOW

        window()
        say(ready=True)
        began = float(json.loads(sys.stdin.readline())["begin"]) + WARMUP_S
        while time.monotonic() < began:
            window()
        count = 0
        while time.monotonic() < began + seconds:
            count += window()
        # The others have not finished yet: go on until they have, too.
        while time.monotonic() < began + seconds + WARMUP_S:
            window()
        say(count=count)


if __name__ == "__main__":
    sys.exit(main())
