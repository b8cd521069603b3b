"""Low-latency calls of crossrail.deep_ep: which tensors they hand out, and which streams they use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import deep_ep_work as work
import pytest
from deep_ep_twin import TwinBackend, TwinDeepEp, TwinExperts, TwinRanks, TwinStreams, on_ranks
from exchange_table import ATTRIBUTE, Table
from fake_gpu import FakeEvent
from host_torch import torch, torch_is_there

from crossrail import UsageError, _native
from crossrail.deep_ep import EventOverlap

__all__ = ["torch_is_there"]
MAIN, OWN, OTHER = 77, 78, 79
EXPERTS, MOST, TOPK, HIDDEN = 8, 4, 2, 512


class NotedStreams(TwinStreams):
    """Several streams, and what is asked of them."""

    def __init__(self) -> None:
        self.now, self.last_handle = MAIN, MAIN
        self.notes: list[Any] = []

    def current_raw(self, ordinal: int) -> int:  # type: ignore[override]
        return self.now

    def beside(self) -> int:
        return OWN

    def follow(self, handle: int) -> None:
        self.notes.append(f"{handle} follows {self.last_handle}")
        self.last_handle = handle

    def record(self, tensors: list[Any]) -> None:
        self.notes.append(f"{len(tensors)} recorded")

    def overlap(self, event: Any, tensors: Any) -> EventOverlap:
        return EventOverlap(event, tensors)


class NotedBuffer(TwinExperts):
    def __init__(self, streams: NotedStreams, *arguments: Any) -> None:
        super().__init__(*arguments)
        native, self.put, self.wires = self._native, [], []
        native.order = lambda before, after: streams.notes.append(f"{after} waits for {before}")
        native.is_capturing = lambda stream: streams.capturing
        dispatch, combine = native.dispatch_expert, native.combine

        def put(stream: int, begun: Any) -> Any:
            self.put.append(stream)
            begun.finish = lambda finish_in, finish=begun.finish: (self.put.append(finish_in), finish(MAIN))
            return begun

        native.dispatch_expert = lambda args, stream, split: put(stream, dispatch(args, MAIN, split))

        def noted(args: Any, handle: Any, stream: int, split: bool) -> Any:
            self.wires.append(args.wire)
            return put(stream, combine(args, handle, MAIN, split))

        native.combine = noted


class NotedBackend(TwinBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams: Any = NotedStreams()

    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        self.made.append(NotedBuffer(self.streams, self.meeting, self.rank, kind, max_tokens, name))
        return self.made[-1]


class NotedDeepEp(TwinDeepEp):
    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        return TwinRanks(*group), NotedBackend(*group)


@pytest.fixture(params=["attributes", "table"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Table | None:
    """How calls look at tensors: by attributes, or, as of PyTorch from 2.10 on, by a table of C functions."""
    made = Table() if request.param == "table" else None
    monkeypatch.setattr(torch.Tensor, ATTRIBUTE, made and made.capsule, raising=False)
    return made


@pytest.fixture
def buffer(table: Table | None) -> Iterator[Any]:
    (made,) = on_ranks(1, lambda one: one, NotedDeepEp)
    yield made


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch, buffer: Any) -> None:
    streams = buffer._backend.streams
    monkeypatch.setattr(FakeEvent, "is_captured", property(lambda event: streams.capturing))


def sent(tokens: int = 3) -> tuple[Any, Any, Any]:
    idx = torch.tensor([[0, 1], [2, -1], [-1, -1]])[:tokens]
    return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), idx, torch.ones(tokens, TOPK)


def dispatch(buffer: Any, **options: Any) -> Any:
    x, idx, _ = sent()
    return buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, **({"use_fp8": False} | options))


def combine(buffer: Any, handle: Any, tokens: int = 3, **options: Any) -> Any:
    y = torch.ones(EXPERTS, MOST, HIDDEN, dtype=torch.bfloat16)
    _, idx, weights = sent(tokens)
    return buffer.low_latency_combine(y, idx, weights, handle, **options)


def address(result: Any) -> int:
    return int(result[0].data_ptr())


def test_results_are_handed_out_in_turn(buffer: Any) -> None:
    first = dispatch(buffer)
    second = dispatch(buffer)
    places = {address(first), address(second)}
    assert len(places) == 2
    del first
    third = dispatch(buffer)
    del second
    assert {address(third), address(dispatch(buffer))} == places


@pytest.mark.parametrize(
    "hold",
    [lambda rows, counts, handle: counts, lambda rows, counts, handle: handle, lambda rows, counts, handle: rows[1:]],
    ids=["a tensor", "the handle", "a view"],
)
def test_what_is_held_is_not_overwritten(buffer: Any, hold: Callable[..., Any]) -> None:
    held: Any = dispatch(buffer)
    place = address(held)
    held = hold(*held[:3])
    others = [dispatch(buffer) for _ in range(2)]
    assert place not in map(address, others)
    del held, others
    assert place in {address(dispatch(buffer)) for _ in range(4)}


def test_a_third_result_is_new_and_told_on_request(buffer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [dispatch(buffer), dispatch(buffer)]
    with pytest.warns(ResourceWarning, match="dispatch: 2 results are still held, where DeepEP allows two"):
        kept.append(dispatch(buffer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept += [dispatch(buffer) for _ in range(5)]
    assert len(set(map(address, kept))) == 8


def test_sums_are_handed_out_in_turn(buffer: Any) -> None:
    handle = dispatch(buffer)[2]
    first, second = combine(buffer, handle), combine(buffer, handle)
    places = {address(first), address(second)}
    assert len(places) == 2 and first[0].shape == (3, HIDDEN)
    del first, second
    x, idx, _ = sent(2)
    handle = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)[2]
    fewer = [combine(buffer, handle, 2) for _ in range(2)]
    assert {address(one) for one in fewer} == places and fewer[0][0].shape == (2, HIDDEN)
    out = torch.empty(2, HIDDEN, dtype=torch.bfloat16)
    assert combine(buffer, handle, 2, out=out)[0] is out


def test_what_a_combine_travels_as(buffer: Any) -> None:
    handle = dispatch(buffer)[2]
    combine(buffer, handle)
    combine(buffer, handle, use_logfmt=True)
    (made,) = buffer._backend.made
    assert made.wires == [0, 1]


def test_results_of_a_capture_are_never_reused(buffer: Any) -> None:
    places = {address(dispatch(buffer)) for _ in range(2)}
    buffer._backend.streams.capturing = True
    captured = [dispatch(buffer) for _ in range(2)]
    assert not places & set(map(address, captured))
    dispatch(buffer, async_finish=True)
    assert buffer._backend.streams.notes[-1] == "6 recorded"


def test_an_operation_beside_the_current_stream(buffer: Any) -> None:
    streams = buffer._backend.streams
    rows, counts, handle, event, hook = dispatch(buffer, async_finish=True)
    assert hook is None and streams.notes == [f"{OWN} waits for {MAIN}", f"{OWN} follows {MAIN}"]
    assert isinstance(event.event, _native.BesideEvent)
    assert any(one is rows for one in event.extra_tensors) and any(one is counts for one in event.extra_tensors)
    combine(buffer, handle, async_finish=True)
    assert streams.notes[2:] == [f"{OWN} waits for {MAIN}"]
    combine(buffer, handle)
    assert streams.notes[3:] == [f"{MAIN} follows {OWN}"]
    (made,) = buffer._backend.made
    assert made.put == [OWN, OWN, MAIN]


def test_inputs_are_kept_until_an_operation_beside_is_over(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over = False
    monkeypatch.setattr(FakeEvent, "is_done", lambda event: over)
    x, idx, _ = sent()
    given = []
    for _ in range(12):
        mine = x.clone()
        given.append(mine.untyped_storage()._cdata)
        buffer.low_latency_dispatch(mine, idx, MOST, EXPERTS, use_fp8=False, async_finish=True)
        del mine
    uses = torch._C._storage_Use_Count
    assert all(uses(one) for one in given), "all are still there"
    over = True
    buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False, async_finish=True)
    with pytest.raises(KeyError):
        uses(given[0])


def test_inputs_are_let_go_when_their_stream_comes_after_an_operation_beside(
    buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(FakeEvent, "is_done", lambda event: pytest.fail("the GPU was asked"))
    monkeypatch.setattr(FakeEvent, "wait", lambda event, stream: waits.append(stream))
    _, idx, _ = sent()
    uses = torch._C._storage_Use_Count
    for _ in range(20):
        mine = sent()[0]
        given = mine.untyped_storage()._cdata
        *_, event, _ = buffer.low_latency_dispatch(mine, idx, MOST, EXPERTS, use_fp8=False, async_finish=True)
        del mine
        event.extra_tensors = None
        event.event.wait(OTHER)
        assert uses(given), "another stream's wait says nothing of the one that they are used in"
        event.event.wait(MAIN)
        with pytest.raises(KeyError):
            uses(given)
    assert waits == [OTHER, MAIN] * 20


def test_one_question_stands_for_several_operations_beside(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(FakeEvent, "is_done", lambda event: not asked.append(event))
    for _ in range(40):
        dispatch(buffer, async_finish=True)
    assert 1 <= len(asked) <= 10


def test_results_of_operations_beside_are_handed_out_in_turn(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "is_done", lambda event: False)
    rows, sums = set(), set()
    for _ in range(12):
        result = dispatch(buffer, async_finish=True)
        back = combine(buffer, result[2], async_finish=True)
        rows.add(address(result))
        sums.add(address(back))
    # The last ones are held while the next are made.
    assert (len(rows), len(sums)) == (2, 2)


def test_a_hook_in_another_stream(buffer: Any) -> None:
    streams = buffer._backend.streams
    *_, hook = dispatch(buffer, return_recv_hook=1)
    streams.now = OTHER
    hook()
    (made,) = buffer._backend.made
    assert made.put == [MAIN, OTHER] and streams.notes == [f"{OTHER} follows {MAIN}"]


def test_ints_are_taken_for_bools(buffer: Any) -> None:
    _, _, handle, _, hook = dispatch(buffer, use_fp8=0, async_finish=0, return_recv_hook=1)
    hook()
    *_, hook = combine(buffer, handle, zero_copy=0, async_finish=0, return_recv_hook=1)
    hook()
    (made,) = buffer._backend.made
    assert made.put == [MAIN] * 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": torch.ones(3, HIDDEN)}, "x: expected bfloat16 [T, H], got float32 [3, 512]"),
        ({"x": torch.ones(HIDDEN, 3, dtype=torch.bfloat16).t()}, "x is not contiguous"),
        ({"x": None}, "x is a NoneType, not a torch.Tensor"),
        (
            {"x": torch.ones(5, HIDDEN, dtype=torch.bfloat16)},
            "topk_idx: expected int64 or int32 [5, K]",
        ),
        ({"x": torch.ones(3 * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(3, HIDDEN)}, "not a multiple of 16"),
        (
            {"topk_idx": torch.ones(2, TOPK, dtype=torch.int64)},
            "int64 or int32 [3, K], got int64 [2, 2]",
        ),
        ({"topk_idx": torch.ones(3, TOPK)}, "topk_idx: expected int64 or int32 [3, K], got float32"),
        ({"cumulative_local_expert_recv_stats": torch.ones(EXPERTS)}, "stats: expected int32 [8], got float32"),
        (
            {"dispatch_wait_recv_cost_stats": torch.ones(3, dtype=torch.int64)},
            "cost_stats: expected int64 [1], got int64 [3]",
        ),
        ({"num_max_dispatch_tokens_per_rank": 2}, "x has 3 tokens, num_max_dispatch_tokens_per_rank is 2"),
        ({"num_max_dispatch_tokens_per_rank": "4"}, "num_max_dispatch_tokens_per_rank is a str"),
    ],
)
def test_a_call_unlike_the_ones_before_says_what_is_wrong(buffer: Any, changed: dict[str, Any], said: str) -> None:
    x, idx, _ = sent()
    good = {"x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}
    good["use_fp8"] = False
    for _ in range(2):
        buffer.low_latency_dispatch(**good)
        with pytest.raises(UsageError) as raised:
            buffer.low_latency_dispatch(**(good | changed))
        assert said in str(raised.value)


def test_wrong_arguments_of_a_combine(buffer: Any) -> None:
    handle = dispatch(buffer)[2]
    y, (_, idx, weights) = torch.ones(EXPERTS, MOST, HIDDEN, dtype=torch.bfloat16), sent()
    for arguments, said in (
        ((y[1:], idx, weights), "x: expected bfloat16 [8, 4, 512], got bfloat16 [7, 4, 512]"),
        ((y, idx[1:], weights), "topk_idx: expected int64 or int32 [3, 2], got int64 [2, 2]"),
        ((y, idx, None), "topk_weights is a NoneType"),
        ((y, idx, weights[:, :1]), "topk_weights: expected float32 [3, 2], got float32 [3, 1]"),
    ):
        with pytest.raises(UsageError) as raised:
            buffer.low_latency_combine(*arguments, handle)
        assert said in str(raised.value)
    with pytest.raises(UsageError, match="combine_wait_recv_cost_stats: expected int64"):
        combine(buffer, handle, combine_wait_recv_cost_stats=torch.ones(3, dtype=torch.int64))


def test_other_numbers_of_tokens_and_experts(buffer: Any) -> None:
    """One set of calls for each kind of dispatch, whatever came before."""

    def rounds(one: TwinDeepEp) -> None:
        env = work.Env(torch, one)
        for seed in range(4):
            work.low_latency(env, 200 + seed, "fp8", hook=seed == 3, counted=False)
            work.low_latency(work.Env(torch, one, hidden=512), 210 + seed, "fp8")

    on_ranks(2, rounds)


def test_without_storage_counts_every_result_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    (buffer,) = on_ranks(1, lambda one: one, NotedDeepEp)
    kept = [dispatch(buffer), dispatch(buffer), dispatch(buffer)]
    assert len(set(map(address, kept))) == 3


@pytest.mark.parametrize("table", ["table"], indirect=True)
def test_tensors_are_looked_at_in_one_call(buffer: Any, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch(buffer)
    before = table.looks
    for name in ("get_device", "is_contiguous", "data_ptr"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, name=name: pytest.fail(f"{name} was asked"))
    monkeypatch.setattr(torch.Tensor, "shape", property(lambda tensor: pytest.fail("the shape was asked")))
    x, idx, _ = torch.ones(3, HIDDEN, dtype=torch.bfloat16), *sent()[1:]
    calls, _ = buffer._calls[MOST, EXPERTS, False, False, False]
    assert calls.combine(x, idx, None, object(), 3, None, None, 0, 0, 0) is None
    assert table.looks > before


@pytest.mark.parametrize("table", ["table"], indirect=True)
@pytest.mark.parametrize("unusual", ["of a subclass", "that the table does not describe"])
def test_an_unusual_tensor_is_asked_for_its_attributes(buffer: Any, table: Table, unusual: str) -> None:
    class Parameter(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    x, idx, weights = sent()
    if unusual == "of a subclass":
        x, idx, weights = (Parameter(one.array) for one in (x, idx, weights))
    else:
        table.refuses = [x, idx, weights]
    handle = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)[2]
    usual = combine(buffer, handle)[0]
    y = torch.ones(EXPERTS, MOST, HIDDEN, dtype=torch.bfloat16)
    handle = dispatch(buffer)[2]
    assert bool((buffer.low_latency_combine(y, idx, weights, handle)[0] == usual).all())


@pytest.mark.parametrize("table", ["attributes"], indirect=True)
@pytest.mark.parametrize("other", [Table(major=2).capsule, 7], ids=["another version", "no capsule"])
def test_another_table_is_not_used(buffer: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, ATTRIBUTE, other)
    assert len(combine(buffer, dispatch(buffer)[2])[0]) == 3
