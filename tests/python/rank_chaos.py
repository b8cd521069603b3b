"""Random kills and stops of ranks, and losses of the store, while all of them exchange: ``make chaos-ranks``.

Two modes. ``losses``: groups go through one to three faults; every result is whole to the bit, or an error, or lists
who is missing; ranks that continue together mask the same ones. ``replaced``: in one group, a rank is killed at a
random moment and replaced by a new process, again and again; what is timed is how soon the others have a result
without it, and how soon results are whole again. Everything but the moment at which a process gets its processor is
drawn from the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chaos_record
from ep_cases import Case, Setup
from ep_cases import judge as judge_sums
from ep_rank import Failed
from ep_ranks import RankProcess, Ranks
from ep_tasks import Endured, Outlasted

import crossrail

TIMEOUT_S = 1.0
PATIENT_S = 40.0
PREPARE_S = 100.0
"""For joining and connecting on a busy machine: less than the test waits for an answer."""
LEASE_S = 10.0
"""Of ranks that are replaced: a successor joins when it has ended; a busy machine may keep a rank from renewing it."""
EXCHANGES = 150
PER_GROUP = 20
KINDS = ("kill", "stop", "long stop", "store")


def episode(seed: int, ranks: int) -> Counter[str]:
    """Runs one group through one to three faults; counts faults and results. Raises AssertionError for a wrong one."""
    rng = random.Random(seed)
    setup = Setup(
        ranks,
        max_tokens=8,
        hidden=128,
        local_experts=2,
        topk=3,
        on_loss=rng.choice(["mask", "raise"]),
        share_node=rng.random() < 0.5,
    )
    case = Case(setup, seed=seed, layout=rng.choice(["expert", "rank"]))
    faults = [(rng.choice(KINDS), rng.randrange(ranks), rng.uniform(0, 0.3)) for _ in range(rng.randint(1, 3))]
    with (
        crossrail._native.StoreServer(crossrail.Context(), "127.0.0.1:0") as store,
        Ranks(ranks, store=store.address) as group,
    ):
        group.call("prepare", setup, {"timeout": TIMEOUT_S})
        for process in group.processes.values():
            process.tell("endure", case, EXCHANGES)
        dead = inflict(rng, group, store, faults)
        answers = {rank: group.processes[rank].answer() for rank in range(ranks) if rank not in dead}
        for rank in dead:
            group.processes.pop(rank).process.wait(30)
        return judge(seed, group, case, answers) + Counter(kind for kind, _, _ in faults)


def inflict(rng: random.Random, group: Ranks, store: crossrail._native.StoreServer, faults: list) -> set[int]:
    """Inflicts the faults; returns whom it killed. Whoever was stopped runs again."""
    dead: set[int] = set()
    resume: list[tuple[float, int]] = []
    for kind, rank, pause in faults:
        time.sleep(pause)  # what the faults hit is a matter of chance
        pid = group.processes[rank].process.pid
        if kind == "store":
            store.close()
        elif rank not in dead and kind == "kill":
            os.kill(pid, signal.SIGKILL)
            dead.add(rank)
        elif rank not in dead:
            os.kill(pid, signal.SIGSTOP)
            longer = rng.uniform(1.2, 2.5) if kind == "long stop" else rng.uniform(0.05, 0.8)
            resume.append((time.monotonic() + longer * TIMEOUT_S, pid))
    for until, pid in sorted(resume):
        time.sleep(max(until - time.monotonic(), 0))
        os.kill(pid, signal.SIGCONT)
    return dead


def judge(seed: int, group: Ranks, case: Case, answers: dict[int, Endured | Failed]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for rank, one in answers.items():
        assert isinstance(one, Endured), f"seed {seed}, rank {rank}: {one}"
        assert one.wrong == 0, f"seed {seed}, rank {rank}: {one.wrong} of {EXCHANGES} results are wrong"
        counts += Counter(whole=one.whole, marked=one.marked, raised=int(bool(one.error)))
    left = [rank for rank, one in answers.items() if isinstance(one, Endured) and not one.error]
    # Who was lost in the last exchange is lost for all of them after two more.
    settled = group.call("endure", replace(case, seed=seed + 1), 3, ranks=left)
    masks = {rank: one.masked for rank, one in settled.items() if not one.error}
    # Two sides that cannot reach each other do not exist here: all that continue do so together.
    assert len(set(map(tuple, masks.values()))) <= 1, f"seed {seed}: masks {masks}"
    for one in settled.values():
        assert one.wrong == 0, f"seed {seed}: a wrong result at the end"
    counts["groups"] += 1
    return counts


@dataclass
class Replaced:
    """What the kills and replacements of one group have shown."""

    recovery_s: list[float] = field(default_factory=list)
    """From the kill to the slowest survivor's first result without the dead rank, for each kill."""
    ended_s: list[float] = field(default_factory=list)
    """Of that, until the killed process had ended: only then does the kernel close its connections."""
    whole_again_s: list[float] = field(default_factory=list)
    """From the kill to the slowest rank's first result with its successor, which includes starting a process."""
    counts: Counter[str] = field(default_factory=Counter)


