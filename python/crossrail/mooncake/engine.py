"""`TransferEngine`: peers by ``host:port``, memory by address, transfers that return 0 or -1.

A session is ``f"{host}:{engine.get_rpc_port()}"``. The peer describes its memory at the first transfer, and again when
an address is not in the known registrations. A lost rail whose bytes move to another is no failure; -1 means that the
transfer is incomplete, and that no more of its bytes will be written.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import crossrail
from crossrail._native import _deregister
from crossrail.nixl import _exchange
from crossrail.nixl._kinds import nixlNotSupportedError

logger = logging.getLogger(__name__)

SUPPORT_CUDA = True
SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = SUPPORT_MNNVL = SUPPORT_MUSA = False

_LEAST_S, _DEFAULT_S = 5.0, 30.0
_NS_PER_BYTE = 1e-9


class TransferOpcode(enum.IntEnum):
    """Read: from the peer."""

    Read = 0
    Write = 1


class TransferNotify:
    """A notification raised at the peer once all bytes of a transfer are in place."""

    def __init__(self, name: str, msg: str) -> None:
        self.name, self.msg = name, msg


class _Peer:
    """A session: the connection, and what the peer has described."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.endpoint: crossrail.Endpoint | None = None
        self.description: crossrail.Description | None = None


class TransferEngine:
    """Any thread may call anything. Calls that fail return -1, and the reason is in the log (MC_LOG_LEVEL, stdout)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: crossrail.Worker | None = None
        self._exchange: _exchange.Exchange | None = None
        self._regions: dict[int, crossrail.Region] = {}
        self._counts: Counter[int] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._batches: dict[int, tuple[crossrail.Request | None, float]] = {}
        self._numbers = 0
        self._buffers: dict[int, Any] = {}

    # Setting up.

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Starts listening; the port in `local_hostname` is not used. Protocol words are accepted, and have no effect.

        `device_name`: devices that carry data, as CROSSRAIL_NET_DEVICES; names that are no network device are ignored.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        if metadata_server != "P2PHANDSHAKE":
            logger.error("metadata server %r: only P2PHANDSHAKE is supported", metadata_server)
            return -1
        try:
            known = os.listdir("/sys/class/net")  # noqa: PTH208
            devices = [name for name in device_name.split(",") if name in known]
            context = crossrail.Context(net_devices=",".join(devices) or None)
            settings = context.settings()
            shared = bool(settings.get("CROSSRAIL_SECRET") or settings.get("CROSSRAIL_SECRET_FILE"))
            name = f"{local_hostname} {os.getpid()}.{id(self):x}"
            self._worker = crossrail.Worker(context, name=name, admit=True, listen="0.0.0.0:0" if shared else None)
            self._exchange = _exchange.Exchange(self, beyond=shared)
            self._exchange.listen(0)
        except (crossrail.CrossrailError, OSError) as error:
            logger.error("initialize: %s", str(error))
            return -1
        return 0

    # At the end of the interpreter the module's names may be gone before this.
    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        for end in (getattr(self, "_exchange", None), getattr(self, "_worker", None)):
            if end is not None:
                with suppress(Exception):
                    end.close()

    def get_rpc_port(self) -> int:
        """The port of this engine's sessions."""
        return 0 if self._exchange is None else self._exchange.port or 0

    def get_local_topology(self, device_name: str | None = None) -> str:
        """The devices of this machine, as JSON."""
        assert self._worker is not None
        return json.dumps(self._worker.context.info()["devices"], default=str)

    # Memory.

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Registers memory for peers, reference-counted per address. `location`: ``cuda:N``, ``cpu:N`` or ``*``."""
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        assert self._worker is not None
        device = location if location.startswith("cuda") else None
        with self._lock:
            try:
                for address, size in zip(buffer_addresses, capacities, strict=True):
                    if address not in self._regions or len(self._regions[address]) < size:
                        self._regions[address] = self._worker.register_range(address, size, device)
                    self._counts[address] += 1
            except (crossrail.CrossrailError, ValueError, OverflowError) as error:
                logger.error("register_memory: %s", str(error))
                return -1
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        return self.batch_unregister_memory([buffer_addr])

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Drops a reference; after the last one of an address, returns once no transfer accesses it: -1 if a peer that
        does not answer may still do so, and then the memory must be unregistered again."""
        ended: list[tuple[int, crossrail.Region]] = []
        missing = False
        with self._lock:
            for address in buffer_addresses:
                missing |= address not in self._regions
                self._counts[address] -= 1
                if self._counts[address] <= 0:
                    del self._counts[address]
                    if (region := self._regions.pop(address, None)) is not None:
                        ended.append((address, region))
        try:
            _deregister([region for _, region in ended])
        except crossrail.CrossrailError as error:
            logger.error("unregister_memory: %s", str(error))
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
        return self.batch_transfer_sync_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self.batch_transfer_sync_read(target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        opcode = TransferOpcode.Write
        return self.batch_transfer_sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
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
        """Moves all rows as one transfer. 0: complete; -1: failed, and no more bytes move."""
        started = self._start(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)
        return -1 if started is None else self._finish(*started)

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        opcode = TransferOpcode.Write
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
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
        """A number for `get_batch_transfer_status` or `transfer_check_status`; 0 if the transfer did not start."""
        started = self._start(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, None)
        if started is None:
            return 0
        with self._lock:
            self._numbers += 1
            self._batches[self._numbers] = started
            return self._numbers

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        return self.batch_transfer_async_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all transfers: 0 if all completed, else -1."""
        with self._lock:
            batches = [self._batches.pop(number, None) for number in batch_ids]
        results = [-1 if batch is None else self._finish(*batch) for batch in batches]
        return min(results, default=0)

    def transfer_check_status(self, batch_id: int) -> int:
        """1: complete; 0: in flight; -1: failed; -2: timed out. The id is invalid after any result but 0."""
        with self._lock:
            batch = self._batches.get(batch_id)
            if batch is None:
                return -1
            request, until = batch
            late = time.monotonic() > until
            if request is not None and not request.is_done() and not late:
                return 0
            del self._batches[batch_id]
        if self._finish(request, until) == 0:
            return 1
        return -2 if late else -1

    def send_probe(self, target_hostname: str) -> int:
        """0 if the peer answers and can be reached."""
        try:
            self._peer(target_hostname, fresh=True)
        except (crossrail.CrossrailError, OSError, ValueError) as error:
            logger.warning("send_probe: %s: %s", target_hostname, str(error))
            return -1
        return 0

    def get_notifies(self) -> list[TransferNotify]:
        """Notifications that peers' transfers have raised since the last call."""
        assert self._worker is not None
        pairs = [json.loads(data) for _, data in self._worker.notices() if data[:1] == b"["]
        return [TransferNotify(str(pair[0]), str(pair[1])) for pair in pairs if len(pair) == 2]

    def _start(
        self, session: str, ours: Any, theirs: Any, lengths: Any, opcode: TransferOpcode, notify: TransferNotify | None
    ) -> tuple[crossrail.Request | None, float] | None:
        """The transfer in flight, and its deadline; None if it cannot start."""
        try:
            local, remote = _rows(ours, lengths), _rows(theirs, lengths)
            total = int(local[:, 1].sum())
            until = time.monotonic() + _timeout_s() + total * _NS_PER_BYTE
            verb = "read" if TransferOpcode(opcode) == TransferOpcode.Read else "write"
            notice = b"" if notify is None else json.dumps([notify.name, notify.msg]).encode()
            if not len(local):
                return None, until
            assert self._worker is not None
            with self._lock:
                regions = list(self._regions.values())
            layout = self._worker.layout(local, regions)
            for fresh in (False, True):
                try:
                    endpoint, description = self._peer(session, fresh=fresh)
                    move = endpoint.prepare(verb, layout, endpoint.layout(remote, description), notice=notice)
                    return move.start(), until
                except (crossrail.RegionError, crossrail.PeerDeadError, crossrail.ClosedError):
                    if fresh:
                        raise
        except (crossrail.CrossrailError, OSError, ValueError, OverflowError) as error:
            logger.error("%s: %s", session, str(error))
        return None

    def _finish(self, request: crossrail.Request | None, until: float) -> int:
        """Waits; cancels the transfer at its deadline, and returns once no more of its bytes move."""
        if request is None:
            return 0
        try:
            request.wait(max(0.0, until - time.monotonic()))
        except crossrail.TimeoutError as error:
            logger.error("%s", str(error))
            request.cancel()
            with contextlib.suppress(crossrail.CrossrailError):
                request.wait()
            return -1
        except crossrail.CrossrailError as error:
            logger.error("%s", str(error))
            return -1
        return 0

    def _peer(self, session: str, *, fresh: bool) -> tuple[crossrail.Endpoint, crossrail.Description]:
        """The session's endpoint and description, asked for again if `fresh`; connects where that is needed."""
        with self._lock:
            peer = self._peers.setdefault(session, _Peer())
        with peer.lock:
            if peer.description is None or fresh:
                data = _exchange.ask(*_address(session))
                described = crossrail.Description(data)
                if peer.description is not None and peer.description.generation != described.generation:
                    peer.endpoint = None
                peer.description = described
            if peer.endpoint is None or not peer.endpoint.is_alive:
                assert self._worker is not None
                peer.endpoint = self._worker.connect(peer.description.address)
            return peer.endpoint, peer.description

    # For the metadata listener, as nixlAgent has them.

    def getLocalMD(self) -> bytes:
        assert self._worker is not None
        with self._lock:
            regions = list(self._regions.values())
        return self._worker.describe(regions)

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        raise nixlNotSupportedError("peers' metadata is fetched, not pushed")

    def forget(self, metadata: bytes) -> None:
        """Nothing: sessions end with their peers."""

    # Memory of the engine's own, for examples and tests.

    def allocate_managed_buffer(self, length: int) -> int:
        """The address of registered memory; 0 if there is none."""
        try:
            buffer = np.zeros(length, np.uint8)
        except (MemoryError, ValueError):
            return 0
        address = int(buffer.ctypes.data)
        self._buffers[address] = buffer
        return address if self.register_memory(address, length) == 0 else 0

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        done = self.unregister_memory(buffer_addr)
        self._buffers.pop(buffer_addr, None)
        return done

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Of the peer's registered memory; 0 if there is none."""
        try:
            regions = self._peer(segment_name, fresh=True)[1].regions
        except (crossrail.CrossrailError, OSError, ValueError):
            return 0
        return regions[0][0] if regions else 0

    def write_bytes_to_buffer(self, dest_address: int, src: bytes, length: int) -> int:
        ctypes.memmove(dest_address, src, min(length, len(src)))
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
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


def _timeout_s() -> float:
    with contextlib.suppress(ValueError):
        return max(_LEAST_S, float(os.environ.get("MC_TRANSFER_TIMEOUT", _DEFAULT_S)))
    return _DEFAULT_S


def _address(session: str) -> tuple[str, int]:
    """Host and port of a session; this machine's own addresses are reached over loopback, where engines listen."""
    host, _, port = session.rpartition(":")
    host = host.strip("[]")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        host = "127.0.0.1"
    return host, int(port)
