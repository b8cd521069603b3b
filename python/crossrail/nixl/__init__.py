"""NIXL's Python interface on Crossrail. The package crossrail-nixl installs it under the name `nixl`.

Programs written for NIXL 1.5.1 run unchanged: agents, registrations, prepared lists, transfers, notifications,
metadata. Any thread may call anything. Both ends need it; it does not talk to NVIDIA's. Storage backends and memory
views for GPU-initiated transfers raise nixlNotSupportedError.
"""

from __future__ import annotations

from crossrail.nixl import _api, _bindings, _utils, logging
from crossrail.nixl._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)

nixlBind = _bindings

__all__ = [
    "DEFAULT_COMM_PORT",
    "_api",
    "_bindings",
    "_utils",
    "logging",
    "nixlBind",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
