"""crossrail.deep_ep without PyTorch: its surface, what it says of sizes, and how its ranks meet."""

from __future__ import annotations

import importlib.util
import inspect
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

import crossrail
from crossrail import MismatchError, UnsupportedError, UsageError, deep_ep
from crossrail.deep_ep import ranks
from crossrail.deep_ep.agreement import Call
from crossrail.deep_ep.events import EventHandle, EventOverlap
from crossrail.deep_ep.pool import Kind, Pool, capacity_for
from crossrail.deep_ep.ranks import Peers, joined

# Names and defaults of what programs call, as DeepEP's first version has them.
BUFFER = {
    "__init__": (
        "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
        "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=False, explicitly_destroy=False, "
        "enable_shrink=False, comm=None"
    ),
    "destroy": "",
    "is_sm90_compiled": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_comm_stream": "",
    "get_local_buffer_tensor": "dtype, size=None, offset=0, use_rdma_buffer=False",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "get_dispatch_layout": (
        "topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False"
    ),
    "dispatch": (
        "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
        "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, "
        "config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False"
    ),
    "combine": (
        "x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False, "
        "allocate_on_comm_stream=False"
    ),
    "low_latency_dispatch": (
        "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats=None, "
        "dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False, "
        "return_recv_hook=False"
    ),
    "low_latency_combine": (
        "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
        "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None"
    ),
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "get_next_low_latency_combine_buffer": "handle",
    "low_latency_update_mask_buffer": "rank, mask=False",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
}
STATIC = {
    "is_sm90_compiled",
    "set_num_sms",
    "capture",
    "get_dispatch_config",
    "get_combine_config",
    "get_low_latency_rdma_size_hint",
}


