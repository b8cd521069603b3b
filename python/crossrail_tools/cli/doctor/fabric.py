"""Checks of libfabric (`--fabric`): what it offers, and what its devices really do, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import crossrail
from crossrail._native import fabric_state, fabric_test, fabric_write_into
from crossrail.records import FabricDevice, FabricState
from crossrail_tools.report.units import format_bytes, format_duration_us, format_rate, format_size

from ..failure import Failure
from ..info import write_limit
from ..processes import Message
from ..rank_process import Parent
from .finding import Found, Machine, mib
from .second import context_for, second_process

STEP_S = 30.0
"""Limit of a test in the other process, its start and the loading of libfabric included."""

OF_NICS = ("efa", "efa-direct", "cxi", "verbs")
"""The providers of NICs, best first, without what is layered on them."""

OTHERS = ("tcp", "shm")
"""Providers that need no NIC: they are tested where there is none."""

RDMA_BY_DEFAULT = (1, 18)
"""Interface from which on EFA uses the NIC's RDMA by itself."""

GPU_BYTES = 16 << 20
PATTERN = 0xA7
SLOW_MS = 100.0
"""Registration of a GiB that takes longer is worth a note."""

LINKS = "ip link, ibv_devinfo, cxi_stat; the cable and the switch's port"


def library(machine: Machine) -> Iterable[Found]:
    """The library: its version and file, and others of this process."""
    state = _state(machine)
    if state["version"] is None:
        yield Found("error", state["reason"] or "it cannot be used", state["fix"] or "apt install libfabric1")
        return
    files = state["files"]
    if len(files) > 1:
        text = f"libfabric is loaded {len(files)} times: {' '.join(files)}: providers of one do not know the other's"
        yield Found("warning", text, "CROSSRAIL_FABRIC_LIBRARY: the file that NCCL's plugin loads, too")
    version = tuple(int(part) for part in state["version"].split("."))
    if version < RDMA_BY_DEFAULT and any(one["provider"] == "efa" for one in state["devices"]):
        text = f"libfabric {state['version']} emulates remote writes on EFA by messages"
        yield Found("warning", text, "CROSSRAIL_FABRIC_LIBRARY=/opt/amazon/efa/lib, of EFA's installer")
    yield Found("ok", f"libfabric {state['version']}: {', '.join(files) or 'its file is not known'}")


def devices(machine: Machine) -> Iterable[Found]:
    """Every device of every provider: NIC, speed, link, and whether GPU memory is read and written directly."""
    state = _usable(machine)
    for one in state["devices"]:
        nic = " ".join(part for part in (one["nic"], one["pci"]) if part)
        speed = f"{one['speed'] / 1e9:g} Gbit/s" if one["speed"] else "speed not known"
        if one["up"] is False:
            yield Found("warning", f"{nic}: no link", LINKS, _name(one))
            continue
        link = "link up" if one["up"] else "link not known"
        memory = "GPU memory directly" if one["gpu"] else "GPU memory through host memory: the provider has no HMEM"
        yield Found("ok", ", ".join(part for part in (nic, speed, link, memory) if part), subject=_name(one))
    if state["refused"]:
        yield Found("warning", state["refused"], state["fix"] or "fi_info")
    if not any(_base(one) in OF_NICS for one in state["devices"]):
        text = f"libfabric {state['version']} finds no NIC (efa, cxi, verbs: none)"
        yield Found("note", text, "fi_info -t FI_EP_RDM -c 'FI_MSG|FI_RMA'; FI_PROVIDER and FI_PROVIDER_PATH")


def limits(machine: Machine) -> Iterable[Found]:
    """The limits of each device that is tested."""
    for one in _tested(machine):
        parts = [
            f"writes of {write_limit(one)}, {one['tx_size']} in flight",
            f"{one['iov_limit']} pieces to {one['rma_iov_limit']}",
            f"{one['inject_size']} bytes injected",
            f"immediates of {one['cq_data_size']} bytes" + (", which consume a receive" if one["rx_cq_data"] else ""),
            f"keys of {one['mr_key_size']} bytes",
            f"registrations: {one['modes']}",
        ]
        yield Found("ok", "; ".join(parts), subject=_name(one))


