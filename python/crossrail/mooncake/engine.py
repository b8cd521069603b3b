"""`TransferEngine`: peers by ``host:port``, memory by address, transfers that return 0 or -1.

A session is ``f"{host}:{engine.get_rpc_port()}"``, with an IPv6 address in brackets. The peer describes its memory at
the first transfer, and again when an address is not in the known registrations or its key is refused. A lost rail whose
bytes move to another is not a failure; -1 means that the transfer is incomplete, and that no more of its bytes will be
written. Rows of length 0 move nothing. A batch of registrations that fails registers nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import crossrail
from crossrail._drop_in import beyond_loopback
from crossrail._endings import at_end
from crossrail._native import _deregister
from crossrail._untrusted import parsing
from crossrail.nixl import _exchange
from crossrail.nixl._kinds import nixlNotSupportedError

logger = logging.getLogger(__name__)

SUPPORT_CUDA = True
SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = SUPPORT_MNNVL = SUPPORT_MUSA = False

_LEAST_S, _DEFAULT_S = 5.0, 30.0
_NS_PER_BYTE = 1e-9

_FAILURES = (crossrail.CrossrailError, OSError, ValueError, TypeError, OverflowError)
"""Errors that a call logs and returns as -1."""
_STALE = (
    crossrail.RegionError,
    crossrail.PeerDeadError,
    crossrail.ClosedError,
    crossrail.UnreachableError,
    crossrail.RefusedError,
)
"""Errors that a stale description of a peer may cause before any byte has moved."""


class TransferOpcode(enum.IntEnum):
    """Direction of a transfer. ``Read``: from the peer; ``Write``: to it."""

    Read = 0
    Write = 1


class TransferNotify:
    """A notification, raised at the peer once all bytes of a transfer are in place.

    `name`, `msg`: texts of the program's own. Raises nothing.
    """

    def __init__(self, name: str, msg: str) -> None:
        self.name, self.msg = name, msg


class _Peer:
    """A session: the connection, and what the peer has described."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.endpoint: crossrail.Endpoint | None = None
        self.description: crossrail.Description | None = None


class _Transfer:
    """A transfer: what it moves, to start it again, and its request; None where there is neither a row nor a notice."""

    def __init__(
        self, session: str, verb: str, layout: crossrail.Layout | None, remote: Any, notice: bytes, until: float
    ) -> None:
        self.session, self.verb, self.layout, self.remote = session, verb, layout, remote
        self.notice, self.until = notice, until
        self.request: crossrail.Request | None = None
        self.fresh = False
        """True if it was started with a description that was fetched for it."""


