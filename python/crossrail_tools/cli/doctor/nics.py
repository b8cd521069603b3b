"""Checks of the network devices that carry data: link, speed, MTU, address, route, queues, distance."""

from __future__ import annotations

import collections
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from crossrail_tools.report.units import counted

from .finding import Cause, Found, Machine, number_of, text_of
from .links import Rail
from .netlink import route

JUMBO_MTU = 9000
JUMBO_FROM_MBPS = 25_000
MANY_PROCESSORS = 4


def link_state(machine: Machine) -> Iterable[Found]:
    """Up, and with a link."""
    if not machine.rails:
        text = "no network device with an address but loopback: other machines cannot be reached"
        yield Found("note", text, "ip addr add ADDRESS/PREFIX dev DEVICE; ip link set DEVICE up")
    for rail in machine.rails:
        if not rail.up:
            yield Found("warning", "is down", f"ip link set {rail.interface} up", rail.name)
        elif not rail.carrier:
            text = "is up but has no link: cable, switch port, or the other end"
            yield Found("warning", text, f"ethtool {rail.interface}; check the cable and the other end", rail.name)
        else:
            speed = "no speed reported" if rail.speed_mbps is None else f"{rail.speed_mbps / 1000:g} Gbit/s"
            yield Found("ok", f"up, {speed}, MTU {rail.mtu}, {rail.address}/{rail.prefix}", subject=rail.name)


def speeds(machine: Machine) -> Iterable[Found]:
    """Whether all data devices have negotiated one speed."""
    known = {rail.name: rail.speed_mbps for rail in machine.rails if rail.works and rail.speed_mbps is not None}
    fastest = max(known.values(), default=0)
    for name, speed in known.items():
        if speed < fastest:
            text = f"{speed / 1000:g} Gbit/s, where another device has {fastest / 1000:g}"
            fix = f"ethtool -s {name} autoneg on; check cable and switch port; or CROSSRAIL_NET_DEVICES=^{name}"
            yield Found("note", text, fix, name)
    if not any(speed < fastest for speed in known.values()):
        same = f"{fastest / 1000:g} Gbit/s each" if known else "no device reports a speed (virtual ones do not)"
        yield Found("ok", same)


def mtus(machine: Machine) -> Iterable[Found]:
    """Whether devices of one speed have one MTU, and one that suits it."""
    rails = [rail for rail in machine.rails if rail.works]
    if not rails:
        yield Found("note", "no device is up")
        return
    for rail in rails:
        alike = [one.mtu for one in rails if one.speed_mbps == rail.speed_mbps]  # a management NIC may have its own
        (usual, _), *_ = collections.Counter(alike).most_common(1)
        largest = max(alike)
        fix = f"ip link set {rail.interface} mtu {largest}, on both ends and the switch between"
        if rail.mtu < largest and (rail.mtu != usual or rail.mtu < 1280):
            yield Found("warning", f"MTU {rail.mtu}, where another device of its speed has {largest}", fix, rail.name)
        elif (rail.speed_mbps or 0) >= JUMBO_FROM_MBPS and rail.mtu < JUMBO_MTU:
            text = f"MTU {rail.mtu} at {(rail.speed_mbps or 0) / 1000:g} Gbit/s: each packet costs processor time"
            fix = f"ip link set {rail.interface} mtu {JUMBO_MTU}, on both ends and the switch between"
            yield Found("note", text, fix, rail.name)
        else:
            yield Found("ok", f"MTU {rail.mtu}", subject=rail.name)


