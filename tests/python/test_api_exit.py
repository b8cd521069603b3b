"""A program may end while daemon threads wait in native code: it ends as if they did not exist, and never aborts."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Many threads, because each has its own chance of asking for the GIL at the wrong moment.
SCRIPT = """
import sys, threading
import crossrail

what, closes = sys.argv[1], sys.argv[2] == "closes"
context = crossrail.Context(timeout=60)
worker = crossrail.Worker(context)
COUNT = 24
asked = threading.Semaphore(0)
buffers = [bytearray(8) for _ in range(COUNT)]


def accept(index):
    worker.accept()


def wait(index):
    worker.recv(buffers[index], tag=index).wait()


def wait_all(index):
    crossrail.wait_all([worker.recv(buffers[index], tag=index)])


def join(index):
    crossrail.Group(name=f"g{index}", rank=1, size=2, store=sys.argv[3], context=context)


def run(index):
    asked.release()
    globals()[what](index)


for index in range(COUNT):
    threading.Thread(target=run, args=(index,), daemon=True).start()
for _ in range(COUNT):
    asked.acquire()
if closes:
    worker.close()
"""

# A handler of atexit that was registered before Crossrail's runs after it, and waits for a thread that Crossrail holds.
JOINED = """
import atexit, threading

def join():
    thread.join(30)
    print("ended" if not thread.is_alive() else "still there", flush=True)

atexit.register(join)
import crossrail

worker = crossrail.Worker(crossrail.Context())
asked = threading.Event()

def accept():
    asked.set()
    try:
        worker.accept()
    except crossrail.ClosedError:
        print("closed", flush=True)

thread = threading.Thread(target=accept, daemon=True)
thread.start()
asked.wait()
"""


@pytest.mark.parametrize("closes", ["closes", "leaves"])
@pytest.mark.parametrize("what", ["accept", "wait", "wait_all", "join"])
def test_a_daemon_thread_that_waits_does_not_abort_the_end_of_a_program(what: str, closes: str) -> None:
    # Nothing listens at port 1: the group waits for its store.
    command = [sys.executable, "-c", SCRIPT, what, closes, "tcp://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FATAL" not in done.stderr and "fatal" not in done.stderr


def test_a_thread_that_another_handler_of_atexit_joins_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", JOINED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["closed", "ended"]), done.stderr


# Both workers have a transfer in flight whose other end goes as well.
BETWEEN = """
import sys
import crossrail

context = crossrail.Context(tls=sys.argv[1])
worker, peer = crossrail.Worker(context), crossrail.Worker(context)
to_peer = worker.connect(peer.address())
to_worker = peer.accept()
received = peer.recv(bytearray(256 << 20), tag=1)
sent = to_peer.send(bytearray(256 << 20), tag=1)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_program_that_ends_does_not_report_its_own_workers_as_lost(transport: str) -> None:
    done = subprocess.run([sys.executable, "-c", BETWEEN, transport], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
