"""What a trace costs while it is recorded: the rate of `crossrail bench p2p` with and without `--trace`, by turns.

    python benches/tracing.py            into benches/results/tracing.json
    python benches/tracing.py --rounds 3 --results DIR

The goal is the rate without a trace, less 2 %, at 64 MiB over shared memory and over TCP. Exit code 1: it is not
reached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossrail_tools.report import capture_environment, compact, write_text
from harness import bench, refusal

RESULTS = Path(__file__).parent / "results"
TRANSPORTS = ("shm", "tcp")
GOAL = 0.98


def main() -> int:
    """Measures, prints and writes; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each kind (9)")
    parser.add_argument("--iters", type=int, default=100, help="transfers of a turn (100)")
    parser.add_argument("--size", default="64M", help="bytes of a transfer (64M)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if why := refusal(arguments.results, RESULTS):
        print(why, file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "schema": "crossrail-tracing/1",
        "environment": asdict(capture_environment()),
        "size": arguments.size,
        "iters": arguments.iters,
        "goal": GOAL,
        "transports": {},
    }
    with tempfile.TemporaryDirectory(prefix="crossrail-tracing-") as scratch:
        for transport in TRANSPORTS:
            options = ("p2p", f"--transport={transport}", f"--size={arguments.size}", f"--iters={arguments.iters}")
            row = compared(Path(scratch), options, arguments.rounds)
            result["transports"][transport] = row
            print(f"{transport}: {row['off']:.2f} GB/s, {row['on']:.2f} with a trace: {row['ratio']:.3f} x (>= {GOAL})")
    write_text(compact(result), str(arguments.results / "tracing.json"))
    return 0 if all(row["ratio"] >= GOAL for row in result["transports"].values()) else 1


def compared(scratch: Path, options: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """The rates of each kind in GB/s, their medians, and the median of the turns' ratios."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(rounds):
        kinds = [("off", ()), ("on", (f"--trace={scratch / 'trace.json'}",))]
        # By turns, and each first as often as the other: neither profits from what the machine does meanwhile.
        for kind, more in kinds if turn % 2 == 0 else kinds[::-1]:
            (row,) = bench(scratch, *options, *more).rows
            rates[kind].append(statistics.median(row.rounds))
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    medians = {kind: statistics.median(figures) for kind, figures in rates.items()}
    return {**medians, "ratio": statistics.median(ratios), "ratios": ratios, "gb_per_s": rates}


if __name__ == "__main__":
    sys.exit(main())
