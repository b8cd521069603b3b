"""All GPU tests of a pack (benches/gpu/pack.sh): Rust, Python, compute-sanitizer; a table at the end.

    python tests/gpu/run.py --pack .gpu --out .gpu/out              with 4, 2 and 1 GPUs, as far as there are
    python tests/gpu/run.py --pack .gpu --out .gpu/out --gpus 2
    python tests/gpu/run.py --pack .gpu --out .gpu/out --share      dispatch and combine alone, two ranks on each GPU

DeepEP's own tests run as well where DEEPEP_TESTS names folders with them (see deepep_own.py).

Every step runs, within its own time: what must be alone first, the rest side by side (--alone: one at a time). Exit 0:
nothing failed; 1: something did, or there is no GPU; 2: bad usage.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))

from sharing import HALF, WITHOUT, mps  # noqa: E402
from steps import (  # noqa: E402
    Runner,
    Step,
    compiler,
    gpu_count,
    group_sizes,
    read_libtest,
    read_program,
    read_pytest,
    read_sanitizer,
)

RUST_LIMIT_S = 120.0
PYTHON_LIMIT_S = 120.0
"""For each file of Python tests."""
SANITIZER_LIMIT_S = 120.0
EP_ITERATIONS = "10000"
"""Back-to-back exchanges with all GPUs; fewer with some of them."""
SANITIZERS = ("memcheck", "racecheck")
NOT_FOR = {"racecheck": "4rank7combine"}
"""A kernel that a tool is not to look at, by part of its mangled name: `crossrail::ep::rank::combine`. The tool
cannot tell the combine of few tokens, which goes by the same name, from the one that is meant.

racecheck of CUDA 13.0 knows mbarriers in part only (its release notes of 2025.4 name false alarms). What the lanes of a
warp write before `__syncwarp` and the first lane's arrival it takes for a race with the warp that waits at the barrier;
where each lane arrives by itself, or these words go by atomics, the kernel never ended under it. The emulator checks
the order of that ring (`broken_kernels_are_caught` in crates/emulator/tests/emulated/rank_layout.rs).
"""
PAIRS = (
    *(f"crossrail-{name}" for name in ("cuda-ipc.gpu", "cuda.gpu", "kernels.gpu", "bench.gpu_unpack")),
    *("crossrail.gpu", "crossrail-gpu.gpu_staging"),
    *(f"test_api_{name}.py" for name in ("allocators", "arrays", "ends", "fallbacks", "graphs", "streams", "waits")),
    *("test_cli_p2p.py", "test_guide.py"),
)
"""Use no third GPU: run with two where there are more."""
EXPERTS = (
    "crossrail-emulator.gpu",
    *(f"test_deep_ep{name}.py" for name in ("", "_elastic", "_engines", "_low_latency")),
    *(f"test_{name}.py" for name in ("cli_ep", "experts_groups", "guide_experts", "published_experts")),
)
"""Their kernels wait for each other."""
ENDLESS = ("crossrail-ep-cuda.gpu", "test_experts.py")
"""And these have thousands of them."""
DEEPEP_LIMIT_S = 240.0
MOST_DEEPEP_RANKS = 8
TWO_NODES = "it asserts that there are two nodes of eight GPUs"
DEEPEP = (
    ("tests/test_intranode.py", "", 2),
    ("tests/test_low_latency.py", "", 2),
    ("tests/test_low_latency.py", "--use-logfmt", 2),
    ("tests/test_low_latency.py", "--shrink-test", 6),
    ("tests/test_internode.py", "", 16),
    ("tests/elastic/test_ep.py", "--num-tokens 1024 --skip-perf-test", 2),
    ("tests/elastic/test_ep.py", "--num-tokens 256 --skip-perf-test --do-cpu-sync 0", 2),
    ("tests/elastic/test_ep.py", "--num-tokens 128 --skip-perf-test --allow-multiple-reduction 0", 2),
    ("tests/elastic/test_ep.py", "--num-tokens 128 --skip-perf-test --masked-ratio 0.3 --deterministic", 2),
)
"""DeepEP's own files, with options, and the ranks that they need: ranks 1, 3 and 5 of the shrink test fail in turn."""
TWO_ON_ONE = Path(__file__).with_name("two_on_one").resolve()
"""A folder of modules: what Python runs first in programs that do not know that they share a GPU."""
COUNTING = "given_back"
"""In the names of Rust tests that count a GPU's free memory, as Python tests marked "alone" do."""


