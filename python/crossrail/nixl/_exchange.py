"""Metadata of agents over connections of their own: `send_local_metadata`, `fetch_remote_metadata`, the listener.

Listener and requests are native: both ends prove that they know the secret before anything is read. What arrives is
metadata, which `nixlAgent.loadRemoteMD` checks. Requests are sent by a thread, in order, as in NIXL: a peer that cannot
be reached is a line in the log.
"""

from __future__ import annotations

import os
import threading
import weakref
from _queue import SimpleQueue
from collections.abc import Callable
from typing import Protocol

import crossrail
from crossrail._native import MetadataInquiry, MetadataListener, ask_metadata
from crossrail._threads import start_thread
from crossrail.nixl._kinds import DEFAULT_COMM_PORT, ERRORS, error, nixlInvalidParamError, refuse
from crossrail.nixl.logging import get_logger

logger = get_logger("exchange")

_LOAD, _FETCH, _FORGET = 1, 2, 3
_LIMIT_S = 5.0
_FAILURES: tuple[type[Exception], ...] = (crossrail.CrossrailError, OverflowError, *ERRORS)


class Described(Protocol):
    """The agent whose metadata is exchanged."""

    def getLocalMD(self) -> bytes: ...

    def loadRemoteMD(self, metadata: bytes) -> bytes: ...

    def forget(self, metadata: bytes) -> None: ...


class Exchange:
    """The listener of one agent, and its requests to others'."""

    def __init__(self, agent: Described, context: crossrail.Context) -> None:
        self._agent = weakref.ref(agent)
        self._context = context
        self._listener: MetadataListener | None = None
        self._work: SimpleQueue[Callable[[], None] | None] | None = None
        self._starting = threading.Lock()

    def listen(self, port: int) -> None:
        """Serves peers at `port`; 0 takes a free one. Raises CrossrailError if it is in use, nixlInvalidParamError."""
        _checked_port(port, "listener")
        self._listener = MetadataListener(self._context, port)
        start_thread(_serve, self._listener, self._agent, name="nixl-listener")

    @property
    def port(self) -> int | None:
        """The port of the listener; None without one."""
        return None if self._listener is None else self._listener.port

    def close(self) -> None:
        if self._listener is not None:
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
        _checked_port(port, call)
        agent, context, to = self._agent, self._context, (ip.strip("[]"), port or DEFAULT_COMM_PORT)

        def work() -> None:
            try:
                answer = ask_metadata(context, *to, operation, body, _LIMIT_S)
                here = agent()
                if operation == _FETCH and here is not None:
                    here.loadRemoteMD(answer)
            except _FAILURES as cause:
                logger.error("%s: %s port %s: %s", call, *to, str(cause))

        with self._starting:
            if self._work is None:
                self._work = SimpleQueue()
                start_thread(_run, self._work, name="nixl-metadata")
            self._work.put(work)


def _checked_port(port: int, call: str) -> None:
    if not 0 <= port < 1 << 16:
        raise error(nixlInvalidParamError, f"{call}: port {port} is not a number from 0 to 65535")


def ask(context: crossrail.Context, host: str, port: int) -> bytes:
    """Fetches the metadata of the agent that listens at that address. Raises CrossrailError."""
    return ask_metadata(context, host, port, _FETCH, b"", _LIMIT_S)


def _run(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()


def _serve(listener: MetadataListener, agent: weakref.ref[Described]) -> None:
    """Answers requests until the listener is closed."""
    while True:
        try:
            inquiry = listener.next()
        except crossrail.CrossrailError:
            return
        here = agent()
        if here is None:
            listener.close()
            return
        try:
            inquiry.answer(_answer(here, inquiry))
        except _FAILURES as cause:
            inquiry.refuse(str(cause))
            logger.warning(
                "a peer of the metadata listener: %s", str(cause)
            )  # not its traceback, which holds the agent
        del here, inquiry


def _answer(agent: Described, inquiry: MetadataInquiry) -> bytes:
    """The agent's metadata, or nothing once the peer's took effect."""
    if inquiry.operation == _FETCH:
        return agent.getLocalMD()
    if inquiry.operation == _LOAD:
        agent.loadRemoteMD(inquiry.body())
    elif inquiry.operation == _FORGET:
        agent.forget(inquiry.body())
    else:
        raise error(nixlInvalidParamError, f"metadata listener: operation {inquiry.operation}")
    return b""
