"""Numbers that go back and forth between two GPUs' graphs, 1 more at every turn: both ends of `test_api_graphs`."""

from __future__ import annotations

from typing import Any

COUNT = 1024
"""Numbers of 4 bytes each."""
NUMBERS_AT = 256
NBYTES = NUMBERS_AT + 4 * COUNT
"""Of the memory that each end shares: a signal of 8 bytes, and from 256 on the numbers."""
LIMIT_S = 20.0


def parts(torch: Any, memory: Any) -> tuple[Any, Any]:
    """The signal and the numbers in shared memory, as tensors."""
    whole = torch.from_dlpack(memory)
    return whole[:8].view(torch.int64), whole[NUMBERS_AT:NBYTES].view(torch.int32)


def call(torch: Any, memory: Any, mapped: Any, replays: int, device: str) -> Any:
    """Puts numbers to the other end, awaits them back: so often, in one captured graph. The numbers in the end."""
    signal, inbox = parts(torch, memory)
    numbers = torch.zeros(COUNT, dtype=torch.int32, device=device)

    def turn(stream: Any) -> None:
        mapped.put(numbers, NUMBERS_AT, stream=stream, signal=(0, 1))
        memory.await_signal(0, 1, stream=stream, timeout=LIMIT_S)
        signal.zero_()
        numbers.copy_(inbox)

    replay(torch, turn, replays, device)
    return numbers


def echo(torch: Any, memory: Any, mapped: Any, replays: int, device: str) -> int:
    """Awaits numbers, adds 1, puts them back. The first number that went back last."""
    signal, inbox = parts(torch, memory)
    answer = torch.zeros(COUNT, dtype=torch.int32, device=device)

    def turn(stream: Any) -> None:
        memory.await_signal(0, 1, stream=stream, timeout=LIMIT_S)
        signal.zero_()
        torch.add(inbox, 1, out=answer)
        mapped.put(answer, NUMBERS_AT, stream=stream, signal=(0, 1))

    replay(torch, turn, replays, device)
    return int(answer[0])


def replay(torch: Any, turn: Any, replays: int, device: str) -> None:
    """Captures one turn and replays it."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        turn(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(replays):
            graph.replay()
    stream.synchronize()
