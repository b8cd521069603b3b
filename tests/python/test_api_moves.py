"""Lists of rows, moves between two of them, and notices."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from pairs import Pair

import crossrail

Connect = Callable[..., Pair]
PAGES, PAGE = 64, 520


def rows_of(memory: np.ndarray, page: int = PAGE) -> np.ndarray:
    """One row of addresses for each page."""
    rows = np.zeros((memory.nbytes // page, 3), np.uint64)
    rows[:, 0] = memory.ctypes.data + page * np.arange(len(rows), dtype=np.uint64)
    rows[:, 1] = page
    return rows


class Both:
    """Memory at both ends of a pair, registered by address."""

    def __init__(self, pair: Pair, page: int = PAGE) -> None:
        self.pair = pair
        self.a, self.b = (np.random.default_rng(seed).integers(0, 256, PAGES * page, np.uint8) for seed in (1, 2))
        self.region_a = pair.a.register_range(self.a.ctypes.data, self.a.nbytes)
        self.region_b = pair.b.register_range(self.b.ctypes.data, self.b.nbytes)
        self.description = crossrail.Description(pair.b.describe([self.region_b]))
        self.local = pair.a.layout(rows_of(self.a, page), [self.region_a])
        self.remote = pair.to_b.layout(rows_of(self.b, page), self.description)

    def notices(self, count: int) -> list[tuple[str, bytes]]:
        got: list[tuple[str, bytes]] = []
        deadline = time.monotonic() + 20
        while len(got) < count:
            assert time.monotonic() < deadline
            self.pair.b.progress()
            got += self.pair.b.notices()
        return got


@pytest.fixture(params=["shm", "tcp"])
def both(request: pytest.FixtureRequest, connected: Connect) -> Both:
    return Both(connected(tls=f"{request.param},self"))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, list])
@pytest.mark.parametrize("op", ["write", "read"])
def test_rows_are_moved_by_index(both: Both, op: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    mine, other = rng.permutation(PAGES)[:20], rng.permutation(PAGES)[:20]
    source, target = (both.a, both.b) if op == "write" else (both.b, both.a)
    left, right = (mine, other) if op == "write" else (other, mine)
    expected = target.copy().reshape(-1, PAGE)
    expected[right] = source.reshape(-1, PAGE)[left]
    index = [each.tolist() if dtype is list else each.astype(dtype) for each in (mine, other)]
    move = both.pair.to_b.prepare(op, both.local, both.remote, *index, notice=b"moved")
    assert (move.rows, move.nbytes) == (20, 20 * PAGE) and 0 < move.runs <= 20
    assert not move.is_in_flight()
    receipt = move.start().wait(20)
    assert receipt.bytes == 20 * PAGE
    assert np.array_equal(target, expected.ravel())
    assert both.notices(1) == [("a", b"moved")]
    assert set(move.explain()) == {"lane", "how", "why", "rows", "runs", "nbytes"}


def test_a_move_is_started_again_with_other_notices_and_fewer_rows(both: Both) -> None:
    move = both.pair.to_b.prepare("write", both.local, both.remote, notice=b"prepared")
    before = both.b.copy()
    move.start(rows=slice(3, 5), notice=b"two rows").wait(20)
    before[3 * PAGE : 5 * PAGE] = both.a[3 * PAGE : 5 * PAGE]
    assert np.array_equal(both.b, before)
    move.start(notice=b"").wait(20)
    assert np.array_equal(both.a, both.b)
    move.start(rows=range(1)).wait(20)
    assert both.notices(2) == [("a", b"two rows"), ("a", b"prepared")]
    for bad in (slice(0, 10, 2), range(0, 4, 2), 3):
        with pytest.raises(crossrail.UsageError, match="without a step"):
            move.start(rows=bad)  # type: ignore[arg-type]
    with pytest.raises(crossrail.UsageError):
        move.start(rows=range(PAGES + 1))


def test_layouts_are_made_of_regions_and_cut(both: Both) -> None:
    whole = both.pair.a.layout([(both.region_a, 0, PAGE, PAGE, PAGES)])
    assert (whole.rows, whole.strides, whole.nbytes) == (PAGES, 1, PAGES * PAGE)
    assert both.local.strides == 1
    assert whole.slice(4, 10).rows == 6
    half = whole.split(2, 1)
    assert (half.rows, half.nbytes) == (PAGES, PAGES * PAGE // 2)
    before = both.b.copy().reshape(PAGES, 2, -1)
    there = both.pair.to_b.layout([(both.region_b.key(), 0, PAGE, PAGE, PAGES)]).split(2, 0)
    both.pair.to_b.prepare("write", half, there).start().wait(20)
    before[:, 0] = both.a.reshape(PAGES, 2, -1)[:, 1]
    assert np.array_equal(both.b.reshape(PAGES, 2, -1), before)
    with pytest.raises(crossrail.UsageError):
        whole.split(7, 0)
    with pytest.raises(crossrail.UsageError):
        whole.slice(0, PAGES + 1)


def test_strided_addresses_and_single_rows(both: Both) -> None:
    table = np.array([[both.a.ctypes.data, 8, 0, PAGE, PAGES], [both.a.ctypes.data + 16, 8, 0, 8, 1]], np.int64)
    layout = both.pair.a.layout(table, [both.region_a])
    assert (layout.rows, layout.nbytes) == (PAGES + 1, 8 * (PAGES + 1))
    one = both.pair.a.layout([(both.region_a, 5, 100)])
    assert (one.rows, one.nbytes) == (1, 100)
    assert crossrail._native.merged_rows(rows_of(both.a)[::-1].copy()) == [(both.a.ctypes.data, both.a.nbytes, 0)]


def test_what_is_wrong_is_refused(both: Both) -> None:
    pair, rows = both.pair, rows_of(both.a)
    outside = rows + np.array([8 * PAGE * PAGES, 0, 0], np.uint64)
    with pytest.raises(crossrail.RegionError):
        pair.a.layout(outside, [both.region_a])
    with pytest.raises(crossrail.RegionError):
        pair.to_b.layout(rows_of(both.b)[:, :] + np.array([1 << 40, 0, 0], np.uint64), both.description)
    for bad in (rows.astype(np.int32), rows.astype(float), rows[:, :2].copy(), rows.ravel(), rows[::2]):
        with pytest.raises(crossrail.UsageError):
            pair.a.layout(bad, [both.region_a])
    with pytest.raises(crossrail.UsageError, match="regions="):
        pair.a.layout(rows)
    with pytest.raises(crossrail.UsageError, match="description"):
        pair.to_b.layout(rows)
    for tuples in ([(both.region_a, 1)], [(both.region_b.key(), 0, 8)], [3], [(both.region_a, -1, 8)]):
        with pytest.raises((crossrail.UsageError, OverflowError)):
            pair.a.layout(tuples)  # type: ignore[arg-type]
    lists = both.local, both.remote
    for index in (
        ([0, 1], [0]),
        ([PAGES], [0]),
        (np.array([-1]), [0]),
        (np.array([2**32]), [0]),
        (np.zeros((1, 1), int), [0]),
        (np.zeros(1, np.int16), [0]),
        (np.arange(8)[::2], np.arange(4)),
    ):
        with pytest.raises(crossrail.UsageError):
            pair.to_b.prepare("write", *lists, *index)  # type: ignore[arg-type]
    for wrong, where in (
        ([0, "x"], r"\[1\]: 'str' object"),
        ((1.5,), r"\[0\]: 'float' object"),
        ("ab", r"\[0\]: 'str' object"),
        (np.zeros(1), ": its items are not integers"),
        (np.array(["x"]), ": its items are not integers"),
        (5, ": 'int' object is not iterable"),
    ):
        for name in ("local_index", "remote_index"):
            with pytest.raises(TypeError, match=f"^prepare: {name}{where}"):
                pair.to_b.prepare("write", *lists, **{name: wrong})  # type: ignore[arg-type]
    for number in (-1, 2**32, 2**70):
        with pytest.raises(crossrail.UsageError, match=rf"remote_index\[1\]: {number} is not an unsigned number of 32"):
            pair.to_b.prepare("write", *lists, None, [0, number])
    with pytest.raises(crossrail.UsageError, match=r"remote_index\[1\]: -1 is not"):
        pair.to_b.prepare("write", *lists, None, np.array([0, -1]))
    for malformed, where in (
        ([(both.region_a, 0, 8), (both.region_a, "x", 8)], r"rows\[1\]\[1\]: 'str' object"),
        ([(both.region_a, 0, 8.5)], r"rows\[0\]\[2\]: 'float' object"),
        (5, "rows: 'int' object is not iterable"),
    ):
        with pytest.raises(TypeError, match=f"^layout: {where}"):
            pair.a.layout(malformed)  # type: ignore[arg-type]
    with pytest.raises(crossrail.UsageError, match="no operation"):
        pair.to_b.prepare("swap", *lists)
    for data in (b"", b"x" * 100, pair.b.describe([both.region_b])[:-1]):
        with pytest.raises(crossrail.UsageError):
            crossrail.Description(data)


@pytest.mark.parametrize("op", ["write", "read"])
def test_rows_of_no_bytes_move_nothing(both: Both, op: str) -> None:
    pair = both.pair
    source, target = (both.a, both.b) if op == "write" else (both.b, both.a)
    # Wherever they are: an array without items often has no address.
    nowhere = np.array([[0, 0, 0], [7, 0, 0]], np.uint64)
    local = pair.a.layout(np.concatenate([nowhere, rows_of(both.a), nowhere]), [both.region_a])
    remote = pair.to_b.layout(np.concatenate([nowhere, rows_of(both.b), nowhere]), both.description)
    assert (local.rows, local.nbytes) == (PAGES + 4, both.a.nbytes)
    expected = target.copy().reshape(-1, PAGE)
    expected[5], expected[0] = source.reshape(-1, PAGE)[3], source.reshape(-1, PAGE)[9]
    move = pair.to_b.prepare(
        op, local, remote, *([1, 5, 0, 11, PAGES + 3], [0, 7, 1, 2, PAGES + 2])[:: 1 if op == "write" else -1]
    )
    assert (move.rows, move.nbytes, move.runs) == (5, 2 * PAGE, 2)
    assert move.start(notice=b"some").wait(20).bytes == 2 * PAGE
    assert np.array_equal(target, expected.ravel())
    pair.to_b.prepare(op, local, remote).start(notice=b"all").wait(20)
    assert np.array_equal(both.a, both.b)
    none = pair.to_b.prepare(op, local, remote, [1, 0], [0, 1])
    assert (none.rows, none.nbytes, none.runs) == (2, 0, 0)
    for rows in (None, range(1, 2)):
        assert none.start(rows=rows, notice=b"none").wait(20).bytes == 0
        assert none.start().wait(20).bytes == 0
    assert move.start(rows=range(2, 3), notice=b"one").wait(20).bytes == 0
    assert both.notices(5) == [("a", notice) for notice in (b"some", b"all", b"none", b"none", b"one")]
    tuples = pair.a.layout([(both.region_a, 1 << 60, 0), (both.region_a, 0, 0, 8, 3)])
    assert (tuples.rows, tuples.nbytes) == (4, 0)
    pair.to_b.prepare(op, tuples, pair.to_b.layout([(both.region_b.key(), 0, 0, 0, 4)])).start().wait(20)
    with pytest.raises(crossrail.UsageError, match="equally long"):
        pair.to_b.prepare(op, local, remote, [0], [2])
    if op == "write":
        counted = pair.to_b.prepare(op, local, remote, [0], [0], imm=7)
        counted.start().wait(20)
        counted.start().wait(20)
    assert np.array_equal(both.a, both.b)


def test_descriptions(both: Both) -> None:
    description = both.description
    assert description.name == "b"
    assert description.regions == [(both.b.ctypes.data, both.b.nbytes, "cpu")]
    more = np.zeros(64, np.uint8)
    region = both.pair.b.register_range(more.ctypes.data, 64)
    merged = description.merge(crossrail.Description(both.pair.b.describe([region, both.region_b])))
    assert len(merged.regions) == 2 and len(description.regions) == 1
    assert merged.generation == description.generation
    with pytest.raises(crossrail.CrossrailError):
        description.merge(crossrail.Description(both.pair.a.describe([both.region_a])))


def test_deregistered_memory_is_not_moved(both: Both) -> None:
    move = both.pair.to_b.prepare("write", both.local, both.remote)
    before = both.b.copy()
    both.region_b.deregister()
    with pytest.raises(crossrail.RegionError):
        move.start().wait(20)
    assert np.array_equal(both.b, before)


def test_notices_alone_and_in_order_of_arrival(both: Both) -> None:
    sent = [f"notice {number}".encode() for number in range(50)] + [b"", b"\0" * 100_000]
    for data in sent:
        both.pair.to_b.notify(data).wait(20)
    assert both.notices(len(sent)) == [("a", data) for data in sent]
    both.pair.to_b.notify(b"one").wait(20)
    both.pair.to_b.notify(b"two").wait(20)
    deadline = time.monotonic() + 20
    while not (first := both.pair.b.notices(1)):
        assert time.monotonic() < deadline
        both.pair.b.progress()
    assert first == [("a", b"one")]
    assert both.notices(1) == [("a", b"two")]


def test_peers_are_admitted_without_accept(connected: Connect) -> None:
    context = connected().context
    with (
        crossrail.Worker(context, name="admits", admit=True) as one,
        crossrail.Worker(context, name="comes") as other,
    ):
        endpoint = other.connect(one.address())
        endpoint.notify(b"here").wait(20)
        assert one.notices() == [("comes", b"here")]
        back = one.peer("comes")
        assert back is not None and one.peer("nobody") is None
        back.notify(b"welcome").wait(20)
        assert other.notices() == [("admits", b"welcome")]
