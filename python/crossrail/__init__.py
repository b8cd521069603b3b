"""Crossrail transfers data between processes over every link of a machine, and reports which it chose and why.

A `Context` is one process's view of its devices and settings; a `Worker` listens, connects and makes progress; an
`Endpoint` is one peer. Messages are sent to an endpoint and received from a worker by tag; a registered `Region` is
written and read by its key. Each operation is a `Request`: `wait()` for it, `await` it, or attach a callback; its
`Receipt` has the bytes transferred, the lanes that carried them, and a breakdown of the time::

    import crossrail

    context = crossrail.Context()
    with crossrail.Worker(context) as worker:
        endpoint = worker.connect("127.0.0.1:7000")
        receipt = endpoint.send(b"hello", tag=7).wait(timeout=5)

A `Layout` is a list of rows of registered memory, by their addresses; a `Move`, prepared once from two of them, moves
any number of rows as one transfer, with a notice behind the last byte. `crossrail.nixl` is NIXL's interface to both.

A `Group` is the membership of this process in a group of ranks; an `ExpertBuffer` dispatches tokens of a mixture of
experts between the ranks, and combines the outputs of the experts.

Any object with the buffer protocol, DLPack or `__cuda_array_interface__` can be transferred: bytes, bytearray,
memoryview, NumPy arrays, and tensors of PyTorch, CuPy and others in host memory or on a GPU. `Context.alloc` allocates
memory of either kind that peers on this machine can map; transfers of it are the fastest between them.

GPU memory is accessed in stream order: an operation accesses it behind the work enqueued so far in the array's own
stream, or in `stream=`, and `Request.wait_on(stream)` makes a stream wait for the operation. `Endpoint.share`,
`Endpoint.map`, `Mapped.put` and `Memory.await_signal` do not need the host once they are enqueued in a stream, and can
be captured in graphs.

Thread safety: any thread may use any object. Calls that wait or transfer much data release the GIL, and Ctrl-C
interrupts every wait. Every wait is bounded by its `timeout` (seconds) or by CROSSRAIL_TIMEOUT. A buffer is borrowed by
its operation until the request is finished: do not write to a buffer that is being sent, nor access one that is being
received into.

Sizes are in bytes; GB is 1e9 bytes and GiB is 2**30. Every error is a `CrossrailError`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from crossrail._native import (
    ALL_BITS,
    Awaited,
    Context,
    Description,
    DeviceArray,
    DeviceHandle,
    Endpoint,
    Explain,
    Layout,
    Mapped,
    Memory,
    Move,
    Notice,
    Receipt,
    Region,
    RegionKey,
    Request,
    Worker,
    __version__,
    bench,
    format_size,
    parse_size,
    parse_sizes,
    settings_reference,
    wait_all,
)
from crossrail.errors import (
    CancelledError,
    ClosedError,
    ConfigError,
    CrossrailError,
    ExhaustedError,
    IoError,
    MismatchError,
    PeerDeadError,
    ProtocolError,
    RefusedError,
    RegionError,
    TimeoutError,
    TruncatedError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from crossrail.group import Group

if TYPE_CHECKING:
    from crossrail.experts import Combined, Dispatched, ExpertBuffer, Fault, Handle, Link, Pending, Plan

__all__ = [
    "ALL_BITS",
    "Awaited",
    "CancelledError",
    "ClosedError",
    "Combined",
    "ConfigError",
    "Context",
    "CrossrailError",
    "Description",
    "DeviceArray",
    "DeviceHandle",
    "Dispatched",
    "Endpoint",
    "ExhaustedError",
    "ExpertBuffer",
    "Explain",
    "Fault",
    "Group",
    "Handle",
    "IoError",
    "Layout",
    "Link",
    "Mapped",
    "Memory",
    "MismatchError",
    "Move",
    "Notice",
    "PeerDeadError",
    "Pending",
    "Plan",
    "ProtocolError",
    "Receipt",
    "RefusedError",
    "Region",
    "RegionError",
    "RegionKey",
    "Request",
    "TimeoutError",
    "TruncatedError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "Worker",
    "__version__",
    "bench",
    "format_size",
    "parse_size",
    "parse_sizes",
    "settings_reference",
    "wait_all",
]

# Imported on first use: they import NumPy, which takes as long as everything else together.
_EXPERTS = frozenset({"Combined", "Dispatched", "ExpertBuffer", "Fault", "Handle", "Link", "Pending", "Plan"})


def __getattr__(name: str) -> Any:
    if name not in _EXPERTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("crossrail.experts"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