def addresses(machine: Machine) -> Iterable[Found]:
    """Devices that share a subnet: the kernel then answers and sends by either."""
    shared = shared_subnets(machine.rails)
    for subnet, rails in shared.items():
        names = _together(rails)
        text = f"share {subnet}: without rules per source address, all of them send by {rails[0].name}"
        fix = "; ".join(
            f"ip route add {subnet} dev {rail.interface} table {100 + number}; "
            f"ip rule add from {rail.address} table {100 + number}"
            for number, rail in enumerate(rails)
        )
        sends = {rail.name: route(_neighbour(rail), rail.address).interface for rail in rails}
        if all(sends[rail.name] == rail.interface for rail in rails):
            yield Found("ok", f"share {subnet}, and each sends by itself", subject=names)
        else:
            yield Found("warning", text, fix, names)
    if not shared:
        yield Found("ok", "each device has a subnet of its own")


def shared_subnets(rails: Iterable[Rail]) -> dict[str, list[Rail]]:
    """The subnets with several of ``rails``, and those."""
    by_subnet: dict[str, list[Rail]] = {}
    for rail in rails:
        if rail.works and not rail.loopback:
            by_subnet.setdefault(rail.subnet, []).append(rail)
    return {subnet: rails for subnet, rails in by_subnet.items() if len(rails) > 1}


def misrouted(rails: Iterable[Rail], rail: Rail) -> Cause:
    """What names the cause if packets of one of ``rails`` leave by another device."""
    twins = shared_subnets(rails).get(rail.subnet)
    return ("nic-route", rail.name) if twins is None else ("nic-address", _together(twins))


def _together(rails: Iterable[Rail]) -> str:
    return " and ".join(rail.name for rail in rails)


def _neighbour(rail: Rail) -> str:
    """Another address of a rail's subnet, to ask for the route to."""
    network = ipaddress.ip_network(rail.subnet)
    own = ipaddress.ip_address(rail.address)
    first = network.network_address + 1
    return str(first if first != own else network.network_address + 2)


def routes(machine: Machine) -> Iterable[Found]:
    """Whether packets to a device's own subnet leave by that device."""
    for rail in machine.rails:
        bits = 128 if ":" in rail.address else 32
        if not rail.works or rail.loopback or rail.prefix >= bits - 1:
            continue
        found = route(_neighbour(rail), rail.address)
        if found.interface == rail.interface:
            yield Found("ok", f"{_neighbour(rail)} leaves by {rail.interface}", subject=rail.name)
            continue
        text = f"{_neighbour(rail)} leaves by {found}, not by {rail.interface}"
        if found.interface is None:
            text = f"{_neighbour(rail)} cannot be reached from {rail.address}: {found}"
        yield Found("warning", text, route_fix(found.matched, rail), rail.name, because=misrouted(machine.rails, rail))


def route_fix(matched: str, rail: Rail) -> str:
    """The command that makes packets to a rail's subnet leave by that rail."""
    if matched and matched != "default" and matched != rail.subnet:
        return f"ip route del {matched}"
    return f"ip route replace {rail.subnet} dev {rail.interface} src {rail.address}"


def queues(machine: Machine) -> Iterable[Found]:
    """Receive queues and the processors that their interrupts run on."""
    seen = False
    for rail in machine.rails:
        if rail.virtual or not rail.works:
            continue
        seen = True
        folder = machine.sys / "class/net" / rail.interface
        count = len(list((folder / "queues").glob("rx-*")))
        if count == 1 and (os.cpu_count() or 1) >= MANY_PROCESSORS:
            text = f"one receive queue: one processor takes all packets of {os.cpu_count()} that there are"
            yield Found("note", text, f"ethtool -L {rail.interface} combined {MANY_PROCESSORS}", rail.name)
            continue
        where = _interrupts(machine, folder)
        one_for_all = len(where) > 1 and len(set(where.values())) == 1 and len(next(iter(where.values()))) == 1
        near = _near(machine, rail)
        far = {irq for irq, on in where.items() if near and not on & near}
        if one_for_all and (os.cpu_count() or 1) > 1:
            text = f"all {len(where)} interrupts run on processor {next(iter(next(iter(where.values()))))}"
            yield Found(
                "warning", text, "systemctl start irqbalance, or spread /proc/irq/N/smp_affinity_list", rail.name
            )
        elif far:
            text = f"{len(far)} of {len(where)} interrupts run on processors of another NUMA node than {rail.numa_node}"
            fix = f"for i in {' '.join(sorted(far)[:4])} ...: echo {_ranges(near)} > /proc/irq/$i/smp_affinity_list"
            yield Found("warning", text, fix, rail.name)
        else:
            shown = f"{counted(len(where), 'interrupt')}" if where else "no interrupts shown"
            yield Found("ok", f"{counted(count, 'receive queue')}, {shown}", subject=rail.name)
    if not seen:
        yield Found("note", "no physical device is up; virtual ones have neither queues nor interrupts")


