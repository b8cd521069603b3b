"""How peers of `crossrail bench ep --device cuda` are started, asked and ended; their ranks are played here."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.ep import peers as ep_peers
from crossrail_tools.cli.ep.options import EpOptions
from crossrail_tools.cli.failure import Failure

QUICK = ("--device=cuda", "--tokens=4", "--iters=2", "--warmup=0", "--mode=dispatch")


class Played:
    """Stands in for `Ranks`: two ranks that answer at once."""

    every: ClassVar[list[Played]] = []
    silent_after = 100

    def __init__(self, quiet: bool) -> None:
        assert quiet
        self.jobs: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.ended = False
        Played.every.append(self)

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *unused: object) -> None:
        self.ended = True

    def start(self, rank: int, kind: str, job: dict[str, Any], environment: dict[str, str]) -> None:
        assert (kind, environment["NVSHMEM_REMOTE_TRANSPORT"]) == ("ep-peer", "none")
        self.jobs.append(job)

    def send_all(self, message: dict[str, Any]) -> None:
        self.asked.append(message)

    def wait_for(self, event: str, ranks: list[int], timeout: float) -> dict[int, dict[str, Any]]:
        names = self.jobs[0]["peers"]
        if event == "ended":
            return {rank: {} for rank in ranks}
        if event == "opened":
            return {rank: {"versions": {"torch": "2"}, "errors": {}} for rank in ranks}
        if len(self.asked) - 1 > self.silent_after:
            raise Failure("nothing was heard of ranks 0, 1")
        last = self.asked[-1]["last"]

        def said(rank: int) -> dict[str, Any]:
            times = {"gpu_us": [10.0, 20.0], "host_us": [30.0], "kernel_us": 7.0 + rank if last else None}
            return {name: {name: {"what": name, "heap_bytes": 5, "modes": {"dispatch": times}}} for name in names}

        return {rank: {"found": said(rank), "errors": {}} for rank in ranks}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> type[Played]:
    monkeypatch.setattr(ep_peers, "Ranks", Played)
    monkeypatch.setattr(Played, "every", [])
    return Played


def options(*more: str) -> EpOptions:
    command = parse_arguments(["bench", "ep", *QUICK, *more])
    assert isinstance(command, EpOptions)
    return command


def test_each_work_has_processes_of_its_own_and_kernels_come_last(played: type[Played]) -> None:
    asked = options("--compare=deepep,nccl", "--rounds=2")
    with ep_peers.GpuPeers(asked) as peers:
        for number in range(2):
            peers.begin(asked.work(2))
            assert [ranks.ended for ranks in played.every] == [True] * number + [False]
            peers.ready()
            peers.measure()
            peers.measure()
            found = peers.results("dispatch")
            assert list(found) == ["deepep", "nccl"]
            assert (found["deepep"].kernel_us, found["deepep"].p50_us) == (8.0, 15.0), "the slowest rank's kernels"
    assert all(ranks.ended for ranks in played.every)
    for ranks in played.every:
        asked_for = [(one["do"], one.get("last")) for one in ranks.asked]
        assert asked_for == [("open", None), ("measure", False), ("measure", True), ("end", None)]


def test_a_peer_that_failed_is_not_started_again(played: type[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = options("--compare=deepep,nccl", "--rounds=1")
    with ep_peers.GpuPeers(asked) as peers:
        peers._errors["deepep"] = "ModuleNotFoundError"
        peers.begin(asked.work(2))
        peers.ready()
        peers.measure()
        assert played.every[0].jobs[0]["peers"] == ["nccl"]
        assert peers.results("dispatch")["deepep"].error == "ModuleNotFoundError"
        assert peers.results("dispatch")["nccl"].error is None
        monkeypatch.setattr(Played, "silent_after", 0)
        peers.begin(asked.work(2))
        peers.ready()
        peers.measure()
        assert played.every[1].ended
        assert played.every[1].asked[-1]["do"] == "measure", "who is silent is not asked to end"
        assert peers.results("dispatch")["nccl"].error == "nothing was heard of ranks 0, 1"
        peers.begin(asked.work(2))
        assert len(played.every) == 2, "nobody is left to be asked"