def replacements(seed: int, ranks: int, times: int) -> Replaced:
    """Kills a random rank of a group at a random moment and replaces it, ``times`` times. Raises AssertionError
    for a result that is neither whole nor marked, and for an error."""
    rng, done = random.Random(seed), Replaced()
    setup = Setup(ranks, max_tokens=8, hidden=128, local_experts=2, topk=3, on_loss="mask")
    setup = replace(setup, share_node=rng.random() < 0.5)
    with (
        crossrail._native.StoreServer(crossrail.Context(), "127.0.0.1:0") as store,
        Ranks(ranks, store=store.address, timeout=PREPARE_S, lease=LEASE_S) as group,
    ):
        # A death is noticed by its connections; this is only for ranks that are late on a busy machine.
        patient = {"timeout": PATIENT_S}
        group.call("prepare", setup, patient)
        for _ in range(times):
            case = Case(setup, seed=rng.randrange(1 << 30), layout=rng.choice(["expert", "rank"]))
            dead, pause = rng.randrange(ranks), rng.uniform(0, 0.2)
            others = [rank for rank in range(ranks) if rank != dead]
            group.call("feed", case)  # what takes long in Python is no part of a recovery
            group.processes[dead].tell("endure", case, 1 << 30)
            for rank in others:
                group.processes[rank].tell("outlast", case, dead)
            time.sleep(pause)  # what the kill hits is a matter of chance
            victim = group.processes.pop(dead)
            killed = time.monotonic()
            ended = end(victim)
            seen = {rank: group.processes[rank].answer() for rank in others}
            for rank, one in seen.items():
                assert isinstance(one, Outlasted), f"seed {seed}, rank {rank}: {getattr(one, 'trace', one)}"
                assert one.wrong == 0, f"seed {seed}, rank {rank}: {one.wrong} results are wrong"
                right = one.missing == [dead] == one.masked
                assert right, f"seed {seed}, rank {dead} was killed at {killed}: {seen}; they said: {group.said()}"
                done.counts += Counter(whole=one.whole, marked=1)
            done.recovery_s.append(max(one.marked_at for one in seen.values()) - killed)
            done.ended_s.append(min(ended - killed, done.recovery_s[-1]))
            without = replace(case, lost=(dead,))
            judge_sums(without, group.call("again", without, ranks=others))
            group.call("change", "disconnect", [dead], ranks=others)
            group.start([dead])
            group.processes[dead].tell("prepare", setup, patient)
            group.call("change", "connect", list(range(ranks)), {"timeout": PREPARE_S}, ranks=others)
            assert group.processes[dead].answer() is None
            whole = group.call("again", case)
            done.whole_again_s.append(time.monotonic() - killed)
            judge_sums(case, whole)
            done.counts["replaced"] += 1
    return done


