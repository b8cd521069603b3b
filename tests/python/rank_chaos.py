"""Random kills and stops of ranks, and losses of the store, while all of them exchange: ``make chaos-ranks``.

Every result is whole to the bit, or an error, or lists who is missing; ranks that continue together mask the same ones.
Everything but the moment at which a process gets its processor is drawn from the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace

from ep_cases import Case, Setup
from ep_rank import Failed
from ep_ranks import Ranks
from ep_tasks import Endured

import crossrail

TIMEOUT_S = 1.0
EXCHANGES = 150
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
            group.processes.pop(rank).process.wait(10)
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


def main() -> int:
    """Runs episodes until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="of the first episode; random by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    given = parser.parse_args()
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    until, total = time.monotonic() + given.seconds, Counter[str]()
    print(f"first seed {seed}", flush=True)
    while time.monotonic() < until:
        total += episode(seed, given.ranks[seed % len(given.ranks)])
        seed += 1
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
