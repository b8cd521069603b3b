"""Ranks of crossrail.deep_ep, a process with a GPU each, that do what is asked of them by name, all together."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ANSWER_S = 55.0
WAIT_S = "15"
"""How long a rank waits for another before it says so; kernels are compiled meanwhile."""
MAY_LOSE = {"low_latency_without", "prepared_without"}
DROP_IN = HERE.parents[1] / "packages" / "crossrail-deep-ep"


class Rank:
    """One process. What it says on stderr is told when it fails."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        self.rank = rank
        self.said = tempfile.TemporaryFile()  # noqa: SIM115
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        network = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(rank), str(size), meeting],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            env={**kept, **network, "CROSSRAIL_TIMEOUT": WAIT_S, "PYTHONFAULTHANDLER": "1"},
        )
        self._came = b""

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, deadline: float) -> str:
        """Nothing, or what went wrong."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._came:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return f"no answer in time; it said:\n{self.words()}"
            data = os.read(descriptor, 1 << 16)
            if not data:
                return f"it ended with {self.process.wait(5)}; it said:\n{self.words()}"
            self._came += data
        line, _, self._came = self._came.partition(b"\n")
        return str(json.loads(line))

    def words(self) -> str:
        return os.pread(self.said.fileno(), 1 << 20, 0).decode(errors="replace")[-6000:]

    def end(self, patience: float) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.said.close()


class Ranks:
    """All of them. After a failure they are started anew."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = [Rank(rank, self.size, f"{self._folder.name}/meeting") for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """SIGKILL. The others go on."""
        process = next(one for one in self._ranks if one.rank == rank)
        self._ranks.remove(process)
        process.process.kill()
        process.end(10)

    def do(self, work: str, *arguments: Any, **options: Any) -> None:
        """Has all ranks do what `deep_ep_work` or this file calls `work`. Raises AssertionError with what each said."""
        for rank in self._ranks:
            rank.ask({"work": work, "arguments": arguments, "options": options})
        deadline = time.monotonic() + ANSWER_S
        wrong = {}
        for rank in self._ranks:
            if text := rank.answer(deadline):
                wrong[rank.rank] = text
                deadline = min(deadline, time.monotonic() + 8)  # the others say what they wait for
        if wrong:
            self.end(1)
            self._start()
            raise AssertionError("\n".join(f"-- rank {rank}: {text}" for rank, text in wrong.items()))

    def end(self, patience: float = 15) -> None:
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.close()
        for rank in self._ranks:
            rank.end(patience)
        self._folder.cleanup()


# In a rank's process.


def prepared(env: Any, seed: int) -> None:
    """A buffer that was told sizes when it was made: its first dispatch is captured, and all kinds of rows work."""
    import deep_ep_work as work

    prepare(env)
    made = env.keep["prepared"]
    here = work.Env(env.torch, made)
    low_latency_graph(here, 3, warm=False)
    for turn, payload in enumerate((*work.PAYLOADS, *work.PAYLOADS)):
        work.low_latency(here, seed + turn, payload, hook=bool(turn % 2))
    for turn, topk in enumerate((1, 6)):
        work.low_latency(work.Env(env.torch, made, topk=topk), seed + 10 + turn)
    assert len(made._pool._bases) == 1, "other sizes were made"


def prepared_without(env: Any, seed: int, dead: int) -> None:
    """A rank dies before the first dispatch of such a buffer: the others go on without it."""
    import deep_ep_work as work

    low_latency_without(work.Env(env.torch, env.keep["prepared"]), seed, dead)


def prepare(env: Any) -> None:
    """Makes such a buffer, and nothing else."""
    import deep_ep_work as work
    import torch.distributed as distributed

    from crossrail import deep_ep

    length = deep_ep.Buffer.get_low_latency_rdma_size_hint(work.MOST, env.hidden, env.size, env.experts)
    env.keep["prepared"] = deep_ep.Buffer(distributed.group.WORLD, 0, length, low_latency_mode=True)


def low_latency_graph(env: Any, replays: int, *, warm: bool = True) -> None:
    """A dispatch and a combine that were captured, replayed with other tokens, ids and weights. `warm`: they ran once
    before."""
    import deep_ep_work as work
    import numpy as np

    from crossrail import ref

    torch, tokens = env.torch, 24
    batches = [work.Batch.of(env, 600 + turn, [tokens] * env.size) for turn in range(replays)]
    x = env.put(batches[0].xs[env.rank], "bfloat16")
    idx, weights = env.put(batches[0].idx[env.rank]), env.put(batches[0].weights[env.rank])
    factors = 1 + torch.arange(env.experts // env.size, device=env.device).float() + env.rank * env.experts // env.size

    def layer() -> tuple[Any, ...]:
        (rows, scales), counts, handle, _, _ = env.buffer.low_latency_dispatch(x, idx, work.MOST, env.experts)
        wide = rows.float() * scales.repeat_interleave(128, dim=-1) * factors[:, None, None]
        out, _, _ = env.buffer.low_latency_combine(wide.bfloat16(), idx, weights, handle)
        return rows, counts, handle, out

    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, counts, _handle, out = layer()
    for turn, batch in enumerate(batches):
        x.copy_(env.put(batch.xs[env.rank], "bfloat16"))
        idx.copy_(env.put(batch.idx[env.rank]))
        weights.copy_(env.put(batch.weights[env.rank]))
        graph.replay()
        came = ref.dispatch(env.shape(work.MOST), batch.xs, batch.idx, None, "expert", scale="f32")
        mine: Any = came[env.rank]
        work.same(counts.cpu(), mine.counts, f"rank {env.rank}, replay {turn}: counts")
        there = work.valid(mine)
        found, wanted = np.where(there, env.bits(rows), 0), np.where(there, mine.x, 0)
        work.same(found, wanted, f"rank {env.rank}, replay {turn}: rows")
        local = env.experts // env.size
        ys = [work.answers(work.reference_values(one), rank * local) for rank, one in enumerate(came)]
        exact: Any = ref.combine_exact(ys, came[0].handle, batch.weights)[env.rank]
        work.near(env.bits(out), exact, f"rank {env.rank}, replay {turn}: sums")


def normal_graph(env: Any, replays: int) -> None:
    """A normal dispatch and its combine, captured with the worst case of rows."""
    import deep_ep_work as work

    from crossrail import ref

    torch, tokens = env.torch, 40
    batches = [work.Batch.of(env, 700 + turn, [tokens] * env.size) for turn in range(replays)]
    x = env.put(batches[0].xs[env.rank], "bfloat16")
    idx = env.put(batches[0].idx[env.rank])

    def layer() -> tuple[Any, ...]:
        per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
        got, got_idx, _, counts, handle, _ = env.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            num_worst_tokens=tokens * env.size,
        )
        assert counts == []
        out, _, _ = env.buffer.combine(got, handle)
        return got, got_idx, handle, out

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, got_idx, handle, out = layer()
    for turn, batch in enumerate(batches):
        x.copy_(env.put(batch.xs[env.rank], "bfloat16"))
        idx.copy_(env.put(batch.idx[env.rank]))
        graph.replay()
        came = ref.dispatch(env.shape(tokens), batch.xs, batch.idx, None, "rank")
        mine: Any = came[env.rank]
        name = f"rank {env.rank}, replay {turn}"
        work.same(handle[0].cpu()[:, env.rank], mine.offsets[1:], f"{name}: rank_prefix_matrix")
        work.same(env.bits(got)[: len(mine.x)], mine.x, f"{name}: rows")
        assert (got_idx.cpu()[len(mine.x) :] == -1).all(), f"{name}: topk_idx behind the rows is not -1"
        exact: Any = ref.combine_exact([one.x for one in came], came[0].handle)[env.rank]
        work.near(env.bits(out), exact, f"{name}: sums")


def normal_outputs(env: Any, chains: int) -> None:
    """What chains gave stays as it is while it is held, in whichever streams and modes they ran; so does what a graph
    gives that was captured in the stream of such chains."""
    import deep_ep_work as work

    torch, side = env.torch, env.torch.cuda.Stream()
    batches = [work.Batch.of(env, 900 + turn, [length] * env.size) for turn, length in enumerate((5, 40, 40, 7))]
    given = [
        (env.put(one.xs[env.rank], "bfloat16"), env.put(one.idx[env.rank]), env.put(one.weights[env.rank]))
        for one in batches
    ]
    torch.cuda.synchronize()

    def chain(x: Any, idx: Any, weights: Any, worst: int = 0, **how: Any) -> tuple[Any, ...]:
        per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts, **how)
        counted = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, _, back, _, handle, _ = env.buffer.dispatch(
            x, **counted, topk_idx=idx, topk_weights=weights, num_worst_tokens=worst, **how
        )
        out, sent, event = env.buffer.combine(rows, handle, topk_weights=back, **how)
        event.current_stream_wait()
        return per_rank, per_expert, in_rank, out, sent

    def check(number: int, results: tuple[Any, ...], copies: list[Any], name: str) -> None:
        for result, copy in zip(results, copies, strict=True):
            assert torch.equal(result, copy), f"{name}: a result has changed"
        work.check_layout(env, batches[number].idx[env.rank], *results[:3])
        times = results[2].sum(1, keepdim=True)
        wanted = (given[number][0].float() * times).bfloat16()
        assert torch.equal(results[3], wanted), f"{name}: sums"

    held = []
    for turn in range(chains):
        where = side if turn % 3 == 2 else torch.cuda.current_stream()
        with torch.cuda.stream(where), torch.inference_mode(turn % 5 == 4):
            results = chain(*given[turn % len(given)], async_finish=turn % 4 == 3)
            held.append((results, [part.clone() for part in results]))
    torch.cuda.synchronize()
    for turn, (results, copies) in enumerate(held):
        check(turn % len(given), results, copies, f"rank {env.rank}, chain {turn}")
    places = {part.data_ptr() for results, _ in held for part in results}
    assert len(places) == 5 * chains, "two results are in one memory"
    worst = 40 * env.size
    with torch.cuda.stream(side):
        for _ in range(2):
            chain(*given[1])
        chain(*given[1], worst)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = chain(*given[1], worst)
    for replay in range(3):
        graph.replay()
        torch.cuda.synchronize()
        copies = [part.clone() for part in captured]
        with torch.cuda.stream(side):
            for one in given:
                chain(*one)
        torch.cuda.synchronize()
        check(1, captured, copies, f"rank {env.rank}, replay {replay}")


def normal_of_nothing(env: Any) -> None:
    """Rows of both kinds along a dispatch that brought nobody a row."""
    torch = env.torch
    x = torch.ones(3, env.hidden, dtype=torch.bfloat16, device=env.device)
    fp8 = (x.to(torch.float8_e4m3fn), torch.ones(3, env.hidden // 128, device=env.device))
    idx = torch.full((3, env.topk), -1, dtype=torch.int64, device=env.device)
    _, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
    counted = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    came, *_, handle, _ = env.buffer.dispatch(x, **counted, topk_idx=idx)
    assert tuple(came.shape) == (0, env.hidden)
    again, *_ = env.buffer.dispatch(fp8, handle=handle)
    assert [tuple(part.shape) for part in again] == [(0, env.hidden), (0, env.hidden // 128)]


def inputs_let_go(env: Any, mode: str) -> None:
    """Inputs that nobody has any more are no one else's before the operation, which runs beside, has read them."""
    import deep_ep_work as work
    import numpy as np

    from crossrail import ref

    torch, tokens, layout = env.torch, 40, "rank" if mode == "normal" else "expert"
    batch = work.Batch.of(env, 850, [tokens] * env.size)
    came: Any = ref.dispatch(env.shape(work.MOST), batch.xs, batch.idx, None, layout)[env.rank]
    beside = env.buffer.get_comm_stream()
    for busy in (False, True):  # the first makes what is needed
        x, idx = env.put(batch.xs[env.rank], "bfloat16"), env.put(batch.idx[env.rank])
        per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
        torch.cuda.synchronize()
        if busy:
            with torch.cuda.stream(beside):
                torch.cuda._sleep(100_000_000)
        if mode == "normal":
            got, _, _, _, _, event = env.buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                num_worst_tokens=env.size * tokens,
                async_finish=True,
            )
        else:
            got, _, _, event, _ = env.buffer.low_latency_dispatch(
                x, idx, work.MOST, env.experts, use_fp8=False, async_finish=True
            )
        del x, idx, per_rank, per_expert, in_rank, event
        others = [torch.full((tokens, env.hidden), -1.0, dtype=torch.bfloat16, device=env.device) for _ in range(8)]
        others += [torch.full((tokens, env.topk), 1 << 20, dtype=torch.int64, device=env.device) for _ in range(8)]
        assert not busy or not beside.query(), f"{mode}: the operation was over before its inputs could be overwritten"
        torch.cuda.current_stream().wait_stream(beside)
        name = f"rank {env.rank}, {mode}, {'behind' if busy else 'without'} other work"
        if mode == "normal":
            work.same(env.bits(got)[: len(came.x)], came.x, name)
        else:
            there = work.valid(came)
            work.same(np.where(there, env.bits(got), 0), np.where(there, came.x, 0), name)
        assert all((one == one.flatten()[0]).all() for one in others)


