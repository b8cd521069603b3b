"""A forked child: what it inherits is refused there, and nothing that it does or its end reaches the parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, os, sys
import ml_dtypes, numpy as np
import crossrail

context = crossrail.Context(tls=sys.argv[1], timeout=20)
a, b = crossrail.Worker(context), crossrail.Worker(context)
to_b = a.connect(b.address())
to_a = b.accept()
memory = context.alloc(4096)
region = b.register(memory)
key = region.key()
group = crossrail.Group(size=1, context=context)
experts = crossrail.ExpertBuffer(group, 4, 128, 2, 1, "bf16")
pending = b.recv(bytearray(8), tag=77)


def exchange(sender, receiver, size=8):
    target = bytearray(size)
    request = receiver.recv(target, tag=5)
    sender.send(bytes(range(256)) * (size // 256) if size >= 256 else b"12345678"[:size], tag=5).wait()
    assert request.wait().bytes == size


def dispatch():
    x = np.ones((4, 128), ml_dtypes.bfloat16)
    return experts.dispatch(x, np.array([[0], [1], [0], [1]]))


exchange(to_b, b, 1 << 20)
CALLS = {
    "connect": lambda: a.connect(b.address()),
    "accept": lambda: b.accept(timeout=1),
    "recv": lambda: b.recv(bytearray(8)),
    "send": lambda: to_b.send(b"12345678"),
    "write": lambda: to_b.write(b"12345678", key),
    "read": lambda: to_b.read(bytearray(8), key),
    "batch": lambda: to_b.batch([("send", b"12345678", 1)]),
    "close": lambda: to_b.close(),
    "register": lambda: b.register(bytearray(8)),
    "deregister": region.deregister,
    "wait_imm": lambda: region.wait_imm(1),
    "wait": lambda: pending.wait(1),
    "test": pending.test,
    "alloc": lambda: context.alloc(8),
    "worker": lambda: crossrail.Worker(context),
    "info": context.info,
    "barrier": group.barrier,
    "publish": lambda: group.publish("key", b"value"),
    "dispatch": dispatch,
    "sync": experts.sync,
}


def child():
    for name, call in CALLS.items():
        try:
            call()
        except crossrail.UsageError as error:
            assert error.operation == name and error.reason == "other_process", (name, error)
            assert "created before a fork" in str(error) and "create a Context in this process" in str(error), error
        else:
            raise AssertionError(f"{name} was not refused")
    assert repr(to_b) and not to_b.is_alive and not to_b.lanes() and not a.endpoints() and not a.progress()
    pending.cancel()
    own = crossrail.Context(tls=sys.argv[1], timeout=20)
    with crossrail.Worker(own) as c, crossrail.Worker(own) as d:
        to_d = c.connect(d.address())
        exchange(to_d, d)
        exchange(to_d, d, 1 << 20)


def end():
    if sys.argv[2] == "closes":
        a.close(), b.close(), group.leave(), experts.destroy()
    if sys.argv[2] == "drops":
        for name in list(CALLS):
            del CALLS[name]
        for name in "pending to_b to_a region memory a b experts group context".split():
            del globals()[name]
        gc.collect()


pid = os.fork()
if pid == 0:
    child()
    end()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
for _ in range(100):
    exchange(to_b, b)
    exchange(to_a, a)
exchange(to_b, b, 1 << 20)
to_b.write(b"12345678", key).wait()
assert bytes(memoryview(memory)[:8]) == b"12345678"
group.barrier()
assert dispatch().counts.sum() == 4
to_b.send(b"12345678", tag=77).wait()
assert pending.wait().bytes == 8
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["exits", "closes", "drops"])
def test_a_forked_child_is_refused_and_leaves_its_parent_alone(transport: str, way: str) -> None:
    # From 3.12 on Python warns of any fork in a process with threads, which is what this one is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, transport, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


# Children of each kind and transport: with a lock that both processes had, some of them hung.
FORKS = 40

# Three threads exchange messages, so that a fork meets them at any point, with any lock taken.
BUSY = """
import os, signal, sys, threading, time
import crossrail

transport, way, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = crossrail.Context(tls=transport, timeout=20)
worker, peer = crossrail.Worker(context), crossrail.Worker(context)
ends = []
for _ in range(3):
    ends.append((worker.connect(peer.address()), peer.accept()))
