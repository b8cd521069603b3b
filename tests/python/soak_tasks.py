"""What the ranks of a soak do: make, use and drop everything there is, again and again, with a peer that checks it."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ep_cases import Case, Setup, as_bf16, inputs, sums_of_rows
from ep_rank import Me, as_bits, task
from ep_tasks import main

import crossrail
from crossrail import ref

__all__ = ["LIMIT_S", "START", "Figures", "main"]

START = "import soak_tasks; soak_tasks.main()"
LIMIT_S = 300.0  # of every wait: a soak runs beside other programs and may rank below all of them
LEASE_S = 120.0
PACE_S = 0.01
SETTLED_S, SETTLE_S = 0.5, 10.0
"""Counts must not change for so long to be taken; and they are taken after so long as they are."""
FILLING = 66_000
RAILS = {"tls": "tcp", "net_devices": "127.0.0.1,127.0.0.2"}
SIZES = (8, 1000, 64 << 10, 1 << 20, 4 << 20)
HEAD = struct.Struct("<QQ")
LAST = (1 << 64) - 1


@dataclass
class Figures:
    """What a process holds while nothing is begun, and what it has done so far."""

    resident_kib: int
    """Its own memory and shared memory; not pages of files, which the kernel drops and reads again as it likes."""
    allocated_kib: int
    """In use according to the C library's allocator."""
    descriptors: int
    threads: int
    shared_files: int
    """Files of this process in /dev/shm."""
    cycles: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    bytes_checked: int = 0
    errors: list[str] = field(default_factory=list)


class Gate:
    """Where duties wait between two cycles while it is shut."""

    def __init__(self, duties: int) -> None:
        self._changed = threading.Condition()
        self._duties, self._waiting, self._shut, self.over = duties, 0, False, False

    def go(self) -> bool:
        """Whether another cycle is to begin; waits while the gate is shut."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._shut or self.over)
            self._waiting -= 1
            return not self.over

    def gone(self) -> None:
        """A duty has ended."""
        with self._changed:
            self._duties -= 1
            self._changed.notify_all()

    def shut(self) -> None:
        """Shuts it; returns when all duties are there."""
        with self._changed:
            self._shut = True
            if not self._changed.wait_for(lambda: self._waiting == self._duties, LIMIT_S):
                raise RuntimeError(f"{self._waiting} of {self._duties} duties have ended their cycle in {LIMIT_S:g} s")

    def open(self, over: bool = False) -> None:
        """Opens it; `over`: for the last time, which ends all duties."""
        with self._changed:
            self._shut, self.over = False, over
            self._changed.notify_all()


class Duty:
    """One kind of work, in cycles that both ranks go through. Rank 0 leads: it begins each cycle, and ends the last."""

    settings: ClassVar[dict[str, str]] = {"tls": "shm"}

    def __init__(self, me: Me, kind: str) -> None:
        self.me, self.kind = me, kind
        self.leads = me.group.rank == 0
        self.context = crossrail.Context(timeout=LIMIT_S, **self.settings)
        self.worker = crossrail.Worker(self.context, name=f"{kind} {me.group.rank}")
        me.group.publish(f"soak {kind}", self.worker.address())
        self.address = me.group.collect(f"soak {kind}", [1 - me.group.rank])[0]
        self.pilot = self.worker.connect(self.address) if self.leads else self.worker.accept()
        self.pool = np.random.default_rng(20261123).integers(0, 256, 2 * SIZES[-1], dtype=np.uint8)
        self.buffer = np.zeros(SIZES[-1], np.uint8)
        self.cycles = self.messages = self.bytes_checked = 0

    def cycle(self, number: int) -> None:
        """One cycle."""
        raise NotImplementedError

    def close(self) -> None:
        """Everything that is left."""
        self.pilot.close()
        self.worker.close()

    def run(self, gate: Gate) -> None:
        """All cycles."""
        while self._begun(gate):
            self.cycle(self.cycles)
            self.cycles += 1
            time.sleep(PACE_S)  # leaves the processors to the other duties
        self.close()

    def _begun(self, gate: Gate) -> bool:
        if self.leads:
            going = gate.go()
            self.pilot.send(HEAD.pack(self.cycles if going else LAST, 0), tag=1).wait()
            return going
        head = bytearray(HEAD.size)
        self.worker.recv(head, tag=1, source=self.pilot).wait()
        number, _ = HEAD.unpack(head)
        if number not in (self.cycles, LAST):
            raise AssertionError(f"cycle {number} instead of {self.cycles}")
        return number != LAST

    def meet(self) -> None:
        """Returns when both ranks are here."""
        word, back = self.pilot.send(b"here", tag=3), bytearray(4)
        self.worker.recv(back, tag=3, source=self.pilot).wait()
        word.wait()

    def check(self, got: Any, number: int, to_leader: bool) -> None:
        """Fails unless these are the bytes that the other rank has for this cycle."""
        if not np.array_equal(got, self.content(number, len(got), to_leader)):
            raise AssertionError(f"{self.kind}, cycle {number}: {len(got)} bytes are not what was sent")
        self.messages += 1
        self.bytes_checked += len(got)

    def content(self, number: int, size: int, to_leader: bool) -> Any:
        """The bytes of a cycle's message in that direction."""
        at = (number * 4099 + to_leader) % (len(self.pool) - size)
        return self.pool[at : at + size]

    def swap(self, endpoint: Any, number: int, size: int, worker: Any = None) -> None:
        """A message each way, checked."""
        target = self.buffer[:size]
        inbound = (worker or self.worker).recv(target, tag=2, source=endpoint)
        outbound = endpoint.send(self.content(number, size, not self.leads), tag=2)
        assert inbound.wait().bytes == size
        self.check(target, number, self.leads)
        outbound.wait()