def modes_in_turns(env: Any, rounds: int) -> None:
    """Both modes, one after the other, in one buffer, with work beside them."""
    import deep_ep_work as work

    torch = env.torch
    square = torch.randn(1024, 1024, device=env.device)
    for turn in range(rounds):
        work.normal(env, 800 + turn, "f32" if turn % 2 else "bf16", asynchronous=turn % 3 == 1)
        env.buffer.clean_low_latency_buffer(work.MOST, env.hidden, env.experts)
        work.low_latency(env, 800 + turn, "bf16" if turn % 2 else "fp8", hook=turn % 3 == 2)
        square = torch.nn.functional.normalize(square @ square)
    assert torch.isfinite(square).all()


def over_a_crossrail_group(env: Any, seed: int) -> None:
    """A second buffer, of a crossrail.Group, beside the first."""
    import deep_ep_work as work

    import crossrail
    from crossrail import deep_ep

    store = env.buffer._backend._joined.group.store_address
    with crossrail.Group(name="plain", rank=env.rank, size=env.size, store=store) as group:
        other = deep_ep.Buffer(group, low_latency_mode=True)
        try:
            second = work.Env(env.torch, other)
            for turn in range(3):
                work.low_latency(second, seed + turn)
                work.normal(env, seed + turn)
            group.barrier()
        finally:
            other.destroy()


