"""A group in one process: what it says of itself, and what it refuses."""

import threading

import pytest
from free_ports import free_port

import crossrail
from crossrail.records import RankState


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSSRAIL_STORE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_group_of_one_needs_no_store() -> None:
    with crossrail.Group(size=1) as group:
        assert (group.rank, group.size, group.local_rank, group.name) == (0, 1, 0, "default")
        assert group.bootstrap.startswith("alone: size=1")
        assert group.serves_store and group.store_address.startswith("tcp://127.0.0.1:")
        group.barrier()
        group.publish("key", b"\0value")
        assert group.collect("key") == [b"\0value"]
        group.withdraw("key")
        with pytest.raises(crossrail.TimeoutError, match=r"did not arrive in time \(.*after 0\.200 s\)"):
            group.collect("key", timeout=0.2)
        (member,) = group.members()
        assert (member.rank, member.local_rank, member.node) == (0, 0, group.node)
        assert group.state(0) == RankState("alive", None)
        assert group.control_error is None and group.changes == 0
        assert not group.wait_change(0.01)
        assert repr(group) == f"<crossrail.Group 'default' rank 0 of 1, {group.store_address}>"
        assert group.context.timeout > 0
    assert group.state(0).state == "left"
    group.leave()
    with pytest.raises(crossrail.ClosedError, match='has left the group "default"'):
        group.barrier()


def test_ranks_in_threads_of_one_process() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    context = crossrail.Context(timeout=20)
    told: dict[int, list[bytes]] = {}

    def run(rank: int) -> None:
        with crossrail.Group(name="g", rank=rank, size=3, store=store, context=context) as group:
            group.publish("at", b"%d" % rank)
            told[rank] = group.collect("at")
            group.barrier("end", ranks=[2, 1, 0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {rank: [b"0", b"1", b"2"] for rank in range(3)}


def test_changes_are_told_once() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    with crossrail.Group(rank=0, size=4, store=store) as first:
        assert first.state(1).state == "absent"
        with crossrail.Group(size=4, store=store) as second:
            assert (second.rank, second.local_rank) == (1, 1)
            first.wait_members([1])
            assert first.wait_change(5) and not first.wait_change(0)
            assert first.state(1).state == "alive"
            assert [member.rank for member in first.members()] == [0, 1]
        assert first.wait_change(5)
        assert first.state(1).state == "left"
        with pytest.raises(crossrail.PeerDeadError, match="left the group") as lost:
            first.barrier(ranks=[0, 1])
        assert lost.value.peer is not None and lost.value.peer.startswith("rank 1 (")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, crossrail.ConfigError, "no launcher variables are set and no store is configured"),
        ({"rank": 1, "size": 2}, crossrail.ConfigError, "rank=1 size=2, but no store is configured"),
        ({"rank": 1, "size": 1}, crossrail.ConfigError, "no store is configured"),
        ({"size": 1, "name": "a b"}, crossrail.UsageError, "not a group's name"),
        ({"size": 1, "lease": 0}, crossrail.UsageError, "a lease of 0"),
        ({"size": 1, "lease": -1}, crossrail.UsageError, "-1"),
        ({"size": 0, "store": "tcp://127.0.0.1:1"}, crossrail.UsageError, "a size of 0"),
        ({"size": 1, "store": "127.0.0.1:1"}, crossrail.ConfigError, "has no scheme"),
        (
            {"rank": 1, "size": 2, "store": "tcp://127.0.0.1:1", "timeout": 0.1},
            crossrail.UnreachableError,
            "127.0.0.1:1",
        ),
    ],
)
def test_what_cannot_be_joined_says_why(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        crossrail.Group(**arguments)  # type: ignore[arg-type]


def test_calls_that_make_no_sense() -> None:
    with crossrail.Group(size=1) as group:
        for call in (
            lambda: group.barrier(ranks=[1]),
            lambda: group.barrier(ranks=[0, -1]),
            lambda: group.state(-1),
            lambda: crossrail.Group(rank=-1, size=1),
            lambda: group.collect("key", ranks=[7]),
            lambda: group.collect("", ranks=[0]),
            lambda: group.publish("a\nb", b""),
            lambda: group.publish("key", bytes(1 << 20)),
            lambda: group.barrier(timeout=-1),
        ):
            with pytest.raises(crossrail.UsageError):
                call()
