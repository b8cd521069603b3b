"""`nixl_agent`: the agent that programs use, by the names, defaults and answers of NIXL 1.5.1.

Differences from NIXL, all of them allowed by its documentation: transfers and notifications advance whether the program
polls or not; a notification is raised when the bytes before it are visible; `release` returns when no byte is written
any more; every call may be made from any thread. Storage and GPU-initiated transfers raise nixlNotSupportedError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from crossrail._endings import at_end
from crossrail.nixl import _bindings as nixlBind
from crossrail.nixl import _lists
from crossrail.nixl._kinds import error, nixlInvalidParamError
from crossrail.nixl.logging import get_logger

logger = get_logger("api")

DEFAULT_COMM_PORT = nixlBind.DEFAULT_COMM_PORT

nixl_backend_handle = int

_STATES = ("DONE", "PROC")  # NIXL_SUCCESS, NIXL_IN_PROG: all others are raised


def _is_torch_tensor(given: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


class _Handle:
    """An object of the agent that is released once, at the latest with the last reference."""

    __slots__ = ("__weakref__", "_agent", "_handle", "_release", "_released")

    def __init__(self, agent: Any, value: Any, release: Callable[[Any], Any]) -> None:
        self._handle, self._agent, self._release, self._released = value, agent, release, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({id(self._handle):#x}, released={self._released})"

    def release(self) -> None:
        """Releases it. Calling it again has no effect."""
        if not self._released:
            self._release(self._handle)
            self._released = True

    def live(self) -> Any:
        """The object of the agent. Raises nixlInvalidParamError after its release."""
        if self._released:
            raise error(nixlInvalidParamError, f"{type(self).__name__}: it was released")
        return self._handle

    def _end(self) -> None:
        try:
            self.release()
        except Exception:
            logger.error("%r: not released", self, exc_info=True)

    __del__ = at_end(_end)


class nixl_prepped_dlist_handle(_Handle):
    """A prepared descriptor list. Made by `nixl_agent.prep_xfer_dlist`; usable from any thread."""

    __slots__ = ()

    def __init__(self, agent: Any, value: Any) -> None:
        super().__init__(agent, value, agent.releasedDlistH)


class nixl_xfer_handle(_Handle):
    """A transfer. Made by `nixl_agent.make_prepped_xfer` and `nixl_agent.initialize_xfer`; usable from any thread.

    `release` cancels it if it is in flight, and returns when neither side's memory is accessed.
    """

    __slots__ = ()

    def __init__(self, agent: Any, value: Any) -> None:
        super().__init__(agent, value, agent.releaseXferReq)


class nixl_thread_sync_t(Enum):
    """How the program promises to use its agent; this one may be used from any thread in every mode."""

    NIXL_THREAD_SYNC_NONE = nixlBind.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = nixlBind.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = nixlBind.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = nixlBind.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:
    """Settings of an agent.

    Parameters
    ----------
    enable_prog_thread, num_threads, sync_mode
        Accepted; there is always a thread that makes progress, and every mode is safe. TypeError unless `sync_mode` is
        None or a nixl_thread_sync_t.
    enable_listen_thread : bool
        Whether to serve metadata to peers at `listen_port`; on loopback only, unless CROSSRAIL_SECRET is set.
    listen_port : int
        TCP port of that listener; 8888 by default.
    capture_telemetry : bool
        Whether `nixl_agent.get_xfer_telemetry` answers. NIXL_TELEMETRY_ENABLE overrides it.
    backends : list of str
        "UCX", "CROSSRAIL", or both: the same lanes. Others are skipped with a warning.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] = ["UCX"],  # noqa: B006
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})")
        self.backends = backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """An agent: registered memory, remote agents, and transfers and notifications between them.

    Any thread may call any method. Failures are raised as NIXL's exceptions (`nixlBind.nixlBackendError` and others);
    texts begin with the status, ``NIXL_ERR_NOT_FOUND: ...``.

    Parameters
    ----------
    agent_name : str
        Unique among the agents that know each other. ValueError if empty.
    nixl_conf : nixl_agent_config, optional
        By default one with all its defaults.
    instantiate_all : bool
        Whether to make every backend; ignored with `nixl_conf`.
    """

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        if nixl_conf and instantiate_all:
            logger.warning("Ignoring instantiate_all based on the provided config in agent creation.")
        conf = nixl_conf or nixl_agent_config()
        default = "NIXL_THREAD_SYNC_STRICT" if conf.enable_listen else "NIXL_THREAD_SYNC_NONE"
        config = nixlBind.nixlAgentConfig()
        config.useProgThread = conf.enable_pthread
        config.useListenThread = conf.enable_listen
        config.listenPort = conf.port
        config.syncMode = (conf.sync_mode or nixl_thread_sync_t[default]).value
        config.captureTelemetry = conf.capture_telemetry
        self.agent = nixlBind.nixlAgent(agent_name, config)
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        wanted = self.plugin_list if instantiate_all and not nixl_conf else conf.backends
        for backend in wanted:
            if backend in self.plugin_list:
                self.create_backend(backend, {"num_threads": str(conf.num_threads)} if conf.num_threads else {})
            else:
                logger.warning("Skipping backend registration %s due to the missing plugin.", backend)
        self.nixl_mems = {
            "DRAM": nixlBind.DRAM_SEG,
            "VRAM": nixlBind.VRAM_SEG,
            "FILE": nixlBind.FILE_SEG,
            "BLOCK": nixlBind.BLK_SEG,
            "OBJ": nixlBind.OBJ_SEG,
            "cpu": nixlBind.DRAM_SEG,
            "cuda": nixlBind.VRAM_SEG,
        }
        self.nixl_ops = {"WRITE": nixlBind.NIXL_WRITE, "READ": nixlBind.NIXL_READ}

    # Plugins and backends.

    def get_plugin_list(self) -> list[str]:
        """Backends that can be created: "UCX" and "CROSSRAIL", two names of the same lanes."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Memory kinds of the plugin `backend`: "DRAM" and "VRAM"; [] with a warning if it is unknown. Never raises."""
        return self._known_plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Parameters of the plugin `backend`: none; {} with a warning if it is unknown. Never raises."""
        return self._known_plugin(backend)[0]

    def _known_plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend in self.plugin_list:
            return self.agent.getPluginParams(backend)
        logger.warning("Plugin %s is not available.", backend)
        return {}, []

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Memory kinds of `backend`; [] if it was not created. Never raises."""
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Parameters of `backend`: none, {}. Never raises."""
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] = {}) -> None:  # noqa: B006
        """Creates `backend`, another name for the lanes of this agent.

        `initParams` have no effect, which is logged. Raises nixlNotFoundError for an unknown name, and
        nixlInvalidParamError if it was created before.
        """
        self.backends[backend] = handle = self.agent.createBackend(backend, initParams)
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(handle)

    def _handles(self, backends: list[str] | None) -> list[int]:
        return [self.backends[backend] for backend in backends or ()]

    # Memory.

    def register_memory(
        self,
        reg_list: Any,
        mem_type: str | None = None,
        backends: list[str] = [],  # noqa: B006
    ) -> nixlBind.nixlRegDList:
        """Registers memory, so that remote agents with the metadata may access it. The caller keeps it allocated.

        Parameters
        ----------
        reg_list, mem_type
            As for `get_reg_descs`: rows (address, length in bytes, device), tensors, or a list.
        backends : list of str
            Accepted; all names are the same lanes.

        Returns
        -------
        nixlRegDList
            The rows, for `deregister_memory`.

        Raises
        ------
        nixlInvalidParamError
            The memory cannot be registered.
        nixlNotSupportedError
            Neither "DRAM" nor "VRAM".
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        self.agent.registerMem(descs, self._handles(backends))  # type: ignore[arg-type]  # None is a TypeError there
        return descs  # type: ignore[return-value]

    def deregister_memory(self, dereg_list: nixlBind.nixlRegDList, backends: list[str] = []) -> None:  # noqa: B006
        """Ends all access to registered rows: when it returns, no remote agent accesses them any more.

        `dereg_list`: the result of `register_memory`, else nixlNotFoundError is raised. `backends`: accepted; all names
        are the same lanes.
        """
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Refused with nixlNotSupportedError for any `reg_list`, `backend` and `mem_type`: there is no storage."""
        return self.agent.queryMem(self.get_reg_descs(reg_list, mem_type), self.backends.get(backend, 0))  # type: ignore[arg-type]

    def prep_mem_view(self, dlist: Any, *, backends: list[str] | None = None) -> int:
        """Refused with nixlNotSupportedError for any `dlist` and `backends`: there are no GPU-initiated transfers."""
        return self.agent.prepMemView(dlist, self._handles(backends))

    def release_mem_view(self, mvh: int) -> None:
        """Refused with nixlNotSupportedError for any `mvh`."""
        self.agent.releaseMemView(mvh)

    # Prepared lists and transfers.

    def make_connection(self, remote_agent: str, backends: list[str] = []) -> None:  # noqa: B006
        """Connects to `remote_agent` now; otherwise the first list prepared for it does. Waits up to CROSSRAIL_TIMEOUT.

        Raises nixlNotFoundError if the agent is not known, nixlRemoteDisconnectError if it cannot be reached.
        `backends`: accepted; all names are the same lanes.
        """
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: list[str] = [],  # noqa: B006
    ) -> nixl_prepped_dlist_handle:
        """Prepares a list once, from which transfers then choose rows by index.

        Parameters
        ----------
        agent_name : str or bytes
            "NIXL_INIT_AGENT" or "" for the local side; a remote agent's name, or this agent's own for a transfer
            within it.
        xfer_list
            As for `get_xfer_descs`, or an Nx5 array of rows (address, length, device, stride, count), lengths and
            strides in bytes.
        mem_type : str, optional
            As for `get_xfer_descs`; required for arrays.
        backends : list of str
            Accepted; all names are the same lanes.

        Raises
        ------
        nixlNotFoundError
            The agent is not known, or rows lie in no registered memory, or there are none.
        nixlRemoteDisconnectError
            The agent cannot be reached.
        ValueError
            An Nx5 array without `mem_type`.
        """
        name = nixlBind.NIXL_INIT_AGENT if agent_name == "NIXL_INIT_AGENT" else agent_name
        handles = self._handles(backends)
        width = xfer_list.shape[1] if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 else 0
        if width == 5 and mem_type is None:
            raise ValueError("Please specify a mem type for strided descriptors")
        if width in (3, 5) and mem_type is not None and len(xfer_list):
            rows = xfer_list if width == 5 else _lists.rows_lent(xfer_list)  # read in place
            prepared = self.agent.prepXferDlist(name, self.nixl_mems[mem_type], rows, handles)
        else:
            prepared = self.agent.prepXferDlist(name, self.get_xfer_descs(xfer_list, mem_type), handles)
        return nixl_prepped_dlist_handle(self.agent, prepared)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: str | bytes = b"",
        backends: list[str] = [],  # noqa: B006
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Makes a transfer between rows of two prepared lists; start it with `transfer`.

        Parameters
        ----------
        operation : str
            "WRITE" (local to remote) or "READ".
        local_xfer_side, remote_xfer_side : nixl_prepped_dlist_handle
        local_indices, remote_indices : list or 1-D integer array
            As many at both ends, at least one.
        notif_msg : str or bytes
            Raised at the remote agent after the last byte; none if empty.
        backends : list of str
            Accepted; all names are the same lanes.
        skip_desc_merge : bool
            Whether telemetry counts rows as given, rather than after adjacent ones are merged.

        Raises
        ------
        nixlInvalidParamError
            The sides are exchanged, or indices or lengths differ.
        nixlNotFoundError
            The remote agent was removed since its list was prepared.
        """
        op = self.nixl_ops[operation]
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side.live(),
            local_indices,
            remote_xfer_side.live(),
            remote_indices,
            notif_msg,
            self._handles(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlBind.nixlXferDList,
        remote_descs: nixlBind.nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = b"",
        backends: list[str] = [],  # noqa: B006
    ) -> nixl_xfer_handle:
        """Makes a transfer between all rows of two lists, which are as many and as long; start it with `transfer`.

        `local_descs`, `remote_descs`: lists of `get_xfer_descs`. `remote_agent`: its name. `operation`, `notif_msg`,
        `backends` and errors as for `make_prepped_xfer`; TypeError for another kind of list.
        """
        op = self.nixl_ops[operation]
        handles = self._handles(backends)
        handle = self.agent.createXferReq(op, local_descs, remote_descs, remote_agent, notif_msg, handles)
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: str | bytes = b"") -> str:
        """Starts the transfer `handle`, which is not in flight: "DONE" or "PROC". Does not wait.

        `notif_msg`: in place of the message that it was made with, if not empty. Raises nixlRepostActiveError if it is
        in flight, and nixlRemoteDisconnectError if the remote agent is lost.
        """
        return _STATES[self.agent.postXferReq(handle.live(), notif_msg)]

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """State of the transfer `handle`: "DONE" or "PROC". Makes progress; does not wait.

        Raises what the transfer failed with, and nixlNotPostedError if it was never started.
        """
        return _STATES[self.agent.getXferStatus(handle.live())]

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        """Times in microseconds and bytes of the finished transfer `handle`; all zero while it is in flight.

        Raises nixlNoTelemetryError unless `nixl_agent_config` asked for it, nixlNotPostedError if it was never started.
        """
        return self.agent.getXferTelemetry(handle.live())

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """Name of the backend of the transfer `handle`. Raises nixlNotFoundError if the agent has none."""
        found = self.agent.queryXferBackend(handle.live())
        return next(name for name, backend in self.backends.items() if backend == found)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Microseconds of the transfer `req_handle` by the lanes' cost model, the margin, and "ANALYTICAL_BACKEND".

        Raises nixlRemoteDisconnectError if the remote agent cannot be reached.
        """
        duration, margin, method = self.agent.estimateXferCost(req_handle.live())
        known = method == nixlBind.NIXL_COST_ANALYTICAL_BACKEND
        return duration, margin, "ANALYTICAL_BACKEND" if known else "UNKNOWN"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Releases the transfer `handle`: cancels it if it is in flight, and waits for the end.

        Raises nixlRepostActiveError if it cannot be cancelled at the moment; it then continues.
        """
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Releases the prepared list `handle`; transfers made from it continue. Raises nothing."""
        handle.release()

    # Notifications.

    def get_new_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:  # noqa: B006
        """Messages that have arrived since the last call, by the name of the agent that sent them. Never raises.

        Those of another process that uses the name of a known or living agent are ignored, with a warning. `backends`:
        accepted; all names are the same lanes.
        """
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:  # noqa: B006
        """All messages that were not looked up yet; they stay in `notifs`. Never raises.

        `backends`: accepted; all names are the same lanes.
        """
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: str | bytes,
        backends: list[str] = [],  # noqa: B006
        tag_is_prefix: bool = True,
    ) -> bool:
        """True if a message of `remote_agent_name` has arrived that begins with `lookup_tag`; removes it from `notifs`.

        With ``tag_is_prefix=False`` (`tag_is_prefix`) the tag may stand anywhere in it. Never raises. `backends`:
        accepted; all names are the same lanes.
        """
        waiting = self.update_notifs(backends).get(remote_agent_name, [])
        tag = lookup_tag.encode() if isinstance(lookup_tag, str) else lookup_tag
        for message in waiting:
            if message.startswith(tag) if tag_is_prefix else tag in message:
                waiting.remove(message)
                return True
        return False

    def send_notif(self, remote_agent_name: str, notif_msg: str | bytes, backend: str | None = None) -> None:
        """Sends the message `notif_msg` to `remote_agent_name`.

        It is not ordered with transfers or with other messages.

        `backend`: accepted. Raises nixlNotFoundError for an unknown agent, nixlRemoteDisconnectError for a lost
        one.
        """
        self.agent.genNotif(remote_agent_name, notif_msg, self._handles([backend] if backend else []))

    # Metadata.

    def get_agent_metadata(self) -> bytes:
        """Connection information and keys of all registered memory. A secret: it grants access to that memory."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: list[str] = [],  # noqa: B006
    ) -> bytes:
        """As `get_agent_metadata`, with keys of the rows `descs` alone.

        `inc_conn_info`: connection information is always included. Raises nixlNotFoundError for rows that are not
        registered. `backends`: accepted; all names are the same lanes.
        """
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Adds the remote agent of `metadata` and returns its name as bytes. Metadata of a known agent is merged.

        Raises nixlMismatchError for other bytes, nixlInvalidParamError for this agent's own, and
        nixlNotAllowedError for another agent of a known name.
        """
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forgets the remote agent `agent`: its lists and transfers cannot be posted any more. Never raises."""
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends this agent's metadata to the listener at `ip_addr` and `port`, in the background.

        Failures to reach it are logged. Raises nixlInvalidParamError without an address, or nixlNotSupportedError if a
        store is configured instead (NIXL_ETCD_ENDPOINTS).
        """
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: list[str] = [],  # noqa: B006
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Sends `get_partial_agent_metadata` to a listener, in the background.

        `descs`, `inc_conn_info`, `backends` and errors as there; `ip_addr` and `port` as for `send_local_metadata`;
        `label` has no effect.
        """
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Asks the listener at `ip_addr` and `port` for its metadata, in the background; see `check_remote_metadata`.

        `remote_agent` and `label` have no effect: the metadata names the agent. Errors as for `send_local_metadata`.
        """
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has the listener at `ip_addr` and `port` forget this agent. Errors as for `send_local_metadata`."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str, descs: nixlBind.nixlXferDList | None = None) -> bool:
        """True if the remote agent `agent` is known, and the rows `descs` of it are, if any. Never raises."""
        wanted = nixlBind.nixlXferDList(nixlBind.DRAM_SEG) if descs is None else descs
        return self.agent.checkRemoteMD(agent, wanted) == nixlBind.NIXL_SUCCESS

    # Descriptor lists. Invalid input is logged, and the result is None.

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlBind.nixlXferDList | None:
        """A list of rows (address, length in bytes, device) for transfers.

        `descs`: 3-tuples, an Nx3 array, a contiguous tensor or a list of such tensors of one device, or a list of this
        kind. `mem_type`: "DRAM", "VRAM", "cpu" or "cuda"; not needed for tensors. Raises nothing: what is invalid is
        logged, and the result is None.
        """
        if isinstance(descs, nixlBind.nixlXferDList):
            return descs
        if isinstance(descs, nixlBind.nixlRegDList):
            logger.error("RegList type detected for transfer, please use XferList")
            return None
        made = self._descs(nixlBind.nixlXferDList, descs, mem_type, 3)
        return made if isinstance(made, nixlBind.nixlXferDList) else None

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlBind.nixlRegDList | None:
        """A list of rows (address, length in bytes, device, meta) for registrations.

        `descs`: 4-tuples, or as for `get_xfer_descs`, as are `mem_type` and errors.
        """
        if isinstance(descs, nixlBind.nixlRegDList):
            return descs
        if isinstance(descs, nixlBind.nixlXferDList):
            logger.error("XferList type detected for registration, please use RegList")
            return None
        made = self._descs(nixlBind.nixlRegDList, descs, mem_type, 4)
        return made if isinstance(made, nixlBind.nixlRegDList) else None

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlBind.nixlRemoteDList | None:
        """A list of rows (address, length in bytes, device, agent); memory views, which use it, are refused.

        `descs`, `mem_type` and errors as for `get_xfer_descs`.
        """
        if isinstance(descs, nixlBind.nixlRemoteDList):
            return descs
        made = self._descs(nixlBind.nixlRemoteDList, descs, mem_type, 4)
        return made if isinstance(made, nixlBind.nixlRemoteDList) else None

    def _descs(self, make: Any, descs: Any, mem_type: str | None, width: int) -> Any:
        if _is_torch_tensor(descs):
            return self._of_tensors(make, [descs])
        first = descs[0]
        if isinstance(first, tuple):
            right, form = len(first) == width, f"{width}-tuple list"
        elif isinstance(descs, np.ndarray):
            right, form = descs.ndim == 2 and descs.shape[1] == 3, "Nx3 shape"
        elif _is_torch_tensor(first):
            return self._of_tensors(make, descs)
        else:
            return None
        if mem_type is None:
            logger.error("Please specify a mem type if not using Tensors")
            return None
        if not right:
            logger.error("%s needed for a descriptor list", form)
            return None
        return make(self.nixl_mems[mem_type], descs)

    def _of_tensors(self, make: Any, tensors: Any) -> Any:
        rows = np.zeros((len(tensors), 3), np.uint64)
        for at, tensor in enumerate(tensors):
            if tensor.device != tensors[0].device or not tensor.is_contiguous():
                logger.error("Please use a list of contiguous Tensors of one device")
                return None
            # -1: the host.
            rows[at] = tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(tensor.get_device(), 0)
        host = tensors[0].get_device() == -1
        return make(nixlBind.DRAM_SEG if host else nixlBind.VRAM_SEG, rows)

    def get_serialized_descs(self, descs: nixlBind.nixlXferDList | nixlBind.nixlRegDList) -> bytes:
        """The list `descs` of `get_xfer_descs` or `get_reg_descs` as bytes, for another process. Raises nothing."""
        return _lists.to_bytes(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> nixlBind.nixlXferDList | nixlBind.nixlRegDList:
        """The list of `get_serialized_descs`, from `serialized_descs`.

        Raises nixlMismatchError for other bytes; nothing of them is executed.
        """
        return _lists.from_bytes(serialized_descs)