def over_the_network(env: Any, seed: int) -> None:
    """Low-latency rows that may not go over NVLink, which the host carries; the same ones in normal mode may."""
    import deep_ep_work as work

    import crossrail
    from crossrail import deep_ep

    store = env.buffer._backend._joined.group.store_address
    with crossrail.Group(name="network", rank=env.rank, size=env.size, store=store) as group:
        other = deep_ep.Buffer(group, low_latency_mode=True, allow_nvlink_for_low_latency_mode=False)
        try:
            second = work.Env(env.torch, other)
            work.low_latency(second, seed)
            work.low_latency(second, seed + 1, "bf16", hook=True)
            links = [link for made in other._pool._made.values() for link in made.buffer.links()]
            kinds = {link.kind for link in links if link.rank != env.rank}
            assert kinds == {"network"}, f"rank {env.rank}: links of kinds {kinds}"
            work.normal(second, seed)
            group.barrier()
        finally:
            other.destroy()


def over_nccl(env: Any, seed: int) -> None:
    """A buffer of a group of NCCL's, and NCCL's own operations in turns with its."""
    import deep_ep_work as work
    import torch.distributed as distributed
    from sharing import as_own_host

    from crossrail import deep_ep

    torch = env.torch
    as_own_host(env.rank)
    group = distributed.new_group(backend="nccl")
    other = deep_ep.Buffer(group, low_latency_mode=True, explicitly_destroy=True)
    try:
        second = work.Env(torch, other)
        ones = torch.ones(1 << 20, device=env.device)
        for turn in range(4):
            distributed.all_reduce(ones, group=group)
            work.low_latency(second, seed + turn, hook=turn % 2 == 1)
            distributed.all_reduce(ones, group=group)
            work.normal(second, seed + turn, asynchronous=True)
        assert (ones == float(env.size) ** 8).all(), "what NCCL has summed is wrong"
        torch.cuda.synchronize()
        distributed.barrier()
    finally:
        other.destroy()
        distributed.destroy_process_group(group)