def end(victim: RankProcess) -> float:
    """SIGKILL; when its process had ended, which takes each of its threads a turn on a processor."""
    descriptor = os.pidfd_open(victim.process.pid)
    try:
        victim.process.send_signal(signal.SIGKILL)
        select.select([descriptor], [], [], 30)
        ended = time.monotonic()
    finally:
        os.close(descriptor)
    victim.kill()
    return ended


def losses(seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Episodes until the time is up, or so many faults were inflicted."""
    began, total, errors = time.monotonic(), Counter[str](), []
    first, inflicted = seed, 0
    while time.monotonic() < began + given.seconds and (given.faults is None or inflicted < given.faults):
        try:
            total += episode(seed, given.ranks[seed % len(given.ranks)])
        except AssertionError as error:
            errors.append(str(error))
        inflicted = sum(total[kind] for kind in KINDS)
        seed += 1
    return {
        "seed": first,
        "seconds": round(time.monotonic() - began, 1),
        "ranks": given.ranks,
        "groups": total["groups"],
        "faults": {kind: total[kind] for kind in KINDS},
        "num_faults": inflicted,
        "results": {kind: total[kind] for kind in ("whole", "marked", "raised")},
        "errors": errors,
    }


def replaced(seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Groups of some kills each, until there were so many in all."""
    began, all_of_them, errors = time.monotonic(), Replaced(), []
    first, wanted = seed, given.faults or 200
    while len(all_of_them.recovery_s) < wanted and time.monotonic() < began + given.seconds:
        ranks = given.ranks[seed % len(given.ranks)]
        try:
            one = replacements(seed, ranks, min(PER_GROUP, wanted - len(all_of_them.recovery_s)))
        except AssertionError as error:
            errors.append(str(error))
            break
        all_of_them.recovery_s += one.recovery_s
        all_of_them.ended_s += one.ended_s
        all_of_them.whole_again_s += one.whole_again_s
        all_of_them.counts += one.counts
        seed += 1
    after = [recovery - ended for recovery, ended in zip(all_of_them.recovery_s, all_of_them.ended_s, strict=True)]
    times = {
        "recovery": all_of_them.recovery_s,
        "ended": all_of_them.ended_s,
        "after_end": after,
        "whole_again": all_of_them.whole_again_s,
    }
    return {
        "seed": first,
        "seconds": round(time.monotonic() - began, 1),
        "ranks": given.ranks,
        "num_faults": len(all_of_them.recovery_s),
        "results": dict(all_of_them.counts),
        **{
            f"{name}_{word}_s": round(chaos_record.percentile(samples, share), 3)
            for name, samples in times.items()
            for word, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            if samples
        },
        "samples_s": [round(sample, 4) for sample in all_of_them.recovery_s],
        "ended_samples_s": [round(sample, 4) for sample in all_of_them.ended_s],
        "errors": errors,
    }


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes beside the ranks that use whatever time the processors give them."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            running.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> int:
    """The command: exit code 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("losses", "replaced"), default="losses")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--faults", type=int, default=None, help="ends the run after so many")
    parser.add_argument("--seed", type=int, default=None, help="of the first group; random by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside so many processes that only compute")
    parser.add_argument("--json", type=Path, help="where the result goes, too")
    given = parser.parse_args()
    chaos_record.commit()  # by now: another one may stand here when this ends
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    print(f"first seed {seed}", file=sys.stderr, flush=True)
    with busy(given.busy):
        result = (losses if given.mode == "losses" else replaced)(seed, given)
        load = {"processors": len(os.sched_getaffinity(0)), "busy": given.busy, "load": os.getloadavg()[1]}
    result = {"mode": given.mode, "commit": chaos_record.commit(), **load, **result}
    return chaos_record.show(result, given.json)


if __name__ == "__main__":
    sys.exit(main())
