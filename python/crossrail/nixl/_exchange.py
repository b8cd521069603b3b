"""Metadata of agents over sockets of their own: `send_local_metadata`, `fetch_remote_metadata`, the listener.

A frame is a magic, an operation, the length of its body, and the body: metadata, which `nixlAgent.loadRemoteMD` checks.
Frames are sent by a thread, in order, as in NIXL: a peer that cannot be reached is a line in the log.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from crossrail.nixl._kinds import DEFAULT_COMM_PORT, ERRORS, error, nixlInvalidParamError, refuse
from crossrail.nixl.logging import get_logger

logger = get_logger("exchange")

_HEAD = struct.Struct("<8sBI")
_MAGIC = b"CRNIXLMD"
_LOAD, _FETCH, _FORGET = 1, 2, 3
_BODY_MAX = 64 << 20
_CONNECT_S = 1.0
_TRANSFER_S = 5.0
_PEERS_MAX = 64  # connections that are served at a time


class Described(Protocol):
    """The agent whose metadata is exchanged."""

    def getLocalMD(self) -> bytes: ...

    def loadRemoteMD(self, metadata: bytes) -> bytes: ...

    def forget(self, metadata: bytes) -> None: ...


class Exchange:
    """The sockets of one agent. `beyond`: listen beyond loopback, which needs a secret to connect the agents later."""

    def __init__(self, agent: Described, *, beyond: bool) -> None:
        self._agent = weakref.ref(agent)
        self._beyond = beyond
        self._listener: socket.socket | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._starting = threading.Lock()

    def listen(self, port: int) -> None:
        """Serves peers at `port`; 0 takes a free one. Raises OSError if it is in use."""
        self._listener = socket.create_server(("" if self._beyond else "127.0.0.1", port))
        threading.Thread(target=_accept, args=(self._listener, self._agent), name="nixl-listener", daemon=True).start()

    @property
    def port(self) -> int | None:
        """The port of the listener; None without one."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def close(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._work is not None:
            self._work.put(None)

    def send(self, ip: str, port: int, metadata: bytes) -> None:
        self._later(ip, port, "send_local_metadata", _LOAD, metadata)

    def invalidate(self, ip: str, port: int, metadata: bytes) -> None:
        self._later(ip, port, "invalidate_local_metadata", _FORGET, metadata)

    def fetch(self, ip: str, port: int) -> None:
        self._later(ip, port, "fetch_remote_metadata", _FETCH, b"")

    def _later(self, ip: str, port: int, call: str, operation: int, body: bytes) -> None:
        if not ip:
            if os.environ.get("NIXL_ETCD_ENDPOINTS") or os.environ.get("NIXL_TCPSTORE_ENDPOINT"):
                raise refuse(f"{call} through a store", "pass the ip address of the peer's listener")
            raise error(nixlInvalidParamError, f"{call}: no ip address")
        agent, to = self._agent, (ip, port or DEFAULT_COMM_PORT)

        def work() -> None:
            try:
                with socket.create_connection(to, _CONNECT_S) as peer:
                    peer.settimeout(_TRANSFER_S)
                    peer.sendall(_HEAD.pack(_MAGIC, operation, len(body)) + body)
                    if operation == _FETCH:
                        _load(agent, _read(peer)[1])
                    else:
                        _read(peer)
            except (OSError, ValueError) as cause:
                logger.error("%s: %s:%s: %s", call, *to, str(cause))

        with self._starting:
            if self._work is None:
                self._work = queue.SimpleQueue()
                threading.Thread(target=_run, args=(self._work,), name="nixl-metadata", daemon=True).start()
            self._work.put(work)


def ask(host: str, port: int) -> bytes:
    """Fetches the metadata of the agent that listens at that address. Raises OSError and ValueError."""
    with socket.create_connection((host, port), _CONNECT_S) as peer:
        peer.settimeout(_TRANSFER_S)
        peer.sendall(_HEAD.pack(_MAGIC, _FETCH, 0))
        return _read(peer)[1]


def _run(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()


def _accept(listener: socket.socket, agent: weakref.ref[Described]) -> None:
    free = threading.BoundedSemaphore(_PEERS_MAX)
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        free.acquire()
        threading.Thread(target=_serve, args=(peer, agent, free), name="nixl-peer", daemon=True).start()


def _serve(peer: socket.socket, agent: weakref.ref[Described], free: threading.BoundedSemaphore) -> None:
    """One frame of a peer, and the answer: our metadata, or an empty frame once the peer's took effect."""
    try:
        with peer:
            peer.settimeout(_TRANSFER_S)
            operation, body = _read(peer)
            here, answer = agent(), b""
            if here is None:
                return
            if operation == _FETCH:
                answer = here.getLocalMD()
            elif operation == _LOAD:
                _load(agent, body)
            elif operation == _FORGET:
                here.forget(body)
            del here
            peer.sendall(_HEAD.pack(_MAGIC, _LOAD, len(answer)) + answer)
    except (OSError, ValueError) as cause:
        logger.warning("a peer of the metadata listener: %s", str(cause))  # not its traceback, which holds the agent
    finally:
        free.release()


def _load(agent: weakref.ref[Described], metadata: bytes) -> None:
    here = agent()
    if here is None:
        return
    try:
        here.loadRemoteMD(metadata)
    except ERRORS as cause:
        raise ValueError(f"its metadata is refused: {cause}") from cause


def _read(peer: socket.socket) -> tuple[int, bytes]:
    """One frame: operation and body. Raises ValueError for anything else, OSError for a peer that stops."""
    magic, operation, size = _HEAD.unpack(_exactly(peer, _HEAD.size))
    if magic != _MAGIC or operation not in (_LOAD, _FETCH, _FORGET):
        raise ValueError("not a frame of crossrail.nixl")
    if size > _BODY_MAX:
        raise ValueError(f"a frame of {size} bytes")
    return operation, _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = peer.recv(min(size, 1 << 16))
        if not part:
            raise ConnectionError("the peer has closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
