"""A process whose blocking calls gevent has replaced: what stops no greenlet, and that nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
from gevent import monkey
monkey.patch_all()
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import threading, time
import gevent, gevent.socket
import numpy as np
import crossrail
from crossrail.kv import Receiver, spread
from crossrail.mooncake.engine import TransferEngine
from crossrail.nixl._api import nixl_agent, nixl_agent_config

SIZE = 1 << 20
near, far = np.zeros(SIZE, np.uint8), np.ones(SIZE, np.uint8)
context = crossrail.Context(timeout=20)
here, there = crossrail.Worker(context), crossrail.Worker(context)
to_there = here.connect(there.address())
there.accept()
ticks = 0

def tick():
    global ticks
    while True:
        ticks += 1
        gevent.sleep(0.001)

gevent.spawn(tick)

def others_run():
    before = ticks
    gevent.sleep(0.05)
    assert ticks > before, "all greenlets stand still"
"""
POOL = """
pool = gevent.get_hub().threadpool
inbound = there.recv(near)
receiving = gevent.spawn(pool.apply, inbound.wait)
others_run()
pool.apply(to_there.send(far).wait)
assert receiving.get().bytes == SIZE
"""
EVENTS = """
events, inbound = there.event_fd(), there.recv(near)

def receive():
    while not inbound.is_done():
        gevent.socket.wait_read(events, timeout=20)
        there.drain_events()
        there.progress()
    return inbound.wait().bytes

receiving = gevent.spawn(receive)
others_run()
sending = to_there.send(far)
assert receiving.get() == SIZE
sending.wait()
"""
SPREAD = """
with Receiver(context, [near], name="receiver") as receiver:
    thread = threading.Thread(target=receiver.receive)
    thread.start()
    assert spread(context, [far], [receiver.describe()]).reached == ["receiver"]
    thread.join()
others_run()
"""
MOONCAKE = """
one, other = TransferEngine(), TransferEngine()
for engine in (one, other):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert one.register_memory(near.ctypes.data, SIZE) == other.register_memory(far.ctypes.data, SIZE) == 0
peer = f"127.0.0.1:{other.get_rpc_port()}"
assert one.transfer_sync_read(peer, near.ctypes.data, far.ctypes.data, SIZE) == 0
others_run()
"""
NIXL = """
one = nixl_agent("one", nixl_agent_config(enable_listen_thread=True, listen_port=0))
other = nixl_agent("other", nixl_agent_config(enable_listen_thread=True, listen_port=0))
for agent, memory in ((one, near), (other, far)):
    agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], "DRAM")
one.fetch_remote_metadata("other", "127.0.0.1", other.agent._exchange.port)
until = time.monotonic() + 20
while not one.check_remote_metadata("other"):
    assert time.monotonic() < until
    gevent.sleep(0.01)
handle = one.initialize_xfer(
    "READ",
    one.get_xfer_descs([(near.ctypes.data, SIZE, 0)], "DRAM"),
    one.get_xfer_descs([(far.ctypes.data, SIZE, 0)], "DRAM"),
    "other",
    b"",
)
one.transfer(handle)
while (state := one.check_xfer_state(handle)) == "PROC":
    gevent.sleep(0.001)
assert state == "DONE", state
"""


@pytest.mark.parametrize(
    "code", [POOL, EVENTS, SPREAD, MOONCAKE, NIXL], ids=["pool", "events", "spread", "mooncake", "nixl"]
)
def test_nothing_hangs_under_gevent(code: str) -> None:
    script = f"{START}{code}\nassert (near == 1).all()\nprint('whole')\n"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("whole\n"), done.stdout + done.stderr
