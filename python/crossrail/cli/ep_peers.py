"""Who `crossrail bench ep --device cuda` compares with: their ranks, run in turns with ours on the same routing.

What fails about a peer is the reason that it has no figure, and takes nothing from ours.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict

from crossrail.ref.checking import Work
from crossrail.report import PeerResult, median, percentile, slowest

from .ep_arguments import EpOptions
from .failure import Failure
from .processes import scratch_folder
from .ranks import ENDED, Message, Ranks

OPEN_S = 45.0
MEASURE_S = 45.0
"""Peers that are not ready, or not at the end of a turn, by then are given up: ours must have its figures anyway."""
END_S = 5.0

QUIET = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
"""Peers use this machine alone, and no NVLink multicast."""


class Peers:
    """All ranks of all peers. A context manager: leaving it ends them."""

    def __init__(self, options: EpOptions) -> None:
        self.options = options
        self.versions: dict[str, str] = {}
        self._ranks: Ranks | None = None
        self._stack = contextlib.ExitStack()
        self._errors: dict[str, str] = {}
        self._turns: list[dict[int, Message]] = []

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: object, *unused: object) -> None:
        self._end(ask=kind is None)

    def begin(self, work: Work) -> None:
        """Starts every peer and tells it to get ready for ``work``.

        Those that measured other work are ended: what a profiler leaves behind in a process makes its launches longer.
        """
        self._turns = []
        self._end(ask=True)
        if self.options.compare and not self._out:
            self._ranks = self._start()
            self._ranks.tell_all({"do": "open", "work": asdict(work), "num_sms": self.options.num_sms})

    def ready(self) -> None:
        """Waits until they are."""
        if self._ranks is None:
            return
        try:
            told = self._ranks.gather("opened", self.options.placement.ranks, OPEN_S)
        except Failure as failure:
            self._give_up(failure)
            return
        for message in told.values():
            self.versions |= message["versions"]
            self._errors |= message["errors"]

    def measure(self) -> None:
        """A turn of every peer."""
        if self._ranks is None or self._out:
            return
        options = self.options
        request = {"do": "measure", "modes": options.modes, "iters": options.iters, "warmup": options.warmup}
        self._ranks.tell_all({**request, "last": len(self._turns) == options.rounds - 1})
        try:
            self._turns.append(self._ranks.gather("measured", self.options.placement.ranks, MEASURE_S))
        except Failure as failure:
            self._give_up(failure)
        else:
            for message in self._turns[-1].values():
                self._errors |= message["errors"]

    def results(self, mode: str) -> dict[str, PeerResult]:
        """What each peer reached, by name; for one that repeats its routing another that does not, `NAME-uncached`."""
        found: dict[str, PeerResult] = {}
        for name in self.options.compare:
            if name in self._errors or not self._turns:
                found[name] = PeerResult(what=name, error=self._errors.get(name, "it was not run"))
                continue
            for variant in self._turns[0][0]["found"].get(name, {}):
                said = [[turn[rank]["found"][name][variant] for rank in sorted(turn)] for turn in self._turns]
                if mode in said[0][0]["modes"]:
                    found[variant] = _result(said, mode)
        return found

    @property
    def _out(self) -> bool:
        """Whether no peer is left that may have a figure."""
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
        """Every peer without a figure has this reason; those that ran once keep what they said."""
        for name in self.options.compare:
            self._errors.setdefault(name, str(failure))
        self._end(ask=False)

    def _end(self, *, ask: bool) -> None:
        """Ends all ranks; by themselves, so that they give back what they have, unless they do not when asked."""
        if self._ranks is not None and ask:
            self._ranks.tell_all({"do": "end"})
            with contextlib.suppress(Failure):
                self._ranks.gather(ENDED, self.options.placement.ranks, END_S)
        self._stack.close()
        self._ranks = None


def _result(said: list[list[Message]], mode: str) -> PeerResult:
    """One peer's figures, from what each rank said in each turn."""
    turns = [[one["modes"][mode] for one in turn] for turn in said]
    pooled = [sample for turn in turns for one in turn for sample in one["gpu_us"]]
    host = [sample for turn in turns for one in turn for sample in one["host_us"]]
    kernels = [one["kernel_us"] for one in turns[-1] if one["kernel_us"] is not None]
    return PeerResult(
        what=said[0][0]["what"],
        p50_us=percentile(pooled, 50),
        avg_us=sum(pooled) / len(pooled),
        rounds=[median(slowest([one["gpu_us"] for one in turn])) for turn in turns],
        kernel_us=max(kernels) if kernels else None,
        host_p50_us=percentile(host, 50),
        heap_bytes=said[0][0]["heap_bytes"],
    )
