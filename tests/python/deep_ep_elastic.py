"""What a rank does to check crossrail.deep_ep.ElasticBuffer: on GPUs, and on the twin that needs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deep_ep_work as work
import numpy as np

from crossrail import ref

MOST = 40


@dataclass
class Env(work.Env):
    """A rank: its deep_ep.ElasticBuffer, and torch."""

    @property
    def rank(self) -> int:
        return int(self.buffer.rank_idx)

    @property
    def size(self) -> int:
        return int(self.buffer.num_ranks)


@dataclass
class Sent:
    """What all ranks send, and what has to come to this one: rows (source, token) in order."""

    batch: work.Batch
    mine: Any
    order: list[tuple[int, int]]
    x: Any
    idx: Any
    weights: Any

    @staticmethod
    def of(env: Env, seed: int, kind: str) -> Sent:
        tokens = work.some_tokens(env, seed, MOST)
        batch = work.Batch.of(env, seed, tokens)
        mine: Any = ref.dispatch(env.shape(MOST), batch.xs, batch.idx, batch.weights, "rank")[env.rank]
        x = as_kind(env, batch.xs[env.rank], kind)
        idx, weights = env.put(batch.idx[env.rank]), env.put(batch.weights[env.rank])
        return Sent(batch, mine, work.source_rows(env, mine), x, idx, weights)


def as_kind(env: Env, rows: Any, kind: str) -> Any:
    """Rows as dispatch takes them; "opaque": fp8, with scales as integers that nobody looks at."""
    if kind != "opaque":
        return work.as_kind(env, rows, kind)
    q, scales = work.as_kind(env, rows, "f32")
    return q, scales.view(env.torch.int32)


def kind_of(env: Env, got: Any) -> str:
    """What rows were sent as."""
    if not isinstance(got, tuple):
        return "bf16"
    if got[1].dtype != env.torch.int32:
        return "f32"
    return "packed" if got[1].shape[1] * 512 == env.hidden else "opaque"


def outputs(env: Env, sent: Sent) -> Any:
    """What the experts of each received row's token say, fp32 values of bf16 [N, K, H]: 0 for experts elsewhere."""
    made = np.zeros((len(sent.order), env.topk, env.hidden), np.float32)
    for row, (source, token) in enumerate(sent.order):
        rng = np.random.default_rng((source, token))
        said = ref.bf16_values(ref.bf16_bits(rng.standard_normal((env.topk, env.hidden), np.float32)))
        made[row] = np.where(np.asarray(sent.mine.topk_idx)[row][:, None] >= 0, said, 0)
    return made


def wanted_sums(env: Env, sent: Sent, biases: list[Any]) -> tuple[Any, Any]:
    """What a combine of all experts' outputs gives to this rank's tokens, and how far off it may be."""
    idx = sent.batch.idx[env.rank]
    sums = np.zeros((len(idx), env.hidden))
    sizes = np.zeros_like(sums)
    for token, chosen in enumerate(idx):
        rng = np.random.default_rng((env.rank, token))
        said = ref.bf16_values(ref.bf16_bits(rng.standard_normal((env.topk, env.hidden), np.float32))).astype(float)
        sums[token], sizes[token] = said[chosen >= 0].sum(0), np.abs(said[chosen >= 0]).sum(0)
    for bias in biases:
        sums, sizes = sums + ref.bf16_values(bias), sizes + np.abs(ref.bf16_values(bias))
    # Rounded to bf16 on each rank and at the end.
    return sums, 2**-8 * sizes + 2**-8 * np.abs(sums)


def call(env: Env, name: str, previous: bool, asynchronous: bool, **arguments: Any) -> Any:
    """An operation, after the current stream's end or an event of it, which has ended for the current stream."""
    if previous:
        arguments |= {"previous_event": env.buffer.capture(), "allocate_on_comm_stream": True}
    came = getattr(env.buffer, name)(**arguments, async_with_compute_stream=asynchronous)
    if asynchronous:
        came[-1].current_stream_wait()
    return came


