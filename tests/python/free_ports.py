"""Ports for listeners that a test starts later."""

from __future__ import annotations

import contextlib
import random
import socket

# The kernel hands out ports from 32768 on: one of those could be given to a worker of another test meanwhile.
FIRST, LAST = 20_000, 32_000


def free_port() -> int:
    """A port that nobody listens on, nor on the one after it, where the store of torchrun's job is."""
    while True:
        port = random.randrange(FIRST, LAST)
        with socket.socket() as one, socket.socket() as next_one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            next_one.bind(("127.0.0.1", port + 1))
            return port
