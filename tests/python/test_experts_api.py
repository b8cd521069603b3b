"""ExpertBuffer as a Python object: what it takes and gives, what it refuses, how it waits and ends.

Ranks are threads of this process; what dispatch and combine compute is judged elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from free_ports import free_port

import crossrail

M, H, E, K = 8, 128, 4, 2
MAIN = threading.main_thread().ident
BF16 = np.dtype(ml_dtypes.bfloat16)


def rows(tokens: int = M, hidden: int = H) -> Any:
    return (np.arange(tokens * hidden, dtype=np.float32).reshape(tokens, hidden) % 97).astype(BF16)


def ids(tokens: int = M, experts: int = E) -> Any:
    """Of each token two neighbours."""
    first = np.arange(tokens) % experts
    return np.stack([first, (first + 1) % experts], axis=1)


def halves(tokens: int = M) -> Any:
    return np.full((tokens, K), 0.5, np.float32)


@pytest.fixture
def alone() -> Iterator[Callable[..., crossrail.ExpertBuffer]]:
    """Makes buffers of a group of one."""
    with contextlib.ExitStack() as stack:
        context = crossrail.Context(timeout=20, log="error")
        group = stack.enter_context(crossrail.Group(size=1, context=context))

        def make(dtype: Any = "bf16", **options: Any) -> crossrail.ExpertBuffer:
            name = f"buffer-{len(stack._exit_callbacks)}"  # type: ignore[attr-defined]
            return stack.enter_context(crossrail.ExpertBuffer(group, M, H, E, K, dtype, name=name, **options))

        yield make


class Pair:
    """Two ranks of this process, and a thread for the second."""

    def __init__(self, **options: Any) -> None:
        self.stack = contextlib.ExitStack()
        context = crossrail.Context(timeout=20, log="error")
        self.thread = self.stack.enter_context(ThreadPoolExecutor(1))
        here: dict[str, Any] = {"name": "pair", "size": 2, "store": f"tcp://127.0.0.1:{free_port()}"}
        groups = [crossrail.Group(rank=rank, context=context, **here) for rank in range(2)]
        # Rank 0 serves the store, so it leaves last.
        for group in groups:
            self.stack.callback(group.leave)
        self.groups = groups
        made = [self.stack.enter_context(crossrail.ExpertBuffer(group, M, H, E, K, **options)) for group in groups]
        self.a, self.b = made
        if options.get("connect", True) is False:
            return

    def connect(self) -> None:
        other = self.thread.submit(self.b.connect, [0, 1])
        self.a.connect([0, 1])
        other.result()

    def both(self, call: Callable[[crossrail.ExpertBuffer], Any]) -> tuple[Any, Any]:
        """What `call` gives on each rank."""
        other = self.thread.submit(call, self.b)
        return call(self.a), other.result()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(dispatch_dtype="bf16", connect=False)
    with made.stack:
        made.connect()
        yield made


def exchange(buffer: crossrail.ExpertBuffer) -> Any:
    came = buffer.dispatch(rows(), ids(), halves())
    return np.asarray(buffer.combine(came.x, came.handle))


def test_what_comes_in_the_expert_layout(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    came = buffer.dispatch(rows(), ids(), halves())
    assert came.layout == "expert" and came.x.shape == (E, M, H) and came.x.dtype == BF16
    assert came.scales is None and came.topk_idx is None and came.topk_weights is None and came.offsets is None
    assert came.counts.dtype == np.int32 and came.counts.tolist() == [M * K // E] * E
    assert came.source is not None and came.ranges is not None
    assert came.source.dtype == np.int32 and came.source.shape == (E, M)
    assert came.ranges.dtype == np.int64 and came.ranges.tolist() == [[M * K // E]] * E
    for expert, count in enumerate(came.counts):
        tokens = came.source[expert, :count]
        assert (came.source[expert, count:] == -1).all()
        assert (ids()[tokens] == expert).any(axis=1).all()
        assert (came.x[expert, :count] == rows()[tokens]).all()
    sums = buffer.combine(came.x, came.handle)
    assert sums.x.dtype == BF16 and (sums.x == rows()).all()
    assert np.asarray(sums) is sums.x and np.asarray(sums, np.float32).dtype == np.float32
    for result in (came, sums):
        assert result.timing.keys() == {"cast_us", "copy_us", "sum_us", "wait_us", "total_us"}
        assert result.bytes == {"logical": M * K * H * 2, "wire": 0, "network": 0}


def test_slices_of_what_a_router_sorted(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    order = np.concatenate([ids(), np.full((M, 1), 99)], axis=1)[:, :K]
    weights = np.asfortranarray(halves())
    assert not order.flags.c_contiguous and not weights.flags.c_contiguous
    came = buffer.dispatch(rows(), order, weights)
    assert (buffer.combine(came.x, came.handle).x == rows()).all()


def test_what_comes_in_the_rank_layout(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    came = buffer.dispatch(rows(5), ids(5), halves(5), "rank", expert_alignment=16)
    assert came.layout == "rank" and came.x.shape == (5, H) and (came.x == rows(5)).all()
    assert came.source is None and came.ranges is None
    assert came.topk_idx is not None and came.topk_weights is not None and came.offsets is not None
    assert came.topk_idx.dtype == np.int64 and (came.topk_idx == ids(5)).all()
    assert came.topk_weights.dtype == np.float32 and (came.topk_weights == 0.5).all()
    assert came.offsets.dtype == np.int64 and came.offsets.tolist() == [0, 5]
    assert came.counts.tolist() == [16] * E
    assert (buffer.combine(came.x, came.handle).x == rows(5)).all()
    assert buffer.dispatch(rows(5), ids(5), layout="rank").topk_weights is None
    empty = buffer.dispatch(rows(0), ids(0), halves(0), "rank")
    assert empty.x.shape == (0, H) and empty.topk_weights is not None and empty.topk_weights.shape == (0, K)
    assert buffer.combine(empty.empty_output(), empty.handle).x.shape == (0, H)


@pytest.mark.parametrize(("scale", "kind"), [("f32", np.float32), ("power2", np.float32), ("ue8m0", np.uint8)])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_fp8_rows_have_scales(
    alone: Callable[..., crossrail.ExpertBuffer], scale: str, kind: type, layout: Any
) -> None:
    buffer = alone("fp8", scale=scale)
    came = buffer.dispatch(rows(), ids(), halves(), layout)
    assert came.x.dtype == np.dtype(ml_dtypes.float8_e4m3fn)
    assert came.scales.dtype == kind and came.scales.shape == (*came.x.shape[:-1], H // 128)
    y = came.empty_output()
    assert y.shape == came.x.shape and y.dtype == BF16
    scales = np.exp2(came.scales.astype(np.float32) - 127) if scale == "ue8m0" else came.scales
    y[...] = (came.x.astype(np.float32) * scales.repeat(128, axis=-1)).astype(BF16)
    near = np.abs(np.asarray(buffer.combine(y, came.handle), np.float32) - rows().astype(np.float32))
    assert near.max() <= 96 / 16


class Tensor:
    """bf16 in host memory that knows DLPack only, as tensors of other libraries do."""

    def __init__(self, array: Any, code: int = 4) -> None:
        self.array, self.code = array.view(np.uint16), code
        self.shape = array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **unused: Any) -> Any:
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = self.code  # the dtype's code
        return capsule


class OnGpu(Tensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Broken(Tensor):
    def __dlpack__(self, **unused: Any) -> Any:
        raise RuntimeError("not today")


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.view(np.uint16), Tensor], ids=["bf16", "bits", "dlpack"])
def test_forms_of_bf16(alone: Callable[..., crossrail.ExpertBuffer], form: Callable[[Any], Any]) -> None:
    buffer = alone()
    came = buffer.dispatch(form(rows()), ids(), halves())
    assert came.x.dtype == BF16
    y, out = form(came.x), form(np.zeros((M, H), BF16))
    sums = buffer.combine(y, came.handle, bias=(form(rows()), form(rows())), out=out)
    assert sums.x is out
    shown = np.asarray(sums)
    assert (shown.view(BF16).astype(np.float32) == 3 * rows().astype(np.float32).round()).mean() > 0.3
    room = form(np.zeros((E, M, H), BF16))
    came = buffer.dispatch(form(rows()), ids(), out={"x": room})
    assert came.x is room


def wide(buffer: crossrail.ExpertBuffer, **changed: Any) -> Any:
    return buffer.dispatch(**({"x": rows(), "topk_idx": ids(), "topk_weights": halves()} | changed))


def answered(buffer: crossrail.ExpertBuffer, **changed: Any) -> Any:
    came = buffer.dispatch(rows(), ids(), halves())
    given = {"y": came.x, "handle": came.handle} | changed
    return buffer.combine(**given)


READ_ONLY = np.zeros((M, H), BF16)
READ_ONLY.flags.writeable = False
WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (wide, {"x": [[1.0]]}, "dispatch: x is a list, not an array"),
    (wide, {"x": rows().astype(np.float64)}, r"x: expected bf16 \[T, 128\], got float64 \[8, 128\]"),
    (wide, {"x": rows()[:, ::2]}, r"x: expected bf16 \[T, 128\], got bfloat16 \[8, 64\]"),
    (wide, {"x": rows(16)[::2]}, "x is not contiguous in C order; numpy.ascontiguousarray"),
    (wide, {"x": Tensor(rows(), code=2)}, r"x: expected bf16 \[T, 128\], got float16 \[8, 128\]"),
    (wide, {"x": OnGpu(rows())}, "the OnGpu is on cuda:0"),
    (wide, {"x": Broken(rows())}, "not today"),
    (wide, {"topk_idx": None}, "topk_idx is None"),
    (wide, {"topk_idx": ids().T.copy()}, r"topk_idx: expected int64 \[8, 2\], got int64 \[2, 8\]"),
    (wide, {"topk_weights": halves(7)}, r"topk_weights: expected float32 \[8, 2\], got float32 \[7, 2\]"),
    (wide, {"layout": "column"}, "layout 'column' is neither"),
    (wide, {"handle": "handle"}, "handle is a str"),
    (wide, {"expert_alignment": 0}, "expert_alignment 0"),
    (wide, {"expert_alignment": 1.5}, "expert_alignment is a float"),
    (wide, {"out": {"y": rows()}}, r"out has unknown keys \['y'\]; known: \['x'\]"),
    (wide, {"out": {"x": np.zeros((E, M, H), np.float32)}}, r"out\['x'\]: expected bf16 \[2, 16, 128\], got float32"),
    (wide, {"stats": np.zeros(E, np.float32)}, r"stats: expected int32 or int64 \[2\], got float32 \[4\]"),
    (wide, {"x": rows(9), "topk_idx": ids(9), "topk_weights": None}, "9 tokens are more than max_tokens_per_rank, 8"),
    (answered, {"handle": None}, "handle is a NoneType"),
    (answered, {"y": np.zeros((E, M, H), np.float32)}, r"y: expected bf16 \[2, 16, 128\], got float32 \[4, 8, 128\]"),
    (answered, {"bias": rows(7)}, r"bias: expected bf16 \[8, 128\], got bfloat16 \[7, 128\]"),
    (answered, {"bias": [rows()] * 3}, "3 biases where there may be two"),
    (answered, {"out": READ_ONLY}, "out is read-only"),
    (answered, {"topk_weights": halves()}, "topk_weights were given to dispatch already"),
]


@pytest.mark.parametrize(("call", "changed", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_a_wrong_call_is_named_here_and_there(
    pair: Pair, call: Callable[..., Any], changed: dict[str, Any], says: str
) -> None:
    other = pair.thread.submit(answered if call is answered else wide, pair.b)
    with pytest.raises((crossrail.CrossrailError, RuntimeError), match=says) as caught:
        call(pair.a, **changed)
    with pytest.raises(crossrail.CrossrailError, match="rank 0"):
        other.result(30)
    frames = [frame.name for frame in caught.traceback]
    assert frames[0] == inspect.currentframe().f_code.co_name  # type: ignore[union-attr]
    for sums in pair.both(exchange):
        assert (sums == rows()).all()


def test_a_wrong_call_that_only_begins(pair: Pair) -> None:
    other = pair.thread.submit(wide, pair.b)
    pending = pair.a.dispatch(rows()[:, :8], ids(), send_only=True)
    with pytest.raises(crossrail.UsageError, match=r"x: expected bf16 \[T, 128\], got bfloat16"):
        pending.finish()
    with pytest.raises(crossrail.UsageError, match="rank 0"):
        other.result(30)


def test_a_handle_is_good_for_its_own_buffer_only(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    one, two = alone(), alone()
    foreign = one.dispatch(rows(), ids(), halves())
    assert repr(foreign.handle) == "<crossrail.Handle, expert layout, 8 tokens sent, 8 rows received>"
    with pytest.raises(crossrail.UsageError, match="another buffer's"):
        two.dispatch(rows(), None, handle=foreign.handle)
    with pytest.raises(crossrail.UsageError, match="another buffer's"):
        two.combine(foreign.x, foreign.handle)
    with pytest.raises(crossrail.UsageError, match="of the expert layout"):
        one.dispatch(rows(), None, layout="rank", handle=foreign.handle)
    with pytest.raises(crossrail.UsageError, match=r"x: expected bf16 \[8, 128\], got bfloat16 \[7, 128\]"):
        one.dispatch(rows(7), None, handle=foreign.handle)
    again = one.dispatch(rows(), None, handle=foreign.handle)
    assert (one.combine(again.x, again.handle).x == rows()).all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device": "cuda:no"}, crossrail.UsageError, "is no device"),
        ({"device": -1}, crossrail.UsageError, "-1 is no device"),
        ({"num_sms": 8}, crossrail.UsageError, "num_sms is for buffers on a GPU"),
        ({"node": 1}, crossrail.UsageError, "node is for buffers on a GPU"),
        ({"send": "node"}, crossrail.UsageError, "send is for buffers on a GPU"),
        ({"send": "expert"}, crossrail.UsageError, "send is 'expert', not 'rank', 'node' or 'auto'"),
        ({"node_ranks": 8}, crossrail.UsageError, "node_ranks is for send='node'"),
        ({"topk": -1}, crossrail.UsageError, "topk -1 is not from 0"),
        ({"hidden": 128.0}, crossrail.UsageError, "hidden is a float, not an integer"),
        ({"num_experts": 1 << 40}, crossrail.UsageError, "num_experts 1099511627776 is not from 0"),
        ({"dispatch_dtype": "int8"}, crossrail.UsageError, 'no dispatch_dtype "int8"'),
        ({"scale": "log"}, crossrail.UsageError, 'no scale "log"'),
        ({"timeout": -1}, crossrail.UsageError, "timeout -1"),
        ({"timeout": "soon"}, crossrail.UsageError, "timeout 'soon'"),
        ({"name": "a\nb"}, crossrail.UsageError, "key"),
        ({"ranks": 0}, crossrail.UsageError, "ranks 0"),
        ({"layouts": "rows"}, crossrail.UsageError, 'no layout "rows"'),
        ({"group": "group"}, crossrail.UsageError, "group is a str"),
    ],
    ids=str,
)
def test_a_buffer_that_makes_no_sense(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with crossrail.Group(size=1, context=crossrail.Context(log="error")) as group:
        given = {"max_tokens_per_rank": M, "hidden": H, "num_experts": E, "topk": K, "group": group} | options
        with pytest.raises(error, match=says):
            crossrail.ExpertBuffer(**given)


def test_one_layout_only(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone(layouts="rank")
    with pytest.raises(crossrail.UsageError, match="not made for the expert layout"):
        buffer.dispatch(rows(), ids())
    assert buffer.dispatch(rows(), ids(), layout="rank").x.shape == (M, H)


def test_rows_travel_as_bf16_between_hosts(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    came = buffer.dispatch(rows(), ids(), halves())
    with pytest.raises(crossrail.UsageError, match="wire is for buffers on a GPU, and this one is on the host"):
        buffer.combine(came.x, came.handle, wire="fp8")
    again = buffer.dispatch(rows(), ids(), halves())
    assert (buffer.combine(again.x, again.handle, wire="bf16").x == rows()).all()


@pytest.mark.parametrize("call", ["connect", "disconnect", "mask", "unmask"])
def test_ranks_that_are_none(alone: Callable[..., crossrail.ExpertBuffer], call: str) -> None:
    buffer = alone()
    for ranks, says in [([7], "rank 7"), ([-1], "rank -1"), (["a"], "rank is a str"), (3, "ranks is an int")]:
        with pytest.raises(crossrail.UsageError, match=says):
            getattr(buffer, call)(ranks)
    assert buffer.connected() == [0] and buffer.masked() == [] and buffer.faults() == []
    (link,) = buffer.links()
    assert (link.rank, link.kind, link.masked, link.lanes) == (0, "self", False, [])


def test_room_of_the_callers(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone("fp8")
    x, scales, stats = np.zeros((M + 3, H), np.uint8), np.zeros((M + 3, 1), np.float32), np.zeros(E, np.int64)
    came = buffer.dispatch(
        rows(), ids(), layout="rank", out={"x": x, "scales": scales}, stats=stats, expert_alignment=8
    )
    assert came.x.base is x and came.x.shape == (M, H) and came.scales.base is scales
    assert (x[:M] == buffer.dispatch(rows(), ids(), layout="rank").x.view(np.uint8)).all() and not x[M:].any()
    assert stats.tolist() == [M * K // E] * E
    with pytest.raises(crossrail.UsageError, match=r"out\['x'\] has 3 rows, but 8 were received"):
        buffer.dispatch(rows(), ids(), layout="rank", out={"x": x[:3]})
    assert buffer.dispatch(rows(), ids(), layout="rank").x.shape == (M, H)


def test_results_outlive_the_buffer(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    came = buffer.dispatch(rows(), ids(), halves(), "rank")
    part = came.x[2:4]
    sums = buffer.combine(came.x, came.handle).x
    buffer.destroy()
    buffer.destroy()
    del buffer, came
    gc.collect()
    assert (part == rows()[2:4]).all() and (sums == rows()).all()
    part[...] = 0


def test_arrays_are_given_back(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    x, weights = rows(), halves()
    refs = [weakref.ref(x), weakref.ref(weights)]
    pending = buffer.dispatch(x, ids(), weights, send_only=True)
    del x, weights
    gc.collect()
    assert refs[0]() is not None, "an operation under way keeps what it reads"
    came = pending.finish()
    y, out = came.empty_output(), np.zeros((M, H), BF16)
    refs += [weakref.ref(y), weakref.ref(out)]
    buffer.combine(y, came.handle, out=out)
    del y, out
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * 4


def test_a_second_finish(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    pending = alone().dispatch(rows(), ids(), send_only=True)
    assert pending.finish().x.shape == (E, M, H)
    with pytest.raises(crossrail.UsageError, match="finished already"):
        pending.finish()


def test_what_is_begun_and_dropped_reaches_the_others(pair: Pair) -> None:
    other = pair.thread.submit(exchange, pair.b)
    pair.a.dispatch(rows(), ids(), halves(), send_only=True)
    came = pair.a.dispatch(rows(), ids(), halves(), send_only=True)
    del came
    with pytest.raises(crossrail.MismatchError):
        other.result(30)


def test_a_dropped_dispatch_is_received_by_the_others(pair: Pair) -> None:
    other = pair.thread.submit(wide, pair.b)
    pair.a.dispatch(rows(), ids(), halves(), send_only=True)
    assert other.result(30).counts.tolist() == [M * K * 2 // E] * (E // 2)
    for sums in pair.both(exchange):
        assert (sums == rows()).all()


@contextlib.contextmanager
def interrupted(within: float) -> Iterator[None]:
    """The block is ended by Ctrl-C, soon."""
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(MAIN or 0, signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - began < within
    timer.join()


def test_ctrl_c_ends_an_operation_and_the_buffer_can_go(pair: Pair) -> None:
    with interrupted(20):
        wide(pair.a)
    began = time.monotonic()
    pair.a.destroy()
    assert time.monotonic() - began < 20
    # For the other rank it is as if this one had died after its first dispatch.
    assert int(wide(pair.b).counts.sum()) == M * K
    with pytest.raises(crossrail.PeerDeadError, match="rank 0 is lost"):
        wide(pair.b)
    pair.b.mask([0])
    assert int(wide(pair.b).counts.sum()) == M * K // 2
    assert [fault.rank for fault in pair.b.faults()] == [0] and "rank 0 is lost" in str(pair.b.faults()[0])


def test_an_interrupted_operation_goes_on_for_the_others(pair: Pair) -> None:
    with interrupted(20):
        wide(pair.a)
    assert wide(pair.b).counts.sum() == M * K
    for sums in pair.both(exchange):
        assert (sums == rows()).all()


def test_ctrl_c_ends_connect_and_the_buffer_can_go() -> None:
    made = Pair(connect=False)
    with made.stack:
        with interrupted(20):
            made.a.connect([0, 1])
        began = time.monotonic()
        made.a.destroy()
        assert time.monotonic() - began < 20


def test_destroy_ends_the_waits_of_other_threads(pair: Pair) -> None:
    waiting = pair.thread.submit(wide, pair.a)
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    pair.a.destroy()
    with pytest.raises(crossrail.ClosedError, match="the buffer was destroyed"):
        waiting.result(30)
    for call in (wide, exchange, lambda buffer: buffer.connect([1]), lambda buffer: buffer.sync()):
        with pytest.raises(crossrail.ClosedError):
            call(pair.a)
    with pytest.raises(crossrail.ClosedError):
        pair.a.dispatch(rows()[:, :8], ids())


def test_threads_share_a_buffer(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()

    def several() -> None:
        for _ in range(50):
            came = buffer.dispatch(rows(), ids(), halves())
            assert came.counts.sum() == M * K
            assert buffer.connected() == [0]

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(several) for _ in range(4)]:
            done.result(30)


def test_a_forgotten_buffer_is_destroyed(pair: Pair) -> None:
    stayed = weakref.ref(pair.a._native)
    with crossrail.Group(size=1, context=crossrail.Context(log="error")) as group:
        buffer = crossrail.ExpertBuffer(group, M, H, E, K)
        gone = weakref.ref(buffer._native)
        assert repr(buffer) == "<crossrail.ExpertBuffer rank 0 of 1, 4 experts, top 2, 8 x 128 fp8>"
        del buffer
        gc.collect()
        assert gone() is None and stayed() is not None
        crossrail.ExpertBuffer(group, M, H, E, K).destroy()


ENDS = """
import numpy, crossrail
group = crossrail.Group(size=1, context=crossrail.Context(log="error"))
buffer = crossrail.ExpertBuffer(group, 8, 128, 4, 2, "bf16")
came = buffer.dispatch(numpy.zeros((8, 128), numpy.uint16), numpy.zeros((8, 2), numpy.int64) - 1)
begun = buffer.dispatch(numpy.zeros((8, 128), numpy.uint16), numpy.zeros((8, 2), numpy.int64) - 1, send_only=True)
print("end", flush=True)
"""


def test_an_interpreter_may_end_with_everything_open() -> None:
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
    assert time.monotonic() - began < 30
