"""Threads for native waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def start_thread(target: Callable[..., object], *arguments: Any, name: str) -> None:
    """Starts a daemon thread of the system, also where gevent has replaced threads: a native wait in a greenlet would
    stop all others. What it shares with greenlets must be native, too: `_queue.SimpleQueue`, not `queue.SimpleQueue`.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        monkey.get_original("_thread", "start_new_thread")(target, arguments)
    else:
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()