def taken(function: Callable[..., Any]) -> str:
    """What a function takes: names and defaults."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    empty = inspect.Parameter.empty
    return ", ".join(one.name + ("" if one.default is empty else f"={one.default!r}") for one in parameters)


@pytest.mark.parametrize("name", BUFFER)
def test_the_surface(name: str) -> None:
    assert taken(getattr(deep_ep.Buffer, name)) == BUFFER[name]
    assert isinstance(inspect.getattr_static(deep_ep.Buffer, name), staticmethod) == (name in STATIC)


def test_nothing_else_is_public() -> None:
    public = {name for name in dir(deep_ep.Buffer) if not name.startswith("_")}
    assert public == BUFFER.keys() - {"__init__"} | {"num_sms"}
    assert deep_ep.Buffer.num_sms == 20
    assert taken(deep_ep.EventOverlap) == "event=None, extra_tensors=None"
    from crossrail.deep_ep.utils import EventHandle

    assert EventHandle is deep_ep.EventHandle


def test_config() -> None:
    wanted = (
        "num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256, "
        "num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256"
    )
    assert taken(deep_ep.Config) == wanted
    config = deep_ep.Config(24, num_max_nvl_chunked_send_tokens=8)
    small, large = (config.get_nvl_buffer_size_hint(2 * hidden, 4) for hidden in (2048, 7168))
    assert 12 * 256 * 4 * 2 * 2048 < small < large < 12 * 256 * 4 * 2 * 7168 * 1.1
    assert config.get_nvl_buffer_size_hint(4096, 8) == 2 * small
    assert config.get_rdma_buffer_size_hint(4096, 8) == 0


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"num_sms": 0}, "num_sms is 0"),
        ({"num_sms": "20"}, "num_sms is a str"),
        (
            {"num_max_nvl_chunked_send_tokens": 300},
            "num_max_nvl_chunked_send_tokens 300 is more than num_max_nvl_chunked",
        ),
        ({"num_max_rdma_chunked_recv_tokens": 5}, "num_max_rdma_chunked_send_tokens 6 is more than"),
    ],
)
def test_a_wrong_config(numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deep_ep.Config(**numbers)


def test_num_sms() -> None:
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(16)
        assert deep_ep.Buffer.get_dispatch_config(4).num_sms == deep_ep.Buffer.get_combine_config(3).num_sms == 16
        for wrong in (7, 0, -2, 1.5):
            with pytest.raises(UsageError, match="num_sms"):
                deep_ep.Buffer.set_num_sms(wrong)  # type: ignore[arg-type]
    finally:
        deep_ep.Buffer.set_num_sms(before)
    with pytest.raises(UsageError, match="1025 ranks"):
        deep_ep.Buffer.get_dispatch_config(1025)


def test_the_hint_of_low_latency_mode() -> None:
    few, many = (deep_ep.Buffer.get_low_latency_rdma_size_hint(most, 7168, 4, 288) for most in (64, 128))
    # A slot in bf16 for each rank's tokens, twice, each way.
    assert 4 * 4 * 128 * 2 * 7168 < many < 1.2 * 4 * 4 * 128 * 2 * 7168
    assert few < many < 2.1 * few


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_without_pytorch() -> None:
    with pytest.raises(UnsupportedError, match=r"PyTorch cannot be imported.*crossrail\.ExpertBuffer works without"):
        deep_ep.Buffer(None)


@pytest.mark.parametrize("group", [None, 4, "ranks"])
def test_what_is_no_group(group: Any) -> None:
    with pytest.raises(UsageError, match=r"group is a \w+; a torch.distributed process group, a crossrail.Group"):
        joined(group, None)


def test_an_event_is_let_go_on_request() -> None:
    waited: list[str] = []

    class Known(EventHandle):
        def __init__(self, name: str) -> None:
            self.name = name

        def current_stream_wait(self) -> None:
            waited.append(self.name)

    event = EventOverlap(Known("one"), ("a tensor",))
    event.current_stream_wait()
    with event as same:
        assert same is event and event.extra_tensors == ("a tensor",)
    with event(release_handle=True):
        assert waited == ["one", "one"]
    assert (waited, event.event, event.extra_tensors) == (["one"] * 3, None, None)
    again = EventOverlap(Known("two"))
    again.current_stream_wait(release_handle=True)
    with again:
        pass
    assert waited[3:] == ["two"]


def test_an_event_that_is_none() -> None:
    with EventOverlap() as event:
        event.current_stream_wait()
    assert (event.event, event.extra_tensors) == (None, None)


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1000, 4096, 4097, 100_000])
def test_room_for_more_tokens(tokens: int) -> None:
    room = capacity_for(tokens)
    assert room % 128 == 0
    assert max(tokens, 1) <= room <= max(tokens * 1.125 + 128, 128)


class Sums:
    """A backend that only counts."""

    device = None
    streams: Any = type("", (), {"is_capturing": staticmethod(lambda: False)})

    def make(self, kind: Kind, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        return name

    def prepared_calls(self, buffer: Any, kind: Kind) -> Any:
        return None

    def bytes(self, kind: Kind, max_tokens: int) -> int:
        return 5000 + 7 * max_tokens


def test_a_larger_buffer_replaces_a_smaller_one() -> None:
    kind, other = Kind("rank", 128, 4, 2, "bf16"), Kind("rank", 128, 4, 2, "f32")
    pool = Pool(Sums(), 2, 0)
    rooms = [pool.rank_layout(one, tokens, 20) for one, tokens in ((kind, 5), (kind, 128), (other, 1), (kind, 200))]
    assert [(room.buffer, room.max_tokens) for room in rooms] == [("1", 128), ("1", 128), ("2", 128), ("3", 256)]
    assert pool.rank_layout(kind, 256, 20) is rooms[3]
    for budget, most in ((5000 + 7 * 128, 128), (5000 + 7 * 256 - 1, 128), (5000 + 7 * 512, 512)):
        assert Pool(Sums(), 2, budget).rank_layout(kind, 5, 20).max_tokens == most


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives on each rank, or the error it raised; ranks are threads."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Communicator:
    """A rank of an MPI communicator, as far as it is asked."""

    shared: Any

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.shared[0])

    def allgather(self, said: Any) -> list[Any]:
        heard, barrier = self.shared
        heard[self.rank] = said
        barrier.wait(20)
        everything = list(heard)
        barrier.wait(20)
        return everything


def test_ranks_meet_and_agree() -> None:
    Communicator.shared = [None] * 3, threading.Barrier(3)

    def rank(number: int) -> Any:
        met = joined(None, Communicator(number))
        with met.owned:
            peers = Peers(met.group, met.name)
            try:
                heard = []
                for turn in range(20):
                    peers.next_call()
                    heard.append(peers.exchange(bytes([number, turn])))
                mine = Call(512, 12, 2, wanted=10 * number)
                most = mine.agreed(mine.exchange(peers))
                wrong = [Call(512, 12, 2, int(number == 1)), Call(512 + 128 * (number == 2), 12, 2)]
                said = []
                for call in wrong:
                    with pytest.raises(MismatchError) as raised:
                        call.agreed(call.exchange(peers))
                    said.append(str(raised.value))
                if number == 1:
                    calls = Call().exchange(peers, "x is a banana")
                    assert [one.why for one in calls] == ["", "x is a banana", ""]
                    assert [one.call.fast_kind is None for one in calls] == [False, True, False]
                else:
                    with pytest.raises(UsageError, match="rank 1 could not: x is a banana"):
                        wrong[0].agreed(wrong[0].exchange(peers))
                return heard, most, said
            finally:
                peers.close()

    for number, found in enumerate(on_ranks(3, rank)):
        if isinstance(found, Exception):
            raise found
        heard, most, said = found
        assert heard == [[bytes([other, turn]) for other in range(3)] for turn in range(20)]
        assert most == 20
        assert "the kind of x" in said[0] and ("rank 1" in said[0]) == (number != 1)
        assert re.search(r"the hidden size of x is (512|640) here and (512|640) on rank [02]", said[1])


def test_a_rank_that_is_not_there_is_named() -> None:
    Communicator.shared = [None] * 2, threading.Barrier(2)
    done = threading.Event()

    def rank(number: int) -> Any:
        met = joined(None, Communicator(number))
        with met.owned:
            peers = Peers(met.group, met.name)
            try:
                if number == 1:
                    assert done.wait(20)
                    return None
                with pytest.raises(crossrail.TimeoutError, match="rank 1 is not at the same call"):
                    peers.exchange(b"here")
                return None
            finally:
                done.set()
                peers.close()

    before = crossrail.Context
    ranks._native.Context, kept = (lambda **options: before(timeout=0.5, **options)), ranks._native.Context  # type: ignore
    try:
        found = on_ranks(2, rank)
    finally:
        ranks._native.Context = kept  # type: ignore[misc]
    assert found == [None, None], found


def test_buffers_of_one_group_have_names_of_their_own() -> None:
    with crossrail.Group(name="one", rank=0, size=1, store=f"tcp://127.0.0.1:{port()}") as group:
        assert [joined(group, None).name for _ in range(2)] == ["deep_ep-0", "deep_ep-1"]
        assert joined(group, None).group is group


def port() -> int:
    """A port that nobody listens on."""
    from free_ports import free_port

    return free_port()


@pytest.mark.parametrize(
    ("addresses", "wanted"),
    [
        (["192.0.2.1", "2001:db8::1"], "192.0.2.1:0"),
        (["2001:db8::1", "192.0.2.1"], "192.0.2.1:0"),
        (["127.0.1.1", "fe80::1", "2001:db8::1"], "[2001:db8::1]:0"),
        (["127.0.1.1", "::1"], "[::]:0"),
        ([], "[::]:0"),
    ],
)
def test_where_the_store_of_several_machines_listens(
    addresses: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*unused: object, **named: object) -> list[tuple[Any, ...]]:
        families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in addresses]
        return [(family, 1, 6, "", (one, 0)) for family, one in zip(families, addresses, strict=True)]

    monkeypatch.setattr(ranks.socket, "getaddrinfo", look_up)
    assert ranks._own_place() == wanted


def test_ranks_of_several_machines_share_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    Communicator.shared = [None] * 2, threading.Barrier(2)
    hosts = iter("ab")
    monkeypatch.setattr(ranks, "_host", lambda: next(hosts))
    monkeypatch.setattr(ranks, "_own_place", lambda: "127.0.0.1:0")
    monkeypatch.delenv("CROSSRAIL_SECRET", raising=False)

    def rank(number: int) -> Any:
        met = joined(None, Communicator(number))
        with met.owned:
            assert met.group.context.settings()["CROSSRAIL_SECRET"] == "(hidden)"
            assert met.group.store_address.startswith("tcp://127.0.0.1:")
            met.group.barrier()
        return "well"

    assert on_ranks(2, rank) == ["well", "well"]
