"""The built-in store in a process of its own."""

from __future__ import annotations

import signal

import crossrail
from crossrail._native import StoreServer

from .addresses import STORE_PORT, resolve
from .failure import say
from .store_arguments import StoreOptions

ENDING = (signal.SIGINT, signal.SIGTERM)


def serve_store(options: StoreOptions) -> None:
    """Prints the store's address and serves until SIGINT or SIGTERM. Raises Failure and the library's errors.

    On the main thread: the signals are blocked, for the store's threads too, and waited for.
    """
    context = crossrail.Context(secret_file=options.secret_file)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    with StoreServer(context, resolve(options.listen, default_port=STORE_PORT)) as server:
        print(server.address, flush=True)
        say(f"serving; others use it with CROSSRAIL_STORE={server.address}")
        ended_by = signal.sigwait(ENDING)
    say(f"ended by {signal.Signals(ended_by).name}")
