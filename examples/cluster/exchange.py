"""One rank of a job under any launcher: sends tokens to the experts of all ranks and checks what comes back.

The launcher's variables say which rank this is and where the others meet; nothing else has to be configured.
"""

import ml_dtypes
import numpy as np

import crossrail

TOKENS, HIDDEN, EXPERTS_PER_RANK, TOPK = 32, 256, 2, 2


def exchange(group):
    """Experts that return their input, weighted by one half each: every token comes back as it was sent."""
    rng = np.random.default_rng(group.rank)
    experts = group.size * EXPERTS_PER_RANK
    x = rng.standard_normal((TOKENS, HIDDEN), np.float32).astype(ml_dtypes.bfloat16)
    chosen = np.argsort(rng.random((TOKENS, experts)), axis=1)[:, :TOPK].copy()
    weights = np.full((TOKENS, TOPK), 1 / TOPK, np.float32)
    with crossrail.ExpertBuffer(group, TOKENS, HIDDEN, experts, TOPK, dispatch_dtype="bf16") as buffer:
        received = buffer.dispatch(x, chosen, weights)
        returned = buffer.combine(received.x, received.handle).x
        group.barrier("exchanged")
    if not np.array_equal(returned, x):
        raise SystemExit(f"rank {group.rank}: the tokens that came back differ")
    return f"rank {group.rank} of {group.size}: {TOKENS} tokens came back unchanged ({group.bootstrap})"


if __name__ == "__main__":
    with crossrail.Group() as group:
        # The line with its end in one write: ranks that share an unbuffered pipe would mix them otherwise.
        print(exchange(group) + "\n", end="", flush=True)
        group.barrier("done")
