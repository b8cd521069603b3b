"""Operations behind kernels that let the next one begin long before they write: programmatic dependent launch must not
let a dispatch read what is yet to be written, nor let it write what is still being read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import GPUS

from crossrail import Group
from crossrail.deep_ep import Buffer

torch = pytest.importorskip("torch")

TOKENS, MOST, HIDDEN, EXPERTS, TOPK = 48, 64, 2048, 16, 4
LATE_NS = 20_000
TURNS = 20
PROGRAMMATIC = 1
"""Of an edge in a graph: its end may begin before its beginning has ended."""
LATE_COPY = r"""
extern "C" __global__ void late_copy(short *to, const short *from, long long count, long long ns) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begun < ns);
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
}
"""


@pytest.fixture(scope="module")
def late_copy() -> Any:
    """`(to, rows)`: copies when the next kernel has had time to begin."""
    if not GPUS:
        pytest.skip("no GPU")
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this PyTorch compiles no kernels")
    kernel = torch.cuda._compile_kernel(LATE_COPY, "late_copy")

    def copy(to: Any, rows: Any) -> None:
        given = [to.view(torch.int16), rows.view(torch.int16), to.numel(), LATE_NS]
        kernel(grid=(4, 1, 1), block=(256, 1, 1), args=given)

    return copy


@pytest.fixture(scope="module")
def buffer() -> Iterator[Buffer]:
    hint = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, 1, EXPERTS)
    made = Buffer(Group(size=1), 0, hint, low_latency_mode=True)
    yield made
    made.destroy()


class Layer:
    """Dispatch, experts that multiply, and combine, in one calling pattern."""

    def __init__(self, buffer: Buffer, how: dict[str, Any]) -> None:
        torch.manual_seed(3)
        self.buffer, self.how = buffer, how
        self.idx = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK, dim=1).indices
        self.weights = torch.rand(TOKENS, TOPK, device="cuda")
        self.scale = torch.arange(EXPERTS, device="cuda") % 5 + 1.0

    def run(self, x: Any) -> Any:
        rows, _, handle, event, hook = self.buffer.low_latency_dispatch(
            x, self.idx, MOST, EXPERTS, use_fp8=False, **self.how
        )
        hook() if hook else event.current_stream_wait()
        y = (rows * self.scale[:, None, None]).bfloat16()
        sums, event, hook = self.buffer.low_latency_combine(y, self.idx, self.weights, handle, **self.how)
        hook() if hook else event.current_stream_wait()
        return sums

    def expected(self, x: Any) -> Any:
        rows = (x.float()[:, None] * self.scale[self.idx][:, :, None]).bfloat16().float()
        return (rows * self.weights[:, :, None]).sum(1)

    def check(self, sums: Any, x: Any) -> None:
        expected = self.expected(x)
        torch.testing.assert_close(sums.float(), expected, rtol=0, atol=0.01 * float(expected.abs().max()))


PATTERNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hook": {"return_recv_hook": True},
    "async_finish": {"async_finish": True},
}


@pytest.fixture(params=PATTERNS)
def layer(request: pytest.FixtureRequest, buffer: Buffer) -> Layer:
    return Layer(buffer, PATTERNS[request.param])


def rows() -> Any:
    return torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()


def edges(graph: Any) -> list[int]:
    """The types of a captured graph's edges."""
    driver, captured, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetEdges_v2(captured, None, None, None, ctypes.byref(count)) == 0
    ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
    said = (ctypes.c_uint8 * (8 * count.value))()
    assert driver.cuGraphGetEdges_v2(captured, *ends, said, ctypes.byref(count)) == 0
    return [said[8 * edge + 2] for edge in range(count.value)]


@pytest.mark.parametrize("in_default_stream", [True, False])
def test_eagerly(layer: Layer, late_copy: Any, in_default_stream: bool) -> None:
    stream = torch.cuda.current_stream() if in_default_stream else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        for _ in range(TURNS):
            late_copy(x, there := rows())
            layer.check(layer.run(x), there)
    torch.cuda.synchronize()


def test_in_a_graph(layer: Layer, late_copy: Any) -> None:
    x, there, read = (torch.zeros(2, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    layer.run(x[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for turn in range(2):
            late_copy(x[turn], there[turn])
            late_copy(read[turn], layer.run(x[turn]))
    if torch.cuda.get_device_capability() >= (9, 0) and layer.how == {}:
        assert PROGRAMMATIC in edges(graph)
    graph.instantiate()
    for _ in range(TURNS):
        there.copy_(torch.stack([rows(), rows()]))
        x.fill_(77)
        for _ in range(2):
            graph.replay()
        for turn in range(2):
            layer.check(read[turn], there[turn])