def normal_in_place(env: Any, rounds: int) -> None:
    """A result that nobody has any more makes room for the next at once, which is not copied then."""
    import deep_ep_work as work

    from crossrail.deep_ep.pool import SPARE_RESULTS

    batch = work.Batch.of(env, 470, [30] * env.size)
    for kind in ("bf16", "f32"):
        x, idx = work.as_kind(env, batch.xs[env.rank], kind), env.put(batch.idx[env.rank])
        per_rank, _, per_expert, in_rank, _ = env.buffer.get_dispatch_layout(idx, env.experts)
        for turn in range(rounds):
            got, got_idx, _, _, handle, _ = env.buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
            )
            again = env.buffer.dispatch(x, handle=handle)
            buffer = handle.routing.buffer
            assert buffer.spare_regions == SPARE_RESULTS - 1, f"{kind}, round {turn}: the second result was not copied"
            del again
            assert buffer.spare_regions == SPARE_RESULTS - 1, f"{kind}, round {turn}: the first result was copied"
            del got, got_idx
            spare = buffer.spare_regions
            assert spare == SPARE_RESULTS, (
                f"{kind}, round {turn}: {spare} of {SPARE_RESULTS} after all results are gone"
            )


def low_latency_without(env: Any, seed: int, dead: int) -> None:
    """The operation in which a dead rank is noticed ends; those after it are right without that rank."""
    import deep_ep_work as work
    import numpy as np

    from crossrail import ref

    torch, tokens = env.torch, 20
    alive = [rank for rank in range(env.size) if rank != dead]
    status = torch.zeros(env.size, dtype=torch.int32, device=env.device)
    for turn in range(3):
        batch = work.Batch.of(env, seed + turn, [tokens] * env.size)
        idx, weights = env.put(batch.idx[env.rank]), env.put(batch.weights[env.rank])
        x = env.put(batch.xs[env.rank], "bfloat16")
        got, counts, handle, _, _ = env.buffer.low_latency_dispatch(x, idx, work.MOST, env.experts, use_fp8=False)
        out, _, _ = env.buffer.low_latency_combine(got, idx, weights, handle)
        torch.cuda.synchronize()
        env.buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank == dead) for rank in range(env.size)], f"turn {turn}: {status.tolist()}"
        if turn == 0:
            continue
        xs = [None if rank == dead else one for rank, one in enumerate(batch.xs)]
        came = ref.dispatch(env.shape(work.MOST), xs, batch.idx, None, "expert", active=alive)
        mine: Any = came[env.rank]
        name = f"rank {env.rank} without {dead}, turn {turn}"
        work.same(counts.cpu(), mine.counts, f"{name}: counts")
        there = work.valid(mine)
        work.same(np.where(there, env.bits(got), 0), np.where(there, mine.x, 0), f"{name}: rows")
        ys = [None if one is None else one.x for one in came]
        exact: Any = ref.combine_exact(ys, mine.handle, batch.weights, active=alive)[env.rank]
        work.near(env.bits(out), exact, f"{name}: sums")


