"""Programs for NIXL and Mooncake between two machines that have addresses of one family only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from bed import Bed, Side
from commands import clean_environment
from ends import SECRET

LIMIT_S = 60

NIXL_TARGET = """
import sys, time
import numpy as np
from crossrail.nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("target", nixl_agent_config(enable_listen_thread=True, listen_port=7801))
memory = np.zeros(1 << 20, np.uint8)
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
print(memory.ctypes.data, flush=True)
while not (got := agent.get_new_notifs()):
    time.sleep(0.001)
print(got, int((memory == 5).sum()), flush=True)
"""
NIXL_INITIATOR = """
import sys, time
import numpy as np
from crossrail.nixl._api import nixl_agent
agent = nixl_agent("initiator")
memory = np.full(1 << 20, 5, np.uint8)
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
agent.fetch_remote_metadata("target", sys.argv[1], 7801)
until = time.monotonic() + 20
while not agent.check_remote_metadata("target"):
    assert time.monotonic() < until, "no metadata"
    time.sleep(0.001)
here = agent.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0)], "DRAM")
there = agent.get_xfer_descs([(int(sys.argv[2]), memory.nbytes, 0)], "DRAM")
handle = agent.initialize_xfer("WRITE", here, there, "target", b"done")
state = agent.transfer(handle)
while state == "PROC":
    time.sleep(0.001)
    state = agent.check_xfer_state(handle)
print(state)
"""
MOONCAKE_TARGET = """
import sys
import numpy as np
from crossrail.mooncake import TransferEngine
engine = TransferEngine()
assert engine.initialize(sys.argv[1], "P2PHANDSHAKE", "tcp", "") == 0
memory = np.zeros(1 << 20, np.uint8)
assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
print(memory.ctypes.data, engine.get_rpc_port(), flush=True)
sys.stdin.read()
print(int((memory == 5).sum()), flush=True)
"""
MOONCAKE_INITIATOR = """
import sys
import numpy as np
from crossrail.mooncake import TransferEngine
engine = TransferEngine()
assert engine.initialize("initiator", "P2PHANDSHAKE", "tcp", "") == 0
memory = np.full(1 << 20, 5, np.uint8)
assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
host, address, port = sys.argv[1:]
session = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
print(engine.transfer_sync_write(session, memory.ctypes.data, int(address), memory.nbytes))
"""


def start(bed: Bed, side: Side, program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        bed.inside(side, sys.executable, "-c", program, *arguments),
        env=clean_environment({"CROSSRAIL_SECRET": SECRET, "NIXL_LOG_LEVEL": "ERROR"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def both(bed: Bed, target: str, initiator: str, host: str, *named: str) -> tuple[str, str]:
    """The output of both; the first line of the target's becomes arguments of the initiator."""
    with start(bed, "left", target, *named) as left:
        try:
            assert left.stdout is not None
            where = left.stdout.readline().split()
            with start(bed, "right", initiator, host, *where) as right:
                said, why = right.communicate(timeout=LIMIT_S)
            assert right.returncode == 0, why
            there, why = left.communicate("", timeout=LIMIT_S)
            assert left.returncode == 0, why
        finally:
            left.kill()
    return said.strip(), there.strip()


@pytest.mark.parametrize("version", [4, 6])
def test_agents_exchange_metadata_and_bytes(make_bed: Callable[..., Bed], version: int) -> None:
    bed = make_bed((2000,), ipv4=version == 4, ipv6=version == 6)
    host = bed.address("left", "eth0", 4 if version == 4 else 6)
    said, there = both(bed, NIXL_TARGET, NIXL_INITIATOR, host)
    assert said == "DONE"
    assert there == f"{ {'initiator': [b'done']} } {1 << 20}"


@pytest.mark.parametrize("version", [4, 6])
def test_engines_transfer_by_host_and_port(make_bed: Callable[..., Bed], version: int) -> None:
    bed = make_bed((2000,), ipv4=version == 4, ipv6=version == 6)
    host = bed.address("left", "eth0", 4 if version == 4 else 6)
    said, there = both(bed, MOONCAKE_TARGET, MOONCAKE_INITIATOR, host, host)
    assert (said, there) == ("0", str(1 << 20))
