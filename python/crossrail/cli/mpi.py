"""The same work by MPI_Alltoallv, run in turns with ours: `mpirun` and the program in `crossrail._mpi`."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from crossrail.ref.checking import Work
from crossrail.report import PeerResult, gb_per_s, median, percentile, slowest

from .ep_arguments import EpOptions
from .failure import ERROR, Failure, UsageFailure
from .peers import PeerFailure
from .processes import Process, scratch_folder
from .setup import cpu_of

VARIANTS = {"mpi": "one row per selection", "mpi-dedup": "one row per token and rank"}
"""What MPI programs for such models do, and the least that can be sent."""

LONGEST_S = 600.0
GRACE_S = 2.0


def check(options: EpOptions) -> None:
    """Raises UsageFailure when MPI is not installed, or when it cannot do the same work."""
    if shutil.which("mpirun") is None:
        raise UsageFailure("mpirun is not installed; apt-get install openmpi-bin, or leave mpi out of --compare")
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageFailure("mpi4py is not installed; pip install mpi4py, or leave mpi out of --compare")
    if options.nodes > 1:
        raise UsageFailure("--nodes plays nodes for our ranks only; --backend none compares over TCP on both sides")


def version() -> str:
    """What mpirun says it is."""
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    found = re.search(r"\((.*?)\) ([0-9][0-9A-Za-z.]*)", done.stdout)
    return f"{found.group(1)} {found.group(2)}" if found else "unknown"


class Turns:
    """Every turn that MPI takes, and what came of them."""

    def __init__(self, options: EpOptions, work: Work) -> None:
        self.options = options
        self.work = work
        self._samples: dict[tuple[str, str], list[list[list[float]]]] = {}
        self._wire: dict[tuple[str, str], int] = {}
        self._error: str | None = None

    def run(self) -> None:
        """One turn: all ranks started, verified and timed. A failure is kept as the reason for no figure."""
        if self._error is not None:
            return
        try:
            for line in self._output().splitlines():
                found = json.loads(line)
                key = (found["variant"], found["mode"])
                self._samples.setdefault(key, []).append(found["samples_us"])
                self._wire[key] = found["bytes_wire"]
        except PeerFailure as error:
            self._error = str(error)
        except (ValueError, KeyError, TypeError) as error:
            self._error = f"mpirun printed something else than expected ({error})"

    def results(self) -> list[tuple[str, str, PeerResult]]:
        """Name, mode and result of each variant."""
        return [(name, mode, self._result(name, mode)) for name in VARIANTS for mode in self.options.modes]

    def _result(self, name: str, mode: str) -> PeerResult:
        what = f"MPI_Alltoallv, {VARIANTS[name]}: {' '.join(_flags(self.options))}"
        turns = self._samples.get((name, mode), [])
        if self._error is not None or not turns:
            return PeerResult(what=what, error=self._error or "it was not run")
        pooled = [sample for turn in turns for rank in turn for sample in rank]
        average = sum(pooled) / len(pooled)
        return PeerResult(
            what=what,
            p50_us=percentile(pooled, 50),
            avg_us=average,
            gb_per_s=gb_per_s(self._wire[name, mode], average),
            rounds=[median(slowest(turn)) for turn in turns],
        )

    def _output(self) -> str:
        """What rank 0 printed. Raises PeerFailure."""
        options, ranks = self.options, self.work.shape.ranks
        job = {
            "work": asdict(self.work),
            "variants": list(VARIANTS),
            "modes": options.modes,
            "cached": options.cached,
            "iters": options.iters,
            "warmup": options.warmup,
            "cpus": [cpu_of(options.pin, rank, ranks) for rank in range(ranks)],
        }
        with scratch_folder("crossrail-mpi-", in_memory=True) as folder:
            command = ["mpirun", *_flags(options), "--mca", "orte_tmpdir_base", folder]
            command += ["--mca", "btl_vader_backing_directory", folder]
            command += ["-n", str(ranks), sys.executable, "-m", "crossrail._mpi", json.dumps(job)]
            return _finished(command, {"PYTHONSAFEPATH": "1", "TMPDIR": folder})


def _flags(options: EpOptions) -> list[str]:
    """How MPI is run: where ours places ranks and what ours moves bytes over."""
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    over = "tcp,self" if options.backend == "none" else "vader,self"
    loopback = ["--mca", "btl_tcp_if_include", "lo"] if options.backend == "none" else []
    return [*flags, "--mca", "pml", "ob1", "--mca", "btl", over, *loopback]


def _finished(command: list[str], environment: Mapping[str, str]) -> str:
    try:
        process = Process(command, environment=environment)
    except OSError as error:
        raise PeerFailure(f"cannot run mpirun: {error.strerror}") from error
    try:
        out, said = process.popen.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise PeerFailure(f"mpirun did not finish within {LONGEST_S:g} s; it was ended") from None
    finally:
        if process.popen.poll() is None:
            process.popen.terminate()  # it ends its ranks and clears up after them
        process.stop(GRACE_S)
    if process.popen.returncode != 0:
        raise _reason(said.decode(errors="replace"), process.popen.returncode)
    return out.decode(errors="replace")


def _reason(said: str, code: int) -> Failure:
    """Why mpirun failed: a rank's own error, or the first that it says itself."""
    lines = [line.strip() for line in said.splitlines() if line.strip().strip("-")]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return PeerFailure(f"mpirun failed ({code}): {' '.join(errors[:1] or lines[:3])[:500]}")
