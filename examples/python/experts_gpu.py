"""A PyTorch mixture-of-experts layer across all GPUs of the machine, checked against the dense layer.

Run `experts_gpu.py`, which starts one rank per GPU itself, or start them with torchrun (`--nproc-per-node 4`).
docs/guides/experts-gpu.md explains it step by step.
"""

import os
import socket
import subprocess
import sys

import torch

import crossrail

TOKENS, HIDDEN, EXPERTS, TOPK = 64, 1024, 16, 4


class Experts(torch.nn.Module):
    """The experts of this rank, each a matrix and a ReLU."""

    def __init__(self, matrices):
        super().__init__()
        self.matrices = torch.nn.Parameter(matrices)  # [local experts, HIDDEN, HIDDEN]

    def forward(self, x):
        """Applies each expert to its rows [local experts, rows, HIDDEN]."""
        return torch.bmm(x, self.matrices).relu()


class Layer(torch.nn.Module):
    """A router, and experts spread over the ranks of the buffer."""

    def __init__(self, buffer, router, matrices):
        super().__init__()
        self.buffer = buffer
        self.router = torch.nn.Parameter(router)  # [HIDDEN, EXPERTS]
        self.experts = Experts(matrices)

    def route(self, x):
        """The top experts of each token [T, TOPK], and a softmax over their scores [T, TOPK]."""
        scores, topk_idx = (x.float() @ self.router).topk(TOPK)
        return topk_idx, scores.softmax(dim=-1)

    def forward(self, x):
        """Sends tokens [T, HIDDEN] to their experts and returns the weighted sums of the outputs."""
        topk_idx, topk_weights = self.route(x)
        received = self.buffer.dispatch(x, topk_idx, topk_weights)
        y = self.experts(received.x)
        return self.buffer.combine(y, received.handle).x


class Prefill(Layer):
    """The layer for many tokens: a rank receives each token once, and the arrays have no padding."""

    def forward(self, x):
        topk_idx, topk_weights = self.route(x)
        received = self.buffer.dispatch(x, topk_idx, topk_weights, layout="rank")
        y = torch.zeros(received.x.shape, device=x.device)
        for expert, matrix in enumerate(self.experts.matrices):
            row, k = (received.topk_idx == expert).nonzero(as_tuple=True)
            output = (received.x[row] @ matrix).relu()
            y.index_add_(0, row, output * received.topk_weights[row, k, None])
        return self.buffer.combine(y.to(x.dtype), received.handle).x


class Dispatch(torch.autograd.Function):
    """Sends tokens to their experts' ranks. Backward: combines the gradients of rows and weights."""

    @staticmethod
    def forward(ctx, buffer, x, topk_idx, topk_weights):
        received = buffer.dispatch(x.detach(), topk_idx, topk_weights.detach(), layout="rank")
        ctx.buffer, ctx.handle = buffer, received.handle
        return received.x.clone(), received.topk_idx.clone(), received.topk_weights.clone(), received.handle

    @staticmethod
    def backward(ctx, rows, topk_idx, topk_weights, handle):
        back = ctx.buffer.combine(rows.contiguous(), ctx.handle, topk_weights=topk_weights.contiguous())
        return None, back.x, None, back.topk_weights


class Combine(torch.autograd.Function):
    """Sends rows back and sums them per token. Backward: dispatches the gradients of the sums."""

    @staticmethod
    def forward(ctx, buffer, y, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y.detach(), handle).x

    @staticmethod
    def backward(ctx, sums):
        received = ctx.buffer.dispatch(sums.contiguous(), None, layout="rank", handle=ctx.handle)
        return None, received.x.clone(), None


class Training(Prefill):
    """The layer with gradients."""

    def forward(self, x):
        topk_idx, topk_weights = self.route(x)
        rows, local_idx, weights, handle = Dispatch.apply(self.buffer, x, topk_idx, topk_weights)
        y = torch.zeros(rows.shape, device=x.device)
        for expert, matrix in enumerate(self.experts.matrices):
            row, k = (local_idx == expert).nonzero(as_tuple=True)
            output = (rows[row] @ matrix).relu()
            y = y.index_add(0, row, output * weights[row, k, None])
        return Combine.apply(self.buffer, y.to(x.dtype), handle)


def in_two_halves(layer, x):
    """The layer on two halves of the tokens: one half is in flight while the experts process the other."""
    started = []
    for half in x.chunk(2):
        topk_idx, topk_weights = layer.route(half)
        started.append(layer.buffer.dispatch(half, topk_idx, topk_weights, send_only=True))
    out = []
    for pending in started:
        received = pending.finish()
        y = layer.experts(received.x)
        out.append(layer.buffer.combine(y, received.handle, send_only=True))
    return torch.cat([pending.finish().x for pending in out])


