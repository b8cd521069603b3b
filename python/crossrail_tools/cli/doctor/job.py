"""Checks of what a job needs besides this machine: the store, the launcher's variables, NCCL's plugin."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import crossrail
from crossrail.errors import UnsupportedError
from crossrail.nccl import LIBRARY, environment, plugin_path
from crossrail_tools.report.units import counted, format_bytes, format_duration_us

from ..cases import NetPlugin, P2p
from .finding import Found, Machine, text_of
from .second import context_for, second_process

PLUGIN_BYTES = 1 << 20
MOST_PROCESSES = 10_000
STORE_TURNS = 20

VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"),
}
"""What a launcher sets for each process, and what ranks read."""

_START = {
    "torchrun": "torchrun --nproc-per-node N crossrail doctor --torchrun",
    "Slurm": "srun crossrail doctor --slurm",
}
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


def store(machine: Machine) -> Iterable[Found]:
    """Joins a group of one at the store, publishes a value and reads it back."""
    address = machine.store or os.environ.get("CROSSRAIL_STORE", "")
    if not address:
        yield Found("error", "no store is named", "crossrail doctor --store tcp://HOST:PORT, or set CROSSRAIL_STORE")
        return
    context = crossrail.Context(secret_file=machine.secret_file, timeout=3.0)
    name = f"crossrail-doctor-{os.urandom(8).hex()}"
    try:
        with crossrail.Group(name=name, rank=0, size=1, store=address, context=context) as group:
            value = os.urandom(16)
            began = time.perf_counter()
            for turn in range(STORE_TURNS):
                group.publish(str(turn), value)
                if group.collect(str(turn), [0]) != [value]:
                    yield Found("error", "a value read from the store is not the one published", "restart the store")
                    return
                group.withdraw(str(turn))
            each = (time.perf_counter() - began) / STORE_TURNS
            if group.serves_store:
                text = f"nothing listened at {address}; this command started a store there, as rank 0 would"
                yield Found("note", text, "crossrail store --listen HOST:PORT on the machine of that address")
                return
    except crossrail.CrossrailError as error:
        fix = error.hint or "crossrail store --listen HOST:PORT there"
        yield Found("error", f"{address}: {error.detail}", fix)
        return
    yield Found("ok", f"{address}: published, read, withdrawn in {format_duration_us(each * 1e6)} each")


def variables(machine: Machine, environ: Mapping[str, str] = os.environ) -> Iterable[Found]:
    """The variables of the launcher, whether they agree, and whether the store's host can be reached by its name."""
    launcher = machine.launcher or ""
    needed = VARIABLES[launcher]
    missing = [name for name in needed if not environ.get(name)]
    if launcher == "Slurm" and not any(environ.get(name) for name in _NODE_LISTS):
        missing.append(_NODE_LISTS[0])
    if missing:
        yield Found("error", f"not set: {', '.join(missing)}", f"start it by the launcher: {_START[launcher]}")
        return
    rank, size = environ[needed[0]], environ[needed[1]]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        text = f"{needed[0]}={rank} is not below {needed[1]}={size}"
        yield Found("error", text, "unset variables that another launcher or a script has set")
        return
    others = [name for name, names in VARIABLES.items() if name != launcher and environ.get(names[0])]
    if others and launcher == "Slurm":
        text = f"the variables of {others[0]} are set too, and ranks read those first"
        yield Found("warning", text, f"unset {' '.join(VARIABLES[others[0]])}", launcher)
    if launcher == "torchrun":
        yield from _master(environ)
    yield Found("ok", f"{launcher}: process {rank} of {size}")


def _master(environ: Mapping[str, str]) -> Iterable[Found]:
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65535:
        yield Found("error", f"MASTER_PORT={port} is no port with another after it", "torchrun --master-port 29500")
        return
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"MASTER_ADDR={host} does not resolve: {error.strerror}"
        yield Found("error", text, "torchrun --rdzv-endpoint ADDRESS:29500, with an address of the first node")
        return
    everywhere = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
    if not everywhere and all(str(entry[4][0]).startswith("127.") or entry[4][0] == "::1" for entry in found):
        text = f"MASTER_ADDR={host} is loopback, and the job has ranks on other machines"
        yield Found("error", text, "torchrun --rdzv-endpoint ADDRESS:29500, with an address that the others reach")


