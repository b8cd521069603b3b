"""Token-to-rank layouts, computed as small tensors on the GPU."""

from __future__ import annotations

import struct

from crossrail._untrusted import of_rank, parsing
from crossrail.deep_ep.checks import Tensor, torch
from crossrail.deep_ep.ranks import Ranks

__all__ = [
    "aligned_counts",
    "dispatch_layout",
    "experts_of_ranks",
    "ids_of_ranks",
    "node_counts",
    "prefix_matrix",
    "send_positions",
]


def dispatch_layout(topk_idx: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of each rank i32 [ranks] and of each expert i32 [experts], and whether a token goes to a rank
    bool [T, ranks]. Ids outside of the experts count as none."""
    numbers = torch().arange(experts, device=topk_idx.device)
    # Few kernels: each takes longer to launch than to run.
    chosen = topk_idx[:, :, None] == numbers
    in_rank = chosen.any(1).view(len(topk_idx), ranks, experts // ranks).any(2)
    return in_rank.sum(0, dtype=torch().int32), chosen.sum((0, 1), dtype=torch().int32), in_rank


def node_counts(is_token_in_rank: Tensor, node_ranks: int) -> Tensor | None:
    """Tokens for each node of `node_ranks` ranks, i32 [nodes]; None where there is one node."""
    tokens, ranks = is_token_in_rank.shape
    if ranks <= node_ranks:
        return None
    nodes = -(-ranks // node_ranks)
    whole = is_token_in_rank.new_zeros((tokens, nodes * node_ranks))
    whole[:, :ranks] = is_token_in_rank
    return whole.view(tokens, nodes, node_ranks).any(2).sum(0, dtype=torch().int32)


def prefix_matrix(ends: Tensor, rank: int) -> Tensor:
    """i32 [ranks, ranks], -1 except in the column of `rank`, which is `ends`: the end of each source's rows there."""
    matrix = torch().full((len(ends), len(ends)), -1, dtype=torch().int32, device=ends.device)
    matrix[:, rank] = ends
    return matrix


def send_positions(is_token_in_rank: Tensor) -> Tensor:
    """i32 [T, ranks]: the place of a token among those that go to a rank, in order of tokens; -1 where it does not."""
    places = is_token_in_rank.to(torch().int32).cumsum(0, dtype=torch().int32) - 1
    return torch().where(is_token_in_rank, places, -1)


def experts_of_ranks(is_token_in_rank: Tensor, experts: int) -> Tensor:
    """Ids i64 [T, ranks] that send each token to its ranks: the first expert of each, or -1."""
    ranks = is_token_in_rank.shape[1]
    first = torch().arange(ranks, device=is_token_in_rank.device) * (experts // ranks)
    return torch().where(is_token_in_rank, first, -1)


def ids_of_ranks(is_token_in_rank: Tensor, experts: int, topk: int) -> Tensor:
    """Ids i64 [T, topk] that do the same, of tokens that go to at most `topk` ranks."""
    first = experts_of_ranks(is_token_in_rank, experts)
    tokens, ranks = first.shape
    if ranks >= topk:
        chosen: Tensor = first.topk(topk, 1)[0]
        return chosen
    ids: Tensor = torch().full((tokens, topk), -1, dtype=first.dtype, device=first.device)
    ids[:, :ranks] = first
    return ids


def aligned_counts(ranks: Ranks, per_expert: Tensor, alignment: int) -> list[int]:
    """Rows of each local expert over all ranks, rounded up, where only the sources know their tokens' experts."""
    mine = per_expert.tolist()
    form = struct.Struct(f"<{len(mine)}q")
    counts = []
    for rank, message in enumerate(ranks.exchange(form.pack(*mine))):
        with parsing(of_rank("dispatch", rank, message)):
            counts.append(form.unpack(message))
    local = len(mine) // ranks.size
    first = ranks.rank * local
    sums = [sum(one[expert] for one in counts) for expert in range(first, first + local)]
    return [-(-total // alignment) * alignment for total in sums]
