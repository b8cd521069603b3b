"""Checks of the transports: each really moves data between two processes, and the data is compared."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import crossrail
from crossrail.errors import CrossrailError
from crossrail_tools.report.units import format_bytes, format_rate

from ..ends import End
from .finding import Found, Machine, mib, number_of, text_of
from .second import SECRET_LEN, WAIT_S, context_for, pattern, second_process, timed_rounds

TESTED = frozenset({"self", "shm", "tcp", "cuda_ipc"})
"""Transports that have checks of their own."""

SIZE = 16 << 20
ROUNDS = 3
LOAD_S = 1.0
REGISTERED = (1 << 30, 4 << 30, 16 << 30)

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # the same on every architecture


@contextlib.contextmanager
def connected(
    tls: str, *, rounds: int = ROUNDS, place: str = "cpu", size: int = SIZE, mapped: bool = False
) -> Iterator[tuple[crossrail.Context, crossrail.Worker, crossrail.Endpoint, End]]:
    """A connection over ``tls`` with a second process, which takes part in ``rounds`` of `timed_rounds`."""
    context = context_for(tls=tls)
    with crossrail.Worker(context) as worker:
        job = {"do": "transfer", "tls": tls, "address": worker.address().hex(), "rounds": rounds, "size": size}
        with second_process({**job, "place": place, "map": mapped}) as second:
            try:
                endpoint = worker.accept()
            except crossrail.TimeoutError:
                second.wait_for("connected", 0.5)  # raises the reason why it has not, if it has one
                raise
            yield context, worker, endpoint, second


def shared_memory(machine: Machine) -> Iterable[Found]:
    """Rings between two processes."""
    return _there_and_back("shm")


def _there_and_back(tls: str) -> Iterable[Found]:
    """16 MiB to another process and back over this transport, compared and timed."""
    with connected(tls) as (_, worker, endpoint, _):
        back = np.zeros(SIZE, np.uint8)
        done = timed_rounds(worker, endpoint, pattern(SIZE), back, ROUNDS)
        if not np.array_equal(back, pattern(SIZE)):
            yield Found("error", f"{mib(SIZE)} arrived wrong", "report this, with `crossrail info --json -`")
            return
    yield Found("ok", f"{mib(SIZE)} there and back, compared; {format_rate(SIZE / done.seconds / 1e9)}")


def single_copy(machine: Machine) -> Iterable[Found]:
    """Cross-memory attach, which both ends try when they connect."""
    with connected("shm", rounds=0) as (_, _, endpoint, _):
        ways = {way["lane"]: way for way in endpoint.explain().candidates}
    way = ways.get("shm(cma)")
    if way is not None and not way["missed"]:
        yield Found("ok", "each of two processes reads and writes the other's memory; large messages take one copy")
        return
    why = (way["reason"] if way else None) or "the transport shm does not offer it"
    text = f"large messages take two copies instead of one: {why}"
    yield Found("warning", text, _fix_of_attach(machine), because=("system-calls", "process_vm_readv"))


def _fix_of_attach(machine: Machine) -> str:
    if number_of(machine.proc / "sys/kernel/yama/ptrace_scope"):
        return "sysctl -w kernel.yama.ptrace_scope=0, or allocate buffers by Context.alloc, which need no attach"
    return "in a container: docker run --cap-add=SYS_PTRACE; or allocate buffers by Context.alloc, which need no attach"


def mapped_memory(machine: Machine) -> Iterable[Found]:
    """Memory of `Context.alloc` of another process."""
    with connected("shm", rounds=0, mapped=True) as (_, _, endpoint, second):
        memory = endpoint.map(bytes.fromhex(second.wait_for("shared", WAIT_S)["memory"]))
        seen = np.zeros(SIZE, np.uint8)
        memory.copy_to(seen.data)
        del memory
    if not np.array_equal(seen, pattern(SIZE)):
        yield Found("error", "mapped memory shows other data than its owner wrote", "report this")
        return
    yield Found("ok", f"{mib(SIZE)} of another process mapped and compared")


def loopback_tcp(machine: Machine) -> Iterable[Found]:
    """TCP between two processes of this machine."""
    return _there_and_back("tcp")


def further_transports(machine: Machine) -> Iterable[Found]:
    """Transports without a check of their own, each between two processes; and why others are unusable."""
    further = [one for one in machine.info["transports"] if one["name"] not in TESTED]
    for one in further:
        name = one["name"]
        if not one["usable"]:
            yield Found("note", f"not usable: {one['reason'] or 'no reason given'}", one["fix"] or "", name)
            continue
        with connected(f"{name},tcp") as (_, worker, endpoint, _):
            back = np.zeros(SIZE, np.uint8)
            done = timed_rounds(worker, endpoint, pattern(SIZE), back, ROUNDS)
            ways = [way["reason"] for way in endpoint.explain().candidates if way["transport"] == name]
        if not np.array_equal(back, pattern(SIZE)):
            yield Found("error", f"{mib(SIZE)} arrived wrong", "report this, with `crossrail info --json -`", name)
        elif name in done.transports:
            rate = format_rate(SIZE / done.seconds / 1e9)
            yield Found("ok", f"{mib(SIZE)} there and back, compared; {rate}", subject=name)
        else:
            why = "; ".join(reason for reason in ways if reason) or "see CROSSRAIL_LOG=debug"
            yield Found(
                "warning",
                f"{', '.join(sorted(done.transports))} carried the data instead: {why}",
                one["fix"] or "",
                name,
            )
    if not further:
        yield Found("ok", "this build has no further transport")


def passed_descriptors(machine: Machine) -> Iterable[Found]:
    """A memfd passed over a Unix socket; then pidfd_getfd, which other libraries use for the same."""
    name, secret = f"crossrail-doctor-{os.urandom(8).hex()}", os.urandom(SECRET_LEN)
    answer = os.urandom(SECRET_LEN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{name}")
        listening.listen(1)
        listening.settimeout(WAIT_S)
        with second_process({"do": "memory", "socket": name, "secret": secret.hex()}) as second:
            to, _ = listening.accept()
            with to:
                to.settimeout(WAIT_S)
                peer = int.from_bytes(to.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
                _, descriptors, _, _ = socket.recv_fds(to, 1, 1)
                if not descriptors:
                    yield Found("error", "the descriptor did not arrive", "look for a seccomp or LSM rule: dmesg")
                    return
                with os.fdopen(descriptors[0], "r+b") as held, mmap.mmap(held.fileno(), mmap.PAGESIZE) as seen:
                    if bytes(seen[:SECRET_LEN]) != secret:
                        yield Found("error", "the memory of the descriptor is another one", "report this")
                        return
                    seen[SECRET_LEN : 2 * SECRET_LEN] = answer
                    to.sendall(b"d")
                    if bytes.fromhex(second.wait_for("answered", WAIT_S)["answer"]) != answer:
                        yield Found("error", "what was written did not reach the other process", "report this")
                        return
                refused = _take_descriptor(peer, int(second.wait_for("held", WAIT_S)["descriptor"]))
    yield Found("ok", "a memfd passed over a Unix socket, mapped, written and read by both processes")
    if refused:
        text = f"pidfd_getfd is refused ({refused}); Crossrail does not use it, but NCCL and CUDA programs may"
        yield Found("note", text, "docker run --cap-add=SYS_PTRACE, or sysctl -w kernel.yama.ptrace_scope=0")


def _take_descriptor(pid: int, descriptor: int) -> str:
    """Why pidfd_getfd does not give a copy of another process's descriptor; empty if it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    of = libc.syscall(_PIDFD_OPEN, pid, 0)
    if of < 0:
        return f"pidfd_open: {os.strerror(ctypes.get_errno())}"
    try:
        taken = libc.syscall(_PIDFD_GETFD, of, descriptor, 0)
        if taken < 0:
            return os.strerror(ctypes.get_errno())
        os.close(taken)
        return ""
    finally:
        os.close(of)