def writes(machine: Machine) -> Iterable[Found]:
    """Writes between two endpoints of each device: all bytes, and all bits of immediates."""

    def judge(one: FabricDevice, facts: Any) -> Found:
        text = f"8 bytes in {format_duration_us(facts['latency_us'])}, 1 MiB at {format_rate(facts['gb_per_s'])}"
        return Found("ok", f"{text}, compared; immediates keep their 32 bits", subject=_name(one))

    return _each(machine, "write", judge, every=True)


def keys(machine: Machine) -> Iterable[Found]:
    """A write by a key that was not given: nothing may be written."""

    def judge(one: FabricDevice, facts: Any) -> Found:
        if facts["written"]:
            text = f"a wrong key wrote {format_bytes(facts['written'])}: any peer that reaches this NIC can write"
            fix = f"CROSSRAIL_TLS=^fabric; report this, with provider {one['provider']}"
            return Found("error", text, fix, _name(one))
        refused = f"refused after {facts['error_ms']:.0f} ms" if facts["refused"] else "dropped without an error"
        after = "later writes arrive" if facts["survives"] else "the connection is lost with it"
        return Found("ok", f"a write by a wrong key is {refused}; {after}", subject=_name(one))

    return _each(machine, "key", judge)


def fences(machine: Machine) -> Iterable[Found]:
    """A registration that is closed while a write is arriving: does the write stop?"""

    def judge(one: FabricDevice, facts: Any) -> Found:
        if not facts["began"]:
            return Found("note", "the write was over before its registration was closed", subject=_name(one))
        if facts["fenced"]:
            return Found("ok", "a closed registration stops a write that is arriving", subject=_name(one))
        text = f"{format_bytes(facts['after_bytes'])} were written after the registration was closed"
        text += ": a peer that does not confirm loses its lane before memory is returned"
        return Found("note", text, subject=_name(one))

    return _each(machine, "fence", judge)


def rows(machine: Machine) -> Iterable[Found]:
    """From which length on rows are faster one by one than packed."""

    def judge(one: FabricDevice, facts: Any) -> Found:
        length = format_size(int(facts["packed_below_bytes"]))
        return Found("ok", f"rows of less than {length} are faster packed into one write", subject=_name(one))

    return _each(machine, "rows", judge)


def registration(machine: Machine) -> Iterable[Found]:
    """The cost of registering host memory."""

    def judge(one: FabricDevice, facts: Any) -> Found:
        first, later = facts["first_ms_per_gib"], facts["later_ms_per_gib"]
        text = f"{first:.1f} ms per GiB, {later:.1f} with 256 MiB registered"
        if max(first, later) > SLOW_MS:
            return Found("note", text, "register pools once, before traffic: Worker.register", _name(one))
        return Found("ok", text, subject=_name(one))

    return _each(machine, "register", judge)


def gpu_memory(machine: Machine) -> Iterable[Found]:
    """Each GPU's memory, written by a NIC and read as soon as the immediate has arrived."""
    able = [one for one in _first_of_each(_tested(machine)) if one["gpu"]]
    if not machine.gpus:
        yield Found("note", "no GPU that CUDA can use")
    elif not able:
        yield Found("note", "GPU memory goes through host memory: no provider here has HMEM")
    else:
        for one in able:
            for gpu in machine.gpus:
                yield _gpu_written(one, gpu)


