"""Surroundings that change in the middle of transfers: these continue, or end by an error that names the peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_groups import memory_group
from surroundings import full_disk
from test_surroundings import ALL, needs_root, visit

import crossrail

MIB = 1 << 20
# Transfers over both transports that continue in a thread while `change` runs, and must be whole before and after it.
MOVING = """
import os, sys, threading, time
sys.path.insert(0, FOLDER)
import numpy as np
import surroundings
import crossrail

def workers(tls):
    context = crossrail.Context(timeout=30, tls=tls)
    a, b = crossrail.Worker(context), crossrail.Worker(context)
    to_b = a.connect(b.address())
    b.accept()
    return context, a, b, to_b

ends = {tls: workers(tls) for tls in ("shm", "tcp")}
moved, failed, over = dict.fromkeys(ends, 0), [], threading.Event()

def move(tls):
    _, _, b, to_b = ends[tls]
    target = np.zeros(3 << 20, np.uint8)
    try:
        while not over.is_set():
            number = moved[tls] % 250 + 1
            inbound = b.recv(target)
            to_b.send(np.full(3 << 20, number, np.uint8)).wait()
            inbound.wait()
            assert (target == number).all()
            moved[tls] += 1
    except BaseException as error:
        failed.append(f"{tls}: {type(error).__name__} {error}")

def more(count):
    until, most = time.monotonic() + 60, {tls: moved[tls] + count for tls in moved}
    while not failed and any(moved[tls] < most[tls] for tls in moved):
        assert time.monotonic() < until, "no transfer ends any more"
        time.sleep(0.001)

threads = [threading.Thread(target=move, args=(tls,)) for tls in ends]
[thread.start() for thread in threads]
more(3)
CHANGE
more(10)
over.set()
[thread.join(60) for thread in threads]
print(failed or "whole")
""".replace("FOLDER", repr(str(Path(__file__).parent)))


def test_transfers_go_on_when_the_kernel_refuses_calls_from_now_on() -> None:
    change = f"""
surroundings.deny({ALL!r}, 1, everywhere=True)
try:
    os.close(os.memfd_create("probe"))
    failed.append("nothing was denied")
except PermissionError:
    pass
"""
    assert visit(MOVING.replace("CHANGE", change), []) == "whole"


def test_transfers_go_on_when_all_folders_are_full_from_now_on() -> None:
    needs_root()
    change = """
for folder in ("/dev/shm", f"/tmp/crossrail-{os.geteuid()}"):
    with open(f"{folder}/full", "wb", buffering=0) as file:
        try:
            for _ in range(1 << 16):
                file.write(bytes(4096))
            failed.append(f"{folder} is not full")
        except OSError:
            pass
late = crossrail.Worker(crossrail.Context(timeout=30), name="late")
inbound = late.recv(np.zeros(8, np.uint8))
crossrail.Worker(crossrail.Context(timeout=30)).connect(late.address()).send(b"12345678").wait()
inbound.wait()
"""
    # Of 16 MiB, empty as yet.
    roomy = [part.replace("size=64k", "size=16m").replace("dd if=/dev/zero", "true") for part in full_disk()]
    assert visit(MOVING.replace("CHANGE", change), roomy) == "whole"


WRITER = """
import sys
import numpy as np
import crossrail
worker = crossrail.Worker(crossrail.Context(timeout=60), name=sys.argv[2])
endpoint = worker.connect(bytes.fromhex(sys.argv[1]))
memory, hoard = np.ones(8 << 20, np.uint8), []
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    endpoint.send(memory).wait()
    if line == "grow\\n":
        # In the middle of the next message, of which the peer sees a part.
        endpoint.send(memory)
        while True:
            hoard.append(np.ones(1 << 20, np.uint8))
"""


@contextmanager
def writer(group: Path | None, worker: crossrail.Worker, name: str, tls: str) -> Iterator[subprocess.Popen[str]]:
    enter = [] if group is None else ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    command = [*enter, sys.executable, "-c", WRITER, worker.address().hex(), name]
    environment = {**os.environ, "CROSSRAIL_TLS": tls}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("tls", ["shm", "tcp"])
def test_a_peer_that_its_memory_group_kills_in_mid_transfer_is_named_and_others_go_on(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", tls)
    with (
        memory_group(256 * MIB) as group,
        crossrail.Worker(crossrail.Context(timeout=60), name="here", admit=True) as worker,
        writer(group, worker, "greedy", tls) as greedy,
        writer(None, worker, "modest", tls) as modest,
    ):
        ends = {end.peer: end for end in worker.endpoints()}
        targets = {name: bytearray(8 * MIB) for name in ends}

        def receive(process: subprocess.Popen[str], name: str, line: str) -> None:
            assert process.stdin is not None
            inbound = worker.recv(targets[name], source=ends[name])
            process.stdin.write(line)
            process.stdin.flush()
            assert inbound.wait().bytes == 8 * MIB and targets[name] == b"\x01" * (8 * MIB)

        receive(greedy, "greedy", "go\n")
        receive(greedy, "greedy", "grow\n")
        began = time.monotonic()
        with pytest.raises(crossrail.PeerDeadError, match="greedy"):
            while True:  # the message that it was sending may arrive whole
                worker.recv(targets["greedy"], source=ends["greedy"]).wait()
        assert time.monotonic() - began < 30
        assert greedy.wait(30) == -signal.SIGKILL
        receive(modest, "modest", "go\n")
