"""Runs steps, each with its own timeout, and ends with a table of their results.

Steps that measure run one after the other, all others in parallel, as far as GPUs have room. A step that fails or hangs
does not affect the others. All output goes to one log; the table is rewritten after each step, so that a killed run
keeps its partial results."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

# What is printed of a step that failed, and what a step may add to the log.
SHOWN_LINES = 40
LOG_BYTES = 1 << 20
GRACE_S = 3.0
ROOM = {"waits": 2, "any": 2}
"""Concurrent steps per GPU, by kind: "waits" are steps whose kernels wait for kernels of other GPUs, longer with more
such steps; "any" leave GPUs idle most of the time."""
TAKES = {"alone": ROOM, "endless": {"waits": ROOM["waits"]}, "waits": {"waits": 1}, "any": {"any": 1}}
"""Share of that which a step of each kind takes: "endless" ones run thousands of waiting kernels."""


@dataclass(frozen=True)
class Counts:
    """What a step's output says."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()


Reads = Callable[[str, int], Counts]
"""Makes counts of a step's output and its exit code."""


@dataclass(frozen=True)
class Step:
    """A program to run. `missing`: why it cannot be run here; then it counts as skipped. Where steps run side by side,
    `gpus` is how many it gets, and `kind` (of TAKES) says what may run there meanwhile."""

    name: str
    command: Sequence[str | os.PathLike[str]]
    limit_s: float
    reads: Reads
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None
    gpus: int = 1
    kind: str = "alone"

    def room(self) -> dict[str, int]:
        """What it takes of each of its GPUs."""
        return TAKES[self.kind]


@dataclass(frozen=True)
class Result:
    """Result of a step. `state`: passed, failed, skipped, "out of time" or "not run"."""

    name: str
    state: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.state in ("passed", "skipped")


