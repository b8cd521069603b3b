"""A soak: for hours, everything that a program makes and drops, with all bytes checked: ``make soak``.

Two ranks exchange messages, make connections, workers, regions, mapped memory, expert buffers and groups, each kind in
a thread of its own, and a third process is their store. Every minute all of them pause between two cycles, and what
each process holds is noted: resident memory, what its allocator has in use, descriptors, threads, files in /dev/shm.
None of that may grow by 1 % after the first ten minutes. The result is written anew with every sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import chaos_record
from ep_ranks import RankProcess, Ranks
from soak_tasks import LEASE_S, LIMIT_S, START, Figures

WARM_S = 600.0
WINDOW_S = 300.0
GROWTH_MAX = 0.01
HELD = ("resident_kib", "allocated_kib", "descriptors", "threads", "shared_files")
ALLOCATOR = "glibc.malloc.tcache_count=0:glibc.malloc.mmap_threshold=131072"
"""What is freed goes back. The C library keeps freed blocks of each size for every thread, up to 235 KiB, and reports
them as in use; and once a long block was freed, it keeps the next ones of that length (here 4 MiB, of the check of a
message), which come and go from one sample to the next."""


@dataclass
class Soak:
    """What was seen so far."""

    at_s: list[float] = field(default_factory=list)
    seen: list[dict[str, Figures]] = field(default_factory=list)

    def growth(self) -> dict[str, dict[str, float]]:
        """By how much each figure of each process grew: the median of the last five minutes, by that of the five
        minutes after the first ten. A soak of less than half an hour is divided alike."""
        end = self.at_s[-1]
        warm, window = min(WARM_S, end / 3), min(WINDOW_S, end / 6)
        first = [seen for at, seen in zip(self.at_s, self.seen, strict=True) if warm <= at <= warm + window]
        last = [seen for at, seen in zip(self.at_s, self.seen, strict=True) if at >= end - window]
        if not first:
            return {}
        return {
            process: {
                name: round(median(last, process, name) / (median(first, process, name) or 1.0) - 1.0, 5)
                for name in HELD
                if median(first, process, name) or median(last, process, name)
            }
            for process in self.seen[0]
        }

    def result(self, settle: bool) -> dict[str, Any]:
        """All of it; `settle`: the soak is over, and what has grown is an error."""
        last, growth = self.seen[-1], self.growth()
        errors = [error for one in last.values() for error in one.errors]
        if settle:
            errors += [
                f"{process}: {name} grew by {share:.2%}"
                for process, shares in growth.items()
                for name, share in shares.items()
                if share > GROWTH_MAX
            ]
        leader = last["rank 0"]
        return {
            "mode": "soak",
            "commit": chaos_record.commit(),
            "load": round(os.getloadavg()[2], 1),
            "allocator": ALLOCATOR,
            "seconds": round(self.at_s[-1], 1),
            "cycles": leader.cycles,
            "messages": sum(one.messages for one in last.values()),
            "bytes_checked": sum(one.bytes_checked for one in last.values()),
            "growth_after_warm_up": growth,
            "at_s": [round(at) for at in self.at_s],
            "held": {
                process: {name: [asdict(seen[process])[name] for seen in self.seen] for name in HELD}
                for process in last
            },
            "errors": errors,
        }


def median(seen: list[dict[str, Figures]], process: str, name: str) -> float:
    """Of one figure of one process."""
    return float(statistics.median(asdict(one[process])[name] for one in seen))


def run(seconds: float, every: float, path: Path | None) -> dict[str, Any]:
    """Soaks for so long; the result, which is also in `path` after each sample."""
    environment = {"GLIBC_TUNABLES": ALLOCATOR}
    soak, store = Soak(), RankProcess(environment=environment, start=START)
    try:
        store.tell("serve")
        address = store.answer()
        with Ranks(2, timeout=LIMIT_S, lease=LEASE_S, environment=environment, store=address, start=START) as ranks:
            ranks.call("begin", timeout=2 * LIMIT_S)
            began, due = time.monotonic(), 0.0
            while True:
                ranks.call("hold", ranks=[0], timeout=2 * LIMIT_S)
                sample(soak, ranks, store, time.monotonic() - began)
                over = time.monotonic() - began >= seconds or bool(soak.result(False)["errors"])
                ranks.call("go_on", over, ranks=[0])
                chaos_record.write(soak.result(over), path)
                if over:
                    break
                due = min(due + every, seconds)
                time.sleep(max(0.0, began + due - time.monotonic()))  # samples have their times
            ranks.call("finish", timeout=2 * LIMIT_S)
            errors = [error for one in ranks.call("figures").values() for error in one.errors]
            if errors:
                sys.stderr.write(ranks.said())
    finally:
        store.close()
    result = soak.result(True)
    return result | {"errors": list(dict.fromkeys([*result["errors"], *errors]))}


def sample(soak: Soak, ranks: Ranks, store: RankProcess, at: float) -> None:
    """Notes what every process holds."""
    store.tell("figures")
    seen = {f"rank {rank}": one for rank, one in ranks.call("figures").items()}
    soak.at_s.append(at)
    soak.seen.append(seen | {"store": store.answer()})


def main() -> int:
    """The command: exit code 0 when nothing was wrong and nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--json", type=Path, help="where the result goes, too")
    given = parser.parse_args()
    chaos_record.commit()  # by now: another one may stand here when this ends
    return chaos_record.show(run(given.seconds, given.every, given.json), given.json)


if __name__ == "__main__":
    sys.exit(main())
