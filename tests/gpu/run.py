"""All GPU tests of a pack (benches/gpu/pack.sh): Rust, Python, compute-sanitizer; a table at the end.

    python tests/gpu/run.py --pack .gpu --out .gpu/out              with 4, 2 and 1 GPUs, as far as there are
    python tests/gpu/run.py --pack .gpu --out .gpu/out --gpus 2

Every step runs, within its own time. Exit 0: nothing failed; 1: something did, or there is no GPU; 2: bad usage.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))

from steps import (  # noqa: E402
    Runner,
    Step,
    compiler,
    gpu_count,
    group_sizes,
    read_libtest,
    read_pytest,
    read_sanitizer,
    visible,
)

RUST_LIMIT_S = 120.0
PYTHON_LIMIT_S = 120.0
"""For each file of Python tests."""
SANITIZER_LIMIT_S = 120.0
EP_ITERATIONS = "10000"
"""Back-to-back exchanges with all GPUs; fewer with some of them."""
SANITIZERS = ("memcheck", "racecheck")


def main() -> int:
    """Runs the steps; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pack", type=Path, required=True, metavar="DIR", help="what benches/gpu/pack.sh made")
    parser.add_argument("--site", type=Path, metavar="DIR", help="where the pack's wheel was installed")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the log and the table")
    parser.add_argument("--gpus", metavar="LIST", help="with how many GPUs: 4,1 (4, 2 and 1, as far as there are)")
    parser.add_argument("--only", metavar="WORD", default="", help="steps with this in their names")
    parser.add_argument("--budget", type=float, default=560.0, metavar="S", help="seconds for all steps (560)")
    parser.add_argument("--without-gpu", action="store_true", help="go on without a GPU: every test is skipped then")
    arguments = parser.parse_args()
    present, why_not = gpu_count()
    if not present and not arguments.without_gpu:
        print(f"GPU tests need a GPU: {why_not}", file=sys.stderr)
        return 1
    try:
        sizes = group_sizes(arguments.gpus, present)
    except ValueError as error:
        parser.error(str(error))
    runner = Runner("test-gpu", arguments.out, arguments.budget)
    steps = [step for size in sizes for step in steps_for(arguments.pack, arguments.site, size, present)]
    chosen = [step for step in steps if arguments.only in step.name]
    if not chosen:
        parser.error(f"--only {arguments.only}: no such step; there are {', '.join(step.name for step in steps)}")
    for step in chosen:
        runner.run(step)
    return runner.finish()


def steps_for(pack: Path, site: Path | None, gpus: int, present: int) -> Iterator[Step]:
    """All steps with so many GPUs; the kernels are checked once, with the most."""
    environment = visible(gpus, present)
    if present:
        environment["TEST_GPU"] = "1"
    for program in sorted((pack / "tests").iterdir()):
        name = f"{gpus} GPU: {program.name}"
        yield Step(name, [program.resolve()], RUST_LIMIT_S, read_libtest, {**environment, **compiler()})
    python = {
        **environment,
        "PYTHONFAULTHANDLER": "1",
        "COLUMNS": "200",
        **({"EP_ITERATIONS": EP_ITERATIONS} if gpus == present else {}),
        **({"PYTHONPATH": str(site.resolve())} if site else {}),
    }
    tests = ROOT / "tests" / "gpu"
    pytest = [sys.executable, "-m", "pytest", "-c", tests / "pytest.ini", "-p", "no:cacheprovider"]
    # A process for each file: one that dies takes no other with it.
    for file in sorted(tests.glob("test_*.py")):
        yield Step(f"{gpus} GPU: Python {file.name}", [*pytest, file], PYTHON_LIMIT_S, read_pytest, python)
    if gpus == present or not present:
        for tool in SANITIZERS:
            yield sanitizer(pack, tool, gpus, {**environment, **compiler()})


def sanitizer(pack: Path, tool: str, gpus: int, environment: dict[str, str]) -> Step:
    """Every kernel on small odd shapes, under a tool of compute-sanitizer."""
    program = pack / "examples" / "crossrail-kernels.sanitize"
    checker = find_sanitizer()
    missing = None if checker else "compute-sanitizer is not installed"
    options = [f"--tool={tool}", "--error-exitcode=86", "--print-limit=20"]
    return Step(
        f"{gpus} GPU: {tool}",
        [checker or "compute-sanitizer", *options, program.resolve()],
        SANITIZER_LIMIT_S,
        read_sanitizer,
        environment,
        missing,
    )


def find_sanitizer() -> str | None:
    """compute-sanitizer: on the PATH, or where CUDA is."""
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    folders = [
        f"{root}/{below}" for root in (*roots, "/usr/local/cuda") if root for below in ("bin", "compute-sanitizer")
    ]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


if __name__ == "__main__":
    sys.exit(main())
