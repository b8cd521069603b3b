"""A program may end while daemon threads call Crossrail, whatever they call and however it fails."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

# The main thread ends while three threads call one entry in a loop. Every program ends in a few ways: each gives the
# threads another moment, and a few times as many bytecodes between two switches of threads as by default.
SCRIPT = """
import sys, threading
import crossrail

entry, moment, after = sys.argv[1:4]
sys.setswitchinterval(float(sys.argv[4]))
context = crossrail.Context(timeout=20)
worker, peer = crossrail.Worker(context), crossrail.Worker(context)
to_peer = worker.connect(peer.address())
to_worker = peer.accept()
region = peer.register(bytearray(64))
key = region.key()
running = threading.Semaphore(0)


class Odd:
    def __init__(self):
        self.memory = bytearray(8)

    def __del__(self):
        # Python code, as in many destructors.
        for _ in range(20):
            self.memory = None

    def __index__(self):
        return sum(range(20)) // 190


def receive():
    request = peer.recv(bytearray(8), tag=1)
    to_peer.send(b"12345678", tag=1)
    request.wait()


def with_callback():
    request = peer.recv(bytearray(8), tag=1)
    request.on_complete(lambda request: [None for _ in range(50)])
    to_peer.send(b"12345678", tag=1)


ENTRIES = {
    "send": (lambda: to_peer.send(b"12345678"), lambda: to_peer.send(3)),
    "recv": (lambda: worker.recv(bytearray(8), tag=99), lambda: worker.recv(b"readonly")),
    "exchange": (receive, lambda: peer.recv(bytearray(8), tag=98).wait(0.0)),
    "write": (lambda: to_peer.write(b"12345678", key).wait(), lambda: to_peer.write(b"12345678", key, offset=-1)),
    "read": (lambda: to_peer.read(bytearray(8), key).wait(), lambda: to_peer.read(b"readonly", key)),
    "batch": (lambda: to_peer.batch([("send", b"12345678", 1)]), lambda: to_peer.batch([("no", b"", 1)])),
    "register": (lambda: peer.register(bytearray(8)), lambda: peer.register(b"readonly")),
    "tag": (lambda: worker.recv(bytearray(8), tag=Odd()), lambda: to_peer.send(b"1", tag=1 << 70)),
    "callback": (with_callback, lambda: peer.recv(bytearray(8)).on_complete(3)),
    "progress": (worker.progress, lambda: worker.accept(timeout=0.0)),
    "connect": (lambda: worker.connect(peer.address()).close(), lambda: worker.connect("127.0.0.1:1")),
    "context": (lambda: crossrail.Context(timeout=5), lambda: crossrail.Context(timeout=-5)),
    "worker": (lambda: crossrail.Worker(context).close(), lambda: crossrail.Worker(context, listen="nobody")),
    "alloc": (lambda: context.alloc(8), lambda: context.alloc(8, "cuda:99")),
    "info": (context.info, lambda: context.alloc(-1)),
    "group": (
        lambda: crossrail.Group(size=1, context=context).barrier(),
        lambda: crossrail.Group(size=-1, context=context),
    ),
    "lanes": (lambda: (to_peer.lanes(), str(to_peer.explain()), worker.endpoints()), lambda: crossrail.wait_all([3])),
}


def run():
    call = ENTRIES[entry][moment == "error"]
    first = True
    while True:
        try:
            call()
        except (crossrail.CrossrailError, TypeError, ValueError, OverflowError, MemoryError):
            pass
        if first:
            running.release()
            first = False


if after == "after":
    worker.close()
    peer.close()
for _ in range(3):
    threading.Thread(target=run, daemon=True).start()
for _ in range(3):
    running.acquire()
"""
ENTRIES = (
    "send recv exchange write read batch register tag callback progress connect context worker alloc info group lanes"
)


@pytest.mark.parametrize("entry", ENTRIES.split())
def test_threads_that_call_crossrail_do_not_abort_the_end_of_a_program(entry: str) -> None:
    ways = [
        (outcome, when, switch)
        for outcome in ("ok", "error")
        for when in ("before", "after")
        for switch in ("5e-3", "1e-5")
    ]

    def end(way: tuple[str, str, str]) -> tuple[tuple[str, str, str], int, str]:
        command = [sys.executable, "-c", SCRIPT, entry, *way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return way, done.returncode, done.stderr[-2000:]

    with ThreadPoolExecutor(2) as pool:
        failed = [outcome for outcome in pool.map(end, ways) if outcome[1:] != (0, "")]
    assert not failed
