"""Where an end listens or connects: HOST, HOST:PORT, :PORT, [V6]:PORT."""

from __future__ import annotations

import ipaddress
import socket

from .failure import Failure, UsageFailure

DEFAULT_PORT = 18177
STORE_PORT = 18178
_FORM = "write HOST, HOST:PORT, or [IPV6]:PORT"


def parse_address(text: str, default_host: str = "127.0.0.1", default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of ``text``; what is left out is ``default_host`` and ``default_port``.

    Raises UsageFailure for what is no address.
    """
    host, port_text = _split(text.strip())
    if host.isdigit():
        raise UsageFailure(f"{text!r}: {host} is a number alone, no host; for a port write :{host}, else {_FORM[6:]}")
    if not port_text:
        return host or default_host, default_port
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) < 1 << 16):
        raise UsageFailure(f"{text!r}: {port_text!r} is no port; {_FORM}, port 0 to 65535")
    return host or default_host, int(port_text)


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not host or (rest and not rest.startswith(":")):
            raise UsageFailure(f"{text!r} is no address; {_FORM}")
        return host, rest[1:]
    if text.count(":") > 1:
        return text, ""
    host, _, port = text.partition(":")
    return host, port


def resolve(text: str, default_host: str = "127.0.0.1", default_port: int = DEFAULT_PORT) -> str:
    """The numeric ``host:port`` of ``text``. Raises Failure when the name does not resolve."""
    host, port = parse_address(text, default_host, default_port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Failure(f"{host} does not resolve: {error.strerror}; check the name, or give the address") from error
    return join(str(found[0][4][0]), port)


def join(host: str, port: int) -> str:
    """``host:port`` as text, IPv6 in brackets."""
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        version = 4
    return f"[{host}]:{port}" if version == 6 else f"{host}:{port}"