def main() -> int:
    """Runs the steps; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pack", type=Path, required=True, metavar="DIR", help="what benches/gpu/pack.sh made")
    parser.add_argument("--site", type=Path, metavar="DIR", help="where the pack's wheel was installed")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the log and the table")
    parser.add_argument("--gpus", metavar="LIST", help="with how many GPUs: 4,1 (4, 2 and 1, as far as there are)")
    parser.add_argument("--only", metavar="WORD", default="", help="steps with this in their names")
    parser.add_argument("--budget", type=float, default=560.0, metavar="S", help="seconds for all steps (560)")
    parser.add_argument("--alone", action="store_true", help="one step at a time")
    parser.add_argument("--share", action="store_true", help="expert buffers with two ranks on each GPU, by CUDA's MPS")
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
    runner = Runner("test-gpu-shared" if arguments.share else "test-gpu", arguments.out, arguments.budget)
    steps = steps_for(arguments.pack, arguments.site, sizes, present)
    if arguments.share:
        steps = [*between_two(arguments.site, present)]
    chosen = [step for step in steps if arguments.only in step.name]
    if not chosen:
        parser.error(f"--only {arguments.only}: no such step; there are {', '.join(step.name for step in steps)}")
    one_by_one = arguments.alone or arguments.share
    try:
        with mps() if arguments.share else nullcontext():
            runner.run_all([replace(step, kind="alone") for step in chosen] if one_by_one else chosen, present)
    except RuntimeError as error:
        print(f"run.py: --share: {error}", file=sys.stderr)
        return 1
    return runner.finish()


def steps_for(pack: Path, site: Path | None, sizes: list[int], present: int) -> list[Step]:
    """All steps, those that must be alone first, with the most GPUs first; the kernels are checked once."""
    environment = {"TEST_GPU": "1"} if present else {}
    steps: list[Step] = []
    for program in sorted((pack / "tests").iterdir()):
        steps += rust(program, sizes, {**environment, **compiler()})
    library = {"C_LIBRARY": str((pack / "c").resolve())} if (pack / "c").is_dir() else {}
    environment = {**environment, **of_python(site), **library}
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        steps += python(file, sizes, present, environment)
    steps += [sanitizer(pack, tool, min(max(sizes), 2), environment) for tool in SANITIZERS]
    steps += deepep(os.environ.get("DEEPEP_TESTS", ""), max(sizes), environment)
    return sorted(steps, key=lambda step: (step.kind != "alone", -step.gpus, step.kind != "endless"))


def between_two(site: Path | None, present: int) -> Iterator[Step]:
    """What has ranks that exchange rows, with two ranks for each GPU: each has half of its multiprocessors."""
    environment = {"TEST_GPU": "1", **of_python(site), **HALF}
    # DeepEP's own programs know nothing of it: what places them is what they run first.
    path = os.pathsep.join(filter(None, (str(TWO_ON_ONE), environment.get("PYTHONPATH"))))
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        if kind_of(file.name) != "any" and "cli" not in file.name:
            yield from python(file, [present], present, environment)
    yield from deepep(os.environ.get("DEEPEP_TESTS", ""), 2 * present, {**environment, **WITHOUT, "PYTHONPATH": path})


def of_python(site: Path | None) -> dict[str, str]:
    path = {"PYTHONPATH": str(site.resolve())} if site else {}
    return {"PYTHONFAULTHANDLER": "1", "COLUMNS": "200", **path}


def rust(program: Path, sizes: list[int], environment: dict[str, str]) -> Iterator[Step]:
    """A test program with each number of GPUs; apart from it, its tests that count memory."""
    listed = subprocess.run([program.resolve(), "--list", COUNTING], capture_output=True, text=True, check=False)
    counting = ": test" in listed.stdout
    for gpus in gpus_for(program.name, sizes):
        name, options = f"{gpus} GPU: {program.name}", ["--skip", COUNTING] if counting else []
        step = Step(name, [program.resolve(), *options], RUST_LIMIT_S, read_libtest, environment, gpus=gpus)
        yield replace(step, kind=kind_of(program.name))
        if counting:
            yield replace(step, name=f"{name} {COUNTING}", command=[program.resolve(), COUNTING])


def python(file: Path, sizes: list[int], present: int, environment: dict[str, str]) -> Iterator[Step]:
    """A file of tests with each number of GPUs, in a process of its own: one that dies takes no other with it."""
    pytest = [sys.executable, "-m", "pytest", "-c", file.parent / "pytest.ini", "-p", "no:cacheprovider", file]
    counting = "pytest.mark.alone" in file.read_text()
    for gpus in gpus_for(file.name, sizes):
        name, options = f"{gpus} GPU: Python {file.name}", ["-m", "not alone"] if counting else []
        more = {"EP_ITERATIONS": EP_ITERATIONS} if gpus == present else {}
        step = Step(name, [*pytest, *options], PYTHON_LIMIT_S, read_pytest, {**environment, **more}, gpus=gpus)
        yield replace(step, kind=kind_of(file.name))
        if counting:
            yield replace(step, name=f"{name} alone", command=[*pytest, "-m", "alone"])


def deepep(folders: str, gpus: int, environment: dict[str, str]) -> Iterator[Step]:
    """DeepEP's own tests, of these folders (as in PATH), with as many ranks as there are GPUs."""
    ranks = min(1 << max(gpus.bit_length() - 1, 0), MOST_DEEPEP_RANKS)
    for folder in filter(None, folders.split(os.pathsep)):
        for file, options, needed in DEEPEP:
            if not (Path(folder) / file).exists():
                continue
            missing = TWO_NODES if needed > MOST_DEEPEP_RANKS else f"needs {needed} GPUs" if needed > ranks else None
            program = [sys.executable, Path(__file__).with_name("deepep_own.py"), folder, file]
            command = [*program, "--num-processes", str(ranks), *options.split()]
            name = " ".join(filter(None, (f"{ranks} GPU: DeepEP {Path(file).name}", options)))
            more = {"CROSSRAIL_TIMEOUT": "5"} if "shrink" in options else {}
            yield Step(name, command, DEEPEP_LIMIT_S, read_program, {**environment, **more}, missing, gpus=ranks)


def gpus_for(name: str, sizes: list[int]) -> list[int]:
    """With how many GPUs a program or a file is to run."""
    return sorted({min(size, 2) if name in PAIRS else size for size in sizes}, reverse=True)


def kind_of(name: str) -> str:
    """What may run beside a program or a file."""
    return "endless" if name in ENDLESS else "waits" if name in EXPERTS else "any"


def sanitizer(pack: Path, tool: str, gpus: int, environment: dict[str, str]) -> Step:
    """Every kernel on small odd shapes, under a tool of compute-sanitizer."""
    environment = {**environment, **compiler()}
    program = pack / "examples" / "crossrail-emulator.sanitize"
    checker = find_sanitizer()
    missing = None if checker else "compute-sanitizer is not installed"
    options = [f"--tool={tool}", "--error-exitcode=86", "--print-limit=20"]
    if tool in NOT_FOR:
        options += ["--kernel-name-exclude", f"kernel_substring={NOT_FOR[tool]}"]
    return Step(
        f"{gpus} GPU: {tool}",
        [checker or "compute-sanitizer", *options, program.resolve()],
        SANITIZER_LIMIT_S,
        read_sanitizer,
        environment,
        missing,
        gpus,
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
