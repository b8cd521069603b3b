"""A tiny mixture-of-experts layer on four ranks, checked against the dense computation.

Run `experts.py`, which starts the four ranks itself, or start them with torchrun (`--nproc-per-node 4`) or Slurm.
docs/guides/experts.md explains it step by step.
"""

import os
import socket
import subprocess
import sys

import ml_dtypes
import numpy as np

import crossrail

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 4, 64, 256, 16, 2
LOCAL = EXPERTS // RANKS


def parameters():
    """The router [HIDDEN, EXPERTS] and one matrix per expert [EXPERTS, HIDDEN, HIDDEN], the same on every rank."""
    rng = np.random.default_rng(0)
    router = rng.standard_normal((HIDDEN, EXPERTS), np.float32)
    return router, rng.standard_normal((EXPERTS, HIDDEN, HIDDEN), np.float32) / HIDDEN**0.5


def route(x, router):
    """The top experts of each token [T, TOPK], and a softmax over their scores [T, TOPK]."""
    scores = x.astype(np.float32) @ router
    topk_idx = np.argsort(-scores, axis=1)[:, :TOPK].copy()
    best = np.exp(np.take_along_axis(scores, topk_idx, axis=1) - scores.max(axis=1, keepdims=True))
    return topk_idx, best / best.sum(axis=1, keepdims=True)


def expert(x, matrix):
    """One expert: a matrix and a ReLU."""
    return np.maximum(x.astype(np.float32) @ matrix, 0)


def layer(buffer, x, router, matrices):
    """The layer across ranks: tokens go to the ranks of their experts, and weighted sums of the outputs come back."""
    topk_idx, topk_weights = route(x, router)
    received = buffer.dispatch(x, topk_idx, topk_weights)
    y = np.zeros(received.x.shape, ml_dtypes.bfloat16)
    for local, count in enumerate(received.counts):
        y[local, :count] = expert(received.x[local, :count], matrices[local])
    return buffer.combine(y, received.handle).x


def dense(x, router, matrices):
    """The same on a single rank: every expert processes every token, and most outputs are multiplied by 0."""
    topk_idx, topk_weights = route(x, router)
    weights = np.zeros((len(x), EXPERTS), np.float32)
    np.put_along_axis(weights, topk_idx, topk_weights, axis=1)
    return sum(weights[:, [e]] * expert(x, matrices[e]) for e in range(EXPERTS))


def one_rank():
    """The program of each of the four processes."""
    router, matrices = parameters()
    with crossrail.Group() as group:
        mine = matrices[group.rank * LOCAL : (group.rank + 1) * LOCAL]
        x = np.random.default_rng(1 + group.rank).standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
        with crossrail.ExpertBuffer(group, TOKENS, HIDDEN, EXPERTS, TOPK, "bf16") as buffer:
            out = layer(buffer, x, router, mine)
        np.testing.assert_allclose(out.astype(np.float32), dense(x, router, matrices), rtol=2**-6, atol=1e-4)
        print(f"rank {group.rank}: {TOKENS} tokens, {EXPERTS} experts, {group.size} ranks: matches the dense layer")


def all_ranks():
    """Starts one process per rank; they find each other through RANK, WORLD_SIZE and CROSSRAIL_STORE."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    shared = {**os.environ, "WORLD_SIZE": str(RANKS), "CROSSRAIL_STORE": store}
    ranks = [subprocess.Popen([sys.executable, __file__], env={**shared, "RANK": str(rank)}) for rank in range(RANKS)]
    sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    launched = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
    one_rank() if launched else all_ranks()
