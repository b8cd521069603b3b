"""Control-only connection of two commands: one rail on the port of the control connection, so that one open port is
enough, and no other rail needs to work."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import crossrail
from crossrail.errors import ConfigError, CrossrailError

from .failure import Failure, UsageFailure, print_notice
from .parsing import parse_address
from .point_to_point.channel import Channel

CONNECT_S = 5.0
IDLE_S = 60.0
"""How long one wait for a peer takes."""

_EVERYWHERE = ("0.0.0.0", "::")


@contextlib.contextmanager
def listening(address: str, secret_file: str | None, timeout: float) -> Iterator[tuple[crossrail.Context, Any]]:
    """A context, and its worker that listens at the numeric ``address``. Raises UsageFailure, the library's errors."""
    host, _ = parse_address(address)
    own: dict[str, Any] = {"tls": "tcp", "net_devices": "all" if host in _EVERYWHERE else host, "log": "error"}
    try:
        context = crossrail.Context(**own, secret_file=secret_file, timeout=timeout)
    except ConfigError as error:
        if error.operation != "CROSSRAIL_NET_DEVICES":
            raise
        raise UsageFailure(f"--listen: {error.detail}; {error.hint}") from None
    with crossrail.Worker(context, listen=address) as worker:
        yield context, worker


def serve_each(context: crossrail.Context, worker: Any, serve: Callable[[Channel], None]) -> NoReturn:
    """Serves one peer after the other until it is interrupted; what fails is reported at both ends."""
    while True:
        try:
            endpoint = worker.accept(IDLE_S)
        except crossrail.TimeoutError:
            continue
        channel = Channel(context, worker, endpoint)
        try:
            serve(channel)
            print_notice(f"{endpoint.peer} has finished")
        except (Failure, CrossrailError) as error:
            text = " ".join(str(error).split())
            print_notice(f"{endpoint.peer}: {text}")
            with contextlib.suppress(CrossrailError):
                channel.send({"error": text})
        finally:
            with contextlib.suppress(CrossrailError):
                endpoint.close()


@contextlib.contextmanager
def connected(address: str, secret_file: str | None, timeout: float, start: str) -> Iterator[Channel]:
    """A channel to the command that listens at the numeric ``address``; ``start``: how to start it. Raises Failure."""
    local = own_address(address)
    # No peer connects to this end, so it needs none of the ports of CROSSRAIL_PORTS.
    own: dict[str, Any] = {"tls": "tcp", "net_devices": local, "ports": "1-65535", "log": "error"}
    context = crossrail.Context(**own, secret_file=secret_file, timeout=timeout)
    with crossrail.Worker(context) as worker:
        try:
            endpoint = worker.connect(address, timeout=CONNECT_S)
        except (crossrail.UnreachableError, crossrail.TimeoutError) as error:
            port = parse_address(address)[1]
            allow = f", and allow TCP port {port} from {local}" if isinstance(error, crossrail.TimeoutError) else ""
            raise Failure(f"{' '.join(str(error).split())} (start `{start}` there{allow})") from None
        yield Channel(context, worker, endpoint)


def own_address(to: str) -> str:
    """The local address from which ``to`` (host:port) is reached. Raises Failure."""
    host, port = parse_address(to)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        try:
            one.connect(socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4])
        except OSError as error:
            raise Failure(f"no route to {to}: {error.strerror}; check `ip route get {host}`") from None
        return str(one.getsockname()[0])


def listen_text(address: str, default: int) -> str:
    """``address`` as an argument of ``--listen``, for a command whose default port is ``default``."""
    host, port = parse_address(address)
    shown = f"[{host}]" if ":" in host else host
    return shown if port == default else f"{shown}:{port}"
