"""Peers of `crossrail bench ep`: MPI in host memory; DeepEP, our drop-in for it, and NCCL in GPU memory.

They alternate with Crossrail, on the same routing; the programs they run are in `crossrail_tools.peers`. The failure
of a peer becomes the reason why it has no figure, and does not affect Crossrail's own figures.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from crossrail_tools.report.ep import slowest
from crossrail_tools.report.schema import PeerResult
from crossrail_tools.report.stats import gb_per_s, median, percentile
from crossrail_tools.verify.checking import Work

from ..ends import ENDED
from ..failure import ERROR, Failure, UsageFailure
from ..peers import PeerFailure
from ..placement import cpu_of
from ..processes import Message, Process, scratch_folder
from ..rank_process import Parent
from ..ranks import Ranks
from .options import EpOptions

MPI_VARIANTS = {"mpi": "one row per selection", "mpi-dedup": "one row per token and rank"}
"""The exchange that MPI programs for such models use, and the one that sends the minimum."""

MPI_LONGEST_S = 600.0
MPI_GRACE_S = 2.0

OPEN_S = 45.0
MEASURE_S = 45.0
"""Peers that are not ready, or have not finished a turn, by then are abandoned."""
END_S = 5.0

QUIET = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
"""Restricts peers to this machine, without NVLink multicast."""


def check_mpi(options: EpOptions) -> None:
    """Raises UsageFailure if MPI is not installed, or cannot do the same work."""
    if shutil.which("mpirun") is None:
        raise UsageFailure("mpirun is not installed; apt-get install openmpi-bin, or leave mpi out of --compare")
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageFailure("mpi4py is not installed; pip install mpi4py, or leave mpi out of --compare")
    if options.nodes > 1:
        raise UsageFailure("--nodes does not apply to MPI; with --backend none both use TCP")


def mpi_version() -> str:
    """Name and version that mpirun reports."""
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    found = re.search(r"\((.*?)\) ([0-9][0-9A-Za-z.]*)", done.stdout)
    return f"{found.group(1)} {found.group(2)}" if found else "unknown"


class MpiTurns:
    """The turns of MPI, and their results."""

    def __init__(self, options: EpOptions, work: Work) -> None:
        self.options = options
        self.work = work
        self._samples: dict[tuple[str, str], list[list[list[float]]]] = {}
        self._wire: dict[tuple[str, str], int] = {}
        self._error: str | None = None

    def run(self) -> None:
        """Runs one turn: starts, verifies and times all ranks. A failure is kept as the reason for a missing figure."""
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
            self._error = f"mpirun printed unexpected output ({error})"

    def results(self) -> list[tuple[str, str, PeerResult]]:
        """Name, mode and result of each variant."""
        return [(name, mode, self._result(name, mode)) for name in MPI_VARIANTS for mode in self.options.modes]

    def _result(self, name: str, mode: str) -> PeerResult:
        what = f"MPI_Alltoallv, {MPI_VARIANTS[name]}: {' '.join(_mpi_flags(self.options))}"
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
        """The output of rank 0. Raises PeerFailure."""
        options, ranks = self.options, self.work.shape.ranks
        job = {
            "work": asdict(self.work),
            "variants": list(MPI_VARIANTS),
            "modes": options.modes,
            "cached": options.cached,
            "iters": options.iters,
            "warmup": options.warmup,
            "cpus": [cpu_of(options.pin, rank, ranks) for rank in range(ranks)],
        }
        with scratch_folder("crossrail-mpi-", in_memory=1) as folder:
            command = ["mpirun", *_mpi_flags(options), "--mca", "orte_tmpdir_base", folder]
            command += ["--mca", "btl_vader_backing_directory", folder]
            command += ["-n", str(ranks), sys.executable, "-m", "crossrail_tools.peers.mpi", json.dumps(job)]
            return _finished(command, {"PYTHONSAFEPATH": "1", "TMPDIR": folder})


def _mpi_flags(options: EpOptions) -> list[str]:
    """Flags for mpirun: the same processors and the same kind of transport as Crossrail."""
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
        out, errors = process.popen.communicate(timeout=MPI_LONGEST_S)
    except subprocess.TimeoutExpired:
        raise PeerFailure(f"mpirun did not finish within {MPI_LONGEST_S:g} s and was killed") from None
    finally:
        if process.popen.poll() is None:
            process.popen.terminate()  # so that it ends its ranks and removes their files
        process.stop(MPI_GRACE_S)
    if process.popen.returncode != 0:
        raise _mpi_reason(errors.decode(errors="replace"), process.popen.returncode)
    return out.decode(errors="replace")


def _mpi_reason(output: str, code: int) -> Failure:
    """Why mpirun failed: the error of a rank, or the first lines of its own output."""
    lines = [line.strip() for line in output.splitlines() if line.strip().strip("-")]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return PeerFailure(f"mpirun failed ({code}): {' '.join(errors[:1] or lines[:3])[:500]}")


class GpuPeers:
    """The ranks of all GPU peers. As a context manager, it ends them at the end of the block."""

    def __init__(self, options: EpOptions) -> None:
        self.options = options
        self.versions: dict[str, str] = {}
        self._ranks: Ranks | None = None
        self._stack = contextlib.ExitStack()
        self._errors: dict[str, str] = {}
        self._turns: list[dict[int, Message]] = []

    def __enter__(self) -> GpuPeers:
        return self

    def __exit__(self, kind: object, *unused: object) -> None:
        self._end(ask=kind is None)

    def begin(self, work: Work) -> None:
        """Starts every peer, which prepares for ``work``.

        Peers that measured other work are ended: after profiling, kernel launches in that process are slower.
        """
        self._turns = []
        self._end(ask=True)
        if self.options.compare and not self._out:
            self._ranks = self._start()
            self._ranks.send_all({"do": "open", "work": asdict(work), "num_sms": self.options.num_sms})

    def ready(self) -> None:
        """Waits until every peer is prepared."""
        if self._ranks is None:
            return
        try:
            opened = self._ranks.wait_for("opened", self.options.placement.ranks, OPEN_S)
        except Failure as failure:
            self._give_up(failure)
            return
        for message in opened.values():
            self.versions |= message["versions"]
            self._errors |= message["errors"]

    def measure(self) -> None:
        """Runs a turn of every peer."""
        if self._ranks is None or self._out:
            return
        options = self.options
        request = {"do": "measure", "modes": options.modes, "iters": options.iters, "warmup": options.warmup}
        self._ranks.send_all({**request, "last": len(self._turns) == options.rounds - 1})
        try:
            self._turns.append(self._ranks.wait_for("measured", self.options.placement.ranks, MEASURE_S))
        except Failure as failure:
            self._give_up(failure)
        else:
            for message in self._turns[-1].values():
                self._errors |= message["errors"]

    def results(self, mode: str) -> dict[str, PeerResult]:
        """The result of each peer by name, and of its variant that does not repeat the routing as `NAME-uncached`."""
        found: dict[str, PeerResult] = {}
        for name in self.options.compare:
            if name in self._errors or not self._turns:
                found[name] = PeerResult(what=name, error=self._errors.get(name, "it was not run"))
                continue
            for variant in self._turns[0][0]["found"].get(name, {}):
                messages = [[turn[rank]["found"][name][variant] for rank in sorted(turn)] for turn in self._turns]
                if mode in messages[0][0]["modes"]:
                    found[variant] = _gpu_result(messages, mode)
        return found

    @property
    def _out(self) -> bool:
        """Whether every peer has failed."""
        return set(self.options.compare) <= set(self._errors)

    def _start(self) -> Ranks:
        where = self.options.placement
        ranks = self._stack.enter_context(Ranks(quiet=True))
        folder = self._stack.enter_context(scratch_folder("crossrail-peers-"))
        names = [name for name in self.options.compare if name not in self._errors]
        for rank in where.ranks:
            job = {"rank": rank, "size": where.size, "folder": str(folder), "peers": names}
            ranks.start(rank, "ep-peer", job, QUIET)
        return ranks

    def _give_up(self, failure: Failure) -> None:
        """Abandons all peers, with this reason for those that have not failed before."""
        for name in self.options.compare:
            self._errors.setdefault(name, str(failure))
        self._end(ask=False)

    def _end(self, *, ask: bool) -> None:
        """Ends all ranks. With ``ask`` they may first release their resources."""
        if self._ranks is not None and ask:
            self._ranks.send_all({"do": "end"})
            with contextlib.suppress(Failure):
                self._ranks.wait_for(ENDED, self.options.placement.ranks, END_S)
        self._stack.close()
        self._ranks = None


def _gpu_result(messages: list[list[Message]], mode: str) -> PeerResult:
    """The result of one peer, from the messages of each rank in each turn."""
    turns = [[one["modes"][mode] for one in turn] for turn in messages]
    pooled = [sample for turn in turns for one in turn for sample in one["gpu_us"]]
    host = [sample for turn in turns for one in turn for sample in one["host_us"]]
    kernels = [one["kernel_us"] for one in turns[-1] if one["kernel_us"] is not None]
    return PeerResult(
        what=messages[0][0]["what"],
        p50_us=percentile(pooled, 50),
        avg_us=sum(pooled) / len(pooled),
        rounds=[median(slowest([one["gpu_us"] for one in turn])) for turn in turns],
        kernel_us=max(kernels) if kernels else None,
        host_p50_us=percentile(host, 50),
        heap_bytes=messages[0][0]["heap_bytes"],
    )


def serve(parent: Parent, job: Message) -> None:
    """Runs one rank of all GPU peers: handles requests until `end`. Raises Failure without PyTorch."""
    try:
        from crossrail_tools.peers import gpu
    except ImportError as error:
        raise Failure(f"peers need PyTorch with CUDA and NCCL: {error}") from None
    try:
        with gpu.Rank(job["rank"], job["size"], job["folder"], job["peers"]) as rank:
            while (request := parent.receive())["do"] != "end":
                if request["do"] == "open":
                    parent.send("opened", **rank.open(Work.from_dict(request["work"]), request["num_sms"]))
                elif request["do"] == "measure":
                    found = rank.measure(request["modes"], request["iters"], request["warmup"], last=request["last"])
                    parent.send("measured", **found)
    except Exception as error:  # third-party code may raise anything
        if isinstance(error, Failure):
            raise
        raise Failure(f"peers: {gpu.reason(error)}") from None
