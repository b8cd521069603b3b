"""Interfaces, addresses and routes as the kernel reports them to this network namespace (rtnetlink).

Needs neither privileges nor iproute2, and is not misled by a sysfs of another namespace.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

TIMEOUT_S = 2.0

_NEWLINK, _GETLINK, _GETADDR, _GETROUTE = 16, 18, 22, 26
_ERROR, _DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_HEAD = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_MOST_BYTES = 1 << 20
_UP, _LOOPBACK = 0x1, 0x8
_FIB_MATCH = 0x2000
_ROUTE_KINDS = {6: "blackhole", 7: "unreachable", 8: "prohibit"}

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Address:
    """An address of an interface, and the length of its subnet's prefix."""

    address: str
    prefix: int

    @property
    def subnet(self) -> str:
        """``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))


@dataclass(frozen=True)
class Interface:
    """A network interface. ``kind`` is that of a virtual one (`veth`, `bridge`), else empty.

    ``qdisc``: what queues its packets; ``dropped``, ``errors``: packets since the interface exists, of both directions.
    """

    name: str
    index: int
    up: bool
    carrier: bool
    loopback: bool
    mtu: int
    kind: str
    qdisc: str
    dropped: int
    errors: int
    addresses: list[Address] = field(default_factory=list)


@dataclass(frozen=True)
class Route:
    """How the kernel would send to a destination: the interface (None: it refuses), the gateway, and why it refuses.

    ``matched`` is the destination of the routing entry that decides, as ``10.0.1.0/24``; empty where the kernel does
    not tell.
    """

    interface: str | None
    gateway: str
    matched: str
    refused: str = ""

    def __str__(self) -> str:
        if self.interface is None:
            return self.refused
        by = f" by {self.gateway}" if self.gateway else ""
        entry = f" (routing entry {self.matched})" if self.matched else ""
        return f"{self.interface}{by}{entry}"


def interfaces() -> list[Interface]:
    """The interfaces of this network namespace with their addresses, ordered by index. Raises OSError."""
    addresses: dict[int, list[Address]] = {}
    for payload in _ask(_GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0), _DUMP):
        family, prefix, _, _, index = _ADDRESS.unpack_from(payload)
        held = _attributes(payload, _ADDRESS.size)
        raw = held.get(2) or held.get(1)  # IFA_LOCAL: on point-to-point links IFA_ADDRESS is the other end
        if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
            addresses.setdefault(index, []).append(Address(socket.inet_ntop(family, raw), prefix))
    found = []
    for payload in _ask(_GETLINK, _LINK.pack(0, 0, 0, 0, 0), _DUMP):
        _, _, index, flags, _ = _LINK.unpack_from(payload)
        held = _attributes(payload, _LINK.size)
        counters = struct.unpack_from("=8Q", held.get(23, bytes(64)))
        kind = _attributes(held.get(18, b""), 0).get(1, b"")
        found.append(
            Interface(
                name=held.get(3, b"?").rstrip(b"\0").decode(errors="replace"),
                index=index,
                up=bool(flags & _UP),
                carrier=bool(held.get(33, b"\0")[0]),
                loopback=bool(flags & _LOOPBACK),
                mtu=int.from_bytes(held.get(4, b""), sys.byteorder),
                kind=kind.rstrip(b"\0").decode(errors="replace"),
                qdisc=held.get(6, b"").rstrip(b"\0").decode(errors="replace"),
                errors=counters[4] + counters[5],
                dropped=counters[6] + counters[7],
                addresses=addresses.get(index, []),
            )
        )
    return sorted(found, key=lambda interface: interface.index)


def dropped_by_rail() -> dict[str, int]:
    """Packets that each interface of this machine but loopback has lost so far. Raises OSError."""
    return {one.name: one.dropped + one.errors for one in interfaces() if not one.loopback}


def route(to: str, source: str) -> Route:
    """How the kernel would send from the local address ``source`` to the address ``to``. Raises OSError."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    bits = 128 if family == socket.AF_INET6 else 32
    attributes = _attribute(1, socket.inet_pton(family, to)) + _attribute(2, socket.inet_pton(family, source))
    answers = []
    for flags in (0, _FIB_MATCH):
        body = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, flags)
        try:
            (payload,) = _ask(_GETROUTE, body + attributes, 0)
        except OSError as error:
            if flags == 0:
                return Route(None, "", "", f"no route ({error.strerror})")
            continue  # a kernel that does not name the entry
        answers.append((payload, _attributes(payload, _ROUTE.size)))
    payload, held = answers[0]
    if (kind := _ROUTE_KINDS.get(payload[7])) is not None:
        return Route(None, "", "", f"a route of the kind {kind}")
    gateway = socket.inet_ntop(family, held[5]) if 5 in held else ""
    matched = ""
    if len(answers) > 1:
        entry, more = answers[1]
        destination = socket.inet_ntop(family, more[1]) if 1 in more else "default"
        matched = destination if destination == "default" else f"{destination}/{entry[1]}"
    return Route(socket.if_indextoname(int.from_bytes(held.get(4, b""), sys.byteorder)), gateway, matched)


def _ask(kind: int, body: bytes, flags: int) -> Iterator[bytes]:
    """The payloads of the kernel's answer to one request. Raises OSError, also for an error that it answers with."""
    number = next(_numbers)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(TIMEOUT_S)
        link.send(_HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | flags, number, 0) + body)
        answers: list[bytes] = []
        while True:
            data = link.recv(_MOST_BYTES)
            at = 0
            while at + _HEAD.size <= len(data):
                length, answer, _, to, _ = _HEAD.unpack_from(data, at)
                payload = data[at + _HEAD.size : at + length]
                at += max((length + 3) & ~3, _HEAD.size)
                if to != number:
                    continue
                if answer == _ERROR:
                    code = -int.from_bytes(payload[:4], sys.byteorder, signed=True)
                    raise OSError(code, os.strerror(code))
                if answer == _DONE:
                    return iter(answers)
                answers.append(payload)
            if not flags & _DUMP and answers:
                return iter(answers)


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(payload: bytes, at: int) -> dict[int, bytes]:
    """The attributes of a message by number, from offset ``at``."""
    found = {}
    while at + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind & 0x3FFF] = payload[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found
