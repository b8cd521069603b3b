"""crossrail.nixl against bytes that a peer made up, and against peers that are killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nixl_engines import until

import crossrail
from crossrail.nixl import _bindings as bindings
from crossrail.nixl import _utils as utils
from crossrail.nixl._api import nixl_agent, nixl_agent_config

SIZE = 64 << 20
SOON_S = 3.0
"""How long it may take until a killed peer is noticed; a second or so, and as much again on a busy machine."""
TARGET = f"""
import sys
from crossrail.nixl._api import nixl_agent
from crossrail.nixl import _utils
agent = nixl_agent("target")
at = _utils.malloc_passthru({SIZE})
agent.register_memory([(at, {SIZE}, 0, "")], "DRAM")
sys.stdout.write(f"{{at}} {{agent.get_agent_metadata().hex()}}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def changed(data: bytes, rng: random.Random) -> bytes:
    """`data` with bytes flipped, cut off, repeated or put in."""
    bytes_ = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(bytes_) + 1)
        match rng.randrange(4):
            case 0 if at < len(bytes_):
                bytes_[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 1:
                del bytes_[at:]
            case 2:
                bytes_[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                del bytes_[at : at + rng.randint(1, 9)]
    return bytes(bytes_)


@pytest.fixture
def described() -> Iterator[tuple[nixl_agent, bytes]]:
    agent, other = nixl_agent("reader"), nixl_agent("writer")
    at = utils.malloc_passthru(4096)
    other.register_memory([(at, 1024, 0, ""), (at + 2048, 1024, 0, "")], "DRAM")
    yield agent, other.get_agent_metadata()
    utils.free_passthru(at)


@pytest.mark.parametrize("seed", range(4))
def test_changed_metadata(described: tuple[nixl_agent, bytes], seed: int) -> None:
    agent, metadata = described
    rng, refused = random.Random(seed), 0
    for _ in range(500):
        bad = changed(metadata, rng)
        try:
            name = agent.add_remote_agent(bad)
        except (bindings.nixlMismatchError, bindings.nixlInvalidParamError, bindings.nixlNotAllowedError):
            refused += 1
        else:
            agent.check_remote_metadata(name.decode())
            agent.remove_remote_agent(name)
    assert refused > 100
    assert agent.add_remote_agent(metadata) == b"writer"


@pytest.mark.parametrize("seed", range(4))
def test_changed_lists(described: tuple[nixl_agent, bytes], seed: int) -> None:
    agent, _ = described
    lists = (
        bindings.nixlXferDList(bindings.DRAM_SEG, [(1, 2, 3), (4, 5, 6)]),
        bindings.nixlRegDList(bindings.VRAM_SEG, [(1, 2, 3, "abc"), (4, 5, 6, "")]),
    )
    rng, refused = random.Random(seed), 0
    for descs in lists:
        data = agent.get_serialized_descs(descs)
        assert agent.deserialize_descs(data) == descs
        for _ in range(500):
            try:
                agent.deserialize_descs(changed(data, rng)).descCount()
            except bindings.nixlMismatchError:
                refused += 1
    assert refused > 100
    claims = struct.pack("<8sBBQ", b"CRNIXLDL", 0, 0, 2**60)
    with pytest.raises(bindings.nixlMismatchError):
        agent.deserialize_descs(claims)


def test_pickles_are_not_loaded(described: tuple[nixl_agent, bytes], tmp_path: Path) -> None:
    agent, _ = described

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    with pytest.raises(bindings.nixlMismatchError):
        agent.deserialize_descs(pickle.dumps(Evil()))
    assert not (tmp_path / "touched").exists()


def test_the_listener_survives_strangers() -> None:
    agent = nixl_agent("listener", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    port = agent.agent._exchange.port
    rng = random.Random(0)
    head = struct.pack("<8sBI", b"CRNIXLMD", 1, 4)
    frames = [b"", b"GET / HTTP/1.1\r\n\r\n", head + b"junk", struct.pack("<8sBI", b"CRNIXLMD", 1, 2**32 - 1)]
    frames += [changed(head + b"junk", rng) for _ in range(50)]
    for frame in frames:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.settimeout(10)
            with contextlib.suppress(OSError):  # it hangs up as soon as it has read nonsense
                peer.sendall(frame)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass
    other = nixl_agent("other")
    other.fetch_remote_metadata("listener", "127.0.0.1", port)
    until(lambda: other.check_remote_metadata("listener"), "its metadata")


class Target:
    """A process with an agent whose memory others write."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(crossrail.__file__).parents[1]), "NIXL_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self.process.stdout is not None
        at, metadata = self.process.stdout.readline().split()
        self.at, self.metadata = int(at), bytes.fromhex(metadata)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture
def target() -> Iterator[Target]:
    it = Target()
    yield it
    it.kill()


@pytest.mark.parametrize("tls", ["shm", "tcp"])
@pytest.mark.parametrize("phase", ["known", "connected", "prepared", "in flight", "finished", "notify"])
def test_a_killed_peer_is_named(phase: str, tls: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", f"{tls},self")
    agent = nixl_agent("initiator")
    memory = np.ones(SIZE, np.uint8)
    agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], "DRAM")
    agent.add_remote_agent(target.metadata)
    local = agent.get_xfer_descs([(memory.ctypes.data, SIZE, 0)], "DRAM")
    remote = agent.get_xfer_descs([(target.at, SIZE, 0)], "DRAM")

    def write() -> Any:
        return agent.initialize_xfer("WRITE", local, remote, "target", b"done")

    def finish(handle: Any) -> bool:
        return agent.check_xfer_state(handle) == "DONE"

    handle = None
    if phase == "connected":
        agent.make_connection("target")
    elif phase in ("prepared", "in flight", "finished"):
        handle = write()
    if phase == "finished":
        agent.transfer(handle)
        until(lambda: finish(handle), "the first transfer")
    if phase == "in flight":
        os.kill(target.process.pid, signal.SIGSTOP)
        agent.transfer(handle)
    target.kill()
    began = time.monotonic()
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        while True:
            assert time.monotonic() - began < SOON_S, "nobody noticed"
            if phase == "notify":
                agent.send_notif("target", b"are you there?")
                time.sleep(0.01)
                continue
            if handle is None:
                handle = write()
            if phase != "in flight" or handle is None:
                agent.transfer(handle)
            while not finish(handle):
                assert time.monotonic() - began < SOON_S, "nobody noticed"
                time.sleep(0.001)
            if phase == "in flight":
                # The copy was over, or made by this end alone, before the peer was killed.
                agent.transfer(handle)
    assert not agent.check_remote_metadata("target")
    with pytest.raises(bindings.nixlNotFoundError):
        write()
    again = Target()
    try:
        assert agent.add_remote_agent(again.metadata) == b"target"
        rows = agent.get_xfer_descs([(again.at, SIZE, 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", local, rows, "target")
        agent.transfer(handle)
        until(lambda: finish(handle), "the transfer to its successor")
    finally:
        again.kill()
