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
            assert "made in another process" in str(error) and "make a Context here" in str(error), error
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
