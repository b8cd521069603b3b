"""Checks of what this process may use: settings, descriptors, memory, processors, kernel features, the clock."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import socket
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from crossrail._native import cpu_quota, host_memory
from crossrail_tools.report.units import counted, format_bytes

from .finding import Found, Machine, Severity, text_of
from .transports import refusals

ENOUGH_DESCRIPTORS = 4096
LOCKED = 64 << 20
SMALL_SHM = 1 << 30
LEAST_MEMORY = 1 << 30
ENOUGH_WINDOW = 4 << 20
FAST_MBPS = 10_000
SLOW_CLOCK_NS = 300
CLOCK_READS = 20_000

_USES = {
    "memfd_create": "shared memory between processes",
    "process_vm_readv": "single copies between processes",
    "pidfd_open": "NCCL and CUDA programs that pass descriptors",
    "sched_setaffinity": "pinning processes to processors",
    "get_mempolicy": "placing memory on NUMA nodes",
}

_TIME_ERROR = 5
_PCI_EXPRESS_CONFIG = 4096
_ACS = 0x000D
_REDIRECTS = 0x0C  # ACS control: redirection of peer-to-peer requests and completions


def settings(machine: Machine) -> Iterable[Found]:
    """The settings of the environment, as a context and a worker read them."""
    for error in machine.wrong:
        fix = error.hint or "see `crossrail info` for what is accepted"
        yield Found("error", f"{error.detail}; the checks below run without it", fix, error.operation)
    if not machine.wrong:
        given = [one["name"] for one in machine.info["settings"] if not one["is_default"]]
        yield Found("ok", f"accepted: {', '.join(given) or 'no CROSSRAIL_ variable is set'}")


def descriptors(machine: Machine) -> Iterable[Found]:
    """As many descriptors as a large job needs, opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    why = ""
    with Path(os.devnull).open("rb") as one:
        try:
            while len(opened) < ENOUGH_DESCRIPTORS:
                opened.append(os.dup(one.fileno()))
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            for descriptor in opened:
                os.close(descriptor)
    if why:
        text = f"only {len(opened)} descriptors could be opened ({why}); each peer takes one per rail and channel"
        allowed = hard == resource.RLIM_INFINITY or hard >= ENOUGH_DESCRIPTORS
        fix = f"ulimit -n {ENOUGH_DESCRIPTORS}" if allowed else "raise nofile in /etc/security/limits.conf"
        yield Found("warning", text, fix)
    else:
        yield Found("ok", f"{len(opened)} opened at once; the limit is {soft}")


def locked_memory(machine: Machine) -> Iterable[Found]:
    """Memory locked as registration for RDMA and pinned buffers of other libraries need it."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = LOCKED
    free = host_memory()
    if free is not None and free["available"] < 2 * size:
        yield Found("note", f"{format_bytes(free['available'])} of memory are free: nothing was locked")
        return
    with contextlib.closing(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as memory:
        byte = ctypes.c_char.from_buffer(memory)
        try:
            failed = libc.mlock(ctypes.byref(byte), ctypes.c_size_t(size)) != 0
            why = os.strerror(ctypes.get_errno())
        finally:
            del byte
    if failed:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        text = f"{format_bytes(size)} cannot be locked ({why}); the limit is {format_bytes(soft)}"
        serious = any((machine.sys / "class/infiniband").glob("*"))
        more = "; RDMA devices need it to register memory" if serious else "; only RDMA would need it"
        yield Found(
            "warning" if serious else "note", text + more, "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        )
    else:
        yield Found("ok", f"{format_bytes(size)} locked and unlocked")


def processors(machine: Machine) -> Iterable[Found]:
    """Processors that affinity and control groups leave, with what was throttled."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    usable = allowed if quota is None else min(float(allowed), quota)
    throttled = _throttled(machine)
    if usable < 2:
        text = f"the time of {usable:g} processor may be used: sender, receiver and I/O threads wait for each other"
        yield Found("warning", text, "docker run --cpus 4, or srun --cpus-per-task 4")
    elif throttled:
        text = (
            f"the control group was throttled {counted(throttled, 'time')}; its quota is {quota or usable:g} processors"
        )
        yield Found("warning", text, "docker run --cpus, or cpu.max of the group: raise the quota")
    else:
        limit = "" if quota is None else f"; the control group leaves {quota:g}"
        yield Found("ok", f"{counted(allowed, 'processor')} of {os.cpu_count()} may be used{limit}")


