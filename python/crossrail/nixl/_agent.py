"""The agent under `nixl_agent`: registrations, remote agents, prepared lists, transfers and notifications.

Any thread may call anything, whatever sync mode was asked for: the tables are under one lock, which is never held while
a connection is made or bytes move. Transfers advance on the worker's background thread, polled or not.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import crossrail
from crossrail._native import merged_rows
from crossrail.nixl import _exchange
from crossrail.nixl._kinds import (
    NIXL_INIT_AGENT,
    equivalent,
    error,
    nixl_cost_t,
    nixl_mem_t,
    nixl_status_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    refuse,
    translated,
)
from crossrail.nixl._lists import Rows, nixlRegDList, nixlXferDList
from crossrail.nixl.logging import get_logger

logger = get_logger("agent")

PLUGINS = ["UCX", "CROSSRAIL"]
MEMORY = ["DRAM_SEG", "VRAM_SEG"]
_MAGIC = b"crossrail-nixl 1\n"
_KEPT_MAX = 64  # connections of removed agents, which are often added again
_EACH_MAX = 1024  # rows of one registration that each get a region; of more, neighbours are joined
_PUMP_NS = 20_000  # callers that poll make progress themselves, but not for each of a thousand handles
_FLUSH_S = 2.0  # how long the end of an agent waits for its last notifications
_CLOSE_S = 1.0
_announced = False


class nixlAgentConfig:
    """Settings of an agent. Threads are always there, so only the telemetry flag and the listener have an effect."""

    _NAMES = (
        "useProgThread",
        "useListenThread",
        "listenPort",
        "syncMode",
        "numWorkers",
        "pthrDelay",
        "lthrDelay",
        "captureTelemetry",
    )

    def __init__(self, *values: Any) -> None:
        self.useProgThread: bool = False
        self.useListenThread: bool = False
        self.listenPort: int = 0
        self.syncMode: Any = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        self.captureTelemetry: bool = False
        self.pthrDelay: int = 0
        self.lthrDelay: int = 100_000
        self.etcdWatchTimeout: int = 5_000_000
        for name, value in zip(self._NAMES, values, strict=False):
            setattr(self, name, value)


class nixlXferTelemetry:
    """Times of a transfer in microseconds, its bytes, and its rows after neighbours were joined."""

    def __init__(self) -> None:
        self.startTime = 0
        self.postDuration = 0
        self.xferDuration = 0
        self.totalBytes = 0
        self.descCount = 0


class _Registration:
    """Rows registered by one call, and the regions that they lie in."""

    def __init__(self, kind: nixl_mem_t, rows: Rows, regions: dict[tuple[int, int, int], crossrail.Region]) -> None:
        self.kind, self.rows, self.regions = kind, rows, regions


class _Remote:
    """A remote agent: what is known of it, and the connection once there is one."""

    def __init__(self, name: str, description: crossrail.Description) -> None:
        self.name = name
        self.description = description
        self.connecting = threading.Lock()
        self.endpoint: crossrail.Endpoint | None = None
        self.removed = False


class _Prepared:
    """A prepared list; `remote` is None for local ones."""

    def __init__(self, layout: crossrail.Layout, remote: _Remote | None) -> None:
        self.layout, self.remote = layout, remote


class _Transfer:
    """A transfer, posted or not. `lock` orders posts, polls and the release of one handle."""

    def __init__(self, move: crossrail.Move, remote: _Remote, notice: bytes, merged: bool) -> None:
        self.lock = threading.Lock()
        self.move, self.remote, self.notice, self.merged = move, remote, notice, merged
        self.request: crossrail.Request | None = None
        self.done = False
        self.failure: Exception | None = None
        self.telemetry = nixlXferTelemetry()
        self.posted_ns = 0


def _message(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _wants_telemetry(config: nixlAgentConfig) -> bool:
    said = os.environ.get("NIXL_TELEMETRY_ENABLE", "").strip().lower()
    if said in ("y", "yes", "on", "1", "true", "enable"):
        return True
    if said in ("n", "no", "off", "0", "false", "disable"):
        return False
    return bool(config.captureTelemetry)


def indices(given: Any) -> Any:
    """Row numbers as the engine takes them: a list, or a contiguous array of integers."""
    if isinstance(given, np.ndarray):
        if given.ndim != 1:
            raise ValueError("indices numpy array must be 1D")
        if given.dtype.kind not in "iu" or given.dtype.itemsize < 4 or not given.dtype.isnative:
            return given.astype(np.int64)
        return np.ascontiguousarray(given)
    return given if isinstance(given, list) else list(given)


class nixlAgent:
    """An agent by the names of NIXL's bindings. Statuses below zero are raised."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not name:
            raise ValueError("Agent name cannot be empty")
        self._name = name
        self._telemetry = _wants_telemetry(config)
        self._lock = threading.RLock()
        self._backends: dict[int, str] = {}
        self._registrations: list[_Registration] = []
        self._remotes: dict[str, _Remote] = {}
        self._kept: OrderedDict[int, crossrail.Endpoint] = OrderedDict()
        self._notifying: deque[crossrail.Request] = deque()
        self._pumped_ns = 0
        with translated():
            context = crossrail.Context()
            settings = context.settings()
            shared = settings.get("CROSSRAIL_SECRET") or settings.get("CROSSRAIL_SECRET_FILE")
            # Beyond loopback peers must prove that they know the secret; without one, agents are on one machine.
            self._worker = crossrail.Worker(context, name=name, admit=True, listen="0.0.0.0:0" if shared else None)
        self._exchange = _exchange.Exchange(self, beyond=bool(shared))
        if config.useListenThread:
            self._exchange.listen(config.listenPort)

    def __del__(self) -> None:
        if hasattr(self, "_exchange"):
            self._close()

    def _close(self) -> None:
        with suppress(Exception):
            self._exchange.close()
        until = time.monotonic() + _FLUSH_S
        for request in self._notifying:
            with suppress(crossrail.CrossrailError):
                request.wait(max(0.0, until - time.monotonic()))
        with suppress(Exception):
            self._worker.close()

    # Backends: one set of lanes under two names.

    def getAvailPlugins(self) -> list[str]:
        return list(PLUGINS)

    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:
        if plugin not in PLUGINS:
            raise error(nixlNotFoundError, f"plugin {plugin}: there are {', '.join(PLUGINS)}")
        return {}, list(MEMORY)

    def createBackend(self, plugin: str, parameters: dict[str, str]) -> int:
        self.getPluginParams(plugin)
        with self._lock:
            if plugin in self._backends.values():
                raise error(nixlInvalidParamError, f"backend {plugin} is already there")
            handle = len(self._backends) + 1
            self._backends[handle] = plugin
        _announce(plugin, parameters)
        return handle

    def getBackendParams(self, handle: int) -> tuple[dict[str, str], list[str]]:
        return {}, list(MEMORY)

    # Memory.

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        kind, rows = self._checked(descs, "register_memory"), descs.rows
        if not len(rows):
            raise error(nixlInvalidParamError, "register_memory: no rows")
        registration = _Registration(kind, rows.copy(), self._register(kind, rows))
        with self._lock:
            self._registrations.append(registration)
        return nixl_status_t.NIXL_SUCCESS

    def _register(self, kind: nixl_mem_t, rows: Rows) -> dict[tuple[int, int, int], crossrail.Region]:
        """Regions for `rows`: one each, or of neighbours together where there are very many."""
        with translated():
            pieces: Iterable[tuple[int, int, int]]
            pieces = map(tuple, rows.tolist()) if len(rows) <= _EACH_MAX else merged_rows(rows)
            pieces = dict.fromkeys(pieces)
            device = (lambda number: number) if kind == nixl_mem_t.VRAM_SEG else (lambda number: None)
            return {piece: self._worker.register_range(piece[0], piece[1], device(piece[2])) for piece in pieces}

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        kind, rows = self._checked(descs, "deregister_memory"), descs.rows
        with self._lock:
            for registration in reversed(self._registrations):
                if registration.kind == kind and np.array_equal(registration.rows, rows):
                    self._registrations.remove(registration)
                    break
            else:
                self._deregister_rows(kind, {tuple(row) for row in rows.tolist()})
                return nixl_status_t.NIXL_SUCCESS
        _end(registration.regions.values())
        return nixl_status_t.NIXL_SUCCESS

    def _deregister_rows(self, kind: nixl_mem_t, gone: set[tuple[int, int, int]]) -> None:
        """Takes single rows out of registrations. A region that other rows share is replaced by regions of those."""
        for registration in list(self._registrations):
            rows = [tuple(row) for row in registration.rows.tolist()]
            found = gone.intersection(rows) if registration.kind == kind else set()
            if not found:
                continue
            gone = gone - found
            left = np.array([row for row in rows if row not in found], np.uint64).reshape(-1, 3)
            if len(rows) <= _EACH_MAX:
                _end(registration.regions.pop(row) for row in found if row in registration.regions)
            else:
                old, registration.regions = registration.regions, self._register(kind, left) if len(left) else {}
                _end(old.values())
            registration.rows = left
            if not len(left):
                self._registrations.remove(registration)
        if gone:
            raise error(nixlNotFoundError, f"deregister_memory: {len(gone)} rows are not registered")

    def _regions(self, kind: nixl_mem_t | None = None) -> list[crossrail.Region]:
        with self._lock:
            return [
                region
                for registration in self._registrations
                if kind is None or registration.kind == kind
                for region in registration.regions.values()
            ]

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        raise refuse("query_memory")

    def prepMemView(self, descs: Any, backends: Sequence[int] = ()) -> int:
        raise refuse("prep_mem_view")

    def releaseMemView(self, view: int) -> None:
        raise refuse("release_mem_view")

    # Remote agents.

    def getLocalMD(self) -> bytes:
        with translated():
            return _MAGIC + self._worker.describe(self._regions())

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        """As getLocalMD, with the regions of these rows alone. How to connect is always in it."""
        wanted = {tuple(row) for row in descs.rows.tolist()}
        with self._lock:
            regions = [
                region
                for registration in self._registrations
                if registration.kind == descs.getType()
                for piece, region in registration.regions.items()
                if piece in wanted
            ]
        if len(regions) < len(wanted):
            raise error(nixlNotFoundError, "partial metadata of rows that are not registered")
        with translated():
            return _MAGIC + self._worker.describe(regions)

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        data = bytes(metadata)
        if not data.startswith(_MAGIC):
            theirs = data.startswith(b"nixlSerDes")
            why = "it is of NVIDIA's nixl; both ends need crossrail-nixl" if theirs else "not the metadata of an agent"
            raise error(nixlMismatchError, f"add_remote_agent: {why}")
        try:
            description = crossrail.Description(data[len(_MAGIC) :])
        except crossrail.CrossrailError as cause:
            raise error(nixlMismatchError, str(cause)) from cause
        name = description.name
        if name == self._name:
            raise error(nixlInvalidParamError, "add_remote_agent: this agent's own metadata")
        with self._lock:
            known = self._remotes.get(name)
            gone = known is not None and known.endpoint is not None and not known.endpoint.is_alive
            if known is None or gone:
                remote = _Remote(name, description)
                remote.endpoint = self._kept.pop(description.generation, None)
                if known is not None:
                    known.removed = True
                self._remotes[name] = remote
            elif known.description.generation == description.generation:
                with translated():
                    known.description = known.description.merge(description)
            else:
                raise error(
                    nixlNotAllowedError,
                    f"add_remote_agent: {name} is known as another process; remove it first",
                )
        return name.encode()

    def invalidateRemoteMD(self, agent: str | bytes) -> nixl_status_t:
        with self._lock:
            remote = self._remotes.pop(_text(agent), None)
            if remote is None:
                return nixl_status_t.NIXL_ERR_NOT_FOUND
            remote.removed = True
            evicted = []
            if remote.endpoint is not None and remote.endpoint.is_alive:
                self._kept[remote.description.generation] = remote.endpoint
                while len(self._kept) > _KEPT_MAX:
                    evicted.append(self._kept.popitem(last=False)[1])
        for endpoint in evicted:
            with suppress(crossrail.CrossrailError):
                endpoint.close(_CLOSE_S)
        return nixl_status_t.NIXL_SUCCESS

    def checkRemoteMD(self, agent: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        with self._lock:
            remote = self._remotes.get(_text(agent))
        if remote is None:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        vram = descs.getType() == nixl_mem_t.VRAM_SEG
        regions = [one for one in remote.description.regions if (one[2] != "cpu") == vram]
        covered = all(
            any(base <= address and address + size <= base + length for base, length, _ in regions)
            for address, size, _ in descs.rows.tolist()
        )
        return nixl_status_t.NIXL_SUCCESS if covered else nixl_status_t.NIXL_ERR_NOT_FOUND

    def makeConnection(self, agent: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        self._connected(self._remote(agent))
        return nixl_status_t.NIXL_SUCCESS

    def _remote(self, agent: str | bytes) -> _Remote:
        """The remote agent of this name; this agent itself for its own."""
        name = _text(agent)
        with self._lock:
            remote = self._remotes.get(name)
            if name == self._name:
                with translated():
                    description = crossrail.Description(self._worker.describe(self._regions()))
                if remote is None:
                    remote = self._remotes[name] = _Remote(name, description)
                remote.description = description
        if remote is None:
            raise error(nixlNotFoundError, f"no metadata of remote agent {name}: add_remote_agent first")
        return remote

    def _connected(self, remote: _Remote) -> crossrail.Endpoint:
        """The endpoint of a remote agent, connected by whoever needs it first."""
        with remote.connecting:
            if remote.endpoint is None:
                try:
                    remote.endpoint = self._worker.connect(remote.description.address)
                except crossrail.CrossrailError as cause:
                    raise self._failed(remote, cause) from cause
            return remote.endpoint

    def _failed(self, remote: _Remote, cause: crossrail.CrossrailError) -> Exception:
        """NIXL's exception for `cause`; drops the metadata of an agent that is gone."""
        translation = equivalent(cause)
        if isinstance(translation, nixlRemoteDisconnectError):
            with self._lock:
                remote.removed = True
                if self._remotes.get(remote.name) is remote:
                    del self._remotes[remote.name]
        return translation

    # Prepared lists and transfers.

    def prepXferDlist(self, agent: Any, *given: Any, **named: Any) -> _Prepared:
        """(agent, descs, backends) | (agent, mem_type, Nx5 array, backends) | (descs, backends)"""
        if isinstance(agent, nixlXferDList):
            agent, given = NIXL_INIT_AGENT, (agent, *given)
        descs = given[0] if given else named.get("descs")
        if isinstance(descs, nixlXferDList):
            return self._prepare(_text(agent), self._checked(descs, "prep_xfer_dlist"), descs.rows)
        if len(given) > 1 and isinstance(given[1], np.ndarray):
            kind, rows = nixl_mem_t(given[0]), given[1]
            if rows.dtype not in (np.uint64, np.int64):
                raise ValueError("strided descriptors are a Nx5 numpy array of uint64 or int64")
            return self._prepare(_text(agent), kind, np.ascontiguousarray(rows).view(np.uint64))
        raise TypeError(f"prepXferDlist: a nixlXferDList is needed, not {type(descs).__name__}")

    def _prepare(self, agent: str, kind: nixl_mem_t, rows: Rows) -> _Prepared:
        if not len(rows):
            raise error(nixlNotFoundError, "prep_xfer_dlist: no rows")
        if agent == NIXL_INIT_AGENT:
            with translated():
                return _Prepared(self._worker.layout(rows, self._regions(kind)), None)
        remote = self._remote(agent)
        endpoint = self._connected(remote)
        try:
            return _Prepared(endpoint.layout(rows, remote.description), remote)
        except crossrail.CrossrailError as cause:
            raise self._failed(remote, cause) from cause

    def releasedDlistH(self, handle: _Prepared) -> nixl_status_t:
        return nixl_status_t.NIXL_SUCCESS

    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: _Prepared,
        local_indices: Any,
        remote_side: _Prepared,
        remote_indices: Any,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> _Transfer:
        if local_side.remote is not None or remote_side.remote is None:
            raise error(nixlInvalidParamError, "the first side must be local, the second remote")
        local, remote = indices(local_indices), indices(remote_indices)
        if len(local) != len(remote) or not len(local):
            raise error(nixlInvalidParamError, f"{len(local)} local indices, {len(remote)} remote ones")
        return self._transfer(operation, local_side, local, remote_side, remote, notif_msg, merged=not skip_desc_merge)

    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
    ) -> _Transfer:
        if not isinstance(local_descs, nixlXferDList) or not isinstance(remote_descs, nixlXferDList):
            raise TypeError("createXferReq: both descriptor lists must be nixlXferDList")
        ours, theirs = local_descs.descCount(), remote_descs.descCount()
        if ours != theirs:
            raise error(nixlInvalidParamError, f"{ours} local rows, {theirs} remote ones")
        local = self._prepare(NIXL_INIT_AGENT, self._checked(local_descs, "initialize_xfer"), local_descs.rows)
        kind = self._checked(remote_descs, "initialize_xfer")
        remote = self._prepare(_text(remote_agent), kind, remote_descs.rows)
        return self._transfer(operation, local, None, remote, None, notif_msg, merged=False)

    def _transfer(
        self,
        operation: nixl_xfer_op_t,
        local: _Prepared,
        local_indices: Any,
        remote: _Prepared,
        remote_indices: Any,
        notice: str | bytes,
        *,
        merged: bool,
    ) -> _Transfer:
        there = remote.remote
        if there is None or there.removed or there.endpoint is None:
            raise error(nixlNotFoundError, "the remote agent was removed since its list was prepared")
        data = _message(notice)
        verb = "read" if nixl_xfer_op_t(operation) == nixl_xfer_op_t.NIXL_READ else "write"
        try:
            move = there.endpoint.prepare(verb, local.layout, remote.layout, local_indices, remote_indices, notice=data)
        except crossrail.CrossrailError as cause:
            raise self._failed(there, cause) from cause
        return _Transfer(move, there, data, merged)

    def postXferReq(self, handle: _Transfer, notif_msg: str | bytes = b"") -> nixl_status_t:
        with handle.lock:
            if handle.remote.removed:
                raise error(
                    nixlNotFoundError,
                    f"agent {handle.remote.name} was removed since the transfer was created",
                )
            if handle.move.is_in_flight():
                raise error(nixlRepostActiveError, "the transfer is in flight")
            if notif_msg:
                handle.notice = _message(notif_msg)
            handle.done, handle.failure, handle.request = False, None, None
            handle.telemetry = nixlXferTelemetry()
            handle.telemetry.startTime = time.time_ns() // 1000
            handle.posted_ns = began = time.perf_counter_ns()
            try:
                handle.request = handle.move.start(notice=handle.notice)
            except crossrail.CrossrailError as cause:
                raise self._failed(handle.remote, cause) from cause
            handle.telemetry.postDuration = max(1, (time.perf_counter_ns() - began) // 1000)
            return self._state(handle) if handle.request.is_done() else nixl_status_t.NIXL_IN_PROG

    def getXferStatus(self, handle: _Transfer) -> nixl_status_t:
        request = handle.request
        if request is None:
            raise error(nixlNotPostedError, "the transfer was never posted")
        if not request.is_done():
            self._pump()
            if not request.is_done():
                return nixl_status_t.NIXL_IN_PROG
        with handle.lock:
            return self._state(handle)

    def _state(self, handle: _Transfer) -> nixl_status_t:
        """The state of a posted transfer whose lock is held; raises what it failed with, at every call."""
        if handle.failure is not None:
            raise handle.failure
        if handle.done:
            return nixl_status_t.NIXL_SUCCESS
        if handle.request is None or not handle.request.is_done():
            return nixl_status_t.NIXL_IN_PROG
        try:
            handle.request.test()
        except crossrail.CrossrailError as cause:
            handle.failure = self._failed(handle.remote, cause)
            raise handle.failure from cause
        handle.done = True
        took = (time.perf_counter_ns() - handle.posted_ns) // 1000
        handle.telemetry.xferDuration = max(handle.telemetry.postDuration, took)
        handle.telemetry.totalBytes = handle.move.nbytes
        if self._telemetry:
            handle.telemetry.descCount = handle.move.runs if handle.merged else handle.move.rows
        return nixl_status_t.NIXL_SUCCESS

    def _pump(self) -> None:
        now = time.monotonic_ns()
        if now - self._pumped_ns > _PUMP_NS:
            self._pumped_ns = now
            self._worker.progress()

    def releaseXferReq(self, handle: _Transfer) -> nixl_status_t:
        """Cancels the transfer if it is in flight, and returns when neither end touches its memory any more."""
        request = handle.request
        if request is None or request.is_done():
            return nixl_status_t.NIXL_SUCCESS
        request.cancel()
        try:
            request.wait()
        except crossrail.TimeoutError as cause:
            raise error(nixlRepostActiveError, f"it cannot be cancelled now: {cause}") from cause
        except crossrail.CrossrailError:
            pass  # cancelled, or failed by itself: over either way
        return nixl_status_t.NIXL_SUCCESS

    def getXferTelemetry(self, handle: _Transfer) -> nixlXferTelemetry:
        if not self._telemetry:
            raise error(
                nixlNoTelemetryError,
                "pass capture_telemetry=True or set NIXL_TELEMETRY_ENABLE=y",
            )
        if handle.request is None:
            raise error(nixlNotPostedError, "the transfer was never posted")
        with suppress(Exception):
            self.getXferStatus(handle)
        return handle.telemetry if handle.done else nixlXferTelemetry()

    def queryXferBackend(self, handle: _Transfer) -> int:
        with self._lock:
            if not self._backends:
                raise error(nixlNotFoundError, "the agent has no backend")
            return min(self._backends)

    def estimateXferCost(self, handle: _Transfer) -> tuple[int, int, nixl_cost_t]:
        """Microseconds by the cost model of the lanes that large transfers use, and half of them as the margin."""
        endpoint = self._connected(handle.remote)
        chosen = [lane for lane in endpoint.explain().candidates if "large" in (lane["chosen_for"] or "")]
        rate = sum(lane["gb_per_s"] or 0.0 for lane in chosen)
        latency = min((lane["latency_us"] or 0.0 for lane in chosen), default=0.0)
        cost = max(1, round(latency + (handle.move.nbytes / (rate * 1e3) if rate else 0.0)))
        return cost, cost // 2, nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND

    def _checked(self, descs: Any, call: str) -> nixl_mem_t:
        if not isinstance(descs, (nixlXferDList, nixlRegDList)):
            raise TypeError(f"{call}: a descriptor list is needed, not {type(descs).__name__}")
        kind = descs.getType()
        if kind not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
            raise refuse(f"{call} of {kind.name}")
        return kind

    # Notifications.

    def getNotifs(self, into: dict[str, list[bytes]], backends: Sequence[int] = ()) -> dict[str, list[bytes]]:
        """Adds what has arrived to `into`, by sender, and returns it."""
        notices = self._worker.notices()
        if not notices:
            self._pump()
            notices = self._worker.notices()
        for sender, data in notices:
            into.setdefault(sender, []).append(data)
        return into

    def genNotif(self, agent: str | bytes, message: str | bytes, backends: Any = ()) -> nixl_status_t:
        remote = self._remote(agent)
        try:
            request = self._connected(remote).notify(_message(message))
            with self._lock:
                self._notifying.append(request)
                while self._notifying and self._notifying[0].is_done():
                    done = self._notifying.popleft()
                    with suppress(crossrail.CrossrailError):
                        done.test()
            if request.is_done():
                request.test()
        except crossrail.CrossrailError as cause:
            raise self._failed(remote, cause) from cause
        return nixl_status_t.NIXL_SUCCESS

    # Metadata by socket; see _exchange.

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._exchange.send(ip_addr, port, self.getLocalMD())

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        self._exchange.send(ip_addr, port, self.getLocalPartialMD(descs, inc_conn_info, backends))

    def fetchRemoteMD(self, agent: str, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        self._exchange.fetch(ip_addr, port)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._exchange.invalidate(ip_addr, port, _MAGIC + self._worker.describe([]))

    def forget(self, metadata: bytes) -> None:
        """A peer withdraws its own metadata: only what names the very process that is known has an effect."""
        try:
            description = crossrail.Description(metadata[len(_MAGIC) :])
        except crossrail.CrossrailError:
            return
        with self._lock:
            known = self._remotes.get(description.name)
            if known is not None and known.description.generation == description.generation:
                self.invalidateRemoteMD(description.name)


def _end(regions: Iterable[crossrail.Region]) -> None:
    """When it returns, nobody accesses these regions any more."""
    for region in regions:
        with suppress(crossrail.RegionError):
            region.deregister()


def _announce(plugin: str, parameters: dict[str, str]) -> None:
    global _announced
    if _announced:
        return
    _announced = True
    if plugin == "UCX":
        logger.info("crossrail.nixl: the backend UCX is another name for Crossrail's own lanes")
    if parameters:
        logger.info("crossrail.nixl: parameters of backends have no effect: %s", ", ".join(sorted(parameters)))
