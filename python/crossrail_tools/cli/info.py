"""`crossrail info`: devices and transports, what they can do, and the reason and fix for those that are unusable."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import crossrail
from crossrail._native import fabric_state
from crossrail.errors import ConfigError, CrossrailError
from crossrail.records import CudaDevice, CudaState, FabricDevice, FabricState, Info
from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.tables import console, table
from crossrail_tools.report.units import format_bytes, format_size
from crossrail_tools.report.writing import write_text

from .failure import UsageFailure
from .parsing import Command, Parser
from .reporting import check_json

SCHEMA = "crossrail-info/1"

LIBRARY = "CROSSRAIL_FABRIC_LIBRARY"
NO_LIMIT = 1 << 62
"""Providers of libfabric without a limit state the largest number of a size."""

NIC_KINDS = ("infiniband", "cxi")
"""Classes of devices in sysfs for which libfabric is loaded: InfiniBand, RoCE and EFA, and Slingshot."""


@dataclass(frozen=True)
class InfoOptions:
    """`crossrail info`."""

    json: str | None = None
    parent: int | None = None

    def run(self) -> None:
        """Prints the tables and, if requested, writes the JSON. A setting that is wrong has its error in its row.

        Raises UsageFailure for it at the end, the library's errors, and WriteError.
        """
        check_json(self.json)
        info, wrong = usable_info()
        fabric = usable_fabric()
        if self.json is not None:
            environment = dataclasses.asdict(capture_environment())
            whole = {"schema": SCHEMA, "environment": environment, "info": info, "fabric": fabric}
            write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", self.json)
        to = console(stderr=self.json == "-")
        print_info(info, to)
        print_fabric(fabric, to)
        if wrong:
            raise UsageFailure(f"{wrong[0]}" + (f" (and {len(wrong) - 1} more settings)" if wrong[1:] else ""))


def usable_info() -> tuple[Info, list[ConfigError]]:
    """The data of a context and a worker without the settings that they refuse; the rows of those have the error."""
    wrong: list[tuple[str, ConfigError]] = []
    info: Info | None = None
    while True:
        try:
            context = crossrail.Context()
            info = context.info()
            crossrail.Worker(context).close()  # it reads the settings that only listening needs
            break
        except ConfigError as refused:
            if refused.operation not in os.environ:
                raise
            wrong.append((os.environ.pop(refused.operation), refused))
        except CrossrailError:
            if info is None:
                raise
            break  # what a worker lacks is no matter of the settings
    rows = {setting["name"]: setting for setting in info["settings"]}
    for value, error in wrong:
        name = error.operation
        shown = "(hidden)" if name == "CROSSRAIL_SECRET" else value
        if name not in rows:
            rows[name] = {"name": name, "value": shown, "is_default": False}
            info["settings"].append(rows[name])
        reason = "; ".join(part for part in (error.detail, error.hint) if part)
        rows[name] |= {"value": shown, "is_default": False, "error": reason}
    return info, [error for _, error in wrong]


def usable_fabric(environ: Mapping[str, str] = os.environ, sys: Path = Path("/sys")) -> FabricState | None:
    """The state of libfabric; None where nothing asks for it: loading it takes time, and installs signal handlers."""
    names = environ.get("CROSSRAIL_TLS", "")
    named = any(name.strip().startswith("fabric") for name in names.split(","))
    nics = any(any((sys / "class" / kind).glob("*")) for kind in NIC_KINDS)
    if not (named or nics or environ.get(LIBRARY)):
        return None
    return fabric_state(crossrail.Context(environment=False, fabric_library=environ.get(LIBRARY) or None))


def write_limit(one: FabricDevice) -> str:
    """The limit of one write over a device of libfabric, in words."""
    most = one["max_msg_size"]
    return "any size" if most >= NO_LIMIT else f"at most {format_size(most)}"


def print_fabric(state: FabricState | None, to: Console) -> None:
    """Prints libfabric's version, file and devices, or why there is none."""
    if state is None:
        to.print("libfabric: not loaded: no RDMA device is here; `crossrail doctor --fabric` tests what it offers\n")
        return
    if state["version"] is None:
        to.print(f"libfabric: not usable: {'; '.join(part for part in (state['reason'], state['fix']) if part)}\n")
        return
    columns = ["device", "NIC", "speed", "link", "GPU memory", "limits"]
    title = f"libfabric {state['version']}: {', '.join(state['files'])}"
    devices = table(title, columns, left=6, keys=1, prose=["limits"])
    for one in state["devices"]:
        speed = f"{one['speed'] / 1e9:g} Gbit/s" if one["speed"] else "-"
        link = {True: "up", False: "down", None: "-"}[one["up"]]
        memory = "directly" if one["gpu"] else "through host memory: the provider has no HMEM"
        limits = f"writes of {write_limit(one)}, {one['tx_size']} in flight; registrations: {one['modes']}"
        nic = " ".join(part for part in (one["nic"], one["pci"]) if part) or "-"
        devices.add_row(f"{one['provider']}/{one['name']}", nic, speed, link, memory, limits)
    to.print(devices)
    if state["refused"]:
        to.print(f"libfabric: {state['refused']}; {state['fix']}\n")


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.add_json()
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return InfoOptions(json=parsed.json)