def _gpu_written(one: FabricDevice, gpu: str) -> Found:
    subject = f"{_name(one)}, {gpu}"
    try:
        facts = _ask({"test": "gpu", "provider": one["provider"], "device": one["name"], "gpu": gpu})
    except Failure as error:
        return Found("error", str(error), "nvidia-smi topo -m; modprobe nvidia-peermem, or dmabuf", subject)
    if facts["wrong"]:
        text = f"{format_bytes(facts['wrong'])} of {mib(GPU_BYTES)} were not visible when the immediate had arrived"
        return Found("error", text, f"CROSSRAIL_TLS=^fabric; report this, with provider {one['provider']}", subject)
    text = f"registered in {facts['register_ms']:.1f} ms; {mib(GPU_BYTES)} written and visible with the immediate"
    return Found("ok", text, subject=subject)


def _state(machine: Machine) -> FabricState:
    """The state of libfabric, from a process of its own, once: some providers end the process that loads them."""
    if machine.fabric_state is None:
        asked = _ask({"test": "state", "provider": machine.fabric or None})
        machine.fabric_state = asked["state"]
    return machine.fabric_state


def _usable(machine: Machine) -> FabricState:
    state = _state(machine)
    if state["version"] is None:
        raise Failure(state["reason"] or "libfabric cannot be used")
    return state


def _tested(machine: Machine) -> list[FabricDevice]:
    """The devices to test: those of the provider that was named, or of NICs, or of providers that need none."""
    known = [one for one in _usable(machine)["devices"] if one["up"] is not False]
    if machine.fabric:
        return known
    nics = [one for one in known if _base(one) in OF_NICS]
    return nics or [one for one in known if _base(one) in OTHERS]


def _first_of_each(known: Sequence[FabricDevice]) -> list[FabricDevice]:
    return list({one["provider"]: one for one in reversed(known)}.values())[::-1]


def _each(
    machine: Machine, test: str, judge: Callable[[FabricDevice, Any], Found], *, every: bool = False
) -> Iterable[Found]:
    """The findings of a test, of each device or of the first of each provider; a failed test is an error."""
    known = _tested(machine)
    for one in known if every else _first_of_each(known):
        try:
            yield judge(one, _ask({"test": test, "provider": one["provider"], "device": one["name"]}))
        except Failure as error:
            fix = f"FI_LOG_LEVEL=warn crossrail doctor --fabric {one['provider']} --only fabric-{test}"
            yield Found("error", str(error), fix, _name(one))


def _ask(job: Message) -> dict[str, Any]:
    with second_process({"do": "fabric", **job}) as second:
        return dict(second.wait_for("facts", STEP_S)["facts"])


def serve_test(parent: Parent, job: Message) -> None:
    """Runs the test of ``job`` in the other process. Raises Failure with its reason."""
    context = context_for(fabric_library=os.environ.get("CROSSRAIL_FABRIC_LIBRARY") or None)
    provider, device = job.get("provider"), job.get("device", "")
    try:
        if job["test"] == "state":
            facts: dict[str, Any] = {"state": fabric_state(context, provider)}
        elif job["test"] == "gpu":
            facts = _write_gpu(context, str(provider), device, job["gpu"])
        else:
            facts = fabric_test(context, str(provider), device, job["test"])
    except crossrail.CrossrailError as error:
        raise Failure("; ".join(part for part in (error.detail, error.hint) if part)) from None
    parent.send("facts", facts=facts)


def _write_gpu(context: crossrail.Context, provider: str, device: str, gpu: str) -> dict[str, Any]:
    memory = context.alloc(GPU_BYTES, gpu)
    address = memory.__cuda_array_interface__["data"][0]
    ordinal = int(gpu.removeprefix("cuda:"))
    facts: dict[str, Any] = fabric_write_into(context, provider, device, (address, GPU_BYTES), PATTERN, ordinal)
    seen = np.zeros(GPU_BYTES, np.uint8)
    memory.copy_to(seen.data)
    return facts | {"wrong": int(np.count_nonzero(seen != PATTERN))}


def _name(one: FabricDevice) -> str:
    return f"{one['provider']}/{one['name']}"


def _base(one: FabricDevice) -> str:
    return one["provider"].partition(";")[0]