def registration(machine: Machine) -> Iterable[Found]:
    """Regions of 1, 4 and 16 GiB, as far as the free memory goes, with a write into the end of each."""
    free = machine.info["machine"]["memory_available"]
    sizes = [size for size in REGISTERED if size <= free // 2]
    if not sizes:
        yield Found("note", f"{format_bytes(free)} of memory are free: too little to register {mib(1 << 30)}")
        return
    context = context_for(tls="shm")
    with crossrail.Worker(context) as owner, crossrail.Worker(context) as writer:
        endpoint = writer.connect(owner.address())
        for size in sizes:
            # Pages are allocated on first touch: by registration on hardware that pins them, or by the write below.
            with contextlib.closing(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as memory:
                try:
                    region = owner.register(memory)
                    endpoint.write(b"crossrai", region.key(), size - 8).wait()
                    region.deregister()
                except CrossrailError as error:
                    text = f"a region of {mib(size)} cannot be registered: {error.detail}"
                    fix = error.hint or "ulimit -l unlimited; then register in smaller pieces"
                    yield Found("error", text, fix, because=("memlock", ""))
                    return
                finally:
                    endpoint.worker.progress()
                if memory[-8:] != b"crossrai":
                    yield Found("error", f"a write to the end of {mib(size)} did not arrive", "report this")
                    return
    done = ", ".join(f"{mib(size)}" for size in sizes)
    left = "" if len(sizes) == len(REGISTERED) else f"; more than half of the free {format_bytes(free)} was not tried"
    yield Found("ok", f"registered and written to the end: {done}{left}")


def under_load(machine: Machine) -> Iterable[Found]:
    """Counters of the network stack while one process sends to another for a second."""
    before = _counters(machine)
    sent = 0
    size = 4 << 20
    with connected("tcp", rounds=1 << 30, size=size) as (_, worker, endpoint, _):
        mine, back = pattern(size), np.zeros(size, np.uint8)
        end = time.monotonic() + LOAD_S
        while time.monotonic() < end:
            timed_rounds(worker, endpoint, mine, back, 1)
            sent += 2 * size
    after = _counters(machine)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    segments = max(grown.pop("segments"), 1)
    again = grown.pop("segments sent again")
    lost = {name: count for name, count in grown.items() if count > 0}
    if again > segments // 100:
        text = f"{again} of {segments} TCP segments were sent again during {format_bytes(sent)} over loopback"
        yield Found("warning", text, "look for a full backlog: cat /proc/net/softnet_stat; fewer busy processors")
    for name, count in lost.items():
        text = f"{count} packets were lost during {format_bytes(sent)} over loopback"
        fix = "sysctl -w net.core.netdev_max_backlog=65536" if name == "backlog" else f"ethtool -S {name}"
        yield Found("warning", text, fix, name)
    if not lost and again <= segments // 100:
        yield Found("ok", f"{format_bytes(sent)} in {LOAD_S:g} s over loopback: nothing lost, {again} segments resent")


def _counters(machine: Machine) -> dict[str, int]:
    """Segments and losses since the machine started, by where they are counted."""
    from .netlink import interfaces

    found = {"segments": 0, "segments sent again": 0}
    rows = [line.split() for line in text_of(machine.proc / "net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(rows) == 2:
        tcp = dict(zip(*rows, strict=False))
        found = {"segments": int(tcp.get("OutSegs", 0)), "segments sent again": int(tcp.get("RetransSegs", 0))}
    found["backlog"] = sum(
        int(line.split()[1], 16) for line in text_of(machine.proc / "net/softnet_stat").splitlines() if line.strip()
    )
    return found | {one.name: one.dropped for one in interfaces() if one.up}


def refusals() -> dict[str, str]:
    """System calls that containers often forbid, each tried, with the reason of those that are refused."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    word, seen = ctypes.c_uint64(1), ctypes.c_uint64(0)

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    mine = Piece(ctypes.addressof(seen), 8)
    theirs = Piece(ctypes.addressof(word), 8)

    def attach() -> int:
        return int(libc.process_vm_readv(os.getpid(), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0))

    def close(descriptor: int) -> int:
        if descriptor >= 0:
            os.close(descriptor)
        return descriptor

    mode = ctypes.c_int(0)
    calls: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: close(libc.memfd_create(b"crossrail-doctor", 1)),
        "process_vm_readv": attach,
        "pidfd_open": lambda: close(libc.syscall(_PIDFD_OPEN, os.getpid(), 0)),
        "sched_setaffinity": _same_affinity,
        "get_mempolicy": lambda: libc.syscall(_get_mempolicy(), ctypes.byref(mode), None, 0, None, 0),
    }
    found = {}
    for name, call in calls.items():
        ctypes.set_errno(0)
        try:
            failed = call() < 0
            code = ctypes.get_errno()
        except OSError as error:
            failed, code = True, error.errno or 0
        if failed and code in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            found[name] = os.strerror(code)
    return found


def _same_affinity() -> int:
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    return 0


def _get_mempolicy() -> int:
    return 239 if os.uname().machine == "x86_64" else 236