def print_info(info: Info, to: Console) -> None:
    """Prints every part of ``info``."""
    environment = capture_environment()
    cpus = ",".join(map(str, info["cpus"]))
    to.print(f"crossrail {environment.crossrail} on {environment.host}: {environment.cpu}, processors {cpus}")
    to.print(f"{environment.kernel}, {environment.memory_gib} GiB memory, {environment.python}\n")
    _print_transports(info, to)
    _print_devices(info, to)
    _print_tcp_ways(info, to)
    _print_placement(info, to)
    to.print(f"GPUs: {len(info['gpus'])} seen on the PCI bus" if info["gpus"] else "GPUs: none found")
    for gpu in info["gpus"]:
        to.print("  " + ", ".join(f"{name} {'-' if value is None else value}" for name, value in gpu.items()))
    print_cuda(info["cuda"], to)
    settings = table("settings", ["name", "value", ""], left=3, keys=1, prose=["value", ""])
    for setting in info["settings"]:
        state = "default" if setting["is_default"] else "set"
        if "error" in setting:
            state = f"wrong: {setting['error']}"
        settings.add_row(setting["name"], setting["value"] or "(unset)", state)
    to.print(settings)


def print_cuda(cuda: CudaState, to: Console) -> None:
    """Prints GPUs, their distance to NICs, and the memory taken for them; or why CUDA is unusable, and the fix."""
    if not cuda["present"]:
        reason = "; ".join(part for part in (cuda["reason"], cuda["fix"]) if part)
        to.print(f"CUDA: not usable: {reason or 'unknown reason'}\n")
        return
    to.print(f"CUDA: driver for CUDA {cuda['driver']}\n")
    columns = ["GPU", "name", "for", "PCI", "NUMA", "memory", "free", "bounce memory"]
    devices = table("GPUs", columns, left=5, keys=1, prose=["name"])
    for gpu in cuda["devices"]:
        cells = [f"cuda:{gpu['ordinal']}", gpu["name"], gpu["arch"], gpu["pci"]]
        cells += ["-" if gpu["numa_node"] is None else str(gpu["numa_node"])]
        devices.add_row(*cells, _gib(gpu["memory"]), _gib(gpu["free"]), f"{gpu['bounce_bytes'] / 2**20:.0f} MiB")
    to.print(devices)
    _print_affinity(cuda["devices"], to)
    _print_peer_access(cuda["peer_access"], to)
    cache = cuda["kernel_cache"]
    kept = f"{format_bytes(cache['bytes'])} in {cache['folder']}" if cache else "no usable folder"
    to.print(f"kernel cache: {kept}")
    compiler = cuda["compiler"] or f"none: {cuda['why_no_compiler']}; CROSSRAIL_UNPACK=d2d needs none"
    to.print(f"kernel compiler: {compiler}")
    pinned = sum(gpu["bounce_bytes"] for gpu in cuda["devices"])
    to.print(
        f"memory taken for GPUs: {format_bytes(pinned)} of pinned host memory (CROSSRAIL_BOUNCE for each GPU, from its "
        "first transfer on); no GPU memory except what is allocated through Crossrail\n",
    )


