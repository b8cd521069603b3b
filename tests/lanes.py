"""Runs Rust's test programs in three lanes side by side: cargo's runner, given its lane.

    cargo test --config "target.'cfg(all())'.runner = ['python3', 'tests/lanes.py', 'rest']"

Each lane is such a command of its own, which skips the programs of the others; a program that is named nowhere here is
of the lane "rest". What only calculates has the processors while nothing else needs them, whatever runs then: it reads
no clock, so that it cannot fail by being late.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

LANES = ("calculates", "waits", "rest")
CALCULATES = {"proto", "emulator"}
"""Packages, by their folder."""
WAITS = {"control", "handshake", "fuzz"}
"""Packages whose programs wait for leases and deadlines, or use one processor."""
WAITING = {("engine", "callbacks"), ("engine", "crossrail"), ("engine", "widening")}
"""Programs of other packages that do."""


def lane_of(package: str, program: str) -> str:
    """The lane of a program, by the folder of its package and the name of its file."""
    name = re.sub("-[0-9a-f]{16}$", "", program)
    if package in CALCULATES:
        return "calculates"
    return "waits" if package in WAITS or (package, name) in WAITING else "rest"


def main() -> int:
    """Becomes the program if it is of this lane."""
    lane, program, *arguments = sys.argv[1:]
    if lane not in LANES:
        print(f"lanes.py: no lane {lane}: {', '.join(LANES)}", file=sys.stderr)
        return 2
    # Cargo starts a program in its package's folder.
    if lane_of(Path.cwd().name, Path(program).name) == lane:
        if lane == "calculates":
            with contextlib.suppress(OSError):  # where a sandbox forbids it, it runs as the others do
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.execv(program, [program, *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main())