def decode_memory(env: Any, most: float) -> None:
    """What a buffer for 128 tokens of 7168 and 288 experts takes on this GPU, in bytes."""
    from crossrail.deep_ep.pool import Kind

    torch = env.torch
    hint = env.buffer.get_low_latency_rdma_size_hint(128, 7168, env.size, 288)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    kind = Kind("expert", 7168, 288, 8, "bf16")
    buffer = env.buffer._backend.make(kind, 128, None, "measured", list(range(env.size)))
    took = before - torch.cuda.mem_get_info()[0]
    buffer.destroy()
    assert took < most, f"rank {env.rank}: {took} bytes, wanted less than {most}"
    assert hint < most, f"rank {env.rank}: the hint is {hint} bytes, wanted less than {most}"


def second_version(env: Any, **options: Any) -> Any:
    """An ElasticBuffer with these options, made when it is first asked for."""
    import deep_ep_elastic as elastic
    import torch.distributed as distributed

    from crossrail import deep_ep

    name = f"elastic {sorted(options.items())}"
    if name not in env.keep:
        sizes = {"num_max_tokens_per_rank": elastic.MOST, "hidden": env.hidden, "num_topk": env.topk}
        timeout = {"num_gpu_timeout_secs": int(WAIT_S), "explicitly_destroy": True}
        env.keep[name] = deep_ep.ElasticBuffer(distributed.group.WORLD, **sizes, **timeout, **options)
    return elastic.Env(env.torch, env.keep[name])


