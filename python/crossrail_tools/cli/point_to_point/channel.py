"""The control messages between the two ends of a bench: small JSON messages under a tag of their own."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import crossrail

from ..cases import Case
from ..failure import Failure
from ..processes import Message

CONTROL_TAG = 0x6372_2D62_656E_6368
_MESSAGE_LIMIT = 64 * 1024

IDLE_LIMIT_S = 600.0
"""How long the listening end waits for the driving end's next request before it gives up."""

RAW_TCP_FAILURES = (
    crossrail.IoError,
    crossrail.UnreachableError,
    crossrail.UsageError,
    crossrail.ProtocolError,
    crossrail.ExhaustedError,
)
"""Errors of plain sockets after which the channel still works: a firewall, an unknown address, no port left."""


class Channel:
    """An endpoint with control messages on it. For use by one thread."""

    def __init__(self, context: crossrail.Context, worker: crossrail.Worker, endpoint: crossrail.Endpoint) -> None:
        self.context = context
        self.worker = worker
        self.endpoint = endpoint

    def send(self, message: Message) -> None:
        """Sends ``message``. Raises the library's errors."""
        self.endpoint.send(json.dumps(message).encode(), CONTROL_TAG).wait()

    def leave(self) -> None:
        """Ends the bench. The other end may close the connection before it has confirmed that; this is no failure."""
        with contextlib.suppress(crossrail.PeerDeadError, crossrail.ClosedError):
            self.send({"do": "bye"})
            self.endpoint.close()

    def receive(self, timeout: float | None = None) -> Message:
        """Waits for the next message of the other end.

        Raises the library's errors, and Failure for an invalid message or one that reports the other end's failure.
        """
        buffer = bytearray(_MESSAGE_LIMIT)
        request = self.worker.recv(buffer, CONTROL_TAG, crossrail.ALL_BITS, source=self.endpoint)
        try:
            receipt = request.wait(timeout)
        except crossrail.TimeoutError:
            request.cancel()
            raise
        try:
            message = json.loads(bytes(buffer[: receipt.bytes]))
        except (ValueError, RecursionError):
            raise Failure(f"{self.endpoint.peer} sent a control message that is not JSON") from None
        if not isinstance(message, dict):
            raise Failure(f"{self.endpoint.peer} sent a control message that is not a JSON object")
        if "error" in message:
            raise Failure(f"the other end failed: {message['error']}")
        return message

    def order(self, case: Case, memory: str) -> None:
        """Has the other end run its part of a case with this memory. Raises the library's errors."""
        self.send({"do": "measure", "case": case.order(), "memory": memory})

    def measure(self, case: Case, role: str = "driver", **end: Any) -> Any:
        """Runs this end's part of a case between the two ends. Raises the library's errors."""
        return case.run(self.context, self.worker, [self.endpoint], role=role, **end)

    def request(self, message: Message, timeout: float | None = None) -> Message:
        """Sends ``message`` and waits for the answer."""
        self.send(message)
        return self.receive(timeout)
