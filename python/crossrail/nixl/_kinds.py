"""Constants, enumerations and exceptions, with the names and values of NIXL 1.5.1; and which of our errors is which."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import crossrail

NIXL_INIT_AGENT = ""
DEFAULT_COMM_PORT = 8888
HAVE_UCX_GPU_DEVICE_API = False  # memory views for GPU-initiated transfers are refused


class nixl_mem_t(enum.IntEnum):
    """Kinds of memory. Transfers are between DRAM and VRAM."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(enum.IntEnum):
    """READ: remote to local."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(enum.IntEnum):
    """What calls return; negative ones are raised as exceptions."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_thread_sync_t(enum.IntEnum):
    """How the program promises to use its agent. This one may be used from any thread in every mode."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_cost_t(enum.IntEnum):
    """How a transfer's cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixlNotPostedError(Exception):
    """The transfer was never posted."""


class nixlInvalidParamError(Exception):
    """An argument is wrong, or contradicts another."""


class nixlBackendError(Exception):
    """The transfer, or the link that carried it, failed."""


class nixlNotFoundError(Exception):
    """An agent, a plugin or a registration does not exist (any more)."""


class nixlMismatchError(Exception):
    """Bytes that are no metadata, or an agent of another version."""


class nixlNotAllowedError(Exception):
    """An agent of this name is known by other connection information, or the peer has another secret."""


class nixlRepostActiveError(Exception):
    """The transfer is in flight."""


class nixlUnknownError(Exception):
    """NIXL raises it for what it cannot name; never raised here."""


class nixlNotSupportedError(Exception):
    """A call that this implementation refuses; the text names it."""


class nixlRemoteDisconnectError(Exception):
    """The remote agent is gone. Its metadata is dropped: `add_remote_agent` again."""


class nixlCancelledError(Exception):
    """The transfer was cancelled."""


class nixlNoTelemetryError(Exception):
    """Telemetry is off (`nixl_agent_config(capture_telemetry=)`, NIXL_TELEMETRY_ENABLE)."""


# Their names among NIXL's statuses, with which its texts begin.
_STATUSES: dict[type[Exception], str] = {
    nixlNotPostedError: "NOT_POSTED",
    nixlInvalidParamError: "INVALID_PARAM",
    nixlBackendError: "BACKEND",
    nixlNotFoundError: "NOT_FOUND",
    nixlMismatchError: "MISMATCH",
    nixlNotAllowedError: "NOT_ALLOWED",
    nixlRepostActiveError: "REPOST_ACTIVE",
    nixlUnknownError: "UNKNOWN",
    nixlNotSupportedError: "NOT_SUPPORTED",
    nixlRemoteDisconnectError: "REMOTE_DISCONNECT",
    nixlCancelledError: "CANCELED",
    nixlNoTelemetryError: "NO_TELEMETRY",
}
ERRORS = tuple(_STATUSES)

# By the first class that fits.
_EQUIVALENTS: tuple[tuple[type[crossrail.CrossrailError], type[Exception]], ...] = (
    (crossrail.UsageError, nixlInvalidParamError),
    (crossrail.RegionError, nixlNotFoundError),
    (crossrail.PeerDeadError, nixlRemoteDisconnectError),
    (crossrail.ClosedError, nixlRemoteDisconnectError),
    (crossrail.UnreachableError, nixlRemoteDisconnectError),
    (crossrail.CancelledError, nixlCancelledError),
    (crossrail.MismatchError, nixlMismatchError),
    (crossrail.RefusedError, nixlNotAllowedError),
    (crossrail.UnsupportedError, nixlNotSupportedError),
)


def error(kind: type[Exception], text: str) -> Exception:
    """An exception whose text begins with the name of its status, as NIXL's do."""
    return kind(f"NIXL_ERR_{_STATUSES[kind]}: {text}")


def equivalent(cause: crossrail.CrossrailError) -> Exception:
    """The exception that NIXL would raise, with our text."""
    kind = next((theirs for ours, theirs in _EQUIVALENTS if isinstance(cause, ours)), nixlBackendError)
    return error(kind, str(cause))


@contextmanager
def translated() -> Iterator[None]:
    """Raises NIXL's exceptions in place of Crossrail's."""
    try:
        yield
    except crossrail.CrossrailError as cause:
        raise equivalent(cause) from cause


def refuse(call: str, instead: str = "storage and GPU-initiated transfers stay with NVIDIA's nixl") -> Exception:
    """The exception of a call that is not implemented."""
    return error(nixlNotSupportedError, f"{call} is not supported by crossrail.nixl: {instead}")
