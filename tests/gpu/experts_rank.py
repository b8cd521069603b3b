"""One rank of the tests of expert buffers on GPUs, as a process: `ep_rank` with tasks of its own, in PyTorch."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ep_cases import Case, Got, Inputs, Setup, inputs, outputs, real
from ep_rank import Me, main, task, varied
from experts_tensors import POISON, as_ints, bits, cut, full, padded, poisoned, put, rows, show, valid

import crossrail

sys.path.append(str(Path(__file__).parents[2] / "benches" / "gpu"))
from sharing import as_own_host

__all__ = ["main"]

CONNECT_S = 10.0


def device_of(me: Me) -> str:
    return f"cuda:{me.group.rank % torch.cuda.device_count()}"


def buffer_of(me: Me, setup: Setup, **options: Any) -> Any:
    torch.cuda.set_device(device_of(me))
    buffer = me.buffer_for(setup, device=device_of(me), connect=False, **options)
    buffer.connect(range(setup.ranks), timeout=CONNECT_S)  # those that are connected stay so
    return buffer


def send(buffer: Any, case: Case, fed: Inputs, **options: Any) -> Any:
    if case.weights == "dispatch":
        options["topk_weights"] = put(fed.topk_weights)
    # Numbers of 4 bytes are as good as of 8.
    idx = put(fed.topk_idx.astype(np.int32) if case.seed % 3 == 0 else fed.topk_idx)
    if case.layout == "rank":
        options["expert_alignment"] = case.alignment
    elif case.out:
        options["out"] = poisoned(buffer, odd=case.seed % 2 == 1)
    came = buffer.dispatch(rows(fed.x), idx, layout=case.layout, send_only=case.split, **options)
    return came.finish() if case.split else came


def combine(buffer: Any, case: Case, fed: Inputs, y: Any, handle: Any, **options: Any) -> Any:
    if case.weights == "combine":
        options["topk_weights"] = put(fed.topk_weights)
    if case.biases:
        options["bias"] = [rows(one) for one in fed.biases]
    if case.out:
        options["out"] = full((len(fed.x), case.setup.hidden), torch.bfloat16)
    sums = buffer.combine(y, handle, send_only=case.split, **options)
    return sums.finish() if case.split else sums


def answers(case: Case, rank: int, came: Any) -> Any:
    """What the experts answer: bits on the host, of which rows that did not come are NaN."""
    counts = came.counts.tolist() if case.layout == "expert" else None
    return outputs(case, rank, tuple(came.x.shape), counts)


def run(buffer: Any, case: Case, rank: int) -> Got:
    """A case from beginning to end."""
    fed = inputs(case, rank)
    came = send(buffer, case, fed)
    if case.cached:
        handle = came.handle
        del came
        again = rows(inputs(case, rank, again=True).x)
        came = buffer.dispatch(again, None, layout="rank", handle=handle, expert_alignment=case.alignment)
    got = show(came)
    y = rows(answers(case, rank, came))
    if case.layout == "rank":
        came.x.view(torch.uint8).fill_(POISON)  # nothing that is left there can pass for a later result
    sums = combine(buffer, case, fed, y, came.handle)
    got.sums = bits(sums.x)
    return got


@task
def gpu_compile(me: Me, setups: list[Setup]) -> None:
    """Kernels for these setups, which are kept on disk for all ranks."""
    torch.cuda.set_device(device_of(me))

    def compile_one(number: int) -> None:
        options = {"device": device_of(me), "connect": False, "name": f"compiled by {me.group.rank}: {number}"}
        crossrail.ExpertBuffer(me.group, **(setups[number].arguments() | options)).destroy()

    with ThreadPoolExecutor(max(len(setups), 1)) as threads:
        list(threads.map(compile_one, range(len(setups))))


@task
def gpu_cases(me: Me, cases: list[Case], options: dict[str, Any] | None = None) -> list[Got]:
    """Cases of one setup, one after the other."""
    buffer = buffer_of(me, cases[0].setup, **(options or {}))
    return [run(buffer, case, me.group.rank) for case in cases]


@task
def gpu_state(me: Me) -> dict[str, Any]:
    buffer = me.buffer
    links = [(link.rank, link.kind) for link in buffer.links()]
    faults = [str(fault) for fault in buffer.faults()]
    return {"links": links, "faults": faults, "masked": buffer.masked(), "device": buffer.device, "text": repr(buffer)}


@task
def gpu_endless(me: Me, cases: list[Case], times: int, options: dict[str, Any] | None = None) -> tuple[list[Got], int]:
    """Each case once, for the judge; then again and again in an order that all ranks know, none waiting for the host,
    and now and then one rank being late. How many values then were other ones than the first time."""
    rank = me.group.rank
    buffer = buffer_of(me, cases[0].setup, **(options or {}))
    got, fed, first = [], [], []
    for case in cases:
        given = inputs(case, rank)
        came = send(buffer, case, given, **({"max_rows": buffer._sizes.most} if case.layout == "rank" else {}))
        y = answers(case, rank, came) if case.layout == "expert" else padded(case, rank, came)
        sums = combine(buffer, case, given, rows(y), came.handle)
        got.append(cut(case, came, show(came)))
        got[-1].sums = bits(sums.x)
        fed.append(Ready(case, given, rows(y)))
        first.append({name: tensor.clone() for name, tensor in valid(case, came, sums).items()})
        del came, sums
    order, late = np.random.default_rng(times), np.random.default_rng([times, rank])
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        at = int(order.integers(len(cases)))
        if late.random() < 0.02:
            torch.cuda._sleep(int(late.integers(200_000)))
        came, sums = fed[at].exchange(buffer)
        for name, tensor in valid(cases[at], came, sums).items():
            bad += (as_ints(tensor) != as_ints(first[at][name])).sum()
        del came, sums
    torch.cuda.synchronize()
    return got, int(bad)


class Ready:
    """A case whose tensors are on the GPU already."""

    def __init__(self, case: Case, fed: Inputs, y: Any) -> None:
        self.case, self.y = case, y
        self.x, self.idx = rows(fed.x), put(fed.topk_idx)
        self.weights = put(fed.topk_weights)
        self.biases = [rows(one) for one in fed.biases]

    def exchange(self, buffer: Any) -> tuple[Any, Any]:
        """A dispatch and its combine, of which nothing waits here."""
        case, options = self.case, {}
        if case.layout == "rank":
            options = {"max_rows": buffer._sizes.most, "expert_alignment": case.alignment}
        weights = self.weights if case.weights == "dispatch" else None
        came = buffer.dispatch(self.x, self.idx, weights, case.layout, send_only=case.split, **options)
        came = came.finish() if case.split else came
        weights = self.weights if case.weights == "combine" else None
        sums = buffer.combine(self.y, came.handle, topk_weights=weights, bias=self.biases or None, send_only=case.split)
        return came, sums.finish() if case.split else sums

    def copy_from(self, other: Ready) -> None:
        """Other inputs in the same place."""
        for mine, theirs in (
            (self.x, other.x),
            (self.idx, other.idx),
            (self.weights, other.weights),
            (self.y, other.y),
        ):
            as_ints(mine).copy_(as_ints(theirs))


@task
def gpu_graph(me: Me, cases: list[Case], replays: int) -> list[Got]:
    """The cases eagerly; then one exchange captured, and replayed with the inputs of each in turn."""
    rank = me.group.rank
    buffer = buffer_of(me, cases[0].setup)
    ready = []
    for case in cases:
        fed = inputs(case, rank)
        came = send(buffer, case, fed, **({"max_rows": buffer._sizes.most} if case.layout == "rank" else {}))
        y = answers(case, rank, came) if case.layout == "expert" else padded(case, rank, came)
        combine(buffer, case, fed, rows(y), came.handle)
        ready.append(Ready(case, fed, rows(y)))
        del came
    static = Ready(cases[0], inputs(cases[0], rank), ready[0].y.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        came, sums = static.exchange(buffer)
    assert came.event.is_captured
    got = []
    for turn in range(replays):
        case = cases[turn % len(cases)]
        static.copy_from(ready[turn % len(cases)])
        graph.replay()
        if turn < len(cases) or turn >= replays - len(cases):
            torch.cuda.synchronize()
            got.append(cut(case, came, show(came)))
            got[-1].sums = bits(sums.x)
    # What is not in a graph goes on beside it.
    eager = run(buffer, replace(cases[0], split=False), rank)
    assert np.array_equal(eager.sums, got[0].sums), "an exchange after the graph"
    buffer.sync()
    assert not buffer.faults(), buffer.faults()
    del came, sums, graph
    me.drop()  # its regions are the graph's
    return got


@task
def gpu_streams(me: Me, case: Case) -> list[Got]:
    """In a stream of its own, behind work that takes a while, and received in a third one."""
    rank = me.group.rank
    buffer = buffer_of(me, case.setup)
    fed, side, last = inputs(case, rank), torch.cuda.Stream(), torch.cuda.Stream()
    x, idx, weights = rows(np.zeros_like(fed.x)), put(fed.topk_idx), put(fed.topk_weights)
    right = rows(fed.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.copy_(right)
    begun = buffer.dispatch(x, idx, weights, case.layout, stream=side, send_only=True)
    came = begun.finish(stream=last.cuda_stream)
    came.event.wait()  # the current stream
    got = show(came)
    y = rows(answers(case, rank, came))
    side.wait_stream(torch.cuda.current_stream())
    sums = buffer.combine(y, came.handle, stream=side)
    sums.event.synchronize(20)
    assert sums.event.is_done()
    got.sums = bits(sums.x)
    return [got]


@task
def gpu_ahead(me: Me, case: Case) -> list[Got]:
    """Rank 0 sends, and computes, before the others have begun; then they do."""
    rank, everybody = me.group.rank, list(range(case.setup.ranks))
    buffer = buffer_of(me, case.setup)
    fed, square = inputs(case, rank), torch.ones(512, 512, device="cuda")

    def first(begin: Any) -> Any:
        """What rank 0 begins is sent, and its stream goes on, while nobody else is there."""
        begun = begin() if rank == 0 else None
        if rank == 0:
            product = square @ square
            done = torch.cuda.Event()
            done.record()
            deadline = time.monotonic() + CONNECT_S / 2
            while not done.query():
                assert time.monotonic() < deadline, "the stream waits for ranks that have not begun"
                time.sleep(0.001)
            assert float(product[0, 0]) == 512
        me.group.barrier("ahead", everybody, timeout=CONNECT_S)
        return begin() if begun is None else begun

    x, idx, weights = rows(fed.x), put(fed.topk_idx), put(fed.topk_weights)
    came = first(lambda: buffer.dispatch(x, idx, weights, case.layout, send_only=True)).finish()
    got = show(came)
    y = rows(answers(case, rank, came))
    me.group.barrier("answers", everybody, timeout=CONNECT_S)
    got.sums = bits(first(lambda: buffer.combine(y, came.handle, send_only=True)).finish().x)
    return [got]


@task
def gpu_two_buffers(me: Me, first: list[Case], second: list[Case]) -> list[list[Got]]:
    """Two buffers, each with some of the multiprocessors, in two streams at once."""
    torch.cuda.set_device(device_of(me))
    rank, streams = me.group.rank, [torch.cuda.Stream(), torch.cuda.Stream()]
    several, buffers = [first, second], []
    try:
        for name, cases in zip(("one", "two"), several, strict=True):
            options = cases[0].setup.arguments() | {"device": device_of(me), "num_sms": 16, "name": name}
            buffers.append(crossrail.ExpertBuffer(me.group, **options))
        got: list[list[Got]] = [[], []]
        for pair in zip(*several, strict=True):
            for at in range(2):
                with torch.cuda.stream(streams[at]):
                    fed = inputs(pair[at], rank)
                    came = send(buffers[at], pair[at], fed)
                    got[at].append(show(came))
                    sums = combine(buffers[at], pair[at], fed, rows(answers(pair[at], rank, came)), came.handle)
                    got[at][-1].sums = bits(sums.x)
        handle, y = came.handle, torch.zeros(tuple(came.x.shape), dtype=torch.bfloat16, device="cuda")
        del came
        try:
            buffers[0].combine(y, handle)
        except crossrail.UsageError as error:
            assert "another buffer" in str(error), error
        else:
            raise AssertionError("a handle of another buffer was taken")
        for buffer in buffers:
            buffer.sync()
            assert not buffer.faults(), buffer.faults()
        return got
    finally:
        for buffer in buffers:
            buffer.destroy()


@task
def gpu_beside_nccl(me: Me, case: Case, port: int, times: int) -> tuple[Got, int]:
    """Exchanges while NCCL sums numbers in another stream. How many sums were wrong."""
    import torch.distributed as dist

    rank, size = me.group.rank, me.group.size
    buffer = buffer_of(me, case.setup, num_sms=16)
    where = torch.device(device_of(me))
    as_own_host(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=where)
    try:
        numbers = torch.full((1 << 20,), float(rank), device="cuda")
        total, bad = float(sum(range(size))), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(times):
            summed = numbers.clone()
            work = dist.all_reduce(summed, async_op=True)
            got = run(buffer, case, rank)
            work.wait()
            bad += (summed != total).sum()
        return got, int(bad)
    finally:
        dist.destroy_process_group()


@task
def gpu_regions(me: Me, case: Case) -> dict[str, Any]:
    """Results are kept until there is no region left; when one is let go, there is one."""
    rank = me.group.rank
    buffer = buffer_of(me, case.setup)
    fed = inputs(case, rank)
    kept = [send(buffer, case, fed) for _ in range(2)]
    first = show(kept[0])
    try:
        send(buffer, case, fed)
    except crossrail.ExhaustedError as error:
        refused = str(error)
    else:
        refused = ""
    # A view of a result is enough to keep its region.
    view = kept.pop().x[:1]
    still = ""
    try:
        send(buffer, case, fed)
    except crossrail.ExhaustedError as error:
        still = str(error)
    del view
    again = send(buffer, case, fed)
    same = all(np.array_equal(a, b) for a, b in ((show(again).x, first.x), (show(kept[0]).x, first.x)))
    return {"refused": refused, "still": still, "same": same}


@task
def gpu_few_rows(me: Me, case: Case) -> int:
    """Room for two rows where more come: they are lost, and nothing else is. How many would have come."""
    buffer, fed = buffer_of(me, case.setup), inputs(case, me.group.rank)
    came = send(buffer, case, fed, max_rows=2)
    assert came.x.shape[0] == 2
    combine(buffer, case, fed, came.empty_output().fill_(1), came.handle)
    buffer.sync()
    assert not buffer.faults(), buffer.faults()
    return int(came.offsets[-1])


@task
def gpu_gradients(me: Me, case: Case) -> dict[str, Any]:
    """Weights that go back with their rows: as a router's gradients do."""
    rank = me.group.rank
    buffer = buffer_of(me, case.setup)
    fed = inputs(case, rank)
    came = send(buffer, case, fed)
    y = rows(outputs(case, rank, tuple(came.x.shape), None))
    sums = buffer.combine(y, came.handle, topk_weights=came.topk_weights * 2)
    return {"back": bits(sums.topk_weights), "sent": np.where(fed.topk_idx >= 0, fed.topk_weights, 0)}


