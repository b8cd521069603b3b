"""The rails of this machine as the doctor sees them: also those that are down, which no transfer would use."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crossrail._native import loopback
from crossrail.records import Info

from .netlink import Interface, interfaces

SKIPPED_KINDS = frozenset({"bridge", "dummy", "ifb", "tun", "wireguard", "vxlan", "geneve", "sit", "gre"})
"""Virtual interfaces that are no rails unless the settings name them: they lead to containers, tunnels, or nowhere."""


@dataclass(frozen=True)
class Rail:
    """One address of one interface that carries data, or would if the interface were up."""

    name: str
    interface: str
    up: bool
    carrier: bool
    mtu: int
    address: str
    prefix: int
    virtual: bool
    speed_mbps: int | None = None
    numa_node: int | None = None
    pci: str = ""
    qdisc: str = ""

    @property
    def works(self) -> bool:
        """Whether its link is up."""
        return self.up and self.carrier

    @property
    def loopback(self) -> bool:
        """Whether it is an address of loopback, which reaches this machine only."""
        return self.interface == "lo"

    @property
    def subnet(self) -> str:
        """``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))


def loopback_rails(rails: Sequence[Rail]) -> list[Rail]:
    """Those of ``rails`` that reach this machine only; the loopback address if there is none. Raises OSError."""
    found = [rail for rail in rails if rail.loopback]
    return found or [_of_loopback(one, loopback()) for one in interfaces() if one.loopback]


def find_rails(info: Info, wanted: str, sys: Path = Path("/sys")) -> list[Rail]:
    """The rails of this machine. ``wanted`` is CROSSRAIL_NET_DEVICES: of loopback, only the addresses that it lists.

    Raises OSError.
    """
    known = {device["interface"]: device for device in info["devices"]}
    found = []
    for interface in interfaces():
        if interface.loopback:
            found += [_of_loopback(interface, name) for name in wanted.split(",") if _is_loopback(name)]
            continue
        address = next((one for one in interface.addresses if not _link_local(one.address)), None)
        if address is None or not _selected(interface, address.address, wanted):
            continue
        device = known.get(interface.name)
        hardware = sys / "class/net" / interface.name / "device"
        found.append(
            Rail(
                name=interface.name,
                interface=interface.name,
                up=interface.up,
                carrier=interface.carrier,
                mtu=interface.mtu,
                address=address.address,
                prefix=address.prefix,
                virtual=bool(interface.kind) or not hardware.exists(),
                speed_mbps=device["speed_mbps"] if device else None,
                numa_node=device["numa_node"] if device else None,
                qdisc=interface.qdisc,
                pci=os.path.realpath(hardware).rpartition("/")[2] if hardware.exists() else "",
            )
        )
    return found


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _of_loopback(interface: Interface, address: str) -> Rail:
    bits = 128 if ":" in address else 32
    return Rail(address, interface.name, interface.up, interface.carrier, interface.mtu, address, bits, virtual=True)


def _selected(interface: Interface, address: str, wanted: str) -> bool:
    """Whether the settings let the interface carry data; ``near`` selects among all."""
    names = wanted.removeprefix("^").split(",")
    listed = interface.name in names or address in names
    if wanted.startswith("^"):
        return not listed and interface.kind not in SKIPPED_KINDS
    if wanted in ("", "all") or wanted.startswith("near"):
        return interface.kind not in SKIPPED_KINDS
    return listed


def _link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local and ":" in address


def pair_rails(mine: Sequence[Rail], theirs: Sequence[Rail]) -> list[tuple[Rail, Rail]]:
    """The pairs that transfers would use: the addresses with the longest common prefix first, each rail once."""
    ways = sorted(
        ((common, -at, -to) for at, a in enumerate(mine) for to, b in enumerate(theirs) if (common := _common(a, b))),
        reverse=True,
    )
    pairs: list[tuple[int, Rail, Rail]] = []
    used: tuple[set[int], set[int]] = (set(), set())
    for _, at, to in ways:
        if -at not in used[0] and -to not in used[1]:
            used[0].add(-at)
            used[1].add(-to)
            pairs.append((-at, mine[-at], theirs[-to]))
    return [(a, b) for _, a, b in sorted(pairs, key=lambda pair: pair[0])]


def _common(a: Rail, b: Rail) -> int:
    """Leading bits that the addresses of two rails share, plus 1; 0 if they cannot be paired."""
    one, other = ipaddress.ip_address(a.address), ipaddress.ip_address(b.address)
    if one.version != other.version or a.loopback != b.loopback:
        return 0
    return one.max_prefixlen - (int(one) ^ int(other)).bit_length() + 1
