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
from crossrail.nixl.logging import get_logger

logger = get_logger("api")

DEFAULT_COMM_PORT = nixlBind.DEFAULT_COMM_PORT

nixl_backend_handle = int

_STATES = {nixlBind.NIXL_SUCCESS: "DONE", nixlBind.NIXL_IN_PROG: "PROC"}


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

    def _end(self) -> None:
        try:
            self.release()
        except Exception:
            logger.error("%r: not released", self, exc_info=True)

    __del__ = at_end(_end)


class nixl_prepped_dlist_handle(_Handle):
    """A prepared descriptor list."""

    __slots__ = ()

    def __init__(self, agent: Any, value: Any) -> None:
        super().__init__(agent, value, agent.releasedDlistH)


class nixl_xfer_handle(_Handle):
    """A transfer. `release` cancels it if it is in flight, and returns when neither side's memory is accessed."""

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
    capture_telemetry : bool
        Whether get_xfer_telemetry answers. NIXL_TELEMETRY_ENABLE overrides it.
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

    Parameters
    ----------
    agent_name : str
        Unique among the agents that know each other. ValueError if empty.
    nixl_conf : nixl_agent_config, optional
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
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return self._known_plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return self._known_plugin(backend)[0]

    def _known_plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend in self.plugin_list:
            return self.agent.getPluginParams(backend)
        logger.warning("Plugin %s is not available.", backend)
        return {}, []

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] = {}) -> None:  # noqa: B006
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
        """Registers rows, tensors or a nixlRegDList, so that remote agents with the metadata may access them.

        The caller keeps the memory allocated until it is deregistered.
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        self.agent.registerMem(descs, self._handles(backends))  # type: ignore[arg-type]  # None is a TypeError there
        return descs  # type: ignore[return-value]

    def deregister_memory(self, dereg_list: nixlBind.nixlRegDList, backends: list[str] = []) -> None:  # noqa: B006
        """Ends all access to registered rows: when it returns, no remote agent accesses them any more."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Refused with nixlNotSupportedError: there is no storage."""
        return self.agent.queryMem(self.get_reg_descs(reg_list, mem_type), self.backends.get(backend, 0))  # type: ignore[arg-type]

    def prep_mem_view(self, dlist: Any, *, backends: list[str] | None = None) -> int:
        """Refused with nixlNotSupportedError: there are no GPU-initiated transfers."""
        return self.agent.prepMemView(dlist, self._handles(backends))

    def release_mem_view(self, mvh: int) -> None:
        """Refused with nixlNotSupportedError."""
        self.agent.releaseMemView(mvh)

    # Prepared lists and transfers.

    def make_connection(self, remote_agent: str, backends: list[str] = []) -> None:  # noqa: B006
        """Connects to a remote agent now; otherwise the first list prepared for it does."""
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: list[str] = [],  # noqa: B006
    ) -> nixl_prepped_dlist_handle:
        """Prepares a list once, from which transfers then choose rows by index.

        `agent_name`: "NIXL_INIT_AGENT" or "" for the local side; a remote agent's name, or this agent's own for a
        transfer within it. An Nx5 array has rows (address, length, device, stride, count); `mem_type` is then needed.
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
        """A transfer between the rows of two prepared lists with these indices: lists, or 1-D integer arrays."""
        op = self.nixl_ops[operation]
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
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
        """A transfer between all rows of two lists."""
        op = self.nixl_ops[operation]
        handles = self._handles(backends)
        handle = self.agent.createXferReq(op, local_descs, remote_descs, remote_agent, notif_msg, handles)
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: str | bytes = b"") -> str:
        """Starts a transfer that is not in flight: "DONE" or "PROC". A message given here replaces its own."""
        return _STATES.get(self.agent.postXferReq(handle._handle, notif_msg), "ERR")

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "DONE" or "PROC"; raises what the transfer failed with."""
        return _STATES.get(self.agent.getXferStatus(handle._handle), "ERR")

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        """Times and size of a finished transfer; all zero while it is in flight."""
        return self.agent.getXferTelemetry(handle._handle)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        found = self.agent.queryXferBackend(handle._handle)
        return next(name for name, backend in self.backends.items() if backend == found)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Microseconds by the lanes' cost model, the margin of error, and "ANALYTICAL_BACKEND"."""
        duration, margin, method = self.agent.estimateXferCost(req_handle._handle)
        known = method == nixlBind.NIXL_COST_ANALYTICAL_BACKEND
        return duration, margin, "ANALYTICAL_BACKEND" if known else "UNKNOWN"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # Notifications.

    def get_new_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:  # noqa: B006
        """Messages that have arrived since the last call, by the name of the agent that sent them.

        Those of another process that uses the name of a known or living agent are ignored, with a warning.
        """
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:  # noqa: B006
        """All messages that were not looked up yet; they stay in `notifs`."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: str | bytes,
        backends: list[str] = [],  # noqa: B006
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether a message that begins with (or else contains) `lookup_tag` has arrived; takes it out of `notifs`."""
        waiting = self.update_notifs(backends).get(remote_agent_name, [])
        tag = lookup_tag.encode() if isinstance(lookup_tag, str) else lookup_tag
        for message in waiting:
            if message.startswith(tag) if tag_is_prefix else tag in message:
                waiting.remove(message)
                return True
        return False

    def send_notif(self, remote_agent_name: str, notif_msg: str | bytes, backend: str | None = None) -> None:
        """Sends a message. It is not ordered with transfers or with other messages."""
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
        """As get_agent_metadata, with keys of these rows alone."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Adds a remote agent and returns its name as bytes. Metadata of a known agent is merged."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forgets a remote agent: its lists and transfers cannot be posted any more."""
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends this agent's metadata to a peer's listener, in the background."""
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
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Asks a peer's listener for its metadata, in the background; see `check_remote_metadata`."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has a peer's listener forget this agent."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str, descs: nixlBind.nixlXferDList | None = None) -> bool:
        """Whether a remote agent is known, and these rows of it are."""
        wanted = nixlBind.nixlXferDList(nixlBind.DRAM_SEG) if descs is None else descs
        return self.agent.checkRemoteMD(agent, wanted) == nixlBind.NIXL_SUCCESS

    # Descriptor lists. Invalid input is logged, and the result is None.

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlBind.nixlXferDList | None:
        """A list of (address, length, device): from 3-tuples, an Nx3 array, a tensor or a list of tensors."""
        if isinstance(descs, nixlBind.nixlXferDList):
            return descs
        if isinstance(descs, nixlBind.nixlRegDList):
            logger.error("RegList type detected for transfer, please use XferList")
            return None
        made = self._descs(nixlBind.nixlXferDList, descs, mem_type, 3)
        return made if isinstance(made, nixlBind.nixlXferDList) else None

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlBind.nixlRegDList | None:
        """A list of (address, length, device, meta): from 4-tuples, an Nx3 array, a tensor or a list of tensors."""
        if isinstance(descs, nixlBind.nixlRegDList):
            return descs
        if isinstance(descs, nixlBind.nixlXferDList):
            logger.error("XferList type detected for registration, please use RegList")
            return None
        made = self._descs(nixlBind.nixlRegDList, descs, mem_type, 4)
        return made if isinstance(made, nixlBind.nixlRegDList) else None

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlBind.nixlRemoteDList | None:
        """A list of (address, length, device, agent); memory views, which use it, are refused."""
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
        """A list for another process."""
        return _lists.to_bytes(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> nixlBind.nixlXferDList | nixlBind.nixlRegDList:
        """The list of `get_serialized_descs`. Raises nixlMismatchError for other bytes; nothing of them is executed."""
        return _lists.from_bytes(serialized_descs)