def _throttled(machine: Machine) -> int:
    """How often the control group of this process ran out of its quota."""
    for line in text_of(machine.proc / "self/cgroup").splitlines():
        path = line.rpartition(":")[2].lstrip("/")
        for place in (machine.sys / "fs/cgroup" / path, machine.sys / "fs/cgroup/cpu" / path):
            for entry in text_of(place / "cpu.stat").splitlines():
                name, _, value = entry.partition(" ")
                if name == "nr_throttled" and value.isdigit():
                    return int(value)
    return 0


def memory(machine: Machine) -> Iterable[Found]:
    """Free memory within the limits of the control groups, and processes killed for want of it."""
    found = host_memory()
    if found is None:
        yield Found("note", "procfs reports no memory")
        return
    limited = "the machine" if found["limited_by"] is None else f"the control group ({found['limited_by']})"
    fix = "docker run --memory, memory.max of the group, or srun --mem: raise the limit"
    if found["available"] < LEAST_MEMORY:
        yield Found("warning", f"{format_bytes(found['available'])} are free, limited by {limited}", fix)
    elif found["oom_kills"]:
        text = f"the out-of-memory killer was at work {counted(found['oom_kills'], 'time')} in this control group"
        yield Found("note", text, fix)
    else:
        yield Found("ok", f"{format_bytes(found['available'])} are free, limited by {limited}")


def shared_memory_folder(machine: Machine) -> Iterable[Found]:
    """/dev/shm, which NCCL, MPI and PyTorch need; Crossrail does not."""
    path = Path("/dev/shm")
    try:
        place = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
    except OSError as error:
        text = f"{path} cannot be used ({error.strerror}); Crossrail needs none, but NCCL, MPI and PyTorch's loaders do"
        yield Found("note", text, "docker run --ipc=host, or --shm-size=8g")
        return
    free = place.f_bavail * place.f_frsize
    if free < SMALL_SHM:
        text = f"{format_bytes(free)} are free in {path}; Crossrail needs none, but NCCL, MPI and PyTorch's loaders do"
        yield Found("note", text, "docker run --ipc=host, or --shm-size=8g; mount -o remount,size=8g /dev/shm")
    else:
        yield Found("ok", f"{format_bytes(free)} are free; a file was made there")


def system_calls(machine: Machine) -> Iterable[Found]:
    """System calls that containers often forbid, each tried."""
    refused = refusals()
    mode = next(
        (line.split()[1] for line in text_of(machine.proc / "self/status").splitlines() if line.startswith("Seccomp:")),
        "0",
    )
    filtered = "a seccomp filter is active" if mode == "2" else "no seccomp filter is active"
    for name, why in refused.items():
        fix = "docker run --security-opt seccomp=unconfined, or a profile that allows it"
        severity: Severity = "error" if name == "memfd_create" else "note"
        yield Found(severity, f"{why}: needed for {_USES[name]}; {filtered}", fix, name)
    if not refused:
        yield Found("ok", f"none refused; {filtered}")


