"""Surroundings that lack something: every wait ends, errors say what is missing, and what needs none of it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ep_cases import Case, Setup
from ep_ranks import Ranks
from surroundings import Clock, denied, few_descriptors, full_disk, little_memory, other_users
from together_tasks import START, Told

import crossrail

ALL = ("process_vm_readv", "process_vm_writev", "memfd_create", "pidfd_open", "pidfd_getfd", "io_uring_setup")
SECRET = {"CROSSRAIL_SECRET": "a secret for the surroundings"}
MESSAGES = """
import os, signal, sys
import crossrail
context = crossrail.Context(timeout=30)
try:
    a, b = crossrail.Worker(context), crossrail.Worker(context)
    to_b = a.connect(b.address())
    b.accept()
    target = bytearray(1 << 20)
    inbound = b.recv(target)
    to_b.send(b"x" * len(target)).wait()
    assert inbound.wait().bytes == len(target) and target == b"x" * len(target)
    print("whole")
except crossrail.CrossrailError as error:
    print(type(error).__name__, error.reason, error)
"""
LISTENER = """
import crossrail
worker = crossrail.Worker(crossrail.Context(timeout=60, tls="tcp"))
try:
    worker.accept(timeout=0.25)  # the first long wait starts the watch for signals
except crossrail.TimeoutError:
    pass
print(worker.address().hex(), flush=True)
for _ in range(int(input())):
    end, target = worker.accept(), bytearray(5)
    assert worker.recv(target, source=end).wait().bytes == 5 and target == b"hello"
    end.send(b"heard").wait()
"""
MANY = """
import os
import crossrail
context = crossrail.Context(timeout=30)
listener = crossrail.Worker(context)
ends = []
for _ in range(2):
    worker = crossrail.Worker(context)
    ends.append((worker, worker.connect(listener.address()), listener.accept()))
try:
    listener.accept(timeout=0.25)  # the first long wait starts the watch for signals
except crossrail.TimeoutError:
    pass
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
for attempt in (lambda: crossrail.Worker(context), lambda: context.alloc(1 << 20)):
    try:
        attempt()
    except crossrail.CrossrailError as error:
        print(type(error).__name__, error.reason, error)
for number, (worker, there, here) in enumerate(ends):
    target = bytearray(100_000)
    inbound = listener.recv(target, source=here)
    there.send(bytes([number]) * len(target)).wait()
    assert inbound.wait().bytes == len(target)
    assert target == bytes([number]) * len(target)
"""


def visit(script: str, before: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """What a process says that runs the script there."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    done = subprocess.run(
        [*before, sys.executable, "-c", script],
        env=clean | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def needs_root() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")


@pytest.mark.parametrize(("calls", "how"), [(ALL, "EPERM"), (("memfd_create",), "ENOSYS")], ids=["all", "memfd"])
def test_messages_experts_and_control_go_on_without_these_calls(calls: Sequence[str], how: str) -> None:
    setup = Setup(2, max_tokens=8, hidden=128, local_experts=2, topk=3)
    with Ranks(2, start=START, lease=30.0, before=dict.fromkeys(range(2), denied(calls, how))) as ranks:
        ranks.call("meet")
        ranks.call("prepare", setup)
        assert {kind for links in ranks.call("links", setup).values() for _, kind in links} == {"self", "network"}
        told: dict[int, Told] = ranks.call("together", Case(setup), 0.0, 60.0, 10, 0.0, timeout=150)
        for rank, one in told.items():
            assert (one.wrong, one.lost, one.experts_error, one.results) == ([], {}, "", {"whole": 10})
            assert one.sent[1 - rank] == told[1 - rank].received[rank] > 0
        assert ranks.call("close_down") == {0: [], 1: []}
        assert "memfd_create" in ranks.said()