def plugin(machine: Machine) -> Iterable[Found]:
    """Loads Crossrail's plugin for NCCL as NCCL would, and moves data through it between two processes."""
    try:
        path = plugin_path()
    except UnsupportedError as error:
        yield Found("error", str(error.detail), "pip install a wheel of Crossrail, or make build in the checkout")
        return
    context = context_for(tls="tcp", net_devices="lo")
    with crossrail.Worker(context) as worker:
        job = {"do": "net-plugin", "address": worker.address().hex(), "path": str(path), "size": PLUGIN_BYTES}
        with second_process(job):
            endpoint = worker.accept()
            NetPlugin(str(path), P2p(PLUGIN_BYTES, iters=1, warmup=0)).run(context, worker, [endpoint])
    yield Found("ok", f"{path.name} loaded by two processes, {format_bytes(PLUGIN_BYTES)} moved and compared")
    wanted = environment()
    unset = [name for name, value in wanted.items() if os.environ.get(name) != value]
    if unset:
        yield Found(
            "note", f"NCCL would not use it here: {', '.join(unset)} not set", 'eval "$(crossrail nccl-plugin)"'
        )


def libraries(machine: Machine) -> Iterable[Found]:
    """Which NCCL programs would load, and which running processes have loaded one, with the plugin or without."""
    installed = sorted(
        f"{name} {one.version}"
        for one in importlib.metadata.distributions()
        if (name := str(one.metadata["Name"] or "")).startswith("nvidia-nccl")
    )
    if len(installed) > 1:
        text = f"{', '.join(installed)} are installed together: which one is loaded depends on the order of imports"
        yield Found("warning", text, f"pip uninstall {installed[0].partition(' ')[0]}")
    loaded = _loaded(machine.proc)
    for pid, (nccl, with_plugin) in loaded.items():
        how = "with Crossrail's plugin" if with_plugin else "without Crossrail's plugin"
        fix = "" if with_plugin else 'eval "$(crossrail nccl-plugin)" before that program starts'
        yield Found("ok" if with_plugin else "note", f"has loaded {', '.join(nccl)} {how}", fix, f"process {pid}")
    version = _version_of_system()
    names = [*installed, *([f"libnccl.so.2 {version}"] if version else [])]
    if names:
        yield Found("ok", f"found {', '.join(names)}; {counted(len(loaded), 'running process')} seen with NCCL")
    elif not loaded:
        text = "no NCCL is installed for this Python or for the machine, and no running process has loaded one"
        yield Found("note", text, "pip install nvidia-nccl-cu12, or -cu13, as PyTorch was built for")


def _version_of_system() -> str:
    with contextlib.suppress(OSError, AttributeError):
        number = ctypes.c_int(0)
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0:
            scale = 10_000 if number.value >= 10_000 else 1_000
            return f"{number.value // scale}.{number.value % scale // 100}.{number.value % 100}"
    return ""


def _loaded(proc: Path) -> dict[int, tuple[list[str], bool]]:
    """Processes that may be read and have an NCCL mapped: its files, and whether Crossrail's plugin is mapped too."""
    found = {}
    numbers = sorted(int(entry.name) for entry in proc.glob("[0-9]*"))[:MOST_PROCESSES]
    for number in numbers:
        text = text_of(proc / str(number) / "maps")
        if "libnccl" not in text:
            continue
        files = {line.split(maxsplit=5)[5] for line in text.splitlines() if line.count(" ") >= 5 and "libnccl" in line}
        nccl = sorted(file for file in files if Path(file).name.startswith("libnccl.so"))
        if nccl:
            found[number] = (nccl, any(Path(file).name == LIBRARY for file in files))
    return found