def captured(layer, x):
    """The layer as a CUDA graph: `graph.replay()` runs it on the current contents of `x` and writes `out`."""
    layer(x)  # warm up: PyTorch cannot do its one-time setup during a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    return graph, out


def with_deep_ep(buffer, layer, x):
    """The layer with DeepEP's interface; `buffer` is a crossrail.deep_ep.Buffer."""
    topk_idx, topk_weights = layer.route(x)
    rows, _, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    hook()  # launch computation that overlaps with the transfer before this
    y = layer.experts(rows)
    out, _, _ = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)
    return out


def dense(x, router, matrices):
    """The same on a single rank: every expert processes every token, and most outputs are multiplied by 0."""
    scores, topk_idx = (x.float() @ router).topk(TOPK)
    weights = torch.zeros(len(x), EXPERTS, device=x.device).scatter_(1, topk_idx, scores.softmax(dim=-1))
    return sum(weights[:, e, None] * (x @ matrices[e]).relu().float() for e in range(EXPERTS))


def check(what, out, wanted):
    """Compares with a tolerance: bf16 sums are rounded three times, and matrix products sum in a different order."""
    torch.testing.assert_close(out.float(), wanted, rtol=2**-6, atol=2**-6)
    print(f"{what}: matches the dense layer\n", end="", flush=True)  # one write per line: ranks print concurrently


@torch.enable_grad()
def check_gradients(what, layer, x, router, matrices):
    """Compares the gradients of tokens and router, relative to the largest one."""
    tokens, dense_tokens = x.clone().requires_grad_(), x.clone().requires_grad_()
    dense_router = router.clone().requires_grad_()
    out, wanted = layer(tokens), dense(dense_tokens, dense_router, matrices)
    gradients = torch.randn_like(out)
    out.backward(gradients)
    wanted.backward(gradients.float())
    for found, right in ((tokens.grad, dense_tokens.grad), (layer.router.grad, dense_router.grad)):
        largest = right.abs().max()
        torch.testing.assert_close((found / largest).float(), (right / largest).float(), rtol=0, atol=2**-5)
    print(f"{what}: matches the dense layer\n", end="", flush=True)  # one write per line: ranks print concurrently


@torch.no_grad()
def one_rank():
    """The program of each process."""
    with crossrail.Group() as group:
        torch.cuda.set_device(group.local_rank)
        torch.manual_seed(0)
        router = torch.randn(HIDDEN, EXPERTS, device="cuda")
        matrices = (torch.randn(EXPERTS, HIDDEN, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
        mine = matrices.chunk(group.size)[group.rank]
        torch.manual_seed(1 + group.rank)
        x, other = torch.randn(2, TOKENS, HIDDEN, device="cuda").bfloat16()
        name = f"rank {group.rank}"

        with crossrail.ExpertBuffer(group, TOKENS, HIDDEN, EXPERTS, TOPK, "bf16", device="cuda") as buffer:
            layer = Layer(buffer, router, mine)
            check(f"{name}, eagerly", layer(x), dense(x, router, matrices))
            check(f"{name}, in two halves", in_two_halves(layer, x), dense(x, router, matrices))
            check(f"{name}, rank layout", Prefill(buffer, router, mine)(x), dense(x, router, matrices))
            check_gradients(f"{name}, gradients", Training(buffer, router, mine), x, router, matrices)
            graph, out = captured(layer, x)
            x.copy_(other)
            graph.replay()
            check(f"{name}, graph", out, dense(other, router, matrices))
            buffer.sync()

        import crossrail.deep_ep as deep_ep

        buffer = deep_ep.Buffer(group, low_latency_mode=True)
        check(f"{name}, deep_ep", with_deep_ep(buffer, layer, x), dense(x, router, matrices))
        torch.cuda.synchronize()
        group.barrier()
        buffer.destroy()


def all_ranks():
    """Starts one rank per GPU; they find each other through RANK, WORLD_SIZE and CROSSRAIL_STORE."""
    ranks = max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count())
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "CROSSRAIL_STORE": store}
    processes = [subprocess.Popen([sys.executable, __file__], env={**shared, "RANK": str(r)}) for r in range(ranks)]
    sys.exit(max(abs(process.wait()) for process in processes))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(f"{sys.argv[0]} needs a GPU, and PyTorch {torch.__version__} can use none here")
    one_rank() if "RANK" in os.environ else all_ranks()
