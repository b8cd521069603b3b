"""One rank of the peer of `crossrail bench ep --compare mpi`: dispatch and combine by MPI_Alltoallv.

Run by mpirun as `python -m crossrail_tools.peers.mpi JOB`. Counts are exchanged first (unless the routing is cached),
then the rows' scales, experts and weights, then the rows. Packing, casting, unpacking and summing are native and the
row kernels those of our own data path; memory is allocated once. Rank 0 prints a line of JSON for each variant and
mode.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import mpi4py
import numpy as np
import numpy.typing as npt

from crossrail._native import _Alltoallv
from crossrail_tools.verify.checking import Difference, Work

mpi4py.rc.threads = False  # only one thread calls MPI, which can then omit its locks

from mpi4py import MPI  # noqa: E402 (the setting above must come first)

_PR_SET_PDEATHSIG = 1

Bytes = npt.NDArray[np.uint8]


@dataclass
class Received:
    """The rows that a dispatch delivered, in the form that the reference expects."""

    x: Any
    scales: Any
    counts: Any
    topk_idx: Any = None
    topk_weights: Any = None


class Rank:
    """One rank, with its memory and operations."""

    def __init__(self, comm: MPI.Intracomm, work: Work, *, dedup: bool, cached: bool) -> None:
        self.comm, self.work, self.dedup, self.cached = comm, work, dedup, cached
        shape, ranks = work.shape, work.shape.ranks
        self.mine = work.inputs(comm.rank, range(ranks))
        self.native = _Alltoallv({**work.parameters(1.0), "prereduce": True}, dedup)
        self.sent, self.received = np.zeros(ranks, np.int32), np.zeros(ranks, np.int32)
        self.native.route(self.mine.topk_idx, self.mine.topk_weights, self.sent)
        comm.Alltoall(self.sent, self.received)
        row, side = self.native.row_bytes, self.native.side_bytes
        self.row, self.side, self.back = (_record(size) for size in (row, side, 2 * shape.hidden))
        going, coming = int(self.sent.sum()), int(self.received.sum())
        self.rows, self.sides = _room(going, row), _room(going, side)
        self.rows_in, self.sides_in = _room(coming, row), _room(coming, side)
        self.by_expert = work.layout == "expert"
        places = shape.local_experts * ranks * shape.max_tokens if self.by_expert else coming
        self.x = _room(places, row) if self.by_expert else self.rows_in
        self.scales = _room(places, side - 8 * self.native.slots)
        self.answers, self.answers_in = _room(coming, 2 * shape.hidden), _room(going, 2 * shape.hidden)
        self.out = _room(len(self.mine.x), 2 * shape.hidden)
        self.y: Any = self.answers
        self._begin()

    def _begin(self) -> None:
        """Computes the offsets of each rank's records."""
        self.sent_at, self.received_at = _offsets(self.sent), _offsets(self.received)

    def dispatch(self) -> None:
        """Exchanges counts, metadata and rows, and unpacks each row to its position."""
        if not self.cached:
            self.native.route(self.mine.topk_idx, self.mine.topk_weights, self.sent)
            self.comm.Alltoall(self.sent, self.received)
            self._begin()
        self.native.pack(self.mine.x, self.mine.topk_idx, self.rows, self.sides)
        there, here = (self.sent, self.sent_at), (self.received, self.received_at)
        self.comm.Alltoallv([self.sides, there, self.side], [self.sides_in, here, self.side])
        self.comm.Alltoallv([self.rows, there, self.row], [self.rows_in, here, self.row])
        self.native.unpack(self.received, self.rows_in, self.sides_in, self.x, self.scales)

    def combine(self) -> None:
        """Returns the outputs to the source ranks, and sums them."""
        if self.by_expert:
            self.native.pack_back(self.y, self.answers)
        answers = self.answers if self.by_expert else self.y
        there, here = (self.received, self.received_at), (self.sent, self.sent_at)
        self.comm.Alltoallv([answers, there, self.back], [self.answers_in, here, self.back])
        self.native.unpack_back(self.answers_in, self.out)

    def both(self) -> None:
        """A dispatch and its combine."""
        self.dispatch()
        self.combine()

    def verify(self) -> None:
        """Compares a dispatch and its combine with the reference. Raises Difference."""
        self.dispatch()
        self.y = self.work.outputs(self._delivered(), self.comm.rank)
        self.combine()
        # With one row per selection, the source rank applies the weights and sums, in either layout.
        alike = replace(self.work, layout="expert", prereduce=False)
        judge = replace(self.work, prereduce=True) if self.dedup else alike
        sums = self.out.view(np.uint16).reshape(-1, self.work.shape.hidden)
        judge.judge_combine(sums, self.comm.rank, range(self.work.shape.ranks))

    def wire(self, mode: str) -> int:
        """Bytes of rows and scales that leave the rank in one iteration."""
        away = int(self.sent.sum() - self.sent[self.comm.rank])
        back = int(self.received.sum() - self.received[self.comm.rank])
        there = away * (self.native.row_bytes + self.native.side_bytes - 8 * self.native.slots)
        total: int = there * (mode != "combine") + back * 2 * self.work.shape.hidden * (mode != "dispatch")
        return total

    def _delivered(self) -> Received:
        shape, slots = self.work.shape, self.native.slots
        lead = (shape.local_experts, shape.ranks * shape.max_tokens) if self.by_expert else (int(self.received.sum()),)
        x = self.x.view(np.uint16 if self.work.scale is None else np.uint8).reshape(*lead, shape.hidden)
        scales = None
        if self.work.scale is not None:
            kind = np.uint8 if self.work.scale == "ue8m0" else np.float32
            scales = self.scales.view(kind).reshape(*lead, shape.hidden // 128)
        received = Received(x, scales, self.native.expert_counts())
        if not self.by_expert:
            sides = self.sides_in.reshape(*lead, -1)[:, -8 * slots :]
            received.topk_idx = np.full((*lead, shape.topk), -1, np.int64)
            received.topk_idx[:, :slots] = sides[:, : 4 * slots].copy().view(np.int32)
            received.topk_weights = np.ones((*lead, shape.topk), np.float32)
            if self.dedup:
                received.topk_weights = sides[:, 4 * slots :].copy().view(np.float32)
        return received


def _record(size: int) -> MPI.Datatype:
    return MPI.BYTE.Create_contiguous(size).Commit()


def _room(count: int, size: int) -> Bytes:
    return np.empty(max(count * size, 8), np.uint8)[: count * size]


def _offsets(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int32)


def measure(rank: Rank, mode: str, warmup: int, iters: int) -> list[float]:
    """Microseconds of each iteration. An untimed barrier precedes each."""
    once = {"dispatch": rank.dispatch, "combine": rank.combine, "e2e": rank.both}[mode]
    samples = []
    for number in range(warmup + iters):
        rank.comm.Barrier()
        began = time.perf_counter_ns()
        once()
        took = time.perf_counter_ns() - began
        if number >= warmup:
            samples.append(took / 1e3)
    return samples


def main() -> None:
    """Verifies and measures all variants and modes of the job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job: dict[str, Any] = json.loads(sys.argv[1])
    comm = MPI.COMM_WORLD
    cpu = job["cpus"][comm.rank]
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    work = Work.from_dict(job["work"])
    for variant in job["variants"]:
        rank = Rank(comm, work, dedup=variant == "mpi-dedup", cached=job["cached"])
        try:
            rank.verify()
        except Difference as difference:
            sys.stderr.write(f"crossrail: error: {variant} did not verify: {difference}\n")
            sys.stderr.flush()
            comm.Abort(1)
        for mode in job["modes"]:
            samples = comm.gather(measure(rank, mode, job["warmup"], job["iters"]))
            wire = comm.gather(rank.wire(mode))
            if samples is not None and wire is not None:
                found = {"samples_us": samples, "bytes_wire": round(sum(wire) / len(wire))}
                sys.stdout.write(json.dumps({"variant": variant, "mode": mode, **found}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
