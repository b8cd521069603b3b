"""What an engine's own process would have around its connections: its configuration, and its loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

LIMIT_S = 40.0


class Config(SimpleNamespace):
    """What is not set is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def until(what: Callable[[], bool], name: str) -> None:
    """Asks again and again, as an engine's loop does between its steps. Raises TimeoutError."""
    limit = time.monotonic() + LIMIT_S
    while not what():
        if time.monotonic() > limit:
            raise TimeoutError(f"{name} took more than {LIMIT_S:g} s")
        time.sleep(0.001)
