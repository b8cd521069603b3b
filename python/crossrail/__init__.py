"""Crossrail transfers data between processes over every link of a machine, and reports which it chose and why.

A `Context` is one process's view of its devices and settings; a `Worker` listens, connects and makes progress; an
`Endpoint` is one peer. Messages are sent to an endpoint and received from a worker by tag; a registered `Region` is
written and read by its key. Each operation is a `Request`: `wait()` for it, `await` it, or give it a callback; its
`Receipt` says what was moved, over which lanes, and where the time went.

    import crossrail

    context = crossrail.Context()
    with crossrail.Worker(context) as worker:
        endpoint = worker.connect("127.0.0.1:7000")
        receipt = endpoint.send(b"hello", tag=7).wait(timeout=5)

A `Group` is this process's place among the ranks of a job; an `ExpertBuffer` dispatches the tokens of a mixture of
experts between them, and combines what the experts answer.

Anything with the buffer protocol, DLPack or `__cuda_array_interface__` can be moved: bytes, bytearray, memoryview,
NumPy arrays, and tensors of PyTorch, CuPy and others in host memory or on a GPU. `Context.alloc` gives memory of either
kind that peers on this machine map, which is fastest between them.

GPU memory is used in the order of streams: an operation touches it after the present work of the array's own stream, or
of `stream=`, and `Request.wait_on(stream)` lets a stream wait for the operation. `Endpoint.share`, `Endpoint.map`,
`Mapped.put` and `Memory.await_signal` need no host at all once they are in a stream, and can be captured in graphs.

Threads: every object may be used from any thread. Calls that wait or move much data let other Python threads run, and
Ctrl-C ends every wait. Every wait is bounded, by its `timeout` (seconds) or by CROSSRAIL_TIMEOUT. A buffer belongs to
its operation until the request is finished: do not write to one that is sent, nor touch one that is received into.

Sizes are bytes; GB is 1e9 bytes and GiB 2**30. Every error is a `CrossrailError`.
"""

from crossrail._native import (
    ALL_BITS,
    Awaited,
    Context,
    DeviceArray,
    DeviceHandle,
    Endpoint,
    Explain,
    Mapped,
    Memory,
    Receipt,
    Region,
    RegionKey,
    Request,
    Worker,
    __version__,
    bench_bandwidth,
    bench_latency,
    bench_p2p,
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
from crossrail.experts import Combined, Dispatched, ExpertBuffer, Fault, Handle, Link, Pending, Plan
from crossrail.group import Group

__all__ = [
    "ALL_BITS",
    "Awaited",
    "CancelledError",
    "ClosedError",
    "Combined",
    "ConfigError",
    "Context",
    "CrossrailError",
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
    "Link",
    "Mapped",
    "Memory",
    "MismatchError",
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
    "bench_bandwidth",
    "bench_latency",
    "bench_p2p",
    "format_size",
    "parse_size",
    "parse_sizes",
    "settings_reference",
    "wait_all",
]
