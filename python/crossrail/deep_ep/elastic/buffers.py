"""The expert buffers behind an ElasticBuffer: two for each kind of dispatch, created on first use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from crossrail.deep_ep.checks import wrong
from crossrail.deep_ep.pool import LEAST_TOKENS, Backend, Kind, SizedBuffer, capacity_for

__all__ = ["BufferPool"]


class BufferPool:
    """Expert buffers by kind and size. All ranks request the same ones in the same order.

    Dispatches of a few tokens have expert buffers of their own, whose kernels take a shorter path; the others have room
    for as many tokens as any dispatch so far, and at least `usual`."""

    def __init__(self, backend: Backend, ranks: int, usual: int, limit: int | None) -> None:
        """`limit`: maximum bytes per expert buffer."""
        self._backend = backend
        self._ranks = list(range(ranks))
        self._usual = usual
        self._limit = limit
        self._made: dict[tuple[Kind, bool], SizedBuffer] = {}
        self._numbers: Iterator[int] = count(1)

    def get(self, kind: Kind, tokens: int, num_sms: int) -> SizedBuffer:
        """The expert buffer for dispatches of up to `tokens`, created if needed with `num_sms`.

        Raises UsageError if it would exceed the limit, or would have to be created during a capture."""
        few = tokens <= LEAST_TOKENS
        made = self._made.get((kind, few))
        if made is None or made.max_tokens < tokens:
            made = self._new(kind, capacity_for(tokens if few else max(tokens, self._usual)), num_sms)
            self._made[kind, few] = made
        return made

    def _new(self, kind: Kind, most: int, num_sms: int) -> SizedBuffer:
        if self._backend.streams.is_capturing():
            detail = f"the first dispatch of this kind allocates memory for {most} tokens, which a capture cannot"
            raise wrong("dispatch", detail, "run it once before the capture")
        needed = 0 if self._limit is None else self._backend.bytes(kind, most)
        if self._limit is not None and needed > self._limit:
            detail = f"{most} tokens of {kind.hidden} take {needed} bytes, and num_bytes is {self._limit}"
            raise wrong("dispatch", detail, "get_buffer_size_hint returns a sufficient number")
        name = str(next(self._numbers))
        buffer = self._backend.make(kind, most, num_sms, name, self._ranks)
        return SizedBuffer(buffer, most, self._backend.prepared_calls(buffer, kind))

    def made(self, tokens: int) -> Iterator[tuple[Kind, SizedBuffer]]:
        """Existing expert buffers with room for `tokens`."""
        few = tokens <= LEAST_TOKENS
        for (kind, small), made in self._made.items():
            if small == few and made.max_tokens >= tokens:
                yield kind, made

    def destroy(self) -> None:
        """Ends them all."""
        for made in self._made.values():
            made.buffer.destroy()
        self._made.clear()
