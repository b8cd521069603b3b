"""The exceptions of Crossrail, one class per kind of error. All derive from `CrossrailError`.

The text of an error names the operation, the peer and lane, the progress, the reason and what to try; the attributes
have the same for programs.
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
    """Base class of all errors of Crossrail.

    Programs branch on the class, or `kind`, and on `reason`; the text is for people and may change.

    Attributes
    ----------
    kind : str
        The class in one word: ``"refused"``.
    reason : str or None
        Why, more precisely than the class, where Crossrail knows:

        - RefusedError: ``"secret_missing"``, ``"secret_wrong"``, ``"token_missing"``, ``"token_wrong"``,
          ``"user_denied"``, ``"busy"``, ``"session_unknown"``, ``"tampered"``
        - MismatchError: ``"version"``, ``"parameters"``
        - UnreachableError: ``"not_listening"``, ``"name_unknown"``, ``"no_response"``, ``"connection_closed"``,
          ``"replaced"``; ProtocolError: ``"foreign"``
        - PeerDeadError: ``"closed"``, ``"process_ended"``, ``"lanes_lost"``
        - ExhaustedError: ``"full"``, ``"descriptors"``, ``"memory"``
        - UsageError: ``"port_in_use"``, ``"address_unknown"``, ``"not_permitted"``, ``"other_process"``;
          ConfigError: ``"secret_required"``
        - UnsupportedError: ``"driver_too_old"``, ``"device_unsupported"``
    operation : str
        The operation that failed: ``"connect"``.
    detail : str
        What happened.
    peer : str or None
        The peer concerned, if any.
    lane : str or None
        The lane concerned, if any.
    progress : tuple of int or None
        Bytes done and bytes in all, where a transfer was in progress.
    waited : float or None
        Seconds that the caller waited, where a wait ran out.
    hint : str or None
        What to try.
    """

    kind: ClassVar[str] = "error"

    reason: str | None
    operation: str
    detail: str
    peer: str | None
    lane: str | None
    progress: tuple[int, int] | None
    waited: float | None
    hint: str | None

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        operation: str = "",
        detail: str = "",
        peer: str | None = None,
        lane: str | None = None,
        progress: tuple[int, int] | None = None,
        waited: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.operation = operation
        self.detail = detail or message
        self.peer = peer
        self.lane = lane
        self.progress = progress
        self.waited = waited
        self.hint = hint

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__.copy()


class UsageError(CrossrailError):
    """A call or command line is invalid: a mistake of the caller."""

    kind = "usage"


class ConfigError(CrossrailError):
    """A setting is unknown or malformed, or a device does not exist."""

    kind = "config"


class UnreachableError(CrossrailError):
    """The peer could not be reached."""

    kind = "unreachable"


class RefusedError(CrossrailError):
    """The peer refused the connection: wrong secret, or too many half-open connections."""

    kind = "refused"


class MismatchError(CrossrailError):
    """The two ends disagree: on the version, chunk, window, channels, sizes of a buffer, or parameters of a bench."""

    kind = "mismatch"


class TimeoutError(CrossrailError, builtins.TimeoutError):
    """A wait exceeded its timeout; the operation may still finish. Also a built-in `TimeoutError`."""

    kind = "timeout"


class PeerDeadError(CrossrailError):
    """The peer died or closed its endpoint. Requests to it fail; the worker continues."""

    kind = "peer_dead"


class TruncatedError(CrossrailError):
    """The receiver's buffer is shorter than the message. Raised at both ends."""

    kind = "truncated"


class CancelledError(CrossrailError):
    """The request was cancelled, here or at the peer. (Not the class of the same name in asyncio.)

    At the sender the message may still have been delivered: a cancellation can cross the receiver's last
    acknowledgement.
    """

    kind = "cancelled"


class RegionError(CrossrailError):
    """A region is no longer registered, its key is wrong, or an access is out of bounds."""

    kind = "region"


class ExhaustedError(CrossrailError):
    """Memory or file descriptors are exhausted; the text names the amount requested."""

    kind = "exhausted"


class UnsupportedError(CrossrailError):
    """The transport or device does not support the operation; the text names one that does."""

    kind = "unsupported"


class IoError(CrossrailError):
    """A system call failed; the text names the call and the error code."""

    kind = "io"


class ProtocolError(CrossrailError):
    """The peer violated the protocol, or data did not verify."""

    kind = "protocol"


class ClosedError(CrossrailError):
    """The object was already closed."""

    kind = "closed"
