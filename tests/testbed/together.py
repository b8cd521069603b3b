"""Random faults while ranks on two nodes exchange messages, experts' rows and control at once: ``make chaos-together``.

Eight ranks, four in each of two network namespaces joined by four rails and a control link, whose store is an etcd.
Meanwhile rails and the control link fail as in `chaos.py` (one rail is healthy), ranks are stopped and killed, and etcd
is killed and restarted. Everything is drawn from a seed, which replays it.

Both ends check: between ranks that live no message is lost, doubled, changed or out of order; sums are whole, or list
who is missing, or an error was raised; ranks that go on mask the same ones, and only those that were killed; numbers
read from the store never decrease; no wait exceeds its limit; afterwards all that live meet at the store, and nothing
is left open.

``--surrounding`` takes something away from all ranks besides: see `SURROUNDINGS`.

Needs root, iproute2 and etcd; ``clocks`` a C compiler.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bed import SIDES, Bed, Side, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import chaos_record
import surroundings
from chaos import Fault, Wreck, plan
from ep_cases import Case, Setup
from ep_ranks import Ranks
from surroundings import Clock
from together_tasks import START, Told

RANKS = 8
STORE_PORT = 18379
START_S, LIMIT_S, END_S = 60.0, 60.0, 600.0
PACE_S = 0.05
LEASE_S = 30.0  # a busy machine may keep a rank from its processor for seconds
CALLS = ("process_vm_readv", "process_vm_writev", "memfd_create", "pidfd_open", "pidfd_getfd", "io_uring_setup")
STEPS_S = (0.0, 3600.0, -86400.0, 3.2e8, -0.5, 0.5)
SURROUNDINGS: dict[str, str] = {
    "plain": "nothing",
    "clocks": "the wall clock steps by up to ten years in both directions",
    "disk": "/dev/shm and the folder of the user's token are full",
    "descriptors": "256 descriptors",
    "exhausted": "no descriptor beyond those that all have when they are connected",
    "memory": "4 GiB of address space",
    "seccomp": "no copies between processes, memfds, descriptors of processes or io_uring (EPERM)",
    "users": "a user namespace of its own for each",
    "ipv6": "no IPv4 between the nodes",
}


class Etcd:
    """An etcd at the left end of the control link. A context manager: gone afterwards, with its data."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        address = bed.address("left", "eth0", 4 if bed.ipv4 else 6)
        self.host = address if bed.ipv4 else f"[{address}]"
        self.bed, self.folder = bed, folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Its address as a store."""
        return f"etcd://{self.host}:{STORE_PORT}"

    def start(self) -> None:
        """Starts it, with the data that it had."""
        client, peer = f"http://{self.host}:{STORE_PORT}", f"http://127.0.0.1:{STORE_PORT + 1}"
        names = ("--name=one", f"--data-dir={self.folder}/etcd", f"--initial-cluster=one={peer}")
        places = (f"--listen-client-urls={client}", f"--advertise-client-urls={client}")
        peers = (f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}")
        command = self.bed.inside("left", "etcd", *names, *places, *peers)
        output = (self.folder / "etcd.log").open("ab")
        self.process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        output.close()

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def __enter__(self) -> Etcd:
        self.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()


@dataclass
class Script:
    """What happens when: the faults of a run, drawn from its seed."""

    faults: list[Fault]
    stopped: dict[Fault, int] = field(default_factory=dict)
    """Which rank a stop or a kill is of."""
    killed: list[int] = field(default_factory=list)


def script(seed: int, seconds: float, rails: Sequence[str], healthy: str) -> Script:
    """As `chaos.plan`, with ranks instead of ends, deaths of at most two ranks, and absences of the store."""
    dice, scale = random.Random(seed), min(1.0, seconds / 60)
    drawn = Script(plan(seed, seconds, rails, healthy))
    for fault in [one for one in drawn.faults if one.what == "stop"]:
        drawn.stopped[fault] = dice.randrange(RANKS)
    drawn.killed = dice.sample(range(RANKS), dice.randrange(3))
    for rank in drawn.killed:
        at = dice.uniform(0.3, 0.9) * seconds
        fault = Fault(at, at, "kill", "", SIDES[rank // (RANKS // 2)])
        drawn.stopped[fault] = rank
        drawn.faults.append(fault)
    at = dice.uniform(1.0, 6.0) * max(scale, 0.2)
    while at < seconds:
        until = at + dice.choice((0.1, 1.0, 3.0)) * dice.uniform(0.5, 1.5)
        drawn.faults.append(Fault(at, until, "store", "", "left"))
        at = until + dice.uniform(3.0, 12.0)
    drawn.faults.sort(key=lambda fault: fault.at)
    return drawn


@dataclass
class RankWreck(Wreck):
    """Does the faults to ranks and to the store, too."""

    ranks: Ranks | None = None
    etcd: Etcd | None = None
    of: dict[Fault, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    held: Counter[int] = field(default_factory=Counter)

    def begin(self, fault: Fault) -> None:
        """Does ``fault``."""
        assert self.ranks is not None and self.etcd is not None
        rank = self.of.get(fault, -1)
        if fault.what == "store":
            self.etcd.kill()
        elif fault.what == "kill":
            self.dead.add(rank)
            self.ranks.processes[rank].kill()
        elif fault.what == "stop":
            self.held[rank] += 1
            self._signal(rank, signal.SIGSTOP)
        else:
            super().begin(fault)

    def end(self, fault: Fault) -> None:
        """Undoes ``fault``."""
        assert self.etcd is not None
        rank = self.of.get(fault, -1)
        if fault.what == "store":
            self.etcd.start()
        elif fault.what == "stop":
            self.held[rank] -= 1
            if not self.held[rank]:
                self._signal(rank, signal.SIGCONT)
        elif fault.what != "kill":
            super().end(fault)

    def _signal(self, rank: int, number: int) -> None:
        assert self.ranks is not None
        if rank not in self.dead:
            os.kill(self.ranks.processes[rank].process.pid, number)


def run(seed: int, seconds: float, surrounding: str, mbit: Sequence[int] = (300, 300, 300, 300)) -> dict[str, Any]:
    """Runs to the end. ``errors`` of the result is empty where nothing was wrong."""
    dice, counts, errors = random.Random(seed), Counter[str](), list[str]()
    told: dict[int, Told] = {}
    began = time.monotonic()
    setup = Setup(RANKS, max_tokens=8, hidden=256, local_experts=2, topk=3, on_loss=dice.choice(["mask", "raise"]))
    case = Case(setup, seed=seed, layout=dice.choice(["expert", "rank"]))
    drawn = Script([])
    try:
        with ExitStack() as stack:
            six = surrounding == "ipv6"
            bed = stack.enter_context(Bed(mbit, ipv4=not six, ipv6=six))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-together-")))
            clock = Clock(folder) if surrounding == "clocks" else None
            etcd = stack.enter_context(Etcd(bed, folder))
            ranks = stack.enter_context(start_ranks(bed, etcd, without(surrounding, clock)))
            drawn = script(seed, seconds, bed.rails, dice.choice(bed.rails))
            wreck = RankWreck(bed, ranks=ranks, etcd=etcd, of=drawn.stopped)
            ranks.call("meet", timeout=END_S)
            ranks.call("prepare", setup, {"timeout": LIMIT_S}, timeout=END_S)
            if surrounding == "exhausted":
                ranks.call("exhaust", case)
            for process in ranks.processes.values():
                process.tell("together", case, seconds, LIMIT_S, round(seconds / PACE_S), PACE_S)
            inflict(wreck, drawn, seconds, counts, clock, dice)
            alive = [rank for rank in range(RANKS) if rank not in wreck.dead]
            told = {rank: ranks.processes[rank].answer(END_S) for rank in alive}
            for rank in wreck.dead:
                ranks.processes.pop(rank)
            errors += judge(told, wreck.dead)
            ranks.call("relieve")
            ranks.call("settle", alive, LIMIT_S, timeout=END_S)
            errors += [f"rank {rank}: left open: {left}" for rank, left in ranks.call("close_down").items() if left]
            pids = [process.process.pid for process in ranks.processes.values()]
        # Pages of those that were killed are removed by whoever comes next.
        pages = [page.name for pid in pids for page in Path("/dev/shm").glob(f"crossrail-page-{pid}-*")]
        errors += [f"left in /dev/shm: {page}" for page in pages]
    except (AssertionError, RuntimeError) as error:
        errors.append(str(error))
    results: Counter[str] = sum((one.results for one in told.values()), Counter[str]())
    return {
        "mode": "together",
        "surrounding": surrounding,
        "commit": chaos_record.commit(),
        "load": round(os.getloadavg()[1], 1),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "ranks": RANKS,
        "nodes": 2,
        "on_loss": setup.on_loss,
        "killed": sorted(drawn.killed),
        "faults": dict(sorted(counts.items())),
        "num_faults": sum(counts.values()),
        "messages": sum(sum(one.received.values()) for one in told.values()),
        "bytes_checked": sum(one.bytes_checked for one in told.values()),
        "results": dict(results) | {"raised": sum(bool(one.experts_error) for one in told.values())},
        "control_turns": sum(one.turns for one in told.values()),
        "control_refused": dict(sum((one.refused for one in told.values()), Counter[str]())),
        "longest_wait_s": round(max((one.longest_s for one in told.values()), default=0.0), 3),
        "errors": errors,
    }


def without(surrounding: str, clock: Clock | None) -> list[str]:
    """The command that starts a rank there."""
    commands: dict[str, Callable[[], list[str]]] = {
        "disk": surroundings.full_disk,
        "descriptors": lambda: surroundings.few_descriptors(256),
        "exhausted": lambda: surroundings.few_descriptors(256),
        "memory": lambda: surroundings.little_memory(4096),
        "seccomp": lambda: surroundings.denied(CALLS, "EPERM"),
        "users": lambda: surroundings.other_users("--map-root-user"),
    }
    if clock is not None:
        return clock.command()
    return commands[surrounding]() if surrounding in commands else []


def start_ranks(bed: Bed, etcd: Etcd, command: Sequence[str]) -> Ranks:
    """The first half of the ranks at the left, the others at the right."""
    environment = {
        "CROSSRAIL_NET_DEVICES": ",".join(bed.rails),
        "CROSSRAIL_CONTROL_DEVICE": "eth0",
        "CROSSRAIL_SECRET": "a secret for the chaos",
        "CROSSRAIL_TIMEOUT": f"{LIMIT_S:g}s",
    }
    side: dict[int, Side] = {rank: SIDES[rank // (RANKS // 2)] for rank in range(RANKS)}
    before = {rank: bed.inside(side[rank], *command) for rank in range(RANKS)}
    return Ranks(
        RANKS, timeout=START_S, lease=LEASE_S, environment=environment, store=etcd.address, before=before, start=START
    )


def inflict(
    wreck: RankWreck, drawn: Script, seconds: float, counts: Counter[str], clock: Clock | None, dice: random.Random
) -> None:
    """The faults at their times, and steps of the clock."""
    steps: list[tuple[float, Callable[[], None]]] = []
    for fault in drawn.faults:
        steps.append((fault.at, lambda fault=fault: (wreck.begin(fault), counts.update([fault.what]))[0]))  # type: ignore[misc]
        if fault.until > fault.at:
            steps.append((fault.until, lambda fault=fault: wreck.end(fault)))  # type: ignore[misc]
    at = 0.5
    while clock is not None and at < seconds:
        offset = dice.choice(STEPS_S)
        steps.append((at, lambda offset=offset: (clock.step(offset), counts.update(["clock"]))[0]))  # type: ignore[misc]
        at += dice.uniform(0.3, 2.0)
    began = time.monotonic()
    for at, step in sorted(steps, key=lambda one: one[0]):
        time.sleep(max(0.0, began + at - time.monotonic()))  # the script's own times
        step()
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def judge(told: dict[int, Told], dead: set[int]) -> list[str]:
    """What is wrong with what the survivors have seen."""
    errors = []
    for rank, one in told.items():
        if not isinstance(one, Told):
            errors.append(f"rank {rank}: {getattr(one, 'trace', one)}")
            continue
        errors += [f"rank {rank}: {wrong}" for wrong in one.wrong]
        for other, text in one.lost.items():
            if other not in dead or not text.startswith("PeerDeadError"):
                errors.append(f"rank {rank} with rank {other}: {text}")
        for other, count in one.sent.items():
            got = getattr(told.get(other), "received", {}).get(rank)
            if other not in dead and got != count:
                errors.append(f"rank {rank} has sent {count} messages, rank {other} has received {got}")
        if one.experts_error and not dead:
            errors.append(f"rank {rank}, though nobody was killed: {one.experts_error}")
        if not set(one.masked) <= dead:
            errors.append(f"rank {rank} masks {one.masked}, and {sorted(dead)} were killed")
    masks = {tuple(one.masked) for one in told.values() if isinstance(one, Told) and not one.experts_error}
    if len(masks) > 1:
        errors.append(f"masks differ: {sorted(masks)}")
    return errors


def main() -> int:
    """The command: exit code 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=None, help="replays that run")
    parser.add_argument("--surrounding", choices=list(SURROUNDINGS), default="plain")
    parser.add_argument("--json", type=Path, help="where the result goes, too")
    options = parser.parse_args()
    chaos_record.commit()  # by now: another one may stand here when this ends
    reason = why_not() or (None if shutil.which("etcd") else "etcd is missing (Debian: etcd-server)")
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    return chaos_record.show(run(seed, options.seconds, options.surrounding), options.json)


if __name__ == "__main__":
    sys.exit(main())