def test_the_wall_clock_may_step(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    setup, clock = Setup(2, max_tokens=8, hidden=128, local_experts=2, topk=3), Clock(tmp_path)
    with Ranks(2, start=START, lease=30.0, before=dict.fromkeys(range(2), clock.command())) as ranks:
        ranks.call("meet")
        ranks.call("prepare", setup)
        for hours in (24 * 365 * 10, -24 * 365, 0):
            for process in ranks.processes.values():
                process.tell("together", Case(setup), 0.1, 60.0, 10, 0.0)
            clock.step(3600.0 * hours)
            told: dict[int, Told] = {rank: process.answer(150) for rank, process in ranks.processes.items()}
            for one in told.values():
                assert (one.wrong, one.lost, one.experts_error, one.results) == ([], {}, "", {"whole": 10})
        ranks.call("settle", [0, 1], 60.0)
        assert ranks.call("close_down") == {0: [], 1: []}


@pytest.mark.parametrize("calls", [("process_vm_readv", "process_vm_writev"), ("pidfd_open", "pidfd_getfd")])
@pytest.mark.parametrize("how", ["EPERM", "ENOSYS"])
def test_messages_are_whole_without_single_copies_or_descriptors_of_processes(calls: Sequence[str], how: str) -> None:
    assert visit(MESSAGES, denied(calls, how)) == "whole"


def test_memory_that_no_peer_can_map_is_refused_by_name() -> None:
    share = """
import crossrail
context = crossrail.Context(timeout=30)
a, b = crossrail.Worker(context), crossrail.Worker(context)
to_b = a.connect(b.address())
memory = context.alloc(1 << 16)
try:
    to_b.share(memory)
except crossrail.UnsupportedError as error:
    print(error)
"""
    said = visit(share, denied(("memfd_create",), "EPERM"))
    assert "share: peers cannot map memory of this process: memfd_create" in said and "allow memfd_create" in said


def test_other_users_of_a_namespace_exchange_messages() -> None:
    if subprocess.run(other_users("true"), capture_output=True, timeout=60, check=False).returncode != 0:
        return  # this kernel gives nobody such a namespace, so nobody is in one
    assert visit(MESSAGES, other_users("--map-root-user")) == "whole"


def test_a_full_disk_is_named_and_a_secret_needs_none() -> None:
    needs_root()
    said = visit(MESSAGES, full_disk(), {"CROSSRAIL_TLS": "tcp"})
    assert said.startswith("ExhaustedError") and "No space left on device" in said, said
    assert "free space in /tmp, or set CROSSRAIL_SECRET_FILE" in said, said
    assert visit(MESSAGES, full_disk(), SECRET) == "whole"


def test_a_checkout_anywhere_keeps_its_files_where_a_disk_is_full(tmp_path: Path) -> None:
    """Also one under /tmp, as this folder, and one under /dev/shm."""
    needs_root()
    kept = tmp_path / "kept"
    kept.write_text("kept")
    assert subprocess.run([*full_disk(), "cat", kept], capture_output=True, text=True, timeout=60).stdout == "kept"
    hidden = [*full_disk(keep=(Path("/dev/shm/checkout"),)), "ls", "/dev/shm/full"]
    assert subprocess.run(hidden, capture_output=True, timeout=60, check=False).returncode != 0


def test_whoever_is_connected_goes_on_when_there_are_no_more_descriptors() -> None:
    worker, memory = visit(MANY, few_descriptors(128)).splitlines()
    assert worker.startswith("ExhaustedError descriptors") and "ulimit -n" in worker, worker
    assert memory.startswith("ExhaustedError") and "Too many open files" in memory, memory


def test_ranks_with_64_descriptors_live_a_whole_life_and_leave_nothing() -> None:
    setup = Setup(3, max_tokens=8, hidden=128, local_experts=2, topk=3)
    with Ranks(3, start=START, lease=30.0, before=dict.fromkeys(range(3), few_descriptors(64))) as ranks:
        ranks.call("meet")
        ranks.call("prepare", setup)
        told: dict[int, Told] = ranks.call("together", Case(setup), 0.0, 60.0, 10, 0.0, timeout=150)
        for rank, one in told.items():
            assert (one.wrong, one.lost, one.experts_error, one.results) == ([], {}, "", {"whole": 10})
            assert all(one.sent[peer] == told[peer].received[rank] > 0 for peer in told if peer != rank)
        assert ranks.call("close_down") == {0: [], 1: [], 2: []}


@pytest.mark.parametrize("limit", [63, 64])
def test_an_end_of_few_descriptors_tells_a_peer_for_which_it_has_none_and_goes_on(limit: int) -> None:
    with (
        subprocess.Popen(
            [*few_descriptors(limit), sys.executable, "-c", LISTENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as listener,
        crossrail.Worker(crossrail.Context(timeout=60, tls="tcp")) as worker,
    ):
        assert listener.stdin is not None and listener.stdout is not None
        address, ends = bytes.fromhex(listener.stdout.readline()), []
        with pytest.raises(crossrail.CrossrailError) as refused:
            while True:
                ends.append(worker.connect(address))
        assert "refused by the peer" in str(refused.value), refused.value
        assert f"its limit of open files is {limit}: raise ulimit -n" in str(refused.value), refused.value
        listener.stdin.write(f"{len(ends)}\n")
        listener.stdin.flush()
        targets = [bytearray(5) for _ in ends]
        inbound = [worker.recv(target, source=end) for target, end in zip(targets, ends, strict=True)]
        for request in [end.send(b"hello") for end in ends] + inbound:
            assert request.wait().bytes == 5
        assert targets == [b"heard"] * len(ends)
        assert listener.wait(60) == 0


def test_too_little_address_space_is_an_error_that_says_so() -> None:
    alloc = """
import crossrail
try:
    crossrail.Context().alloc(1 << 31)
except crossrail.ExhaustedError as error:
    print(error)
"""
    assert "2147483648 bytes" in visit(alloc, little_memory(1500))
