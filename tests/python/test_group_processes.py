"""Groups of processes, as a launcher starts them."""

import re
import time

import pytest
from free_ports import free_port
from group_rank import Rank, ranks, torchrun

MEET = """
with crossrail.Group() as group:
    say(group.bootstrap)
    group.publish("pid", str(os.getpid()).encode())
    group.barrier()
    say(*(int(pid) for pid in group.collect("pid")))
    say(group.rank, group.size, group.local_rank, group.serves_store)
    group.barrier("end")
"""


def test_ranks_of_torchrun_meet() -> None:
    with ranks(MEET, 4) as all_ranks:
        said = [rank.line() for rank in all_ranks]
        pids = {rank.line() for rank in all_ranks}
        assert pids == {" ".join(str(rank.process.pid) for rank in all_ranks)}
        for number, (rank, line) in enumerate(zip(all_ranks, said, strict=True)):
            pattern = (
                rf"torchrun: RANK={number} WORLD_SIZE=4 LOCAL_RANK={number} MASTER_ADDR=127.0.0.1 .*store tcp://.*"
            )
            assert re.fullmatch(pattern, line)
            assert rank.line() == f"{number} 4 {number} {number == 0}"
        for rank in all_ranks:
            assert rank.end() == (0, "", "")


LOSE = """
group = crossrail.Group()
group.barrier("all")
say("in")
if group.rank == 2:
    heard()
try:
    group.barrier("again")
except crossrail.PeerDeadError as error:
    noticed = time.monotonic()
    say(noticed)
    say(error)
    say(*group.state(2))
group.barrier("left", ranks=[0, 1])
group.leave()
"""


def test_a_killed_rank_is_noticed_and_the_others_go_on() -> None:
    with ranks(LOSE, 3) as all_ranks:
        assert [rank.line() for rank in all_ranks] == ["in"] * 3
        all_ranks[2].kill()
        killed = time.monotonic()
        for rank in all_ranks[:2]:
            assert float(rank.line()) - killed < 1.2
            pid = all_ranks[2].process.pid
            assert re.match(rf'barrier: "again": rank 2 \(.*:{pid}\) died: its lease ended', rank.line())
            assert rank.line().startswith("dead its lease ended (noticed at ")
        for rank in all_ranks[:2]:
            assert rank.end() == (0, "", "")


INTERRUPTED = """
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    {}
except KeyboardInterrupt:
    say("interrupted")
"""


@pytest.mark.parametrize(
    ("rank", "call"), [(0, 'crossrail.Group().barrier("never", timeout=60)'), (1, "crossrail.Group(timeout=60)")]
)
def test_ctrl_c_ends_a_wait(rank: int, call: str) -> None:
    with Rank(INTERRUPTED.format(call), **torchrun(rank, 2, free_port())) as process:
        began = time.monotonic()
        assert process.line() == "interrupted"
        assert process.end()[0] == 0
        assert time.monotonic() - began < 20


FORGET = """
group = crossrail.Group()
group.barrier()
if group.rank == 1:
    sys.exit()
while group.state(1).state == "alive":
    group.wait_change()
say(*group.state(1))
group.leave()
"""


def test_an_interpreter_that_ends_leaves() -> None:
    with ranks(FORGET, 2) as (first, second):
        assert second.end() == (0, "", "")
        assert first.line() == "left None"
        assert first.end() == (0, "", "")


LATE = """
group = crossrail.Group()
try:
    group.barrier("start", timeout=0.3)
except crossrail.TimeoutError as error:
    say(error)
group.leave()
"""


def test_a_rank_that_never_comes_is_named() -> None:
    with Rank(LATE, **torchrun(0, 3, free_port())) as rank:
        assert (
            rank.line()
            == 'barrier: "start": rank 1 (never joined), rank 2 (never joined) did not arrive in time (after 0.300 s)'
        )
        assert rank.end()[0] == 0


def test_the_same_rank_twice_and_another_size() -> None:
    port = free_port()
    stay = 'group = crossrail.Group()\nsay("in")\nheard()\ngroup.leave()\n'
    fail = "try:\n    crossrail.Group()\nexcept crossrail.MismatchError as error:\n    say(error)\n"
    with Rank(stay, **torchrun(0, 2, port)) as first:
        assert first.line() == "in"
        with Rank(fail, **torchrun(0, 2, port)) as second:
            text = second.line()
            assert text.startswith("join: rank 0 is taken by another process (peer rank 0 (")
            assert f":{first.process.pid})" in text
        with Rank(fail, **torchrun(1, 3, port)) as second:
            text = second.line()
            assert text.startswith("join: rank 1 was told of 3 ranks, rank 0 of 2 (peer rank 0 (")
            assert f":{first.process.pid})" in text
        first.say()
        assert first.end()[0] == 0


STORE_GONE = """
group = crossrail.Group()
group.barrier("all")
say("in")
while group.control_error is None:
    group.wait_change(0.05)
say(type(group.control_error).__name__)
try:
    group.barrier("again")
except crossrail.UnreachableError:
    say(group.state(0).state)
group.leave()
"""


def test_a_store_that_is_gone_is_said_once() -> None:
    with ranks(STORE_GONE, 2) as (first, second):
        assert (first.line(), second.line()) == ("in", "in")
        first.kill()
        assert second.line() == "UnreachableError"
        assert second.line() == "alive"
        code, _, talk = second.end()
        assert code == 0
        assert talk.count("\n") == 1 and " warn: group " in talk and "transfers continue" in talk


def test_what_is_missing_is_said() -> None:
    with Rank("crossrail.Group()", RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500) as rank:
        code, _, talk = rank.end()
        assert code == 1
        assert "ConfigError: join: WORLD_SIZE is not set, while RANK=0 is; torchrun sets it" in talk


@pytest.mark.parametrize("size", [8])
def test_a_job_is_together_quickly(size: int) -> None:
    timed = """
began = time.perf_counter()
group = crossrail.Group()
joined = time.perf_counter()
group.barrier("start")
met = time.perf_counter()
for _ in range(20):
    group.barrier("step")
done = time.perf_counter()
say(joined - began, met - joined, (done - met) / 20)
group.leave()
"""
    with ranks(timed, size) as all_ranks:
        steps = [[float(part) for part in rank.line().split()] for rank in all_ranks]
        for rank in all_ranks:
            assert rank.end() == (0, "", "")
    assert max(each for _, _, each in steps) < 0.1