@task
def gpu_backward(me: Me, case: Case, matrices: Any) -> dict[str, Any]:
    """A layer's sums, and the gradients of its tokens and weights by PyTorch, whose backward pass goes the other way:
    the gradients of the sums are dispatched along the handle, those of the rows combined."""
    rank, local = me.group.rank, case.setup.local_experts
    buffer = buffer_of(me, case.setup)
    fed = inputs(case, rank)
    idx, routed = put(fed.topk_idx), []

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weights: Any) -> Any:
            came = buffer.dispatch(x.detach(), idx, weights.detach(), "rank")
            ctx.handle = came.handle
            routed[:] = came.handle, came.topk_idx.clone()
            return came.x.clone(), came.topk_weights.clone()

        @staticmethod
        def backward(ctx: Any, rows: Any, weights: Any) -> Any:
            sums = buffer.combine(rows.contiguous(), ctx.handle, topk_weights=weights.contiguous())
            return sums.x, sums.topk_weights

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Any) -> Any:
            ctx.handle = routed[0]
            return buffer.combine(y.detach(), ctx.handle).x

        @staticmethod
        def backward(ctx: Any, sums: Any) -> Any:
            return buffer.dispatch(sums.contiguous(), None, layout="rank", handle=ctx.handle).x.clone()

    x = put(real(case, rank)).bfloat16().requires_grad_()
    weights = put(fed.topk_weights).requires_grad_()
    came, came_weights = Dispatch.apply(x, weights)
    y = torch.zeros(came.shape, device="cuda")
    for expert, matrix in enumerate(put(matrices[rank * local :][:local]).bfloat16()):
        row, k = (routed[1] == expert).nonzero(as_tuple=True)
        y = y.index_add(0, row, (came[row] @ matrix).float() * came_weights[row, k, None])
    sums = Combine.apply(y.bfloat16())
    sums.backward(put(real(case, rank, 1)).bfloat16())
    found = {"sums": sums, "x": x.grad, "weights": weights.grad}
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}


