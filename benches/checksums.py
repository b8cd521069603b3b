"""What CROSSRAIL_CHECKSUM=crc costs a lane over TCP: the figures behind docs/design/trust.md.

    python benches/checksums.py            into benches/results/checksums.json
    python benches/checksums.py --rounds 1 --results DIR

Two processes move 8 bytes to and fro, and 64 MiB, over one lane of loopback (crates/tcp/examples/raw_lane.rs), with
checksums and without by turns.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossrail_tools.report import capture_environment, compact, write_text
from harness import ROOT, build, output, refusal

RESULTS = ROOT / "benches" / "results"
MODES = {"off": "reference", "crc": "checked"}
LIMIT_S = 60.0
FOUND = {
    "one_way_us": r": 8 B one way ([\d.]+) us",
    "gb_per_s": r": 64 MiB ([\d.]+) GB/s",
    "sender_ms_per_gb": r": sender (\d+) ms of CPU per GB",
    "receiver_ms_per_gb": r": receiver (\d+) ms of CPU per GB",
}
"""What a turn prints."""


def main() -> int:
    """Measures, prints and writes; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each kind (7)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if why := refusal(arguments.results, RESULTS):
        print(why, file=sys.stderr)
        return 2
    program = build("crossrail-tcp", "raw_lane")
    samples: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        for mode, turns in samples.items():
            turns.append(one_turn(program, MODES[mode]))
    result: dict[str, Any] = {
        "schema": "crossrail-checksums/1",
        "environment": asdict(capture_environment()),
        "outcomes": outcomes(samples),
        "samples": samples,
    }
    for outcome in result["outcomes"]:
        print("{work}: {ours}, {peer}, {ratio}".format(**outcome))
    write_text(compact(result), str(arguments.results / "checksums.json"))
    return 0


def one_turn(program: Path, mode: str) -> dict[str, float]:
    """Runs it once; what it says."""
    said = output(f"raw_lane {mode}", [program, mode, "spin"], LIMIT_S)
    turn = {}
    for name, pattern in FOUND.items():
        if (found := re.search(pattern, said)) is None:
            raise ValueError(f"the output of raw_lane has no {name}: {said}")
        turn[name] = float(found[1])
    return turn


def outcomes(samples: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A line for each figure: medians of all turns, and their ratio: how much of the speed is left."""
    rows = []
    for name, work, unit, more in (
        ("one_way_us", "8 bytes, one way", "us", False),
        ("gb_per_s", "64 MiB", "GB/s", True),
        ("sender_ms_per_gb", "64 MiB, processor time of the sender", "ms per GB", False),
        ("receiver_ms_per_gb", "64 MiB, processor time of the receiver", "ms per GB", False),
    ):
        with_crc, without = (statistics.median(turn[name] for turn in samples[mode]) for mode in ("crc", "off"))
        ratio = with_crc / without if more else without / with_crc
        texts = {"ours": f"{with_crc:.3g} {unit}", "peer": f"{without:.3g} {unit} without", "ratio": f"{ratio:.2f}"}
        rows.append({"work": work, **texts, "to_reach": "-", "met": None, "failed": False})
    return rows


if __name__ == "__main__":
    sys.exit(main())