def _print_affinity(gpus: Sequence[CudaDevice], to: Console) -> None:
    """Prints the distance of each NIC to each GPU; NICs at unknown distance (virtual ones) are left out."""
    far = {(gpu["ordinal"], nic["name"]): nic["distance"] for gpu in gpus for nic in gpu["nics"]}
    known = list(dict.fromkeys(nic for (_, nic), distance in far.items() if distance != "unknown"))
    if not known:
        to.print("GPU to NIC: the machine does not expose the distances\n")
        return
    made = table("GPU to NIC: distance on the PCI bus", ["GPU", *known], left=1 + len(known), keys=1)
    for gpu in gpus:
        made.add_row(f"cuda:{gpu['ordinal']}", *(far.get((gpu["ordinal"], nic), "unknown") for nic in known))
    to.print(made)


def _print_peer_access(access: Sequence[Sequence[bool]], to: Console) -> None:
    """Prints which GPUs cannot access each other's memory."""
    if len(access) < 2:
        return
    apart = [f"cuda:{a} to cuda:{b}" for a, row in enumerate(access) for b, reaches in enumerate(row) if not reaches]
    said = f"not from {', '.join(apart)}: those transfers are staged" if apart else "between all GPUs"
    to.print(f"peer access: {said}")


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"


def _print_transports(info: Info, to: Console) -> None:
    detailed = "capabilities, or why it is unusable and the fix"
    transports = table("transports", ["transport", "usable", detailed], left=3, keys=2, prose=[detailed])
    for transport in info["transports"]:
        detail = transport["detail"]
        if not transport["usable"]:
            detail = "; ".join(part for part in (transport["reason"], transport["fix"]) if part)
        transports.add_row(transport["name"], "yes" if transport["usable"] else "no", detail)
    to.print(transports)


def _print_devices(info: Info, to: Console) -> None:
    columns = ["device", "interface", "address", "speed", "NUMA", "rail", "because"]
    devices = table("network devices", columns, left=7, keys=1, prose=["because"], spare=["interface"])
    for device in info["devices"]:
        speed = "-" if device["speed_mbps"] is None else f"{device['speed_mbps'] / 1000:g} Gbit/s"
        node = "-" if device["numa_node"] is None else str(device["numa_node"])
        chosen = "yes" if device["chosen"] else "no"
        cells = [device["name"], device["interface"], device["address"], speed, node, chosen, device["reason"]]
        devices.add_row(*cells)
    to.print(devices)


def _print_tcp_ways(info: Info, to: Console) -> None:
    """Prints which of the kernel's ways to send over TCP are used, and why not the others."""
    columns = ["way", "used", "because"]
    ways = table("TCP: ways to send and receive beside send and recv", columns, left=3, keys=1, prose=["because"])
    for way in info["tcp_ways"]:
        state = "yes" if way["used"] else "no" if way["possible"] else "not possible"
        ways.add_row(way["name"], state, "; ".join(part for part in (way["reason"], way["fix"]) if part))
    to.print(ways)


def _print_placement(info: Info, to: Console) -> None:
    """Prints on which processors threads of network devices and GPUs run."""
    placement = info["placement"]
    if placement["near_devices"]:
        counts = ", ".join(f"{len(node['cpus'])} of node {node['node']}" for node in placement["nodes"])
        to.print(
            "threads of connections and GPUs: on the processors of their device's NUMA node, where that is known "
            f"({counts}); CROSSRAIL_AFFINITY=off lets the scheduler choose\n"
        )
    else:
        to.print(f"threads of connections and GPUs: wherever the scheduler puts them: {placement['why_not']}\n")
