"""Instructions of the hot paths, counted by callgrind: the same on a busy machine as on a quiet one.

Counted without the page that `crossrail top` reads, because a timer writes it: callgrind slows the program down, so the
page would be written many more times per message than in reality. `make bench` counts with the page as well, as an
upper bound of its cost. It also counts round trips beside many idle endpoints.

`hotpath` (crates/engine/examples) runs N round trips of 8 bytes between two workers of one process, on one thread. It
is counted within its round trips, for two values of N; the difference is without the first ones, which set up what the
others use. Start and end are left out because threads wait for each other there, for as long as it takes. The count
depends on the compiler, so the baseline names the compiler that it was recorded with.

    python benches/instructions.py            count, and compare with the baseline (exit 1: above it by TOLERANCE)
    python benches/instructions.py --record   count, and replace the baseline
    python benches/instructions.py --from-c   count from C, and compare with Rust (exit 1: above it by C_TOLERANCE)

Only `--record` writes benches/baseline.json. `make bench` and the tests compare with it and leave it alone, so that
several small increases can't pass one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.goals import Figures, judged
from crossrail_tools.report.units import format_size
from crossrail_tools.report.writing import write_text
from harness import ROOT, Effort, Outcome, Results, build, changed_files

BASELINE = ROOT / "benches" / "baseline.json"
SCHEMA = "crossrail-instructions/1"
FIGURES = "instructions_per_round_trip"
PAGED = "instructions_with_page"
CROWDED = "instructions_beside_idle_endpoints"
FROM_C = "instructions_from_c"
TRANSPORTS = ("shm",)
FEW, MANY = 1000, 3000
TOLERANCE = 0.02
IDLE_TOLERANCE = 0.03
C_TOLERANCE = 0.03
ENDPOINTS = 1000
ROWS, ROW = 10_000, 64
MOVES = 30, 10
REPEATS = 2
INSTRUCTIONS = Figures(lambda count: f"{count:,.0f} instructions", digits=3)
LIMIT_S = 300.0


def count(program: Path, transport: str, pages: str = "off") -> float:
    """Instructions of one round trip over ``transport``. ``pages``: CROSSRAIL_PAGES, empty for its default."""
    many, few = (_within_rounds(program, [str(trips), transport], pages) for trips in (MANY, FEW))
    return (many - few) / (MANY - FEW)


def from_c(folder: Path, name: str) -> Path:
    """A program of tests/capi with the C library as it is released, which is installed in ``folder``."""
    if not (folder / "lib").exists():
        build_script = [sys.executable, str(ROOT / "packaging" / "c_library.py"), "--prefix", str(folder)]
        subprocess.run(build_script, check=True)
    program, lib, source = folder / name, folder / "lib", ROOT / "tests" / "capi" / f"{name}.c"
    compiler = ["cc", "-std=c11", "-O2", "-pthread", f"-I{folder / 'include'}", str(source)]
    subprocess.run([*compiler, "-o", str(program), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lcrossrail"], check=True)
    return program


def count_from_c(folder: Path) -> float:
    """Instructions of the same round trip over shared memory by a program in C."""
    program = from_c(folder, "cost")
    many, few = (_within(program, [str(trips)], ["rounds*"], "off") for trips in (MANY, FEW))
    return (many - few) / (MANY - FEW)


def count_rows(program: Path) -> int:
    """Instructions of listing ``ROWS`` rows at both ends and preparing a write and a read of them, by `rows`."""
    return _within(program, ["shm", "plain", str(ROWS), str(ROW), "1"], ["rows::listed*", "rows::prepared*"], "off")


def count_rows_from_c(folder: Path, program: Path) -> int:
    """Instructions of that by a program in C, whose rows are those of a server of ``program``."""
    client = from_c(folder, "rows")
    command = [str(program), "serve", "shm", "plain", str(ROWS * ROW)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            described = server.stdout.readline().strip()
            return _within(client, [described, str(ROWS), str(ROW), "1"], ["listed", "prepared"], "off")
        finally:
            server.kill()


def count_moves(program: Path, function: str) -> float:
    """Instructions of moving the rows there and back, by either program: both ends in one process, on one thread."""
    many, few = (_within(program, ["driven", str(ROWS), str(ROW), str(moves)], [function], "off") for moves in MOVES)
    return (many - few) / (MOVES[0] - MOVES[1])


def count_beside(program: Path, transport: str, size: int, idle: int) -> float:
    """Instructions of one round trip of ``size`` bytes while one end has ``idle`` other endpoints."""
    return _within_rounds(program, [str(FEW), transport, str(size), str(idle)]) / FEW


def count_crowded(program: Path, transport: str, size: int, alone: float) -> float:
    """The same beside ``ENDPOINTS``.

    The timers of all endpoints are looked at ten times a second. A run that takes many times as long as it really would
    may have such a look within it: one that counts too much against ``alone`` is repeated.
    """
    crowded = count_beside(program, transport, size, ENDPOINTS)
    if crowded > (1 + IDLE_TOLERANCE) * alone:
        crowded = min(crowded, *(count_beside(program, transport, size, ENDPOINTS) for _ in range(REPEATS)))
    return crowded


def _within_rounds(program: Path, arguments: list[str], pages: str = "off") -> int:
    """Instructions within the function that runs the round trips, on its thread."""
    return _within(program, arguments, ["hotpath::rounds*"], pages)


def _within(program: Path, arguments: list[str], functions: list[str], pages: str) -> int:
    command = [_valgrind(), "--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"]
    command += [*(f"--toggle-collect={function}" for function in functions), str(program), *arguments]
    counted = _collected(command, {"CROSSRAIL_PAGES": pages} if pages else {})
    if counted < FEW:
        raise RuntimeError(f"callgrind found no function {' or '.join(functions)} in {program}")
    return counted


def _valgrind() -> str:
    if (valgrind := shutil.which("valgrind")) is None:
        raise RuntimeError("valgrind is not installed (Debian: valgrind)")
    return valgrind


def _collected(command: list[str], settings: dict[str, str]) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    done = subprocess.run(command, env=clean | settings, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.search(r"Collected\s*:\s*([0-9]+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"callgrind failed: {' '.join(command)}: {done.stderr.strip()[-500:]}")
    return int(found.group(1))


def baseline() -> dict[str, float]:
    """The recorded figure of each transport. Raises RuntimeError where there is none."""
    try:
        figures = json.loads(BASELINE.read_text())[FIGURES]
    except (OSError, ValueError, KeyError) as error:
        raise RuntimeError(f"{BASELINE}: {error!r}; record one with python benches/instructions.py --record") from error
    return {str(name): float(figure) for name, figure in figures.items()}


def measure() -> dict[str, Any]:
    """Counts every transport; in the form of the baseline. Counting is exact, so one run is enough."""
    program = build("crossrail", "hotpath")
    return {
        "schema": SCHEMA,
        "environment": asdict(capture_environment()),
        "compiler": _compiler(),
        FIGURES: {transport: count(program, transport) for transport in TRANSPORTS},
    }


def count_all(_: Effort, found: Results) -> None:
    """Counts every transport, compares with the baseline, and counts again with the page."""
    data = found.more = measure()
    found.outcomes += compared(data[FIGURES], baseline())
    program = build("crossrail", "hotpath")
    data[PAGED] = {transport: count(program, transport, pages="") for transport in TRANSPORTS}
    for transport, figure in data[PAGED].items():
        work = f"{transport}, 8 B round trip, with the page of top"
        found.outcomes.append(_beside(work, figure, data[FIGURES][transport], TOLERANCE, "without it"))
    with tempfile.TemporaryDirectory() as folder:
        data[FROM_C], beside = compared_with_c(Path(folder), data[FIGURES]["shm"])
    found.outcomes += beside
    data[CROWDED] = {}
    for transport in ("shm", "tcp"):
        for size in (8, 64 << 10):
            alone = count_beside(program, transport, size, 0)
            crowded = count_crowded(program, transport, size, alone)
            data[CROWDED][f"{transport}, {format_size(size)}"] = {"0": alone, str(ENDPOINTS): crowded}
            work = f"{transport}, {format_size(size)} round trip beside {ENDPOINTS:,} idle endpoints"
            found.outcomes.append(_beside(work, crowded, alone, IDLE_TOLERANCE, "without them"))


def compared_with_c(folder: Path, round_trip: float) -> tuple[dict[str, float], list[Outcome]]:
    """Instructions of a round trip (Rust's: ``round_trip``), and of rows prepared and moved, in C and in Rust."""
    program = build("crossrail", "rows")
    rust = {"shm": round_trip, "rows": float(count_rows(program)), "moves": count_moves(program, "rows::moved*")}
    in_c = {"shm": count_from_c(folder), "rows": float(count_rows_from_c(folder, program))}
    in_c["moves"] = count_moves(from_c(folder, "rows"), "moved")
    works = {
        "shm": "shm, 8 B round trip, from C",
        "rows": f"{ROWS:,} rows listed and prepared, from C",
        "moves": f"{ROWS:,} rows written and read, from C",
    }
    outcomes = [_beside(works[name], in_c[name], rust[name], C_TOLERANCE, "Rust's") for name in works]
    return in_c, outcomes


def _beside(work: str, figure: float, other: float, tolerance: float, what: str) -> Outcome:
    made = judged(work, figure, other, 1 + tolerance, what, INSTRUCTIONS)
    return replace(made, peer=f"{other:,.0f} ({what.partition(' ')[0]})")


def compared(now: dict[str, float], recorded: dict[str, float]) -> list[Outcome]:
    """An outcome for each transport that was counted. One without a baseline has failed."""
    outcomes = []
    for transport, figure in now.items():
        work = f"{transport}, 8 B round trip, both ends"
        if (before := recorded.get(transport)) is not None:
            outcomes.append(_beside(work, figure, before, TOLERANCE, "baseline"))
            continue
        note, to_reach = f"{BASELINE.name} has no figure for {transport}", f"<= {1 + TOLERANCE:g} x baseline"
        outcomes.append(Outcome(work, f"{figure:,.0f} instructions", to_reach, failed=True, notes=[note]))
    return outcomes


def _compiler() -> str:
    done = subprocess.run(["rustc", "--version"], capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Counts alone, without the rest of the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--record", action="store_true", help=f"write {BASELINE.relative_to(ROOT)}")
    parser.add_argument("--from-c", action="store_true", help="compare programs in C with those in Rust")
    arguments = parser.parse_args()
    if arguments.record and (changed := changed_files()):
        print(f"instructions.py: a baseline names its commit; commit first: {', '.join(changed)}", file=sys.stderr)
        return 2
    try:
        # Before anything is compiled, which takes minutes.
        _valgrind()
        data = measure()
    except RuntimeError as error:
        print(f"instructions.py: {error}", file=sys.stderr)
        return 1
    if arguments.record:
        write_text(json.dumps(data, indent=1) + "\n", str(BASELINE))
        print(f"recorded in {BASELINE.relative_to(ROOT)}: {data[FIGURES]}")
        return 0
    if arguments.from_c:
        with tempfile.TemporaryDirectory() as folder:
            _, outcomes = compared_with_c(Path(folder), data[FIGURES]["shm"])
    else:
        outcomes = compared(data[FIGURES], baseline())
    for outcome in outcomes:
        print(f"{outcome.work}: {outcome.ours}; {outcome.peer}; {outcome.ratio}", *outcome.notes)
    return 0 if all(outcome.met for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
