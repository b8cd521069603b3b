"""The cost of CROSSRAIL_CHECKSUM=crc for a lane over TCP: the figures of docs/design/trust.md.

Two processes move 8 bytes to and fro, and 64 MiB, over one lane of loopback (crates/tcp/examples/raw_lane.rs), with
checksums and without by turns.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from harness import Effort, Outcome, Results, build, output

MODES = {"off": "reference", "crc": "checked"}
LIMIT_S = 60.0
TURNS = 7
FIGURES = (
    (r": 8 B one way ([\d.]+) us", "8 bytes, one way", "us", False),
    (r": 64 MiB ([\d.]+) GB/s", "64 MiB", "GB/s", True),
    (r": sender (\d+) ms of CPU per GB", "64 MiB, processor time of the sender", "ms per GB", False),
    (r": receiver (\d+) ms of CPU per GB", "64 MiB, processor time of the receiver", "ms per GB", False),
)
"""The pattern of each printed figure, its work and unit; True: a larger one is better."""


def cost(effort: Effort, found: Results) -> None:
    """A line for each figure: medians of all turns, and their ratio: how much of the speed is left."""
    program = build("crossrail-tcp", "raw_lane")
    turns: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(1 if effort.quick else TURNS):
        for mode, of in turns.items():
            of.append(one_turn(program, MODES[mode]))
    found.more["samples"] = turns
    for place, (_, work, unit, more) in enumerate(FIGURES):
        with_crc, without = (statistics.median(turn[place] for turn in turns[mode]) for mode in ("crc", "off"))
        ratio = with_crc / without if more else without / with_crc
        peer = f"{without:.3g} {unit} without"
        found.outcomes.append(Outcome(work, f"{with_crc:.3g} {unit}", "-", peer, f"{ratio:.2f}"))


def one_turn(program: Path, mode: str) -> list[float]:
    """Runs it once; its figures."""
    said = output(f"raw_lane {mode}", [program, mode, "spin"], LIMIT_S)
    matches = [re.search(pattern, said) for pattern, *_ in FIGURES]
    if not all(matches):
        raise RuntimeError(f"the output of raw_lane lacks a figure: {said}")
    return [float(match[1]) for match in matches if match]
