"""crossrail.nixl: what programs may rely on, as NIXL's documentation and its bindings have it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from foreign import NOWHERE
from nixl_engines import until

from crossrail.nixl import _agent
from crossrail.nixl import _bindings as bindings
from crossrail.nixl import _utils as utils
from crossrail.nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

SIZE = 64 << 10


class Two:
    """Two agents that know each other, each with one registered piece of memory."""

    def __init__(self, **config: Any) -> None:
        self.a, self.b = nixl_agent("A", nixl_agent_config(**config)), nixl_agent("B", nixl_agent_config(**config))
        self.at = {"A": utils.malloc_passthru(SIZE), "B": utils.malloc_passthru(SIZE)}
        self.registered = {
            agent.name: agent.register_memory([(self.at[agent.name], SIZE, 0, "")], "DRAM")
            for agent in (self.a, self.b)
        }
        self.a.add_remote_agent(self.b.get_agent_metadata())
        self.b.add_remote_agent(self.a.get_agent_metadata())

    def rows(self, side: str, *rows: tuple[int, int]) -> bindings.nixlXferDList:
        descs = self.a.get_xfer_descs([(self.at[side] + offset, size, 0) for offset, size in rows], "DRAM")
        assert descs is not None
        return descs

    def write(self, offset: int = 0, size: int = 256, message: Any = b"") -> Any:
        return self.a.initialize_xfer(
            "WRITE", self.rows("A", (offset, size)), self.rows("B", (offset, size)), "B", message
        )

    def done(self, handle: Any) -> None:
        until(lambda: self.a.check_xfer_state(handle) == "DONE", "the transfer")

    def messages(self, count: int) -> list[bytes]:
        got: list[bytes] = []
        until(lambda: got.extend(self.b.get_new_notifs().get("A", [])) or len(got) >= count, f"{count} notifications")
        return got


@pytest.fixture
def two() -> Iterator[Two]:
    pair = Two()
    yield pair
    for address in pair.at.values():
        utils.free_passthru(address)


def test_a_post_again_sends_its_message_again_and_a_new_one_stays(two: Two) -> None:
    handle = two.write(message="first")
    for message in (b"", b"second", b""):
        assert two.a.transfer(handle, message) in ("DONE", "PROC")
        two.done(handle)
    assert two.messages(3) == [b"first", b"second", b"second"]
    silent = two.write()
    two.a.transfer(silent)
    two.done(silent)
    two.a.send_notif("B", "behind it")
    assert two.messages(1) == [b"behind it"]


def test_a_notification_needs_no_poll_of_the_initiator(two: Two) -> None:
    utils.ba_buf(two.at["A"], 256)
    handle = two.write(message=b"there\0it is")
    two.a.transfer(handle)
    assert two.messages(1) == [b"there\0it is"]
    utils.verify_transfer(two.at["A"], two.at["B"], 256)
    two.done(handle)


def test_messages_are_looked_up_by_prefix_or_part_and_empty_ones_count(two: Two) -> None:
    for message in (b"one:x", b"", "two:y", b"\xff\x00"):
        two.a.send_notif("B", message)
    until(lambda: len(two.b.update_notifs().get("A", [])) == 4, "four notifications")
    assert not two.b.check_remote_xfer_done("A", b":y")
    assert two.b.check_remote_xfer_done("A", b":y", tag_is_prefix=False)
    assert two.b.check_remote_xfer_done("A", b"\xff")
    assert two.b.check_remote_xfer_done("A", b"one:x") and not two.b.check_remote_xfer_done("A", b"one:x")
    assert two.b.check_remote_xfer_done("A", b"") and two.b.notifs["A"] == []
    assert not two.b.check_remote_xfer_done("nobody", b"")


def test_states_of_a_handle(two: Two) -> None:
    handle = two.write()
    with pytest.raises(bindings.nixlNotPostedError, match="NIXL_ERR_NOT_POSTED"):
        two.a.check_xfer_state(handle)
    two.a.transfer(handle)
    two.done(handle)
    assert two.a.check_xfer_state(handle) == "DONE"
    assert two.a.query_xfer_backend(handle) == "UCX"
    cost, margin, how = two.a.estimate_xfer_cost(handle)
    assert cost > 0 and margin >= 0 and how == "ANALYTICAL_BACKEND"
    with pytest.raises(bindings.nixlNoTelemetryError):
        two.a.get_xfer_telemetry(handle)
    two.a.remove_remote_agent("B")
    with pytest.raises(bindings.nixlNotFoundError, match="B was removed"):
        two.a.transfer(handle)
    two.a.add_remote_agent(two.b.get_agent_metadata())
    with pytest.raises(bindings.nixlNotFoundError):
        two.a.transfer(handle)  # of the agent as it was before
    two.a.release_xfer_handle(handle)
    two.a.release_xfer_handle(handle)
    assert {handle: 1}[handle] == 1


def test_rows_that_are_not_registered(two: Two) -> None:
    inside, outside = two.rows("A", (0, 8)), two.rows("A", (SIZE - 4, 8))
    there, beyond = two.rows("B", (0, 8)), two.rows("B", (SIZE - 4, 8))
    for local, remote in ((outside, there), (inside, beyond)):
        with pytest.raises(bindings.nixlNotFoundError):
            two.a.initialize_xfer("WRITE", local, remote, "B")
    for name, rows in (("", outside), ("B", beyond), ("nobody", there)):
        with pytest.raises(bindings.nixlNotFoundError):
            two.a.prep_xfer_dlist(name, rows)
    assert two.a.check_remote_metadata("B", there) and not two.a.check_remote_metadata("B", beyond)
    assert two.a.check_remote_metadata("B") and not two.a.check_remote_metadata("nobody")


def test_lists_that_do_not_fit_each_other(two: Two) -> None:
    local = two.a.prep_xfer_dlist("NIXL_INIT_AGENT", two.rows("A", (0, 8), (8, 8), (16, 16)))
    remote = two.a.prep_xfer_dlist("B", two.rows("B", (0, 8), (8, 8), (16, 16)))

    def make(mine: Any, other: Any) -> Any:
        return two.a.make_prepped_xfer("WRITE", local, mine, remote, other)

    for mine, other in (([], []), ([0], [0, 1]), ([3], [0]), ([-1], [0]), ([2], [0]), ([0], [2**33])):
        with pytest.raises(bindings.nixlInvalidParamError):
            make(mine, other)
        if mine:
            with pytest.raises(bindings.nixlInvalidParamError):
                make(np.array(mine), np.array(other))
    with pytest.raises(ValueError, match="1D"):
        make(np.zeros((1, 1), int), [0])
    with pytest.raises(bindings.nixlInvalidParamError, match="first side must be local"):
        two.a.make_prepped_xfer("WRITE", remote, [0], local, [0])
    with pytest.raises(KeyError):
        two.a.make_prepped_xfer("RD", local, [0], remote, [0])
    with pytest.raises(bindings.nixlInvalidParamError):
        two.a.initialize_xfer("READ", two.rows("A", (0, 8)), two.rows("B", (0, 16)), "B")
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        handle = make(np.array([2, 0, 1, 9], dtype)[:3], np.array([2, 1, 0], dtype))
        two.a.transfer(handle)
        two.done(handle)


def test_rows_with_strides(two: Two) -> None:
    memory = [
        np.frombuffer((__import__("ctypes").c_uint8 * SIZE).from_address(two.at[side]), np.uint8) for side in "AB"
    ]
    memory[0][:], memory[1][:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8), 0
    table = [
        np.array([[two.at[side], 32, 0, 100, 50], [two.at[side] + 8192, 32, 0, 32, 10]], np.uint64) for side in "AB"
    ]
    with pytest.raises(ValueError, match="mem type"):
        two.a.prep_xfer_dlist("", table[0])
    local, remote = two.a.prep_xfer_dlist("", table[0], "DRAM"), two.a.prep_xfer_dlist("B", table[1], "DRAM")
    handle = two.a.make_prepped_xfer("WRITE", local, [0, 49, 50, 59], remote, [1, 48, 51, 58])
    two.a.transfer(handle)
    two.done(handle)
    expected = np.zeros(SIZE, np.uint8)
    for source, target in ((0, 100), (4900, 4800), (8192, 8192 + 32), (8192 + 9 * 32, 8192 + 8 * 32)):
        expected[target : target + 32] = memory[0][source : source + 32]
    assert np.array_equal(memory[1], expected)


def test_a_transfer_within_one_agent(two: Two) -> None:
    utils.ba_buf(two.at["A"], 100)
    handle = two.a.initialize_xfer("WRITE", two.rows("A", (0, 100)), two.rows("A", (500, 100)), "A", b"mine")
    two.a.transfer(handle)
    two.done(handle)
    utils.verify_transfer(two.at["A"], two.at["A"] + 500, 100)
    until(lambda: two.a.update_notifs().get("A") == [b"mine"], "its own notification")
    lists = two.a.prep_xfer_dlist("", two.rows("A", (0, 8))), two.a.prep_xfer_dlist("A", two.rows("A", (8, 8)))
    assert two.a.make_prepped_xfer("READ", lists[0], [0], lists[1], [0])


def test_metadata(two: Two) -> None:
    with pytest.raises(bindings.nixlInvalidParamError, match="own metadata"):
        two.a.add_remote_agent(two.a.get_agent_metadata())
    for bad in (b"", b"xxx", b"nixlSerDes|Agent", two.b.get_agent_metadata()[:-1], two.b.get_agent_metadata() + b"x"):
        with pytest.raises(bindings.nixlMismatchError):
            two.a.add_remote_agent(bad)
    other = nixl_agent("B")
    with pytest.raises(bindings.nixlNotAllowedError, match="remove it first"):
        two.a.add_remote_agent(other.get_agent_metadata())
    more = utils.malloc_passthru(256)
    descs = two.b.register_memory([(more, 256, 0, "")], "DRAM")
    rows = two.a.get_xfer_descs([(more, 256, 0)], "DRAM")
    assert not two.a.check_remote_metadata("B", rows)
    assert two.a.add_remote_agent(two.b.get_partial_agent_metadata(descs, True, ["UCX"])) == b"B"
    assert two.a.check_remote_metadata("B", rows) and two.a.check_remote_metadata("B", two.rows("B", (0, SIZE)))
    two.b.deregister_memory(descs)
    utils.free_passthru(more)
    with pytest.raises(bindings.nixlNotFoundError):
        two.b.deregister_memory(descs)


def test_deregistered_memory_is_not_written(two: Two) -> None:
    handle = two.write()
    two.b.deregister_memory(two.registered["B"])
    with pytest.raises(bindings.nixlNotFoundError):
        two.a.transfer(handle)
        two.done(handle)


def test_single_rows_of_a_registration_are_deregistered() -> None:
    agent, other = nixl_agent("one"), nixl_agent("other")
    memory = np.zeros(3 << 12, np.uint8)
    base = memory.ctypes.data
    agent.register_memory([(base + at * 4096, 4096, 0, "") for at in range(3)], "DRAM")
    agent.deregister_memory(agent.get_reg_descs([(base + 4096, 4096, 0, "")], "DRAM"))
    other.add_remote_agent(agent.get_agent_metadata())
    known = [
        other.check_remote_metadata("one", other.get_xfer_descs([(base + at * 4096, 64, 0)], "DRAM")) for at in range(3)
    ]
    assert known == [True, False, True]


def test_very_many_rows_are_registered_together() -> None:
    agent, count = nixl_agent("one"), 3000
    memory = np.zeros(count * 64, np.uint8)
    rows = np.zeros((count, 3), np.uint64)
    rows[:, 0] = memory.ctypes.data + 64 * np.random.default_rng(0).permutation(count)
    rows[:, 1] = 64
    descs = agent.register_memory(rows, "DRAM")
    assert len(agent.get_agent_metadata()) < 1000
    whole = agent.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0)], "DRAM")
    assert agent.prep_xfer_dlist("", whole)
    agent.deregister_memory(agent.get_reg_descs(rows[:1].copy(), "DRAM"))
    with pytest.raises(bindings.nixlNotFoundError):
        agent.prep_xfer_dlist("", whole)
    assert agent.prep_xfer_dlist("", rows[1:].copy(), "DRAM")
    with pytest.raises(bindings.nixlNotFoundError):
        agent.deregister_memory(descs)  # one row is gone, though the others are taken out


def test_memory_that_is_not_there_is_refused_and_nothing_of_its_list_is_kept(two: Two) -> None:
    size = 4096
    more = np.zeros(size, np.uint8)
    good = (more.ctypes.data, size, 0, "")
    for at, length in ((more.ctypes.data, 1 << 45), (0, size), ((1 << 64) - size, 2 * size), (NOWHERE, size)):
        with pytest.raises(bindings.nixlInvalidParamError):
            two.b.register_memory([good, (at, length, 0, "")], "DRAM")
        with pytest.raises(bindings.nixlNotFoundError):
            two.b.deregister_memory(two.b.get_reg_descs([good], "DRAM"))
    two.b.deregister_memory(two.b.register_memory([good], "DRAM"))
    handle = two.write()
    two.a.transfer(handle)
    two.done(handle)


def test_what_is_refused_names_the_call(two: Two) -> None:
    for call, name in (
        (lambda: two.a.query_memory(two.registered["A"], "UCX"), "query_memory"),
        (lambda: two.a.prep_mem_view(two.rows("A", (0, 8))), "prep_mem_view"),
        (lambda: two.a.release_mem_view(1), "release_mem_view"),
        (lambda: two.a.register_memory([(0, 4096, 0, "file")], "FILE"), "register_memory of FILE_SEG"),
    ):
        with pytest.raises(bindings.nixlNotSupportedError, match=name):
            call()
    for name in ("GDS", "POSIX", "nothing"):
        with pytest.raises(bindings.nixlNotFoundError, match=name):
            two.a.create_backend(name)
    with pytest.raises(bindings.nixlInvalidParamError, match="no ip address"):
        two.a.fetch_remote_metadata("B")


def test_constants_and_exceptions() -> None:
    assert [int(kind) for kind in bindings.nixl_mem_t] == [0, 1, 2, 3, 4]
    assert (bindings.DRAM_SEG, bindings.VRAM_SEG, bindings.FILE_SEG) == (0, 1, 4)
    assert (bindings.NIXL_READ, bindings.NIXL_WRITE, bindings.NIXL_IN_PROG, bindings.NIXL_SUCCESS) == (0, 1, 1, 0)
    assert bindings.NIXL_ERR_NOT_FOUND == -4 and bindings.NIXL_ERR_NOT_SUPPORTED == -9
    assert bindings.NIXL_THREAD_SYNC_DEFAULT is bindings.NIXL_THREAD_SYNC_NONE and bindings.NIXL_INIT_AGENT == ""
    names = [name for name in vars(bindings) if name.endswith("Error")]
    assert len(names) == 12
    for name in names:
        assert getattr(bindings, name).__bases__ == (Exception,)
    with pytest.raises(TypeError, match="sync_mode must be a nixl_thread_sync_t"):
        nixl_agent_config(sync_mode=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        nixl_agent("")


def test_lists() -> None:
    rows = [(1000, 105, 0), (2000, 30, 0), (2**64 - 1, 20, 7)]
    descs = bindings.nixlXferDList(bindings.DRAM_SEG, rows)
    assert [descs[at] for at in range(3)] == rows and descs.descCount() == 3 and descs
    assert descs.index((2000, 30, 0)) == 1
    with pytest.raises(bindings.nixlNotFoundError):
        descs.index((2000, 31, 0))
    assert pickle.loads(pickle.dumps(descs)) == descs
    descs.remDesc(1)
    descs.append((5, 6, 7))
    descs.addDesc((8, 9, 10))
    descs[0] = (1, 2, 3)
    assert [descs[at] for at in range(4)] == [(1, 2, 3), rows[2], (5, 6, 7), (8, 9, 10)]
    with pytest.raises(IndexError):
        descs[4]
    descs.clear()
    assert descs.isEmpty() and descs  # there is no length, so it is true
    registered = bindings.nixlRegDList(bindings.VRAM_SEG, [(1, 2, 3, "meta"), (4, 5, 6, b"\xff")])
    assert registered[0] == (1, 2, 3, b"meta") and registered[1] == (4, 5, 6, b"\xff")
    assert pickle.loads(pickle.dumps(registered)) == registered
    assert registered.trim() == bindings.nixlXferDList(bindings.VRAM_SEG, [(1, 2, 3), (4, 5, 6)])
    assert registered != bindings.nixlRegDList(bindings.VRAM_SEG, [(1, 2, 3, "beta"), (4, 5, 6, b"\xff")])
    for bad, kind in (
        ([(1, 2)], ValueError),
        ([[1, 2, 3]], TypeError),
        ([(-1, 2, 3)], TypeError),
        (np.zeros((2, 3), np.int32), ValueError),
        (np.zeros((4, 3), np.uint64)[::2], ValueError),
        (np.zeros(3, np.uint64), ValueError),
    ):
        with pytest.raises(kind):
            bindings.nixlXferDList(bindings.DRAM_SEG, bad)
    array = np.array([[1, 2, 0]], np.int64)
    copied = bindings.nixlXferDList(bindings.DRAM_SEG, array)
    array[:] = 9
    assert copied[0] == (1, 2, 0)


def test_a_released_transfer_writes_nothing_more() -> None:
    """Handles are released and dropped in flight; the target does not change afterwards."""
    size = 32 << 20
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    a, b = nixl_agent("A"), nixl_agent("B")
    a.register_memory([(source.ctypes.data, size, 0, "")], "DRAM")
    b.register_memory([(target.ctypes.data, size, 0, "")], "DRAM")
    a.add_remote_agent(b.get_agent_metadata())
    rows = [a.get_xfer_descs([(one.ctypes.data, size, 0)], "DRAM") for one in (source, target)]
    for turn in range(8):
        handle = a.initialize_xfer("WRITE", *rows, "B", b"whole")
        a.transfer(handle)
        if turn % 2:
            a.release_xfer_handle(handle)
        else:
            del handle
        written = target.copy()
        time.sleep(0.01)
        assert np.array_equal(target, written)
        target[:] = 0


@pytest.mark.parametrize("mode", list(nixl_thread_sync_t))
def test_many_threads_share_an_agent(mode: nixl_thread_sync_t) -> None:
    """Posts, polls, notifications, lists and metadata at once, in every mode."""
    pair = Two(sync_mode=mode)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                handle = pair.write(1024 * number, 512, f"{number}:{turn}")
                pair.a.transfer(handle)
                pair.a.send_notif("B", f"note {number}:{turn}")
                pair.done(handle)
                pair.a.add_remote_agent(pair.b.get_agent_metadata())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    got = pair.messages(160)
    for thread in threads:
        thread.join()
    assert not errors and len(set(got)) == 160
    for address in pair.at.values():
        utils.free_passthru(address)


def test_metadata_by_the_listener() -> None:
    target = nixl_agent("target", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    port = target.agent._exchange.port
    assert port is not None
    initiator = nixl_agent("initiator")
    initiator.fetch_remote_metadata("target", "127.0.0.1", port)
    initiator.send_local_metadata("127.0.0.1", port)
    until(lambda: initiator.check_remote_metadata("target"), "the fetched metadata")
    until(lambda: target.check_remote_metadata("initiator"), "the sent metadata")
    target.send_notif("initiator", b"hello")
    until(lambda: initiator.get_new_notifs() == {"target": [b"hello"]}, "a notification")
    initiator.invalidate_local_metadata("127.0.0.1", port)
    until(lambda: not target.check_remote_metadata("initiator"), "its invalidation")


def test_rows_without_bytes_move_nothing_and_are_no_error(two: Two) -> None:
    message = 0

    def moved(ours: bindings.nixlXferDList, theirs: bindings.nixlXferDList) -> None:
        nonlocal message
        message += 1
        handle = two.a.initialize_xfer("WRITE", ours, theirs, "B", str(message))
        two.a.transfer(handle)
        two.done(handle)
        assert two.messages(1) == [str(message).encode()], "its notification is raised all the same"

    moved(two.rows("A", (0, 0)), two.rows("B", (0, 0)))
    moved(two.rows("A", (0, 0), (64, 16), (0, 0)), two.rows("B", (0, 0), (64, 16), (SIZE, 0)))
    silent = two.a.initialize_xfer("READ", two.rows("A", (0, 0)), two.rows("B", (0, 0)), "B")
    assert two.a.transfer(silent) == "DONE" == two.a.check_xfer_state(silent)
    ours = two.a.prep_xfer_dlist("NIXL_INIT_AGENT", two.rows("A", (0, 16), (16, 0), (32, 16)), "DRAM")
    theirs = two.a.prep_xfer_dlist("B", two.rows("B", (0, 16), (16, 0), (32, 16)), "DRAM")
    for chosen in ([2, 1, 0], [1], np.array([0])):
        handle = two.a.make_prepped_xfer("WRITE", ours, chosen, theirs, chosen)
        two.a.transfer(handle)
        two.done(handle)
    for bad in ([3], [-1]):
        with pytest.raises(bindings.nixlInvalidParamError, match="not below"):
            two.a.make_prepped_xfer("WRITE", ours, bad, theirs, bad)
    with pytest.raises(bindings.nixlInvalidParamError, match="not equally long"):
        two.a.make_prepped_xfer("WRITE", ours, [1], theirs, [0])


def test_a_released_handle_starts_and_answers_nothing(two: Two) -> None:
    handle = two.write()
    two.a.transfer(handle)
    two.done(handle)
    two.a.release_xfer_handle(handle)
    two.a.release_xfer_handle(handle)
    for call in (two.a.transfer, two.a.check_xfer_state, two.a.get_xfer_telemetry):
        with pytest.raises(bindings.nixlInvalidParamError, match="released"):
            call(handle)
    ours = two.a.prep_xfer_dlist("NIXL_INIT_AGENT", two.rows("A", (0, 16)), "DRAM")
    theirs = two.a.prep_xfer_dlist("B", two.rows("B", (0, 16)), "DRAM")
    two.a.release_dlist_handle(ours)
    with pytest.raises(bindings.nixlInvalidParamError, match="released"):
        two.a.make_prepped_xfer("WRITE", ours, [0], theirs, [0])


def test_polls_make_progress_once_for_all_that_is_in_flight(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        passes = 0

        def progress(self) -> bool:
            self.passes += 1
            return False

    def handle() -> Any:
        return SimpleNamespace(request=SimpleNamespace(is_done=lambda: False))

    agent, worker, in_flight = two.a.agent, Counted(), [handle() for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_worker", worker)
        patch.setattr(_agent, "_PUMP_NS", 1 << 62)
        for _ in range(5):
            for one in in_flight:
                assert agent.getXferStatus(one) == bindings.NIXL_IN_PROG
        assert worker.passes == 4, "none in the first round, which may be of many handles"
        patch.setattr(_agent, "_PUMP_NS", -1)
        agent.getXferStatus(handle())
        assert worker.passes == 5, "the last was too long ago"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_named(two: Two, port: int) -> None:
    with pytest.raises(bindings.nixlInvalidParamError, match=f"port {port} is not"):
        nixl_agent("listens", nixl_agent_config(enable_listen_thread=True, listen_port=port))
    with pytest.raises(bindings.nixlInvalidParamError, match=f"port {port} is not"):
        two.a.fetch_remote_metadata("B", "127.0.0.1", port)
