"""The C library's checks under valgrind, and compiled with the address and undefined-behaviour sanitizers.

    python tests/capi/memory.py [NAME...]

Prints a line for each run; exit code 1 if one has failed. valgrind finds invalid accesses and leaks of the library too,
the sanitizers those of the programs, also in memory of the library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "packaging")]

from c_programs import SOURCES, build, checks  # noqa: E402

import programs  # noqa: E402

VALGRIND = ["valgrind", "--quiet", "--error-exitcode=99", "--fair-sched=yes", "--leak-check=full"]
VALGRIND += ["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
LIMIT_S = 300.0
FORKS = {"forks", "forked"}
"""Not under valgrind, whose forked child has what it has found in the parent."""


def main() -> int:
    """Runs all checks, or those named."""
    if said := programs.missing(("valgrind", "gcc")):
        print(f"not run: {said}")
        return 1
    names = sys.argv[1:]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for program in sorted({program for program, _ in checks()}):
            build(SOURCES / program, Path(folder) / f"{program}.plain")
            build(SOURCES / program, Path(folder) / f"{program}.checked", "gcc", *SANITIZERS)
        for program, name in checks():
            if names and name not in names:
                continue
            for tls in ("shm", "tcp"):
                runs = {"sanitizers": [f"{folder}/{program}.checked", name, tls]}
                if name not in FORKS:
                    runs["valgrind"] = [*VALGRIND, f"{folder}/{program}.plain", name, tls]
                for tool, command in runs.items():
                    failed += not _passes(f"{name} over {tls}, {tool}", command)
    return 1 if failed else 0


def _passes(what: str, command: list[str]) -> bool:
    settings = os.environ | {"ASAN_OPTIONS": "detect_leaks=1", "CROSSRAIL_LOG": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=settings)
    except subprocess.TimeoutExpired:
        print(f"{what}: not finished after {LIMIT_S:g} s", flush=True)
        return False
    print(f"{what}: {'good' if done.returncode == 0 else f'exit code {done.returncode}'}", flush=True)
    if done.returncode != 0:
        print(done.stderr[-4000:], flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