def huge_pages(machine: Machine) -> Iterable[Found]:
    """Transparent huge pages, which large buffers get by themselves."""
    text = text_of(machine.sys / "kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Found("note", "transparent huge pages are off: copies of large buffers miss the TLB more often", fix)
    elif not chosen:
        yield Found("note", "the kernel reports no transparent huge pages")
    else:
        yield Found("ok", f"transparent huge pages: {chosen}")


def direct_access(machine: Machine) -> Iterable[Found]:
    """Whether the IOMMU and bridges send traffic between PCI devices through the host."""
    devices = machine.sys / "bus/pci/devices"
    gpus = len(machine.info["gpus"])
    if not gpus:
        yield Found("ok", "no GPU on the PCI bus, so nothing moves between PCI devices")
        return
    redirecting, unread = [], 0
    for bridge in sorted(devices.glob("*")):
        if not text_of(bridge / "class").startswith("0x0604"):
            continue
        redirects = _acs_redirects(bridge / "config")
        unread += redirects is None
        if redirects:
            redirecting.append(bridge.name)
    if redirecting:
        shown = ", ".join(redirecting[:4]) + (f" and {len(redirecting) - 4} more" if redirecting[4:] else "")
        text = f"ACS of the PCI bridges {shown} sends traffic between devices through the host's root complex"
        yield Found(
            "warning", text, f"setpci -s {redirecting[0]} ECAP_ACS+6.w=0000, for each; or disable ACS in the BIOS"
        )
    groups = {text_of(group / "type") for group in (machine.sys / "kernel/iommu_groups").glob("*")}
    if {"DMA", "DMA-FQ"} & groups:
        text = "the IOMMU translates the addresses of devices, which slows traffic between them down"
        yield Found(
            "note", text, "add iommu=pt to the kernel's command line and restart, unless virtual machines need it"
        )
    elif unread:
        yield Found("note", f"ACS of {counted(unread, 'bridge')} can only be read by root", "sudo crossrail doctor")
    elif not redirecting:
        yield Found("ok", "no bridge redirects, and the IOMMU does not translate")


def _acs_redirects(config: Path) -> bool | None:
    """Whether a bridge's ACS redirects traffic between devices below it; None if that cannot be read."""
    try:
        data = config.read_bytes()
    except OSError:
        return None
    if len(data) < _PCI_EXPRESS_CONFIG:
        return None
    at, hops = 0x100, 0
    while 0x100 <= at <= _PCI_EXPRESS_CONFIG - 8 and hops < 64:
        (head,) = struct.unpack_from("<I", data, at)
        if head & 0xFFFF == _ACS:
            return bool(int.from_bytes(data[at + 6 : at + 8], "little") & _REDIRECTS)
        at, hops = head >> 20, hops + 1
    return False


def clock(machine: Machine) -> Iterable[Found]:
    """The cost of reading the clock, and whether it is kept in step with others."""
    began = time.perf_counter_ns()
    for _ in range(CLOCK_READS):
        time.monotonic_ns()
    cost = (time.perf_counter_ns() - began) / CLOCK_READS
    source = text_of(machine.sys / "devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    if cost > SLOW_CLOCK_NS and source not in ("tsc", "kvm-clock", "arch_sys_counter"):
        text = f"reading the clock takes {cost:.0f} ns (clock source {source}): short latencies are measured too long"
        yield Found("warning", text, "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource")
    adjusted = ctypes.create_string_buffer(256)
    state = ctypes.CDLL(None).adjtimex(adjusted)
    if state == _TIME_ERROR:
        text = "the kernel's clock is not synchronized: times of this machine and of others cannot be compared"
        yield Found("note", text, "systemctl enable --now chrony")
    elif cost <= SLOW_CLOCK_NS or source in ("tsc", "kvm-clock", "arch_sys_counter"):
        yield Found("ok", f"{cost:.0f} ns per reading, clock source {source}, synchronized")


def socket_buffers(machine: Machine) -> Iterable[Found]:
    """The largest windows that the kernel's autotuning gives TCP, and what a socket really gets."""
    fast = max((rail.speed_mbps or 0 for rail in machine.rails), default=0)
    largest = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        words = text_of(machine.proc / "sys/net/ipv4" / name).split()
        if len(words) == 3 and words[2].isdigit():
            largest[name] = int(words[2])
    small = {name: size for name, size in largest.items() if size < ENOUGH_WINDOW}
    granted = _granted(ENOUGH_WINDOW)
    for name, size in small.items():
        text = f"autotuning stops at {format_bytes(size)}"
        more = f"; {fast / 1000:g} Gbit/s need more from 1 ms of round trip on" if fast else ""
        fix = f"sysctl -w net.ipv4.{name}='4096 131072 {16 << 20}'"
        yield Found("warning" if fast >= FAST_MBPS else "note", text + more, fix, f"net.ipv4.{name}")
    if not small:
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest.items()) or "not shown here"
        yield Found("ok", f"autotuning up to {sizes}; a socket that asks for 4 MiB gets {format_bytes(granted)}")


def _granted(asked: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, asked)
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2


def congestion_control(machine: Machine) -> Iterable[Found]:
    """The congestion control that a connection gets."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        raw = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    name = raw.partition(b"\0")[0].decode(errors="replace")
    if name in ("cubic", "bbr", "dctcp", "htcp"):
        yield Found("ok", f"new connections use {name}")
    else:
        text = f"new connections use {name}, which fills fast links slowly after a loss"
        yield Found("note", text, "sysctl -w net.ipv4.tcp_congestion_control=cubic")