def elastic(env: Any, work: str, *arguments: Any, options: dict[str, Any] | None = None, **named: Any) -> None:
    """What `deep_ep_elastic` calls `work`, with an ElasticBuffer."""
    import deep_ep_elastic

    getattr(deep_ep_elastic, work)(second_version(env, **(options or {})), *arguments, **named)


def engine(env: Any, program: str, kind: str, graph: bool = False) -> None:
    """The calls of a serving engine."""
    import deep_ep_engines as engines

    here = second_version(env) if program in engines.ELASTIC else env
    (engines.run_in_graph if graph else engines.run)(here, program, kind)


def published(env: Any, site: str, program: str, kind: str) -> None:
    """An engine's own classes, over the package crossrail-deep-ep, imported first: DeepEP may be there too."""
    import torch.distributed as distributed

    path = list(sys.path)
    sys.path[:] = [str(DROP_IN), *(entry for entry in path if not any(Path(entry or ".").glob("deep_ep*")))]
    importlib.import_module("deep_ep")
    sys.path[:] = path
    import published_experts

    published_experts.run(env, distributed.group.WORLD, site, program, kind)


def lost(env: Any) -> str:
    """The ranks that did not come in time, if there are any."""
    faults = [str(fault) for made in env.buffer._pool._made.values() for fault in made.buffer.faults()]
    return "".join(f"\nlost: {fault}" for fault in faults)


def state(env: Any) -> str:
    """What is in the memory of each expert buffer, for whoever must find out what went wrong."""
    said = ""
    for (kind, _), made in env.buffer._pool._made.items():
        with contextlib.suppress(Exception):  # of a GPU that cannot be asked any more
            said += f"\n{kind}, {made.max_tokens} tokens:\n{made.buffer._native.report()[:3000]}"
    return said


def main() -> None:
    """Does what stdin says until it ends."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "python"), str(HERE.parent / "engines")]
    sys.path[:0] = [str(HERE.parents[1] / "benches" / "gpu")]
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import deep_ep_work
    import torch
    import torch.distributed as distributed

    from crossrail import deep_ep

    torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    env = None
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(ANSWER_S - 10)
        try:
            if env is None:
                buffer = deep_ep.Buffer(distributed.group.WORLD, num_nvl_bytes=8 << 20, low_latency_mode=True)
                env = deep_ep_work.Env(torch, buffer)
            work = globals().get(request["work"]) or getattr(deep_ep_work, request["work"])
            work(env, *request["arguments"], **request["options"])
            torch.cuda.synchronize()
            said = "" if request["work"] in MAY_LOSE else lost(env)
        except Exception:  # told to the test, which fails with it
            said = f"{traceback.format_exc()}\n{'' if env is None else lost(env) + state(env)}"
        finally:
            faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(said) + "\n")
        answers.flush()
    if env is not None:
        for buffer in (*env.keep.values(), env.buffer):
            buffer.destroy()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