class Runner:
    """Runs steps and saves their results in `folder`: NAME.log and NAME.json."""

    def __init__(self, name: str, folder: Path, budget_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        self.table = folder / f"{name}.json"
        self.log.write_bytes(b"")
        self.results: list[Result] = []
        self.started = time.monotonic()
        self.budget_s = budget_s
        self._lock = threading.Lock()
        """Of the log, the table and the results."""
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        """By the file of their output."""
        self._stopped = False

    def run_all(self, steps: Iterable[Step], present: int) -> None:
        """Runs steps side by side, as far as there is room. None overtakes one that waits for the same room."""
        waiting = list(steps)
        begun: list[Future[None]] = []
        gpus = Gpus(max(present, 1))

        def on(places: list[int], step: Step) -> None:
            try:
                self.run(replace(step, environment={**step.environment, **visible(places, present)}))
            finally:
                gpus.leave(step, places)

        with ThreadPoolExecutor(max_workers=len(gpus) * sum(ROOM.values())) as threads:
            try:
                while waiting:
                    step, places = gpus.enter(waiting)
                    waiting.remove(step)
                    begun.append(threads.submit(on, places, step))
                for one in wait(begun, return_when=FIRST_EXCEPTION).done:
                    one.result()
            except BaseException:
                self._stop()
                raise

    def run(self, step: Step) -> Result:
        """Runs a step to its end, or to the end of its time."""
        left = self.budget_s - (time.monotonic() - self.started)
        output = ""
        if step.missing is not None:
            result = Result(step.name, "skipped", notes=[step.missing])
        elif left <= 0:
            result = Result(step.name, "not run", notes=["no time was left: --budget"])
        else:
            result, output = self._run(replace(step, limit_s=min(step.limit_s, left)))
        counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
        with self._lock:
            self.results.append(result)
            if not result.good and output:
                print(f"-- the end of {step.name}:\n" + "\n".join(output.splitlines()[-SHOWN_LINES:]))
            print(f"{result.name}: {result.state} ({counts}, {result.seconds:.1f} s)", flush=True)
            self.table.write_text(json.dumps({"steps": [asdict(each) for each in self.results]}, indent=1) + "\n")
        return result

    def _run(self, step: Step) -> tuple[Result, str]:
        """Returns the result and output of a step; until it ends, output goes to a file of its own beside the log."""
        start = time.monotonic()
        own = self.log.with_suffix(f".{threading.get_ident()}.log")
        with own.open("wb") as said:
            said.write(f"\n== {step.name}: {' '.join(map(str, step.command))}\n".encode())
            said.flush()
            offset = said.tell()
            code = execute(step, said.fileno(), lambda process: self._began(own, process))
        self._running.pop(own, None)
        seconds = time.monotonic() - start
        output = self._keep(own, offset)
        counts = step.reads(output, -1 if code is None else code)
        if code is None:
            state = "out of time"
        elif code or counts.failed:
            state = "failed"
        else:
            state = "skipped" if counts.skipped and not counts.passed else "passed"
        numbers = (counts.passed, counts.failed, counts.skipped, round(seconds, 1))
        return Result(step.name, state, *numbers, list(counts.notes)), output

    def _keep(self, own: Path, offset: int) -> str:
        """What the step wrote; of very much, the log keeps the beginning and the end."""
        with own.open("r+b") as said:
            said.seek(offset)
            output = said.read()
            if len(output) > LOG_BYTES:
                half = LOG_BYTES // 2
                said.seek(offset)
                said.write(output[:half] + b"\n[...]\n" + output[-half:])
                said.truncate()
        with self._lock, self.log.open("ab") as log, own.open("rb") as said:
            shutil.copyfileobj(said, log)
        own.unlink()
        return output.decode(errors="replace")

    def _began(self, own: Path, process: subprocess.Popen[bytes]) -> None:
        self._running[own] = process
        if self._stopped:
            end_group(process)

    def _stop(self) -> None:
        """Ends what runs, and begins nothing more."""
        self._stopped, self.budget_s = True, 0.0
        for process in list(self._running.values()):
            end_group(process)

    def finish(self) -> int:
        """Prints the table; the exit code: 0 if nothing failed."""
        print()
        for result in self.results:
            for note in result.notes:
                print(f"{result.name}: {note}")
        width = max((len(result.name) for result in self.results), default=4)
        print(f"\n{'step':<{width}}  {'state':<11}  {'passed':>6}  {'failed':>6}  {'skipped':>7}  {'seconds':>7}")
        for result in self.results:
            counts = f"{result.passed:>6}  {result.failed:>6}  {result.skipped:>7}  {result.seconds:>7.1f}"
            print(f"{result.name:<{width}}  {result.state:<11}  {counts}")
        bad = [result.name for result in self.results if not result.good]
        took = time.monotonic() - self.started
        print(f"{'FAILED: ' + ', '.join(bad) if bad else 'nothing failed'} ({took:.0f} s; log: {self.log})", flush=True)
        return 1 if bad else 0


class Gpus:
    """What room there is on each GPU."""

    def __init__(self, count: int) -> None:
        self._free = [Counter(ROOM) for _ in range(count)]
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._free)

    def enter(self, waiting: Sequence[Step]) -> tuple[Step, list[int]]:
        """The first of these steps that there is room for, once there is, and its GPUs: of those, the emptiest."""
        with self._changed:
            while True:
                held: set[str] = set()
                for step in waiting:
                    if held & set(step.room()):
                        continue
                    room, count = Counter(step.room()), min(step.gpus, len(self))
                    fit = [gpu for gpu, free in enumerate(self._free) if room <= free]
                    if len(fit) >= count:
                        fit.sort(key=lambda gpu: -self._free[gpu].total())
                        places = sorted(fit[:count])
                        for gpu in places:
                            self._free[gpu] -= room
                        return step, places
                    held.update(step.room())
                self._changed.wait()

    def leave(self, step: Step, places: Sequence[int]) -> None:
        with self._changed:
            for gpu in places:
                self._free[gpu] += Counter(step.room())
            self._changed.notify()


