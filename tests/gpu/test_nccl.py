"""PyTorch's collectives over our network plugin for NCCL, in processes that NCCL takes for different machines."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import GPUS

import crossrail.nccl

sys.path.append(str(Path(__file__).parents[1] / "testbed"))

from bed import SIDES, Bed, why_not
from sharing import mps

pytest.importorskip("torch.distributed")

RANK = Path(__file__).with_name("nccl_rank.py")
LIMIT_S = 50.0
FOUR_RAILS = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4"
WAYS = {
    "default": {},
    "one rail": {"CROSSRAIL_TLS": "tcp", "CROSSRAIL_NET_DEVICES": "127.0.0.1"},
    "four rails": {"CROSSRAIL_TLS": "tcp", "CROSSRAIL_NET_DEVICES": FOUR_RAILS},
}


@pytest.fixture(scope="module", autouse=True)
def _shared() -> Iterator[None]:
    """Two ranks share a single GPU, if it can run kernels of both at once: NCCL is told that they are on two hosts."""
    with contextlib.ExitStack() as stack:
        if GPUS == 1:
            try:
                stack.enter_context(mps())
            except RuntimeError as error:
                pytest.skip(f"needs 2 GPUs: there is 1, and {error}")
        yield


class Job:
    """The ranks of a job, and NCCL's log."""

    def __init__(self, processes: list[subprocess.Popen[str]], folder: Path) -> None:
        self.processes = processes
        self.folder = folder

    def results(self) -> list[dict[str, object]]:
        """What every rank printed; none may fail."""
        found = []
        for rank, process in enumerate(self.processes):
            said, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"rank {rank}: exit {process.returncode}\n{errors[-3000:]}\n{self.log()}"
            found.append(json.loads(said.splitlines()[-1]))
        return found

    def log(self, words: str = "NET/") -> str:
        """Lines of NCCL's log that have ``words``."""
        files = sorted(self.folder.glob("nccl.*"))
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
        return "\n".join(line for line in lines if words in line)


@contextmanager
def job(
    task: str, folder: Path, ranks: int = 2, prefixes: Sequence[Sequence[str]] | None = None, **settings: str
) -> Iterator[Job]:
    """Ranks that reach each other by the network only; ``prefixes`` is what each is started by."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CROSSRAIL_", "NCCL_"))}
    network = {
        **crossrail.nccl.environment(),
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
    }
    processes = []
    try:
        for rank in range(ranks):
            own: Mapping[str, str] = {"NCCL_HOSTID": f"host-{rank}", "NCCL_DEBUG_FILE": f"{folder}/nccl.{rank}"}
            command = [
                *(prefixes[rank] if prefixes else ()),
                sys.executable,
                str(RANK),
                task,
                str(rank),
                str(ranks),
                str(folder),
            ]
            environment = {**clean, **network, **own, **settings}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        yield Job(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("way", WAYS)
def test_collectives_are_right_over_every_way(way: str, tmp_path: Path) -> None:
    with job("collectives", tmp_path, **WAYS[way]) as running:
        running.results()
        assert running.log("Using network Crossrail"), running.log()
        connected = running.log("connected to")
        names = [f"tcp/{rail}" for rail in WAYS[way].get("CROSSRAIL_NET_DEVICES", "").split(",") if rail]
        assert all(name in connected for name in names or ["shm"]), connected


@pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs")
def test_collectives_are_right_between_four_ranks(tmp_path: Path) -> None:
    with job("collectives", tmp_path, ranks=4, **WAYS["four rails"]) as running:
        running.results()


def test_a_dead_rank_is_an_error_in_bounded_time_and_named_in_nccls_log(tmp_path: Path) -> None:
    with job("killed", tmp_path, **WAYS["one rail"]) as running:
        victim, survivor = running.processes[1], running.processes[0]
        victim.wait(LIMIT_S)
        began = time.monotonic()
        while not (log := running.log("NET/Crossrail : test failed")):
            assert time.monotonic() - began < 20, f"no error in NCCL's log:\n{running.log()}"
            assert survivor.poll() is None or running.log("NET/Crossrail : "), running.log()
            time.sleep(0.05)
        # When the survivor then ends is PyTorch's decision.
        assert f":{victim.pid}" in log, log


def test_a_collective_survives_the_loss_of_a_rail(tmp_path: Path) -> None:
    """Two network namespaces, joined by four rails; one is set down in mid-collective."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        try:
            bed = stack.enter_context(Bed())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error}")
        prefixes = [bed.inside(side) for side in SIDES]
        settings = {
            "CROSSRAIL_TLS": "tcp",
            "CROSSRAIL_NET_DEVICES": ",".join(bed.rails),
            "CROSSRAIL_SECRET": "a secret for the test",
            "NCCL_SOCKET_IFNAME": "eth0",
        }
        with job("long", tmp_path, prefixes=prefixes, **settings) as running:
            deadline = time.monotonic() + LIMIT_S
            while not (tmp_path / "begun.0").exists() and time.monotonic() < deadline:
                assert running.processes[0].poll() is None, running.processes[0].communicate()[1]
                time.sleep(0.02)
            bed.set_down("left", "eth3")
            results = running.results()
            connected = running.log("connected to")
    times = results[0]["times"]
    assert isinstance(times, list)
    assert all(f"tcp/{rail}" in connected for rail in bed.rails), connected
    assert max(times) < statistics.median(times) + 2.0, times