@task
def gpu_statistics(me: Me, case: Case, times: int) -> dict[str, Any]:
    """Rows by expert and waits by rank, added up. The last rank is late each time."""
    rank, late = me.group.rank, case.setup.ranks - 1
    buffer = buffer_of(me, case.setup)
    fed = inputs(case, rank)
    stats = torch.zeros(case.setup.local_experts, dtype=torch.int32, device="cuda")
    waits = torch.zeros(case.setup.ranks, dtype=torch.int64, device="cuda")
    for _ in range(times):
        me.group.barrier("statistics", list(range(case.setup.ranks)), timeout=CONNECT_S)
        if rank == late:
            torch.cuda._sleep(100_000_000)
        came = send(buffer, case, fed, stats=stats, waits=waits)
        combine(buffer, case, fed, rows(answers(case, rank, came)), came.handle, waits=waits)
    return {"counts": bits(came.counts), "stats": bits(stats), "waits": bits(waits)}


@task
def gpu_plain(me: Me, case: Case) -> Got:
    """The same without PyTorch's tensors: arrays in memory of the library's own."""
    rank, sizes = me.group.rank, case.setup
    buffer = buffer_of(me, sizes)
    context, device, fed = me.group.context, device_of(me), inputs(case, me.group.rank)

    def lent(array: Any, dtype: str) -> Any:
        memory = context.alloc(max(array.nbytes, 16), device)
        memory.fill_from(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return crossrail.DeviceArray(memory, dtype, list(array.shape))

    x, idx, weights = lent(fed.x, "bfloat16"), lent(fed.topk_idx, "int64"), lent(fed.topk_weights, "float32")
    came = buffer.dispatch(x, idx, weights, case.layout)
    assert isinstance(came.x, crossrail.DeviceArray)
    came.event.synchronize()
    seen = crossrail.Dispatched.__new__(type(came))
    names = ("x", "scales", "counts", "source", "ranges", "topk_idx", "topk_weights", "offsets")
    seen.__dict__ = {name: theirs(getattr(came, name)) for name in names} | {"layout": case.layout, "count_list": None}
    got = show(seen)
    y = lent(answers(case, rank, seen), "bfloat16")
    sums = buffer.combine(y, came.handle)
    sums.event.synchronize()
    got.sums = bits(torch.from_dlpack(sums.x))
    return got


def theirs(array: Any) -> Any:
    if array is None:
        return None
    tensor = torch.from_dlpack(array)
    return tensor.view(torch.float8_e4m3fn) if array.dtype == "float8_e4m3fn" else tensor


@task
def gpu_wrong(me: Me, case: Case) -> dict[str, str]:
    """What each wrong call says; none of them begins anything."""
    rank = me.group.rank
    buffer = buffer_of(me, case.setup)
    fed, sizes = inputs(case, rank), case.setup
    x, idx, weights = rows(fed.x), put(fed.topk_idx), put(fed.topk_weights)
    more = torch.zeros(sizes.max_tokens + 1, sizes.hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(sizes.local_experts, 3, sizes.hidden, dtype=torch.bfloat16, device="cuda")
    came = buffer.dispatch(x, idx, weights, "expert")
    listed = buffer.dispatch(x, idx, weights, "rank")
    y = torch.zeros(tuple(came.x.shape), dtype=torch.bfloat16, device="cuda")
    calls: dict[str, Any] = {
        "host": lambda: buffer.dispatch(x.cpu(), idx),
        "numpy": lambda: buffer.dispatch(fed.x, idx),
        "dtype": lambda: buffer.dispatch(x.float(), idx),
        "width": lambda: buffer.dispatch(x[:, :-8], idx),
        "tokens": lambda: buffer.dispatch(more, torch.zeros(len(more), sizes.topk, dtype=torch.int64, device="cuda")),
        "idx": lambda: buffer.dispatch(x, idx[:, :1]),
        "weights": lambda: buffer.dispatch(x, idx, weights.double()),
        "apart": lambda: buffer.dispatch(x.t().contiguous().t(), idx),
        "layout": lambda: buffer.dispatch(x, idx, layout="rows"),
        "out": lambda: buffer.dispatch(x, idx, out={"x": out}),
        "unknown": lambda: buffer.dispatch(x, idx, out={"z": out}),
        "max_rows": lambda: buffer.dispatch(x, idx, layout="rank", max_rows=1 << 20),
        "handle": lambda: buffer.dispatch(x, None, layout="rank", handle=came.handle),
        "fewer": lambda: buffer.dispatch(x[:-1], None, layout="rank", handle=listed.handle),
        "stats": lambda: buffer.dispatch(x, None, layout="rank", handle=listed.handle, stats=came.counts),
        "stream": lambda: buffer.dispatch(x, idx, stream="fast"),
        "y": lambda: buffer.combine(x, came.handle),
        "twice": lambda: buffer.combine(y, came.handle, topk_weights=weights),
        "biases": lambda: buffer.combine(y, came.handle, bias=[x, x, x]),
        "array": lambda: np.asarray(buffer.combine(y, came.handle)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except crossrail.CrossrailError as error:
            said[name] = f"{type(error).__name__}: {error}"

    return said


@task
def gpu_die(me: Me, case: Case, stage: str) -> None:
    """Dies in the middle of an exchange."""
    buffer, rank = me.buffer, me.group.rank
    if stage == "dispatch":
        fed = inputs(case, rank)
        buffer.dispatch(rows(fed.x), put(fed.topk_idx), put(fed.topk_weights), case.layout, send_only=True)
        torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


@task
def gpu_disconnect(me: Me, ranks: list[int]) -> list[int]:
    """Those that are connected then."""
    torch.cuda.synchronize()
    me.buffer.disconnect(ranks)
    connected: list[int] = me.buffer.connected()
    return connected


@task
def gpu_survive(me: Me, cases: list[Case]) -> list[Got]:
    """Exchanges, whoever dies meanwhile."""
    return [run(me.buffer, case, me.group.rank) for case in cases]


@task
def gpu_variations(me: Me, case: Case, count: int) -> list[Got]:
    buffer = buffer_of(me, case.setup)
    return [run(buffer, varied(case, turn), me.group.rank) for turn in range(count)]