def exchange(
    env: Env,
    seed: int,
    kind: str = "bf16",
    alignment: int = 1,
    biases: int = 0,
    sync: bool = True,
    previous: bool = False,
    asynchronous: bool = False,
) -> None:
    """A dispatch, the same expanded, both repeated, and their combines."""
    sent = Sent.of(env, seed, kind)
    name = f"rank {env.rank}, seed {seed}, {kind}"
    stats = env.torch.zeros(env.experts // env.size, dtype=env.torch.int32).to(env.device)
    arguments = {"x": sent.x, "topk_idx": sent.idx, "topk_weights": sent.weights, "num_experts": env.experts}
    arguments |= {"num_max_tokens_per_rank": MOST, "expert_alignment": alignment, "do_cpu_sync": sync}
    how = (previous, asynchronous)
    got, idx, weights, handle, _ = call(
        env, "dispatch", *how, **arguments, cumulative_local_expert_recv_stats=stats, do_handle_copy=seed % 2 == 0
    )
    assert (handle.topk_idx.data_ptr() != sent.idx.data_ptr()) == (seed % 2 == 0), f"{name}: do_handle_copy"
    counts = np.bincount(np.asarray(sent.mine.topk_idx)[np.asarray(sent.mine.topk_idx) >= 0], minlength=len(stats))
    work.same(stats.cpu(), counts, f"{name}: stats")
    check_plain(env, sent, got, idx, weights, handle, name)
    check_counts(handle, counts, alignment, sync, name)
    wide, no_idx, wide_weights, wide_handle, _ = call(
        env, "dispatch", *how, **arguments, do_expand=True, use_tma_aligned_col_major_sf=True
    )
    assert no_idx is None
    check_expanded(env, sent, wide, wide_weights, wide_handle, name)
    check_counts(wide_handle, counts, alignment, sync, f"{name}, expanded")
    for turn in range(2):
        again, again_idx, none, same_handle, _ = call(env, "dispatch", *how, x=sent.x, handle=handle)
        assert same_handle is handle and none is None
        check_rows(env, sent, again, f"{name}, again {turn}")
        work.same(again_idx.cpu(), idx.cpu(), f"{name}, again {turn}: topk_idx")
    padded, _, padded_weights, _, _ = call(
        env,
        "dispatch",
        *how,
        x=sent.x,
        handle=wide_handle,
        topk_weights=sent.weights,
        do_expand=True,
        do_zero_padding=True,
    )
    check_expanded(env, sent, padded, padded_weights, wide_handle, f"{name}, padded")
    check_padding(env, padded, padded_weights, wide_handle, alignment, f"{name}, padded")
    sums(env, sent, (handle, weights), (wide_handle, wide_weights), biases, how, seed, name)


def check_rows(env: Env, sent: Sent, got: Any, name: str) -> None:
    """The rows that came, and their scales."""
    kind = kind_of(env, got)
    work.came_rows(env, got, [as_kind(env, one, kind) for one in sent.batch.xs], sent.mine, rows_of(got), name)


def rows_of(got: Any) -> int:
    return len(got[0] if isinstance(got, tuple) else got)


def check_plain(env: Env, sent: Sent, got: Any, idx: Any, weights: Any, handle: Any, name: str) -> None:
    """A result that is not expanded, and what its handle says of it."""
    rows = len(sent.order)
    check_rows(env, sent, got, f"{name}: x")
    assert rows_of(got) == handle.num_recv_tokens == len(idx), f"{name}: {handle}"
    work.same(idx.cpu()[:rows], sent.mine.topk_idx, f"{name}: topk_idx")
    assert (idx.cpu()[rows:] == -1).all(), f"{name}: topk_idx behind the rows is not -1"
    work.same(weights.cpu()[:rows], sent.mine.topk_weights, f"{name}: topk_weights")
    check_sources(env, sent, handle, name)
    there = np.asarray(sent.idx.cpu()) >= 0
    work.same(np.asarray(handle.dst_buffer_slot_idx.cpu()) >= 0, there, f"{name}: dst_buffer_slot_idx")


def check_sources(env: Env, sent: Sent, handle: Any, name: str) -> None:
    """Where each row is from."""
    rows, found = len(sent.order), np.asarray(handle.recv_src_metadata.cpu())
    work.same(found[:rows, 0], [source * MOST + token for source, token in sent.order], f"{name}: recv_src_metadata")
    ends = sent.mine.offsets[1:]
    work.same(handle.psum_num_recv_tokens_per_scaleup_rank.cpu(), ends, f"{name}: psum of ranks")
    firsts = sent.mine.offsets[[source for source, _ in sent.order]]
    work.same(found[:rows, 1], np.arange(rows) - firsts, f"{name}: places among a source's rows")


def check_counts(handle: Any, counts: Any, alignment: int, sync: bool, name: str) -> None:
    """What a handle says of the rows of each expert."""
    padded = -(-counts // alignment) * alignment
    assert handle.num_recv_tokens_per_expert_list == (padded.tolist() if sync else []), f"{name}: counts"
    ends = np.cumsum(padded) - padded + counts if handle.do_expand else np.cumsum(padded)
    work.same(handle.psum_num_recv_tokens_per_expert.cpu(), ends, f"{name}: psum of experts")
    work.same(handle.num_unaligned_recv_tokens_per_expert.cpu(), counts, f"{name}: counts")


def check_expanded(env: Env, sent: Sent, wide: Any, weights: Any, handle: Any, name: str) -> None:
    """Each row is at the place of each of its experts, which is among that expert's."""
    check_sources(env, sent, handle, name)
    rows, ids = len(sent.order), np.asarray(sent.mine.topk_idx)
    slots = np.asarray(handle.recv_src_metadata.cpu())[:rows, 2:]
    work.same(slots >= 0, ids >= 0, f"{name}: slots")
    places, experts = slots[ids >= 0], ids[ids >= 0]
    assert len(set(places.tolist())) == len(places), f"{name}: two rows at one place"
    ends = np.asarray(handle.psum_num_recv_tokens_per_expert.cpu())
    firsts = np.r_[0, -(-ends // handle.expert_alignment) * handle.expert_alignment][: len(ends)]
    assert ((places >= firsts[experts]) & (places < ends[experts])).all(), f"{name}: rows of other experts"
    kind = kind_of(env, wide)
    all_sent = [as_kind(env, one, kind) for one in sent.batch.xs]
    for number, part in enumerate(wide if isinstance(wide, tuple) else (wide,)):
        assert len(part) == handle.num_expanded_tokens, f"{name}: {len(part)} rows"
        found = env.bits(part) if number == 0 else part.cpu().numpy()
        there = [one[number] if isinstance(one, tuple) else one for one in all_sent]
        whole = [env.bits(one) if number == 0 else one.cpu().numpy() for one in there]
        for row, (source, token) in enumerate(sent.order):
            for place in slots[row][slots[row] >= 0]:
                work.same(found[place], whole[source][token], f"{name}: row {row} at {place}")
    came = np.asarray(sent.mine.topk_weights)
    work.same(np.asarray(weights.cpu())[places], came[ids >= 0], f"{name}: weights")


def check_padding(env: Env, wide: Any, weights: Any, handle: Any, alignment: int, name: str) -> None:
    """There are zeros between the rows of experts."""
    ends = np.asarray(handle.psum_num_recv_tokens_per_expert.cpu())
    parts = [part.cpu() for part in (wide if isinstance(wide, tuple) else (wide,))]
    values = [env.bits(parts[0]), *(np.asarray(part) for part in parts[1:]), np.asarray(weights.cpu())]
    for end in ends:
        for value in values:
            assert not value[end : -(-end // alignment) * alignment].any(), f"{name}: padding behind {end} is not zero"


def sums(
    env: Env, sent: Sent, plain: Any, wide: Any, biases: int, how: tuple[bool, bool], seed: int, name: str
) -> None:
    """Combines of both results, of outputs that are their experts'."""
    (handle, weights), (wide_handle, wide_weights) = plain, wide
    rows, said = len(sent.order), outputs(env, sent)
    rng = np.random.default_rng((seed, env.rank, 7))
    shape = (len(sent.batch.idx[env.rank]), env.hidden)
    added = [ref.bf16_bits(rng.standard_normal(shape, np.float32)) for _ in range(biases)]
    bias = [env.put(one, "bfloat16") for one in added]
    given = None if not bias else bias[0] if len(bias) == 1 else tuple(bias)
    narrow = np.full((handle.num_recv_tokens, env.hidden), 0x7FC0, np.uint16)
    narrow[:rows] = ref.bf16_bits(said.sum(1, dtype=np.float32))
    spread = np.full((wide_handle.num_expanded_tokens, env.hidden), 0x7FC0, np.uint16)
    slots = np.asarray(wide_handle.recv_src_metadata.cpu())[:rows, 2:]
    spread[slots[slots >= 0]] = ref.bf16_bits(said)[slots >= 0]
    exact = wanted_sums(env, sent, added)
    chosen = np.where(sent.batch.idx[env.rank] >= 0, sent.batch.weights[env.rank], 0)
    once = not env.buffer.allow_multiple_reduction
    for y, of, its_weights in (
        (narrow, handle, weights),
        (spread, wide_handle, None if once else wide_weights),
    ):
        out, back, _ = call(
            env, "combine", *how, x=env.put(y, "bfloat16"), handle=of, topk_weights=its_weights, bias=given
        )
        work.near(env.bits(out), exact, f"{name}, {'expanded' if of.do_expand else 'plain'}: sums")
        assert (back is None) == (its_weights is None)
        if back is not None:
            work.same(back.cpu(), chosen, f"{name}: weights that came back")


def barriers(env: Env) -> None:
    """In either stream, with and without the host."""
    for streams in (True, False):
        for host in (True, False):
            env.buffer.barrier(use_comm_stream=streams, with_cpu_sync=host)