region = peer.register(bytearray(64))
key = region.key()
stopping = threading.Event()
rounds = [0] * len(ends)


def exchange(sender, receiver, tag, size):
    target = bytearray(size)
    request = receiver.recv(target, tag=tag)
    sender.send(bytes(size), tag=tag).wait()
    assert request.wait().bytes == size


def work(index):
    while not stopping.is_set():
        exchange(ends[index][0], peer, index, 300_000)
        rounds[index] += 1


def refused(call, *args):
    try:
        call(*args)
    except crossrail.UsageError as error:
        assert error.reason == "other_process", error
    else:
        raise AssertionError(f"{call} was not refused")


def touches():
    mine, theirs = ends[0]
    refused(mine.send, b"12345678")
    refused(worker.recv, bytearray(8))
    refused(mine.write, b"12345678", key)
    refused(mine.read, bytearray(8), key)
    refused(peer.register, bytearray(8))
    refused(region.deregister)
    refused(worker.connect, peer.address())
    refused(context.alloc, 8)
    assert repr(mine) and not mine.is_alive and not mine.lanes() and not worker.endpoints() and not worker.progress()
    worker.close()


def own():
    mine = crossrail.Context(tls=transport, timeout=20)
    with crossrail.Worker(mine) as a, crossrail.Worker(mine) as b:
        to_b = a.connect(b.address())
        exchange(to_b, b, 1, 8)
        exchange(to_b, b, 1, 300_000)


def ends_only():
    pass


def await_end(pid):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


threads = [threading.Thread(target=work, args=(index,)) for index in range(len(ends))]
for thread in threads:
    thread.start()
outcomes = []
for _ in range(count):
    pid = os.fork()
    if pid == 0:
        {"touches": touches, "own": own, "ends": ends_only}[way]()
        sys.exit(0)
    outcomes.append(await_end(pid))
before = list(rounds)
stopping.set()
for thread in threads:
    thread.join()
for index, (mine, _) in enumerate(ends):
    exchange(mine, peer, index, 300_000)
assert set(outcomes) == {0}, outcomes
assert all(before), before
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["ends", "touches", "own"])
def test_children_forked_in_the_midst_of_traffic_do_not_hang(transport: str, way: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BUSY, transport, way, str(FORKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]


# As DataLoader of PyTorch: workers of multiprocessing, forked by one thread while others exchange messages; they take
# work from a queue and put results into another.
LOADER = """
import multiprocessing, sys, threading
import crossrail

context = crossrail.Context(timeout=20)
worker, peer = crossrail.Worker(context), crossrail.Worker(context)
to_peer = worker.connect(peer.address())
peer.accept()
stopping = threading.Event()


def work(index):
    while not stopping.is_set():
        target = bytearray(300_000)
        request = peer.recv(target, tag=index)
        to_peer.send(bytes(300_000), tag=index).wait()
        request.wait()


def load(tasks, results, own):
    if own:
        mine = crossrail.Context(timeout=20)
        a, b = crossrail.Worker(mine), crossrail.Worker(mine)
        to_b = a.connect(b.address())
        b.accept()
    for number in iter(tasks.get, None):
        if own:
            request = b.recv(bytearray(8), tag=number)
            to_b.send(b"12345678", tag=number).wait()
            request.wait()
        results.put(number)


threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(3)]
for thread in threads:
    thread.start()
fork = multiprocessing.get_context("fork")
for epoch in range(int(sys.argv[1])):
    tasks, results = fork.SimpleQueue(), fork.SimpleQueue()
    loaders = [fork.Process(target=load, args=(tasks, results, number % 2), daemon=True) for number in range(4)]
    for loader in loaders:
        loader.start()
    for number in range(16):
        tasks.put(number)
    assert sorted(results.get() for _ in range(16)) == list(range(16))
    for _ in loaders:
        tasks.put(None)
    for loader in loaders:
        loader.join(30)
    assert [loader.exitcode for loader in loaders] == [0] * 4, [loader.exitcode for loader in loaders]
stopping.set()
for thread in threads:
    thread.join()
"""


def test_loaders_of_data_that_are_forked_in_the_midst_of_traffic_end() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOADER]
    done = subprocess.run([*command, "6"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
