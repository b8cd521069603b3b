"""The agent under `nixl_agent`: registrations, remote agents, prepared lists, transfers and notifications.

Any thread may call anything, whatever sync mode was asked for: each table has a lock of its own, which is never held
while a connection is made or bytes move. Transfers advance on the worker's background thread, polled or not.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import crossrail
from crossrail._drop_in import beyond_loopback
from crossrail._endings import at_end
from crossrail.nixl import _exchange
from crossrail.nixl._kinds import (
    NIXL_INIT_AGENT,
    error,
    nixl_cost_t,
    nixl_mem_t,
    nixl_status_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    refuse,
    translated,
)
from crossrail.nixl._lists import Rows, nixlRegDList, nixlXferDList
from crossrail.nixl._registrations import Registrations
from crossrail.nixl._remotes import MAGIC, Remotes
from crossrail.nixl._transfers import IN_PROG, Nothing, Prepared, Transfer, nixlXferTelemetry
from crossrail.nixl.logging import get_logger

logger = get_logger("agent")

PLUGINS = ["UCX", "CROSSRAIL"]
MEMORY = ["DRAM_SEG", "VRAM_SEG"]
_PUMP_NS = 20_000  # callers that poll make progress: once for all their handles, and at least this often
_PLAIN = 3  # columns of rows that are not strided
_FLUSH_S = 2.0  # how long closing an agent waits for its last notifications to be delivered
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
        self._lock = threading.Lock()
        self._backends: dict[int, str] = {}
        self._notifying: deque[crossrail.Request] = deque()
        self._polled: set[int] = set()
        self._pumped_ns = 0
        with translated():
            context = crossrail.Context()
            self._worker = crossrail.Worker(context, name=name, admit=True, listen=beyond_loopback(context))
        self._registrations = Registrations(self._worker)
        self._remotes = Remotes(name, self._worker, lambda: self._worker.describe(self._registrations.regions()))
        self._exchange = _exchange.Exchange(self, context)
        if config.useListenThread:
            with translated():
                self._exchange.listen(config.listenPort)

    def _close(self) -> None:
        if not hasattr(self, "_exchange"):
            return  # it was never whole
        self._exchange.close()
        until = time.monotonic() + _FLUSH_S
        for request in self._notifying:
            with suppress(crossrail.CrossrailError):
                request.wait(max(0.0, until - time.monotonic()))
        self._worker.close()

    __del__ = at_end(_close)

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
        self._registrations.add(self._checked(descs, "register_memory"), descs.rows)
        return nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        self._registrations.remove(self._checked(descs, "deregister_memory"), descs.rows)
        return nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        raise refuse("query_memory")

    def prepMemView(self, descs: Any, backends: Sequence[int] = ()) -> int:
        raise refuse("prep_mem_view")

    def releaseMemView(self, view: int) -> None:
        raise refuse("release_mem_view")

    # Remote agents.

    def getLocalMD(self) -> bytes:
        with translated():
            return MAGIC + self._worker.describe(self._registrations.regions())

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        """As getLocalMD, with the regions of these rows alone. How to connect is always in it."""
        wanted = {tuple(row) for row in descs.rows.tolist()}
        regions = self._registrations.regions(descs.getType(), wanted)
        if len(regions) < len(wanted):
            raise error(nixlNotFoundError, "partial metadata of rows that are not registered")
        with translated():
            return MAGIC + self._worker.describe(regions)

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        return self._remotes.load(bytes(metadata)).encode()

    def invalidateRemoteMD(self, agent: str | bytes) -> nixl_status_t:
        was_known = self._remotes.remove(_text(agent))
        return nixl_status_t.NIXL_SUCCESS if was_known else nixl_status_t.NIXL_ERR_NOT_FOUND

    def checkRemoteMD(self, agent: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        remote = self._remotes.known(_text(agent))
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
        self._remotes.connected(self._remotes.named(_text(agent)))
        return nixl_status_t.NIXL_SUCCESS

    # Prepared lists and transfers.

    def prepXferDlist(self, agent: Any, *given: Any, **named: Any) -> Prepared:
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

    def _prepare(self, agent: str, kind: nixl_mem_t, rows: Rows) -> Prepared:
        if not len(rows):
            raise error(nixlNotFoundError, "prep_xfer_dlist: no rows")
        places = None
        if rows.shape[1] == _PLAIN and np.count_nonzero(rows[:, 1]) < len(rows):
            moving = rows[:, 1] != 0  # rows without bytes move nothing, wherever they are
            places = np.where(moving, np.cumsum(moving) - 1, -1)
            rows = np.ascontiguousarray(rows[moving])
        if agent == NIXL_INIT_AGENT:
            with translated():
                regions = self._registrations.regions(kind)
                return Prepared(self._worker.layout(rows, regions) if len(rows) else None, None, places)
        remote = self._remotes.named(agent)
        endpoint = self._remotes.connected(remote)
        try:
            return Prepared(endpoint.layout(rows, remote.description) if len(rows) else None, remote, places)
        except crossrail.CrossrailError as cause:
            raise self._remotes.failed(remote, cause) from cause

    def releasedDlistH(self, handle: Prepared) -> nixl_status_t:
        return nixl_status_t.NIXL_SUCCESS

    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: Prepared,
        local_indices: Any,
        remote_side: Prepared,
        remote_indices: Any,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> Transfer:
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
    ) -> Transfer:
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
        local: Prepared,
        local_indices: Any,
        remote: Prepared,
        remote_indices: Any,
        notice: str | bytes,
        *,
        merged: bool,
    ) -> Transfer:
        there = remote.remote
        if there is None or there.removed or there.endpoint is None:
            raise error(nixlNotFoundError, "the remote agent was removed since its list was prepared")
        data = _message(notice)
        verb = "read" if nixl_xfer_op_t(operation) == nixl_xfer_op_t.NIXL_READ else "write"
        if local.places is not None or remote.places is not None:
            count = len(local.places if local.places is not None else remote.places)
            ours, theirs = local.chosen(local_indices, count), remote.chosen(remote_indices, count)
            if ((ours < 0) != (theirs < 0)).any():
                raise error(nixlInvalidParamError, "prepare: rows of a pair that are not equally long")
            local_indices, remote_indices = ours[ours >= 0], theirs[theirs >= 0]
        try:
            move: crossrail.Move | Nothing
            if local.layout is None or remote.layout is None or (local_indices is not None and not len(local_indices)):
                move = Nothing(there.endpoint)
            else:
                layouts = local.layout, remote.layout
                move = there.endpoint.prepare(verb, *layouts, local_indices, remote_indices, notice=data)
        except crossrail.CrossrailError as cause:
            raise self._remotes.failed(there, cause) from cause
        return Transfer(move, there, self._remotes, data, rows=self._telemetry, merged=merged)

    def postXferReq(self, handle: Transfer, notif_msg: str | bytes = b"") -> nixl_status_t:
        return handle.post(_message(notif_msg))

    def getXferStatus(self, handle: Transfer) -> nixl_status_t:
        request = handle.request
        if request is None:
            raise error(nixlNotPostedError, "the transfer was never posted")
        if not request.is_done():
            self._pump(handle)
            if not request.is_done():
                return IN_PROG
        return handle.state()

    def _pump(self, handle: Transfer) -> None:
        now = time.monotonic_ns()
        if id(handle) in self._polled or now - self._pumped_ns > _PUMP_NS:
            self._polled.clear()
            self._pumped_ns = now
            # The peer may have to run on this processor first.
            if not self._worker.progress():
                os.sched_yield()
        self._polled.add(id(handle))

    def releaseXferReq(self, handle: Transfer) -> nixl_status_t:
        """Cancels the transfer if it is in flight, and returns when neither end touches its memory any more."""
        handle.release()
        return nixl_status_t.NIXL_SUCCESS

    def getXferTelemetry(self, handle: Transfer) -> nixlXferTelemetry:
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

    def queryXferBackend(self, handle: Transfer) -> int:
        with self._lock:
            if not self._backends:
                raise error(nixlNotFoundError, "the agent has no backend")
            return min(self._backends)

    def estimateXferCost(self, handle: Transfer) -> tuple[int, int, nixl_cost_t]:
        """Microseconds by the cost model of the lanes that large transfers use, and half of them as the margin."""
        endpoint = self._remotes.connected(handle.remote)
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
        for notice in self._worker.notices():
            if self._remotes.is_from(notice):
                into.setdefault(notice.peer, []).append(notice.data)
        return into

    def genNotif(self, agent: str | bytes, message: str | bytes, backends: Any = ()) -> nixl_status_t:
        remote = self._remotes.named(_text(agent))
        try:
            request = self._remotes.connected(remote).notify(_message(message))
            with self._lock:
                self._notifying.append(request)
                while self._notifying and self._notifying[0].is_done():
                    done = self._notifying.popleft()
                    with suppress(crossrail.CrossrailError):
                        done.test()
            if request.is_done():
                request.test()
        except crossrail.CrossrailError as cause:
            raise self._remotes.failed(remote, cause) from cause
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
        self._exchange.invalidate(ip_addr, port, MAGIC + self._worker.describe([]))

    def forget(self, metadata: bytes) -> None:
        """A peer withdraws its own metadata."""
        self._remotes.forget(metadata)


def _announce(plugin: str, parameters: dict[str, str]) -> None:
    global _announced
    if _announced:
        return
    _announced = True
    if plugin == "UCX":
        logger.info("crossrail.nixl: the backend UCX is another name for Crossrail's own lanes")
    if parameters:
        logger.info("crossrail.nixl: parameters of backends have no effect: %s", ", ".join(sorted(parameters)))
