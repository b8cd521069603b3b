"""What can go wrong, one class per kind. All derive from `CrossrailError`.

The text says what failed, with which peer and lane, how far it got, and what to try; the attributes say the same to
programs.
"""

from __future__ import annotations

import builtins
from typing import Any, ClassVar

__all__ = [
    "CancelledError",
    "ClosedError",
    "ConfigError",
    "CrossrailError",
    "ExhaustedError",
    "IoError",
    "MismatchError",
    "PeerDeadError",
    "ProtocolError",
    "RefusedError",
    "RegionError",
    "TimeoutError",
    "TruncatedError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
]


class CrossrailError(Exception):
    """Anything that went wrong in Crossrail.

    Attributes: `kind` (the class in one word), `operation` that failed, `detail` (what happened), `peer` and `lane`
    where one is concerned, `progress` (bytes done, bytes in all) where a transfer was under way, `hint` (what to try).
    """

    kind: ClassVar[str] = "error"

    operation: str
    detail: str
    peer: str | None
    lane: str | None
    progress: tuple[int, int] | None
    hint: str | None

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        detail: str = "",
        peer: str | None = None,
        lane: str | None = None,
        progress: tuple[int, int] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.detail = detail or message
        self.peer = peer
        self.lane = lane
        self.progress = progress
        self.hint = hint

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__.copy()


class UsageError(CrossrailError):
    """A call or command line that makes no sense: the caller's own mistake."""

    kind = "usage"


class ConfigError(CrossrailError):
    """A setting that is unknown or does not parse, or a device that is not there."""

    kind = "config"


class UnreachableError(CrossrailError):
    """The peer could not be reached at all."""

    kind = "unreachable"


class RefusedError(CrossrailError):
    """The peer refused: wrong secret, or too many half-open connections."""

    kind = "refused"


class MismatchError(CrossrailError):
    """Both ends are there but disagree: version, chunk, window, channels, or a bench's parameters."""

    kind = "mismatch"


class TimeoutError(CrossrailError, builtins.TimeoutError):
    """A bounded wait ran out; the operation may still finish. Also a built-in `TimeoutError`."""

    kind = "timeout"


class PeerDeadError(CrossrailError):
    """The peer died or closed; its own requests fail, the worker goes on."""

    kind = "peer_dead"


class TruncatedError(CrossrailError):
    """The receiver's buffer is shorter than the message. Raised at both ends."""

    kind = "truncated"


class CancelledError(CrossrailError):
    """The request was cancelled, here or at the peer. (asyncio's own class is a different one.)"""

    kind = "cancelled"


class RegionError(CrossrailError):
    """A region that is gone, a wrong key, or an access outside its bounds."""

    kind = "region"


class ExhaustedError(CrossrailError):
    """Memory or descriptors ran out; the text names the sum asked for."""

    kind = "exhausted"


class UnsupportedError(CrossrailError):
    """This transport or device cannot do that; the text says which could."""

    kind = "unsupported"


class IoError(CrossrailError):
    """The operating system refused a call; the text names call and code."""

    kind = "io"


class ProtocolError(CrossrailError):
    """The peer sent something that is not this protocol, or data that did not verify."""

    kind = "protocol"


class ClosedError(CrossrailError):
    """The object was already closed."""

    kind = "closed"