def execute(step: Step, output: int, began: Callable[[subprocess.Popen[bytes]], None]) -> int | None:
    """The exit code, or None if it was out of time: then the whole process group is ended."""
    environment = {**os.environ, **step.environment}
    try:
        process = subprocess.Popen(
            [os.fspath(part) for part in step.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        os.write(output, f"{step.command[0]}: {error}\n".encode())
        return 127
    began(process)
    try:
        return process.wait(step.limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a process's group: by SIGTERM, and after a while by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def read_libtest(output: str, code: int) -> Counts:
    """Counts of a Rust test program. Its skips are lines of their own, as libtest knows none."""
    totals = re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", output, re.MULTILINE)
    passed, failed, ignored = (sum(int(total[place]) for total in totals) for place in range(3))
    skips = dict(re.findall(r"^skipped: (\S+): (.+)$", output, re.MULTILINE))
    reasons = Counter(skips.values())
    broken = list(dict.fromkeys(re.findall(r"^test (\S+) \.\.\. FAILED$", output, re.MULTILINE)))
    notes = [f"FAILED {name}" for name in broken] + [f"SKIPPED [{count}] {why}" for why, count in reasons.items()]
    if not totals:
        running = re.findall(r"^test (\S+) has been running for", output, re.MULTILINE)
        notes += [f"did not end: {name}" for name in dict.fromkeys(running)] or [f"ended early, exit code {code}"]
        failed = max(len(broken), 1)
    elif passed + failed + ignored == 0:
        notes, failed = ["no test ran"], 1
    skipped = min(len(skips), passed)
    return Counts(passed - skipped, failed, skipped + ignored, tuple(notes))


def read_pytest(output: str, code: int) -> Counts:
    """Counts of pytest's last line, and its own short summary (-ra)."""
    last = re.findall(r"^=* ?((?:\d+ \w+,? ?)+) in [\d.]+s.*$", output, re.MULTILINE)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last[-1])} if last else {}
    notes = re.findall(r"^((?:FAILED|ERROR|SKIPPED) .+)$", output, re.MULTILINE)
    failed = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    if not last:
        return read_verbose(output, code)
    if passed + failed + skipped == 0:
        notes, failed = ["no test ran"], 1
    return Counts(passed, failed, skipped, tuple(notes))


def read_verbose(output: str, code: int) -> Counts:
    """Counts of a pytest that did not come to its end: of what it said (-v) of each test."""
    lines = re.findall(r"^\S*::.+$", output, re.MULTILINE)
    ended = [re.match(r"(\S*::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", line) for line in lines]
    words = [(match[1], match[2]) for match in ended if match]
    counts = Counter(word for _, word in words)
    notes = [f"{word} {name}" for name, word in words if word in ("FAILED", "ERROR")]
    notes.append(f"ended early, exit code {code}")
    if ended and ended[-1] is None:
        notes.append(f"in {lines[-1].partition(' ')[0]}")
    return Counts(counts["PASSED"], counts["FAILED"] + counts["ERROR"] + 1, counts["SKIPPED"], tuple(notes))


def read_program(output: str, code: int) -> Counts:
    """One program is one test."""
    return Counts(passed=1) if code == 0 else Counts(failed=1, notes=(f"exit code {code}",))


def read_sanitizer(output: str, code: int) -> Counts:
    """A program under compute-sanitizer, which must have looked and found nothing."""
    summaries = re.findall(r"=========\s+((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    clean = bool(summaries) and all(re.search(r"SUMMARY: 0 ", summary) for summary in summaries)
    if code == 0 and clean:
        return Counts(passed=1)
    return Counts(failed=1, notes=tuple(summaries) or (f"it gave no summary, exit code {code}",))


def gpu_count() -> tuple[int, str]:
    """How many GPUs this machine has, by its driver; and if none, why."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"no CUDA driver: {error}"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return 0, f"the CUDA driver gives error {code}"
    return count.value, "the CUDA driver knows no GPU" if count.value == 0 else ""


def group_sizes(asked: str | None, present: int) -> list[int]:
    """Numbers of GPUs to run with, largest first: 1, 2 and 4 as far as present, or the ones requested."""
    if asked is None:
        return [size for size in (4, 2, 1) if size <= present] or [present]
    try:
        sizes = [int(part) for part in asked.split(",")]
    except ValueError:
        raise ValueError(f"--gpus {asked!r}: a list of numbers, as 4,1") from None
    if not sizes or any(not 1 <= size <= max(present, 1) for size in sizes):
        raise ValueError(f"--gpus {asked}: this machine has {present}")
    return sizes


def visible(gpus: Sequence[int], present: int) -> dict[str, str]:
    """The environment in which a program sees these of the GPUs that this one sees."""
    if len(gpus) >= present:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(gpu) for gpu in range(present)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}


def compiler() -> dict[str, str]:
    """The environment in which a program that is no Python finds NVRTC among this Python's packages."""
    package = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (package.submodule_search_locations or [])] if package else []
    folders = [folder for root in roots for folder in sorted(root.glob("*/lib")) if any(folder.glob("libnvrtc.so.*"))]
    named = [*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(named)} if folders else {}