class TransferEngine:
    """Registered memory, sessions with peers, and transfers between them.

    Any thread may call any method. Calls that fail return -1, unless stated otherwise, and the reason is logged
    (MC_LOG_LEVEL, stdout). A transfer that takes longer than MC_TRANSFER_TIMEOUT seconds (30 by default, at least 5)
    plus one nanosecond per byte fails. Lengths and sizes are in bytes; addresses are of this process or, for peers'
    memory, of the peer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: crossrail.Worker | None = None
        self._exchange: _exchange.Exchange | None = None
        self._regions: dict[int, crossrail.Region] = {}
        self._counts: Counter[int] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._batches: dict[int, _Transfer] = {}
        self._numbers = 0
        self._buffers: dict[int, Any] = {}

    # Setting up.

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Starts to listen, on a port of the engine's choice: `get_rpc_port`. 0, or -1 if it cannot.

        `local_hostname`: part of the name that peers see; a port in it is not used. `metadata_server`: "P2PHANDSHAKE",
        the only kind. `protocol`: accepted, and has no effect. `device_name`: devices that carry data, as
        CROSSRAIL_NET_DEVICES; names of other things are ignored. Peers on other machines need
        CROSSRAIL_SECRET at both ends.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """As `initialize`; `metadata_type` has no effect."""
        if self._worker is not None:
            logger.error("initialize: the engine is initialized already, and stays as it is")
            return -1
        if metadata_server != "P2PHANDSHAKE":
            logger.error("metadata server %r: only P2PHANDSHAKE is supported", metadata_server)
            return -1
        try:
            known = os.listdir("/sys/class/net")  # noqa: PTH208
            devices = [name for name in (device_name or "").split(",") if name in known]
            context = crossrail.Context(net_devices=",".join(devices) or None)
            name = f"{local_hostname} {os.getpid()}.{id(self):x}"
            worker = crossrail.Worker(context, name=name, admit=True, listen=beyond_loopback(context))
            exchange = _exchange.Exchange(self, context)
            exchange.listen(0)
        except _FAILURES as error:
            logger.error("initialize: %s", str(error))
            return -1
        self._worker, self._exchange = worker, exchange
        return 0

    @at_end
    def __del__(self) -> None:
        for end in (getattr(self, "_exchange", None), getattr(self, "_worker", None)):
            if end is not None:
                end.close()

    def get_rpc_port(self) -> int:
        """The port of this engine's sessions."""
        return 0 if self._exchange is None else self._exchange.port or 0

    def get_local_topology(self, device_name: str | None = None) -> str:
        """The devices of this machine, as JSON; empty before `initialize`.

        `device_name` has no effect. Raises what `crossrail.Context.info` does.
        """
        if self._worker is None:
            return ""
        return json.dumps(self._worker.context.info()["devices"], default=str)

    # Memory.

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Registers `capacity` bytes at `buffer_addr` for peers, reference-counted per address. 0, or -1.

        `location`: ``cuda:N`` for memory of that GPU, ``cpu:N`` or ``*``.
        """
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Registers `capacities` bytes at `buffer_addresses`; all, or, with -1, none.

        `location` as for `register_memory`.
        """
        device = location if (location or "").startswith("cuda") else None
        with self._lock:
            made: dict[int, crossrail.Region] = {}
            try:
                worker = self._ready()
                pairs = [(int(at), int(size)) for at, size in zip(buffer_addresses, capacities, strict=True)]
                for address, size in pairs:
                    if size < 0:
                        raise ValueError(f"{size} bytes at {address:#x}")
                    known = made.get(address) or self._regions.get(address)
                    if known is None or len(known) < size:
                        made[address] = worker.register_range(address, size, device)
            except _FAILURES as error:
                logger.error("register_memory: %s", str(error))
                _ended([*made.values()])
                return -1
            replaced = [self._regions[address] for address in made if address in self._regions]
            self._regions.update(made)
            self._counts.update(address for address, _ in pairs)
        _ended(replaced)
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """Drops a reference to the memory at `buffer_addr`: as `batch_unregister_memory`."""
        return self.batch_unregister_memory([buffer_addr])

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Drops a reference to each of `buffer_addresses`; after the last one, returns once no transfer accesses it.

        -1: an address that is not registered, or a peer that does not answer may still access the memory, which then
        stays registered.
        """
        ended: list[tuple[int, crossrail.Region]] = []
        missing = False
        with self._lock:
            for address in buffer_addresses:
                if address not in self._regions:
                    missing = True
                    continue
                self._counts[address] -= 1
                if self._counts[address] <= 0:
                    del self._counts[address]
                    ended.append((address, self._regions.pop(address)))
        if not _ended([region for _, region in ended]):
            with self._lock:
                for address, region in ended:
                    self._regions.setdefault(address, region)
                    self._counts[address] = max(self._counts[address], 1)
            return -1
        return -1 if missing else 0

    # Transfers.

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Writes `length` bytes from `buffer` to `peer_buffer_address` there; else as for `batch_transfer_sync`."""
        return self.batch_transfer_sync_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Reads `length` bytes at `peer_buffer_address` there into `buffer`; else as for `batch_transfer_sync`."""
        return self.batch_transfer_sync_read(target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        """As `batch_transfer_sync` with ``TransferOpcode.Write``."""
        opcode = TransferOpcode.Write
        return self.batch_transfer_sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        """As `batch_transfer_sync` with ``TransferOpcode.Read``."""
        opcode = TransferOpcode.Read
        return self.batch_transfer_sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Moves `length` bytes between `buffer` and `peer_buffer_address`; the rest as for `batch_transfer_sync`."""
        rows = [buffer], [peer_buffer_address], [length]
        return self.batch_transfer_sync(target_hostname, *rows, opcode, notify)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Moves all rows as one transfer, and waits. 0: complete; -1: failed, and no more bytes move.

        Parameters
        ----------
        target_hostname : str
            The peer's session, ``host:port`` with its `get_rpc_port`. The first transfer connects.
        buffers, peer_buffer_addresses, lengths : sequence or array of int
            Addresses here and at the peer, in registered memory of both, and bytes of each row.
        opcode : TransferOpcode
        notify : TransferNotify, optional
            Raised at the peer after the last byte, for its `get_notifies`.
        transport_hint : str
            No effect.
        """
        started = self._start(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)
        return -1 if started is None else self._finish(started)

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        """As `batch_transfer_async` with ``TransferOpcode.Write``."""
        opcode = TransferOpcode.Write
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        """As `batch_transfer_async` with ``TransferOpcode.Read``."""
        opcode = TransferOpcode.Read
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Starts to move all rows as one transfer; arguments as for `batch_transfer_sync`. Connecting may wait.

        Returns a number for `get_batch_transfer_status` or `transfer_check_status`; 0 (not -1) if it did not start.
        """
        started = self._start(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, None)
        if started is None:
            return 0
        with self._lock:
            self._numbers += 1
            self._batches[self._numbers] = started
            return self._numbers

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        """Starts to write `length` bytes from `buffer` to `peer_buffer_address`; else as `batch_transfer_async`."""
        return self.batch_transfer_async_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for the transfers of all numbers `batch_ids`: 0 if all completed, else -1.

        The numbers are then invalid.
        """
        with self._lock:
            batches = [self._batches.pop(number, None) for number in batch_ids]
        results = [-1 if batch is None else self._finish(batch) for batch in batches]
        return min(results, default=0)

    def transfer_check_status(self, batch_id: int) -> int:
        """State of the transfer number `batch_id`, without waiting. The number is invalid after any result but 0.

        1: complete; 0: in flight; -1: failed, or no such number; -2: timed out, and no more bytes move.
        """
        with self._lock:
            transfer = self._batches.pop(batch_id, None)
        if transfer is None:
            return -1
        late = time.monotonic() > transfer.until
        if not late and not self._settled(transfer):
            with self._lock:
                self._batches[batch_id] = transfer
            return 0
        if self._finish(transfer) == 0:
            return 1
        return -2 if late else -1

    def _settled(self, transfer: _Transfer) -> bool:
        """True once it has finished. A refused transfer may be in flight again."""
        if transfer.request is None:
            return True
        if not transfer.request.is_done():
            return False
        try:
            transfer.request.test()
        except crossrail.CrossrailError as error:
            return not self._again(transfer, error)
        return True

    def send_probe(self, target_hostname: str) -> int:
        """0 if the peer at `target_hostname` answers and can be reached, else -1."""
        try:
            self._peer(target_hostname, fresh=True)
        except _FAILURES as error:
            logger.warning("send_probe: %s: %s", target_hostname, str(error))
            return -1
        return 0

    def get_notifies(self) -> list[TransferNotify]:
        """Notifications that peers' transfers have raised since the last call."""
        found = []
        for notice in [] if self._worker is None else self._worker.notices():
            try:
                found.append(_notification(notice.data))
            except crossrail.CrossrailError as error:
                logger.warning("%s: %s", notice.peer, str(error))
        return found

    def _start(
        self, session: str, ours: Any, theirs: Any, lengths: Any, opcode: TransferOpcode, notify: TransferNotify | None
    ) -> _Transfer | None:
        """The transfer in flight; None if it cannot start."""
        try:
            local, remote = _rows(ours, lengths), _rows(theirs, lengths)
            moving = local[:, 1] != 0  # empty rows move nothing, wherever they are
            local, remote = local[moving], remote[moving]
            until = time.monotonic() + _timeout_s() + int(local[:, 1].sum()) * _NS_PER_BYTE
            verb = "read" if TransferOpcode(opcode) == TransferOpcode.Read else "write"
            notice = b"" if notify is None else _notice(notify)
            worker = self._ready()
            with self._lock:
                regions = list(self._regions.values())
            layout = worker.layout(local, regions) if len(local) else None
            transfer = _Transfer(session, verb, layout, remote, notice, until)
            self._begin(transfer)
        except _FAILURES as error:
            logger.error("%s: %s", session, str(error))
            return None
        return transfer

    def _begin(self, transfer: _Transfer, *, fresh: bool = False) -> None:
        """Starts a transfer with the known description of the peer, or, if that is refused, with a fresh one."""
        if transfer.layout is None and not transfer.notice:
            return
        while True:
            transfer.fresh = fresh
            try:
                endpoint, description = self._peer(transfer.session, fresh=fresh)
                if transfer.layout is None:
                    transfer.request = endpoint.notify(transfer.notice)
                    return
                remote = endpoint.layout(transfer.remote, description)
                move = endpoint.prepare(transfer.verb, transfer.layout, remote, notice=transfer.notice)
                transfer.request = move.start()
                return
            except _STALE:
                if fresh:
                    raise
                fresh = True

    def _again(self, transfer: _Transfer, error: crossrail.CrossrailError) -> bool:
        """Starts a transfer anew that the peer has refused: its memory may be registered under other keys by now.

        False if it already had a fresh description, or cannot start.
        """
        if transfer.fresh or not isinstance(error, crossrail.RegionError):
            return False
        try:
            self._begin(transfer, fresh=True)
        except _FAILURES as cause:
            logger.error("%s: %s", transfer.session, str(cause))
            return False
        return True

    def _finish(self, transfer: _Transfer) -> int:
        """Waits; cancels the transfer at its deadline, and returns once no more of its bytes move."""
        while transfer.request is not None:
            request = transfer.request
            try:
                request.wait(max(0.0, transfer.until - time.monotonic()))
                return 0
            except crossrail.TimeoutError as error:
                logger.error("%s", str(error))
                request.cancel()
                with contextlib.suppress(crossrail.CrossrailError):
                    request.wait()
                return -1
            except crossrail.CrossrailError as error:
                if not self._again(transfer, error):
                    logger.error("%s", str(error))
                    return -1
        return 0

    def _peer(self, session: str, *, fresh: bool) -> tuple[crossrail.Endpoint, crossrail.Description]:
        """The session's endpoint and description, asked for again if `fresh`; connects where that is needed."""
        worker = self._ready()
        with self._lock:
            peer = self._peers.setdefault(session, _Peer())
        with peer.lock:
            if peer.description is None or fresh:
                data = _exchange.ask(worker.context, *_address(session))
                described = crossrail.Description(data)
                if peer.description is not None and peer.description.generation != described.generation:
                    peer.endpoint = None
                peer.description = described
            if peer.endpoint is None or not peer.endpoint.is_alive:
                peer.endpoint = worker.connect(peer.description.address)
            return peer.endpoint, peer.description

    def _ready(self) -> crossrail.Worker:
        """The worker. Raises ClosedError before `initialize`."""
        if self._worker is None:
            detail = "the engine is not initialized"
            raise crossrail.ClosedError(f"mooncake: {detail}", operation="mooncake", detail=detail)
        return self._worker

    # For the metadata listener, as nixlAgent has them.

    def getLocalMD(self) -> bytes:
        """Description of all registered memory, for `crossrail.Description`.

        A secret: it grants access to the memory.
        """
        worker = self._ready()
        with self._lock:
            regions = list(self._regions.values())
        return worker.describe(regions)

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        """Refused with nixlNotSupportedError: peers' `metadata` is fetched, not pushed."""
        raise nixlNotSupportedError("peers' metadata is fetched, not pushed")

    def forget(self, metadata: bytes) -> None:
        """Does nothing with `metadata`, and never raises: sessions end with their peers."""

    # Memory of the engine's own, for examples and tests.

    def allocate_managed_buffer(self, length: int) -> int:
        """Allocates and registers `length` bytes of host memory: their address, or 0 (not -1) if there is no memory."""
        try:
            buffer = np.zeros(length, np.uint8)
        except (MemoryError, ValueError):
            return 0
        address = int(buffer.ctypes.data)
        self._buffers[address] = buffer
        return address if self.register_memory(address, length) == 0 else 0

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Deregisters and frees memory of `allocate_managed_buffer` at `buffer_addr`. 0, or -1.

        `length`, in bytes, has no effect.
        """
        done = self.unregister_memory(buffer_addr)
        self._buffers.pop(buffer_addr, None)
        return done

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Address of the first registered memory of the peer `segment_name`; 0 (not -1) if there is none."""
        try:
            regions = self._peer(segment_name, fresh=True)[1].regions
        except _FAILURES:
            return 0
        return regions[0][0] if regions else 0

    def write_bytes_to_buffer(self, dest_address: int, src: bytes, length: int) -> int:
        """Copies up to `length` bytes of `src` to `dest_address` in this process, and returns 0.

        Never raises: the address must be valid.
        """
        ctypes.memmove(dest_address, src, min(length, len(src)))
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Copies `length` bytes at `source_address` of this process.

        Never raises: the address must be valid.
        """
        return ctypes.string_at(source_address, length)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_on_cuda") or name in ("get_engine", "get_engine_ptr", "warmup_efa_segment"):
            raise NotImplementedError(f"TransferEngine.{name} is not supported by crossrail.mooncake")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _rows(addresses: Any, lengths: Any) -> Any:
    """(address, length, 0) each; ValueError if there are not as many of both."""
    count = len(addresses)
    if len(lengths) != count:
        raise ValueError(f"{count} addresses and {len(lengths)} lengths")
    rows = np.zeros((count, 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, lengths
    return rows


def _ended(regions: Sequence[crossrail.Region]) -> bool:
    """Deregisters regions, and returns once no transfer accesses them; False if a peer still may."""
    try:
        _deregister(regions)
    except crossrail.CrossrailError as error:
        logger.error("unregister_memory: %s", str(error))
        return False
    return True


def _notice(notify: TransferNotify) -> bytes:
    """The notice that :func:`_notification` parses. Raises TypeError."""
    if not isinstance(notify, TransferNotify) or not (isinstance(notify.name, str) and isinstance(notify.msg, str)):
        raise TypeError("notify is a TransferNotify of two texts")
    return json.dumps([notify.name, notify.msg]).encode()


def _notification(data: bytes) -> TransferNotify:
    """Parses the notice of a peer's transfer. Raises UsageError."""

    def malformed() -> crossrail.UsageError:
        detail = f"a notice of {len(data)} bytes that is not a notification"
        return crossrail.UsageError(f"get_notifies: {detail}", operation="get_notifies", detail=detail)

    with parsing(malformed):
        name, message = json.loads(data)
        if not isinstance(name, str) or not isinstance(message, str):
            raise TypeError("name and message")
        return TransferNotify(name, message)


def _timeout_s() -> float:
    with contextlib.suppress(ValueError):
        return max(_LEAST_S, float(os.environ.get("MC_TRANSFER_TIMEOUT", _DEFAULT_S)))
    return _DEFAULT_S


def _address(session: str) -> tuple[str, int]:
    """Host and port of a session: ``host:port``, or ``[a]:port`` for an IPv6 address. Raises ValueError."""
    host, _, port = str(session).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{session!r} is not a session: host:port, or [address]:port")
    return host.strip("[]"), int(port)
