"""Who gets which token: small tensors, made on the GPU."""

from __future__ import annotations

import struct

from crossrail.deep_ep.checks import Tensor, torch
from crossrail.deep_ep.ranks import Ranks

__all__ = ["aligned_counts", "dispatch_layout", "experts_of_ranks"]


def dispatch_layout(topk_idx: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of each rank i32 [ranks] and of each expert i32 [experts], and whether a token goes to a rank
    bool [T, ranks]. Ids outside of the experts count as none."""
    chosen = (topk_idx >= 0) & (topk_idx < experts)
    # One more column, for none.
    expert = torch().where(chosen, topk_idx, experts)
    to_experts = topk_idx.new_zeros(experts + 1, dtype=torch().int32)
    to_experts.scatter_add_(0, expert.reshape(-1), torch().ones_like(expert, dtype=torch().int32).reshape(-1))
    rank = torch().where(chosen, topk_idx // (experts // ranks), ranks)
    in_rank = topk_idx.new_zeros((len(topk_idx), ranks + 1), dtype=torch().bool)
    in_rank.scatter_(1, rank, True)
    in_rank = in_rank[:, :ranks].contiguous()
    return in_rank.sum(0, dtype=torch().int32), to_experts[:experts].clone(), in_rank


def experts_of_ranks(is_token_in_rank: Tensor, experts: int) -> Tensor:
    """Ids i64 [T, ranks] that send each token to its ranks: the first expert of each, or -1."""
    ranks = is_token_in_rank.shape[1]
    first = torch().arange(ranks, device=is_token_in_rank.device) * (experts // ranks)
    return torch().where(is_token_in_rank, first, -1)


def aligned_counts(ranks: Ranks, per_expert: Tensor, alignment: int) -> list[int]:
    """Rows of each local expert over all ranks, rounded up, where only the sources know their tokens' experts."""
    mine = per_expert.tolist()
    form = struct.Struct(f"<{len(mine)}q")
    said = [form.unpack(message) for message in ranks.exchange(form.pack(*mine))]
    local = len(mine) // ranks.size
    first = ranks.rank * local
    sums = [sum(one[expert] for one in said) for expert in range(first, first + local)]
    return [-(-total // alignment) * alignment for total in sums]
