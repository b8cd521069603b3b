"""`crossrail info`: what is here, what it can do, what is unusable, why, and the fix."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.text import Text

import crossrail
from crossrail.records import Info
from crossrail.report import capture_environment, console, table, write_text

from .info_arguments import InfoOptions
from .setup import check_json

SCHEMA = "crossrail-info/1"


def show_info(options: InfoOptions) -> None:
    """Prints the tables and writes the JSON that was asked for. Raises the library's errors and WriteError."""
    check_json(options.json)
    info = crossrail.Context().info()
    print_info(info, console(stderr=options.json == "-"))
    if options.json is not None:
        whole = {"schema": SCHEMA, "environment": dataclasses.asdict(capture_environment()), "info": info}
        write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", options.json)


def print_info(info: Info, to: Console) -> None:
    """Prints every part of ``info``."""
    environment = capture_environment()
    cpus = ",".join(map(str, info["cpus"]))
    to.print(f"crossrail {environment.crossrail} on {environment.host}: {environment.cpu}, processors {cpus}")
    to.print(f"{environment.kernel}, {environment.memory_gib} GiB memory, {environment.python}\n")
    _print_transports(info, to)
    _print_devices(info, to)
    to.print(f"GPUs: {len(info['gpus'])}" if info["gpus"] else "GPUs: none found")
    for gpu in info["gpus"]:
        to.print("  " + ", ".join(f"{name} {value}" for name, value in gpu.items()))
    settings = table("settings", ["name", "value", ""], left=3)
    for setting in info["settings"]:
        settings.add_row(setting["name"], setting["value"] or "(unset)", "default" if setting["is_default"] else "set")
    to.print(settings)


def _print_transports(info: Info, to: Console) -> None:
    transports = table("transports", ["transport", "usable", "what it can do, or why it is out and the fix"], left=3)
    for transport in info["transports"]:
        said = transport["detail"]
        if not transport["usable"]:
            said = "; ".join(part for part in (transport["reason"], transport["fix"]) if part)
        transports.add_row(transport["name"], "yes" if transport["usable"] else "no", Text(said, overflow="fold"))
    to.print(transports)


def _print_devices(info: Info, to: Console) -> None:
    devices = table("network devices", ["device", "interface", "address", "speed", "NUMA", "rail", "because"], left=7)
    for device in info["devices"]:
        speed = "-" if device["speed_mbps"] is None else f"{device['speed_mbps'] / 1000:g} Gbit/s"
        node = "-" if device["numa_node"] is None else str(device["numa_node"])
        chosen = "yes" if device["chosen"] else "no"
        cells = [device["name"], device["interface"], device["address"], speed, node, chosen, device["reason"]]
        devices.add_row(*cells)
    to.print(devices)