class Messages(Duty):
    """Messages of five sizes on a connection that stays."""

    def cycle(self, number: int) -> None:
        """A message each way."""
        self.swap(self.pilot, number, SIZES[number % len(SIZES)])


class MessagesOverRails(Messages):
    """Messages over two rails."""

    settings = RAILS


class Connections(Duty):
    """Connections that are made, used, and closed by either end first."""

    def cycle(self, number: int) -> None:
        """One connection."""
        endpoint = self.worker.connect(self.address) if self.leads else self.worker.accept()
        self.swap(endpoint, number, SIZES[number % 3])
        self.meet()
        first = self.leads == (number % 2 == 0)
        if first:
            endpoint.close()
        self.meet()
        if not first:
            endpoint.close()


class ConnectionsOverRails(Connections):
    """The same over two rails."""

    settings = RAILS


class Workers(Duty):
    """Workers with names of their own, each with a connection."""

    def cycle(self, number: int) -> None:
        """One worker of the leader."""
        if self.leads:
            with crossrail.Worker(crossrail.Context(timeout=LIMIT_S, **self.settings), name=f"passing {number}") as one:
                self.swap(one.connect(self.address), number, SIZES[1], one)
                self.meet()
            return
        accepted = self.worker.accept()
        self.swap(accepted, number, SIZES[1])
        self.meet()
        try:
            self.worker.recv(self.buffer[:8], tag=4, source=accepted).wait()
        except crossrail.TimeoutError:
            raise
        except crossrail.CrossrailError:
            return
        raise AssertionError("a message of a worker that was closed")


class Regions(Duty):
    """Regions that the peer writes and reads, memory that it maps, and receives that are cancelled."""

    def cycle(self, number: int) -> None:
        """One of each."""
        size = SIZES[2]
        self.worker.recv(self.buffer[:8], tag=9, source=self.pilot).cancel()
        if self.leads:
            name = np.zeros(256, np.uint8)
            length = self.worker.recv(name, tag=5, source=self.pilot).wait().bytes
            key = crossrail.RegionKey.from_bytes(name[:length].tobytes())
            self.pilot.write(self.content(number, size, False), key, imm=3).wait()
            self.pilot.read(self.buffer[:size], key).wait()
            self.check(self.buffer[:size], number, False)
            memory = self.context.alloc(size)
            memory.fill_from(self.content(number, size, False))
            self.pilot.send(self.pilot.share(memory), tag=6).wait()
            self.meet()
            return
        target = np.zeros(size, np.uint8)
        region = self.worker.register(target)
        self.pilot.send(bytes(region.key()), tag=5).wait()
        region.wait_imm(3)
        self.check(target, number, False)
        name = np.zeros(256, np.uint8)
        length = self.worker.recv(name, tag=6, source=self.pilot).wait().bytes
        mapped = self.pilot.map(name[:length].tobytes())
        mapped.copy_to(self.buffer[:size])
        self.check(self.buffer[:size], number, False)
        self.meet()
        region.deregister()


class Exchanges(Duty):
    """Dispatch and combine with a buffer that stays."""

    def __init__(self, me: Me, kind: str) -> None:
        super().__init__(me, kind)
        self.setup = Setup(2, max_tokens=16, hidden=256, local_experts=4, topk=3)
        self.case = Case(self.setup)
        self.fed, self.right = inputs(self.case, me.group.rank), sums_of_rows(self.case, me.group.rank)
        self.experts = self.made("staying")

    def made(self, name: str) -> Any:
        """A buffer of that name."""
        return crossrail.ExpertBuffer(self.me.group, name=name, timeout=LIMIT_S, **self.setup.arguments())

    def cycle(self, number: int) -> None:
        """One exchange, its sums compared with what both ranks give."""
        self.exchange(self.experts)

    def exchange(self, buffer: Any) -> None:
        """Dispatches and combines."""
        came = buffer.dispatch(as_bf16(self.fed.x), self.fed.topk_idx, self.fed.topk_weights, self.case.layout)
        sums = buffer.combine(came.x, came.handle)
        if sums.missing or not np.array_equal(ref.bf16_values(as_bits(sums.x)), self.right, equal_nan=True):
            raise AssertionError(f"{self.kind}: sums are wrong, without {sums.missing}")
        self.bytes_checked += self.right.nbytes // 2

    def close(self) -> None:
        """The buffer, too."""
        self.experts.destroy()
        super().close()


