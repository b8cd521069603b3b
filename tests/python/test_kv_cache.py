"""Paged caches: blocks between two processes, shards of heads, layers behind each other, leases that end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest
from kv_peer import Made, Peer, peer

import crossrail
from crossrail.kv import PagedCache, RemoteCache

MINE, ITS = np.array([3, 4, 9, 20], np.uint32), np.array([7, 0, 1, 23], np.uint32)


class Ends:
    """A cache here, and the other process's."""

    def __init__(self, worker: crossrail.Worker, made: Made, there: Peer) -> None:
        self.worker, self.made, self.there = worker, made, there
        self.memory = made.memory()
        self.cache = made.cache(worker, self.memory)
        self.remote = self.cache.remote(there.described)

    def heads(self) -> tuple[slice, slice]:
        """The heads that both have, here and there."""
        ranges = []
        for made in (self.made, self.there.made):
            (part, parts), heads = made.shard, made.heads
            ranges.append((part * heads // parts, (part + 1) * heads // parts))
        low, high = max(a for a, _ in ranges), min(b for _, b in ranges)
        mine, its = (slice(low - first, high - first) for first, _ in ranges)
        return mine, its

    def pulled(self, mine: np.ndarray, its: np.ndarray) -> np.ndarray:
        """What this end's memory is after a pull."""
        expected, (here, there) = self.memory.copy(), self.heads()
        expected[:, :, mine, :, here] = self.there.made.memory()[:, :, its, :, there]
        return expected


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[crossrail.Worker]:
    tls = getattr(request, "param", "shm")
    with crossrail.Worker(crossrail.Context(tls=tls, log="error", timeout=30), name="mine", admit=True) as made:
        yield made


SHARDS = [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((3, 4), (1, 2)), ((2, 4), (1, 2)), ((0, 2), (1, 4)), ((0, 1), (5, 8))]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("mine", "its"), SHARDS)
@pytest.mark.parametrize("worker", ["shm", "tcp"], indirect=True)
def test_blocks_are_pulled_and_pushed_between_shards(
    worker: crossrail.Worker, mine: tuple[int, int], its: tuple[int, int], heads_first: bool
) -> None:
    tls = worker.context.settings()["CROSSRAIL_TLS"]
    assert tls is not None
    made = Made(pages=30, shard=mine, heads_first=heads_first, seed=2, tls=tls)
    with peer(Made(shard=its, heads_first=heads_first, tls=tls)) as there:
        ends = Ends(worker, made, there)
        expected = ends.pulled(MINE, ITS)
        receipt = ends.remote.pull(MINE, ITS, notice=b"read").wait()
        assert receipt.bytes == 4 * ends.cache.block_nbytes // max(its[1] * 1 // mine[1], 1)
        assert np.array_equal(ends.memory, expected)
        after = there.made.memory()
        here, far = ends.heads()
        after[:, :, ITS[:2], :, far] = ends.memory[:, :, [29, 0], :, here]
        ends.remote.push([29, 0], ITS[:2].tolist(), notice=b"written").wait()
        (raised, content) = there.ask(do="notices", count=2)
        assert raised == ["read", "written"]
        assert np.array_equal(np.frombuffer(bytes.fromhex(content), np.uint16), after.ravel())
        assert np.array_equal(there.memory(), after) and np.array_equal(ends.memory, expected)


def test_some_layers_and_moves_that_are_started_again(worker: crossrail.Worker) -> None:
    with peer(Made()) as there:
        ends = Ends(worker, Made(shard=(1, 2), seed=2), there)
        expected = ends.memory.copy()
        expected[[0, 2]] = ends.pulled(MINE, ITS)[[0, 2]]
        move = ends.remote.prepare("pull", MINE.astype(np.int64), ITS, layers=[2, 0], notice=b"once")
        move.start().wait()
        assert np.array_equal(ends.memory, expected)
        ends.memory[:] = 0
        move.start(notice=b"twice").wait()
        assert np.array_equal(ends.memory[:, :, MINE][[0, 2]], expected[:, :, MINE][[0, 2]])
        assert not ends.memory[1].any() and np.count_nonzero(ends.memory.any((0, 1, 3, 4, 5))) == len(MINE)
        assert there.ask(do="notices", count=2)[0] == ["once", "twice"]


def test_layers_are_pushed_one_behind_the_other_with_one_notice(worker: crossrail.Worker) -> None:
    with peer(Made()) as there:
        ends = Ends(worker, Made(seed=2), there)
        after = there.made.memory()
        after[:, :, ITS] = ends.memory[:, :, MINE]
        push = ends.remote.push_layers(MINE, ITS, notice=b"all layers")
        with pytest.raises(crossrail.UsageError, match=r"layers \[0, 1, 2\] were not started"):
            push.wait()
        for layer in (0, 2, 1):
            push.start(layer)
        with pytest.raises(crossrail.UsageError, match="layer 1 of 3, or it was started before"):
            push.start(1)
        assert [receipt.bytes for receipt in push.wait()] == [len(MINE) * ends.cache.block_nbytes // 3] * 3
        raised, content = there.ask(do="notices", count=1)
        assert raised == ["all layers"]
        assert np.array_equal(np.frombuffer(bytes.fromhex(content), np.uint16), after.ravel())
        ends.remote.push_layers(MINE, ITS).start(0)
        assert there.ask(do="notices", count=0)[0] == []


def test_a_layer_behind_a_stream_needs_a_gpu(worker: crossrail.Worker) -> None:
    with peer(Made()) as there:
        ends = Ends(worker, Made(seed=2), there)
        push = ends.remote.push_layers(MINE, ITS)
        with pytest.raises(crossrail.UnsupportedError):
            push.start(0, stream=77)
        for layer in range(3):
            push.start(layer)
        assert len(push.wait()) == 3


def test_a_layer_that_fails_raises_no_notice(worker: crossrail.Worker) -> None:
    with peer(Made()) as there:
        ends = Ends(worker, Made(), there)
        lease = bytes.fromhex(there.ask(do="lend", blocks=ITS.tolist()))
        push = ends.remote.borrow(lease).push_layers(MINE, notice=b"never")
        there.ask(do="end")
        for layer in (1, 0, 2):
            push.start(layer)
        with pytest.raises(crossrail.RegionError, match="theirs"):
            push.wait()
        worker.endpoints()[0].notify(b"behind").wait()
        assert there.ask(do="notices", count=1)[0] == ["behind"]


@pytest.mark.parametrize("worker", ["shm", "tcp"], indirect=True)
@pytest.mark.parametrize("shard", [(0, 1), (1, 4)])
def test_a_lease_that_has_ended_delivers_nothing_of_the_next_request(
    worker: crossrail.Worker, shard: tuple[int, int]
) -> None:
    tls = worker.context.settings()["CROSSRAIL_TLS"]
    assert tls is not None
    with peer(Made(pages=400, tls=tls)) as there:
        ends = Ends(worker, Made(pages=400, shard=shard, tls=tls), there)
        blocks = np.random.default_rng(0).permutation(400)[:300]
        closed = ends.cache.remote(bytes.fromhex(there.ask(do="describe without access")))
        with pytest.raises(crossrail.UsageError, match="theirs has described its cache without access"):
            closed.pull([0], [0])
        lent = closed.borrow(bytes.fromhex(there.ask(do="lend", blocks=blocks.tolist())))
        assert lent.pages == 300 and np.array_equal(lent.blocks, blocks)
        expected = ends.pulled(np.arange(300), blocks)
        lent.pull(np.arange(300)).wait()
        assert np.array_equal(ends.memory, expected)
        lent.pull([399, 398], [299, 0]).wait()
        assert np.array_equal(ends.memory, ends.pulled(np.array([399, 398]), blocks[[299, 0]]))
        # Pulls that the end of the lease, and the next request's bytes, come in between.
        moves = [lent.prepare("pull", np.arange(300)) for _ in range(8)]
        assert there.process.stdin
        there.process.stdin.write(json.dumps({"do": "end"}) + "\n")
        there.process.stdin.flush()
        until = time.monotonic() + 30
        failed = 0
        while not failed and time.monotonic() < until:
            requests = [move.start() for move in moves]
            for request in requests:
                try:
                    request.wait()
                except crossrail.RegionError as error:
                    assert error.peer == "theirs"
                    failed += 1
        assert there.ask() is None
        assert failed and not (ends.memory == 0xFFFF).any()
        for op in ("pull", "push"):
            with pytest.raises(crossrail.RegionError, match="theirs"):
                lent.prepare(op, np.arange(300)).start().wait()
        assert (there.memory()[:, :, blocks] == 0xFFFF).all()
        # Other blocks, and the blocks' next lease, are not concerned.
        again = closed.borrow(bytes.fromhex(there.ask(do="lend", blocks=blocks[:2].tolist())))
        again.pull([0, 1]).wait()
        assert (ends.memory[:, :, :2] == 0xFFFF).all()
        there.ask(do="close")
        with pytest.raises(crossrail.RegionError, match="theirs"):
            ends.remote.pull([0], [0]).wait()


@pytest.mark.parametrize("worker", ["shm", "tcp"], indirect=True)
def test_a_killed_peer_is_named(worker: crossrail.Worker) -> None:
    tls = worker.context.settings()["CROSSRAIL_TLS"]
    assert tls is not None
    with peer(Made(tls=tls)) as there:
        ends = Ends(worker, Made(tls=tls), there)
        move = ends.remote.prepare("pull", MINE, ITS)
        move.start().wait()
        there.process.kill()
        began = time.monotonic()
        with pytest.raises(crossrail.PeerDeadError) as caught:
            while time.monotonic() < began + 20:
                move.start().wait()
        assert caught.value.peer == "theirs" and time.monotonic() - began < 20
        with pytest.raises((crossrail.PeerDeadError, crossrail.ClosedError)):
            ends.remote.push(MINE, ITS).wait()


@pytest.mark.parametrize(
    ("other", "mine", "its"),
    [
        ({"layers": 4}, "3 layers of 6 tensors", "4 layers of 8 tensors"),
        ({"tokens": 2}, "512 bytes = 4 x 8 heads x 8 of uint16", "256 bytes = 2 x 8 heads x 8 of uint16"),
        ({"heads": 16}, "4 x 8 heads", "4 x 16 heads"),
        ({"dim": 4}, "heads x 8 of", "heads x 4 of"),
        ({"heads_first": True}, "4 x 8 heads x 8", "1 x 8 heads x 32"),
        ({"heads": 24, "shard": (0, 3)}, "4 x 8 heads", "4 x 24 heads"),
    ],
)
def test_a_cache_of_another_shape_is_refused_with_both(
    worker: crossrail.Worker, other: dict[str, object], mine: str, its: str
) -> None:
    here = Made()
    cache = here.cache(worker, here.memory())
    there = here._replace(**other)
    described = there.cache(worker, there.memory()).describe()
    with pytest.raises(crossrail.MismatchError) as caught:
        cache.remote(described, worker.connect(worker.address()))
    text = str(caught.value)
    assert f"this cache has {mine}" in text or (mine in text and text.index(mine) < text.index("that of mine has"))
    assert its in text[text.index("that of mine has") :]


@pytest.mark.parametrize(
    ("shape", "head_axis", "refused"),
    [
        # Its own axes say how many rows there can be.
        ((2, 512, 1, 128), 2, "512 x 2 heads x 128 of uint8"),
        # With one row before the heads it takes the peer's number, up to the bound.
        ((1, 1, 512 * 128), 1, "at most 262144 rows of heads for each block.* 2097152 of them"),
    ],
)
def test_rows_that_a_peer_describes_as_single_items_are_refused_before_they_are_made(
    worker: crossrail.Worker, shape: tuple[int, ...], head_axis: int, refused: str
) -> None:
    tokens, dim, layers = 512, 128, 32
    mine = PagedCache(worker, [np.zeros(shape, np.uint8)] * layers, head_axis=head_axis, shard=(0, 2))
    with crossrail.Worker(crossrail.Context(tls="shm"), name="theirs") as other:
        theirs = PagedCache(other, [np.zeros((2, tokens, 2, dim), np.uint8)] * layers, head_axis=2)
        described = theirs.describe()
        begin = described.index(b"{")
        said = json.loads(described[begin:])
        for part in said["shape"][2]:
            part[3], part[5] = tokens * dim, 1  # rows before the heads, items after them
        began = time.monotonic()
        with pytest.raises(crossrail.MismatchError, match=refused):
            mine.remote(described[:begin] + json.dumps(said).encode())
        assert time.monotonic() - began < 1
        assert mine.remote(described).prepare("pull", [0], [0]).rows == layers * tokens


def test_shards_without_heads_in_common_are_refused(worker: crossrail.Worker) -> None:
    for mine, its in [((0, 2), (1, 2)), ((0, 4), (1, 2)), ((1, 2), (1, 8)), ((0, 2), (0, 3))]:
        here, there = Made(shard=mine, heads=24), Made(shard=its, heads=24)
        described = there.cache(worker, there.memory()).describe()
        with pytest.raises(crossrail.MismatchError, match=rf"shard {mine[0]} of {mine[1]}.*shard {its[0]} of {its[1]}"):
            here.cache(worker, here.memory()).remote(described)


def test_dtypes_are_compared(worker: crossrail.Worker) -> None:
    one, other = (PagedCache(worker, [np.zeros((4, 16), dtype)]) for dtype in (np.float16, np.uint16))
    with pytest.raises(crossrail.MismatchError, match=r"float16 .* uint16"):
        one.remote(other.describe())


def test_what_is_wrong_is_refused(worker: crossrail.Worker) -> None:
    with peer(Made()) as there:
        ends = Ends(worker, Made(), there)
        remote, cache = ends.remote, ends.cache
        for blocks, remote_blocks, words in [
            ([24], [0], "block 24 of 24"),
            ([-1], [0], "block -1 of 24"),
            ([0], [24], "remote: block 24 of 24"),
            ([0, 1], [0], "2 blocks here, 1 of theirs"),
            ([], [], "non-empty"),
            ([0.5], [0], "integers"),
            ([[0]], [0], "one-dimensional"),
            ([0], None, "remote_blocks is missing"),
        ]:
            with pytest.raises(crossrail.UsageError, match=words):
                remote.pull(blocks, remote_blocks)
        for layers in ([3], [], [-1]):
            with pytest.raises(crossrail.UsageError, match=r"layers .* of 3"):
                remote.pull([0], [0], layers=layers)
        with pytest.raises(crossrail.UsageError, match="no operation"):
            remote.prepare("read", [0], [0])
        mine = Made().cache(worker, Made().memory())
        with pytest.raises(crossrail.MismatchError, match="does not belong to the cache that theirs described"):
            remote.borrow(bytes(mine.lend([0])))
        with pytest.raises(crossrail.UsageError, match="not a lease"):
            remote.borrow(there.described)
        with pytest.raises(crossrail.UsageError, match="block 24 of 24"):
            cache.lend([24])


def test_a_peers_bytes_are_not_trusted(worker: crossrail.Worker) -> None:
    made = Made(layers=1, pages=2)
    cache = made.cache(worker, made.memory())
    there = worker.connect(worker.address())
    described, lease = cache.describe(), bytes(cache.lend([1]))
    remote = cache.remote(described, there)
    rng = np.random.default_rng(0)
    accepted = 0
    for good, use in ((described, lambda data: cache.remote(data, there)), (lease, remote.borrow)):
        for cut in range(len(good)):
            with pytest.raises(crossrail.CrossrailError):
                use(good[:cut])
        for _ in range(1500):
            bad = bytearray(good)
            for at in rng.integers(5, len(bad), 2):
                bad[at] = rng.choice(list(b'0123456789abcdef[]{},":.-'))
            try:
                made_up = use(bytes(bad))
                assert isinstance(made_up, RemoteCache)
                accepted += 1
                made_up.pull([0]).wait() if made_up.blocks is not None else made_up.pull([0], [0]).wait()
            except crossrail.CrossrailError:
                pass
    assert accepted


@pytest.mark.parametrize(
    ("numbers", "replaced"),
    [
        (b'"shape":[2,', b'"shape":[-2,'),
        (b'"shape":[2,', b'"shape":[2.5,'),
        (b'"regions":1', b'"regions":2'),
        (b'"uint16",2,', b'"uint16",0,'),
        (b"[0,1]", b"[1,1]"),
        (b"[0,1]", b"[" * 5000),
    ],
)
def test_numbers_that_make_no_sense(worker: crossrail.Worker, numbers: bytes, replaced: bytes) -> None:
    made = Made(layers=1, pages=2)
    cache = made.cache(worker, made.memory())
    described = cache.describe()
    assert numbers in described
    with pytest.raises(crossrail.UsageError, match="not the description of a cache"):
        cache.remote(described.replace(numbers, replaced, 1))