def _interrupts(machine: Machine, folder: Path) -> dict[str, frozenset[int]]:
    """The interrupts of a device, and the processors that each runs on."""
    device = Path(os.path.realpath(folder / "device"))
    for place in (device, device.parent):
        numbers = sorted(entry.name for entry in (place / "msi_irqs").glob("*"))
        if numbers:
            break
    found = {}
    for number in numbers:
        entry = machine.proc / "irq" / number
        on = parse_cpus(text_of(entry / "effective_affinity_list") or text_of(entry / "smp_affinity_list"))
        if on:
            found[number] = on
    return found


def _near(machine: Machine, rail: Rail) -> frozenset[int]:
    """The processors of the device's NUMA node; empty if it is unknown or the only one."""
    nodes = machine.info["machine"]["numa_nodes"]
    if len(nodes) < 2 or rail.numa_node is None:
        return frozenset()
    return frozenset(cpu for node in nodes if node["node"] == rail.numa_node for cpu in node["cpus"])


def parse_cpus(text: str) -> frozenset[int]:
    """The processors of a list such as ``0-3,8``; empty for anything else."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _ranges(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


def distances(machine: Machine) -> Iterable[Found]:
    """How far each GPU is from the nearest data device."""
    gpus = machine.info["cuda"]["devices"]
    if not gpus:
        yield Found("note", "no GPU can be used")
        return
    for gpu in gpus:
        by_name = {nic["name"]: nic["distance"] for nic in gpu["nics"]}
        known = {name: distance for name, distance in by_name.items() if distance != "unknown"}
        subject = f"cuda:{gpu['ordinal']}"
        if not known:
            yield Found("note", "the machine does not expose its distance to any network device", subject=subject)
        elif set(known.values()) == {"across"}:
            text = f"every network device is across the NUMA boundary: {', '.join(known)}"
            fix = f"use another GPU for network traffic, or CROSSRAIL_NET_DEVICES=near:{gpu['ordinal']}"
            yield Found("note", text, fix, subject)
        else:
            near = [name for name, distance in known.items() if distance != "across"]
            yield Found("ok", f"near {', '.join(near)}", subject=subject)


def filters(machine: Machine) -> Iterable[Found]:
    """Reverse-path filters, which drop packets that arrive by another device than answers would leave by."""
    everywhere = number_of(machine.proc / "sys/net/ipv4/conf/all/rp_filter") or 0
    strict = [
        rail.name
        for rail in machine.rails
        if rail.works
        and not rail.loopback
        and max(everywhere, number_of(machine.proc / "sys/net/ipv4/conf" / rail.interface / "rp_filter") or 0) == 1
    ]
    if len(strict) > 1 and len({rail.subnet for rail in machine.rails if rail.name in strict}) < len(strict):
        text = (
            f"strict reverse-path filters on {', '.join(strict)}, of which some share a subnet, drop packets silently"
        )
        fix = "; ".join(f"sysctl -w net.ipv4.conf.{name}.rp_filter=2" for name in strict)
        yield Found("warning", text, fix)
    else:
        yield Found("ok", f"strict on {', '.join(strict)}, each alone in its subnet" if strict else "none is strict")