class Buffers(Exchanges):
    """Buffers that are made, used once and destroyed."""

    def cycle(self, number: int) -> None:
        """One buffer."""
        passing = self.made(f"passing {number}")
        self.exchange(passing)
        self.meet()
        passing.destroy()

    def made(self, name: str) -> Any:
        """A buffer of that name, of this duty."""
        return super().made(f"{self.kind}, {name}")


class Groups(Duty):
    """Groups that are joined and left."""

    def cycle(self, number: int) -> None:
        """One group."""
        rank = self.me.group.rank
        with crossrail.Group(
            name=f"passing-{number}",
            rank=rank,
            size=2,
            local_rank=rank,
            store=self.me.group.store_address,
            lease=LEASE_S,
            timeout=LIMIT_S,
        ) as group:
            group.publish("number", struct.pack("<QQ", number, rank))
            for other, value in enumerate(group.collect("number")):
                assert struct.unpack("<QQ", value) == (number, other)
            group.barrier("before the end")


DUTIES: dict[str, type[Duty]] = {
    "messages over shm": Messages,
    "messages over tcp": MessagesOverRails,
    "connections over shm": Connections,
    "connections over tcp": ConnectionsOverRails,
    "workers": Workers,
    "regions": Regions,
    "exchanges": Exchanges,
    "expert buffers": Buffers,
    "groups": Groups,
}


@task
def serve(me: Me) -> str:
    """Runs the store of the soak; its address."""
    me.keep["store"] = crossrail._native.StoreServer(crossrail.Context(), "127.0.0.1:0")
    return str(me.keep["store"].address)


@task
def begin(me: Me) -> None:
    """Begins all duties."""
    if me.group.rank == 0:
        # The store keeps the last changes: as many as it ever keeps.
        for number in range(FILLING):
            me.group.publish("filling", HEAD.pack(number, 0) * 4)
        me.group.withdraw("filling")
    duties = [kind(me, name) for name, kind in DUTIES.items()]
    gate, errors = Gate(len(duties)), list[str]()

    def run(duty: Duty) -> None:
        try:
            duty.run(gate)
        except Exception:
            errors.append(f"rank {me.group.rank}, {duty.kind}, cycle {duty.cycles}: {traceback.format_exc()}")
        finally:
            gate.gone()

    threads = [threading.Thread(target=run, args=[duty], daemon=True) for duty in duties]
    me.keep.update(duties=duties, gate=gate, errors=errors, threads=threads)
    for thread in threads:
        thread.start()


@task
def hold(me: Me) -> None:
    """Returns when no cycle is begun, nor will one be; of the leader, whom the other one follows."""
    me.keep["gate"].shut()


@task
def go_on(me: Me, over: bool = False) -> None:
    """Lets cycles begin again; `over`: no more, ever."""
    me.keep["gate"].open(over)


@task
def finish(me: Me) -> None:
    """Returns when all duties have ended."""
    deadline = time.monotonic() + LIMIT_S
    for thread in me.keep["threads"]:
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [
        duty.kind for duty, thread in zip(me.keep["duties"], me.keep["threads"], strict=True) if thread.is_alive()
    ]
    if running:
        raise RuntimeError(f"these have not ended in {LIMIT_S:g} s: {', '.join(running)}")


@task
def figures(me: Me) -> Figures:
    """What this process holds, once its counts have settled: what was closed ends on threads of its own."""
    gc.collect()
    counts, since, deadline = _counts(), time.monotonic(), time.monotonic() + SETTLE_S
    while time.monotonic() < min(since + SETTLED_S, deadline):
        time.sleep(0.02)  # nobody tells when a thread has left the kernel's list
        if (now := _counts()) != counts:
            counts, since = now, time.monotonic()
    descriptors, threads, files = counts
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    duties: list[Duty] = me.keep.get("duties", [])
    return Figures(
        resident,
        _allocated() >> 10,
        descriptors,
        threads,
        files,
        {duty.kind: duty.cycles for duty in duties},
        sum(duty.messages for duty in duties),
        sum(duty.bytes_checked for duty in duties),
        list(me.keep.get("errors", [])),
    )


def _counts() -> tuple[int, int, int]:
    files = 0
    with suppress(OSError):
        files = sum(1 for _ in Path("/dev/shm").glob(f"crossrail-*-{os.getpid()}-*"))
    descriptors, threads = (sum(1 for _ in Path(f"/proc/self/{kind}").iterdir()) for kind in ("fd", "task"))
    return descriptors, threads, files


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def _allocated() -> int:
    """Bytes in use of the C library's allocator, those of mappings of their own included; 0 where it can't say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    said = mallinfo()
    return int(said.uordblks + said.hblkhd)
