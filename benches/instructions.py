"""Instructions of the hot paths, counted by callgrind: the same on a busy machine as on a quiet one.

`hotpath` (crates/bench/examples) runs N round trips of 8 bytes between two workers of one process, on one thread. It is
counted for two values of N; the difference is the round trips' own, without start and end. The figures depend on the
compiler and the processor's instruction set, so those are recorded with them.

    python benches/instructions.py            count, and compare with the record (exit 1: worse by more than TOLERANCE)
    python benches/instructions.py --record   count, and record
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from crossrail.report import capture_environment, write_text
from scenarios import Outcome, Result, Terms

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).parent / "results" / "instructions.json"
TRANSPORTS = ("shm",)
FEW, MANY = 1000, 3000
TOLERANCE = 0.05
LIMIT_S = 300.0


def build(package: str = "crossrail-bench", example: str = "hotpath") -> Path:
    """Builds an example as it is shipped, optimised, and gives its path. Raises RuntimeError."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise RuntimeError(f"cargo is not installed; it is needed to build the example {example} of {package}")
    command = [cargo, "build", "--quiet", "--release", "--locked", "--package", package, "--example", example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S * 4, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{example} does not build: {done.stderr.strip()[-500:]}")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / "release" / "examples" / example


def count(program: Path, transport: str, scratch: Path) -> float:
    """Instructions of one round trip over ``transport``."""
    return (_total(program, MANY, transport, scratch) - _total(program, FEW, transport, scratch)) / (MANY - FEW)


def _total(program: Path, trips: int, transport: str, scratch: Path) -> int:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise RuntimeError("valgrind is not installed; apt-get install valgrind")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    out = f"--callgrind-out-file={scratch / 'callgrind.out'}"
    command = [valgrind, "--tool=callgrind", out, str(program), str(trips), transport]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.search(r"Collected\s*:\s*([0-9]+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"callgrind failed on hotpath over {transport}: {done.stderr.strip()[-500:]}")
    return int(found.group(1))


def recorded() -> dict[str, float]:
    """What the committed record says, by transport; empty before there is one."""
    if not RECORD.exists():
        return {}
    data = json.loads(RECORD.read_text())
    return {str(name): float(figure) for name, figure in data.get("instructions_per_round_trip", {}).items()}


def count_all(terms: Terms, scratch: Path) -> Result:
    """Counts every transport and compares with the record. Counting is exact, so one round is enough."""
    _ = terms
    program = build()
    before = recorded()
    now = {transport: count(program, transport, scratch) for transport in TRANSPORTS}
    outcomes = [_outcome(transport, figure, before.get(transport)) for transport, figure in now.items()]
    data = {
        "schema": "crossrail-instructions/1",
        "environment": asdict(capture_environment()),
        "compiler": _compiler(),
        "instructions_per_round_trip": now,
    }
    return outcomes, data


def _outcome(transport: str, now: float, before: float | None) -> Outcome:
    work = f"{transport}, 8 B round trip, both ends"
    ours = f"{now:,.0f} instructions"
    if before is None:
        return Outcome(work, ours, "as recorded", peer="none recorded")
    ratio = now / before
    to_reach = f"<= {1 + TOLERANCE:g} x recorded"
    return Outcome(work, ours, to_reach, f"{before:,.0f} (recorded)", f"{ratio:.3f}", met=ratio <= 1 + TOLERANCE)


def _compiler() -> str:
    done = subprocess.run(["rustc", "--version"], capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Counts alone, without the rest of the benchmark."""
    import tempfile

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crossrail-bench-") as scratch:
        outcomes, data = count_all(Terms(), Path(scratch))
    for outcome in outcomes:
        print(f"{outcome.work}: {outcome.ours}; {outcome.peer}; {outcome.ratio}")
    if arguments.record:
        write_text(json.dumps(data, indent=1) + "\n", str(RECORD))
        return 0
    return 1 if any(outcome.met is False for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
