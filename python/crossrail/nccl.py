"""Crossrail as a network plugin of NCCL: where the library is, and what makes NCCL use it.

import os, crossrail.nccl
os.environ.update(crossrail.nccl.environment())     # before the first communicator is made
"""

from __future__ import annotations

from pathlib import Path

from .errors import UnsupportedError

__all__ = ["environment", "plugin_path"]

LIBRARY = "libnccl-net-crossrail.so"


def plugin_path() -> Path:
    """The plugin's path. Raises UnsupportedError if this installation has none."""
    path = Path(__file__).with_name(LIBRARY)
    if not path.is_file():
        raise UnsupportedError(
            f"this installation has no {LIBRARY}; `make build` and the wheels of `make wheels` have it"
        )
    return path


def environment() -> dict[str, str]:
    """The variables that make NCCL load the plugin, and fail rather than use another network.

    Raises UnsupportedError if this installation has no plugin.
    """
    return {"NCCL_NET_PLUGIN": str(plugin_path()), "NCCL_NET": "Crossrail"}
