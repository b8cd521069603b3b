"""All listeners of a process that uses everything, and their answers to unauthenticated clients."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import clean_environment
from nixl_engines import until

from crossrail._native import Context, MetadataListener, ask_metadata
from crossrail.mooncake import TransferEngine
from crossrail.nixl._api import nixl_agent, nixl_agent_config

TRUST = Path(__file__).parents[2] / "docs/design/trust.md"
SECRET = "correct horse battery staple"
EVERYTHING = """
import json, sys
import numpy as np
import crossrail
from crossrail.kv import Receiver
from crossrail.mooncake import TransferEngine
from crossrail.nixl._api import nixl_agent, nixl_agent_config

context = crossrail.Context()
worker = crossrail.Worker(context, listen="[::]:0")
group = crossrail.Group(size=1, context=context)
agent = nixl_agent("agent", nixl_agent_config(enable_listen_thread=True, listen_port=0))
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
receiver = Receiver(context, [np.zeros(8, np.uint8)], listen="[::]:0")
ports = lambda worker: sorted({int(at.rpartition(":")[2]) for at in worker.control_addresses()})
kinds = {
    "worker": ports(worker) + ports(agent.agent._worker) + ports(engine._worker) + ports(receiver._weights.worker),
    "store": [int(group.store_address.rpartition(":")[2])],
    "metadata": [agent.agent._exchange.port, engine.get_rpc_port()],
    "metrics": [int(sys.argv[1])],
}
print(json.dumps(kinds), flush=True)
sys.stdin.read()
"""


def listening(pid: int) -> dict[int, list[str]]:
    """The TCP sockets that a process listens at: port, and addresses."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()))
    found: dict[int, list[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.setdefault(int(port, 16), []).append(address)
    return found


@pytest.fixture(scope="module")
def everything() -> Iterator[tuple[int, dict[str, list[int]]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"CROSSRAIL_SECRET": SECRET, "CROSSRAIL_METRICS": f":{port}", "NIXL_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(
        [sys.executable, "-c", EVERYTHING, str(port)],
        env=clean_environment(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        kinds: dict[str, list[int]] = json.loads(said)
        yield process.pid, kinds
        process.communicate("", timeout=30)


def test_every_listener_is_of_a_kind_that_the_page_lists(everything: tuple[int, dict[str, list[int]]]) -> None:
    pid, kinds = everything
    known = {port: kind for kind, ports in kinds.items() for port in ports}
    found = listening(pid)
    # A rail's lanes may have a listener of their own, with the handshake of its worker.
    unknown = {port: at for port, at in found.items() if port not in known}
    assert set(found) >= set(known), "a kind that does not listen is not tested"
    for port in unknown:
        assert greeting(port)[:6] == b"\xc5XRAIL", f"an unknown listener at {unknown[port]}, port {port}"
    page = TRUST.read_text()
    table = page[page.index("## Listeners") :].split("\n## ")[0]
    for kind in kinds:
        assert f"| {kind}" in table, f"trust.md does not list the listener of {kind}"


def greeting(port: int, sent: bytes = b"") -> bytes:
    """The answer to an unauthenticated client that sends these bytes and nothing more."""
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        stranger.settimeout(20)
        got = stranger.recv(64)  # before it sends: a reset takes away what was not read
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while len(got) < 1 << 20 and (part := stranger.recv(65536)):
                got += part
        return got


@pytest.mark.parametrize("kind", ["worker", "store", "metadata"])
def test_a_stranger_gets_a_challenge_and_nothing_else(everything: tuple[int, dict[str, list[int]]], kind: str) -> None:
    pid, kinds = everything
    messages = [b"", b"x" * (1 << 20), b"CRNIXLMD\x02\0\0\0\0", b"CRNIXLMD\x01\0\0\0\x04" + b"x" * (1 << 20)]
    for port in kinds[kind]:
        for message in messages:
            got = greeting(port, message)
            # A challenge, and a reject at most.
            assert got[:2] == b"\xc5X" and got[6:8] == b"\x01\0", (kind, port, got[:8])
            assert len(got) <= 64 + 256, (kind, port, len(got))
    assert listening(pid), "it lives"


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_strangers_neither_block_metadata_nor_cost_memory(everything: tuple[int, dict[str, list[int]]]) -> None:
    pid, kinds = everything
    context = Context(secret=SECRET)
    for port in kinds["metadata"]:
        before = resident(pid)
        slow = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(64)]
        try:
            for turn in range(3):
                for one in slow:
                    try:
                        one.sendall(b"\xc5" if turn == 0 else b"x" * 4096)
                    except OSError:  # evicted, or refused
                        continue
                assert ask_metadata(context, "127.0.0.1", port, 2, b"", 20.0)
        finally:
            for one in slow:
                one.close()
        assert resident(pid) - before < 32 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_neither_fetches_nor_withdraws_nor_adds_an_agent() -> None:
    agent, other = (nixl_agent(name, nixl_agent_config(True, True, 0)) for name in ("target", "other"))
    agent.add_remote_agent(other.get_agent_metadata())
    port = agent.agent._exchange.port
    metadata = other.get_agent_metadata()
    stranger = (
        "import os, signal, sys, crossrail; from crossrail._native import ask_metadata\n"
        "context = crossrail.Context()\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "try: print(ask_metadata(context, '127.0.0.1', int(sys.argv[1]), int(sys.argv[2]), "
        "bytes.fromhex(sys.argv[3]), 10.0))\n"
        "except crossrail.CrossrailError as error: print(type(error).__name__, error.reason)\n"
    )
    for operation in (1, 2, 3):
        command = [sys.executable, "-c", stranger, str(port), str(operation), metadata.hex()]
        done = subprocess.run(command, env=clean_environment({}), capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith("RefusedError"), (operation, done.stdout, done.stderr)
    assert agent.check_remote_metadata("other")
    subprocess.run(["rm", "-rf", "/tmp/crossrail-65534"], check=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_agents_and_engines_are_reached_by_both_families(host: str) -> None:
    target = nixl_agent("target", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    initiator = nixl_agent("initiator")
    initiator.fetch_remote_metadata("target", host, target.agent._exchange.port)
    until(lambda: initiator.check_remote_metadata("target"), "the fetched metadata")
    a, b = TransferEngine(), TransferEngine()
    assert a.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0 == b.initialize(host, "P2PHANDSHAKE", "tcp", "")
    session = f"[{host.strip('[]')}]:{b.get_rpc_port()}"
    mine, its = a.allocate_managed_buffer(100), b.allocate_managed_buffer(100)
    a.write_bytes_to_buffer(mine, b"x" * 100, 100)
    assert a.transfer_sync_write(session, mine, its, 100) == 0
    assert b.read_bytes_from_buffer(its, 100) == b"x" * 100


def test_a_listener_that_is_closed_ends_its_thread_and_its_clients() -> None:
    context = Context(log="error")
    listener = MetadataListener(context, 0)
    with socket.create_connection(("127.0.0.1", listener.port), 10) as waiting:
        waiting.settimeout(20)
        assert len(waiting.recv(48)) == 48
        began = time.monotonic()
        listener.close()
        assert waiting.recv(1) == b"" and time.monotonic() - began < 5
