"""asyncio: awaited requests, many at once, timeouts, cancelled tasks, accepting."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest
from pairs import Pair

import crossrail
from crossrail import _async


def test_await_a_request(pair: Pair) -> None:
    async def talk() -> None:
        into = bytearray(100)
        inbound = pair.b.recv(into, tag=5)
        outbound = pair.to_b.send(b"awaited", tag=5)
        receipt = await inbound
        assert receipt.bytes == 7 and into[:7] == b"awaited"
        assert (await outbound).bytes == 7
        assert (await outbound).bytes == 7, "again"

    asyncio.run(talk())


def test_await_something_large(pair: Pair) -> None:
    async def talk() -> None:
        size = 5_000_001
        into, out = bytearray(size), bytes(range(256)) * (size // 256 + 1)
        inbound = pair.b.recv(into)
        receipts = await asyncio.gather(inbound, pair.to_b.send(memoryview(out)[:size]))
        assert [receipt.bytes for receipt in receipts] == [size, size]
        assert bytes(into) == out[:size]

    asyncio.run(talk())


def test_many_at_once(pair: Pair) -> None:
    count = 1000

    async def one(number: int) -> int:
        into = bytearray(8)
        inbound = pair.b.recv(into, tag=number)
        await asyncio.sleep(0)
        outbound = pair.to_b.send(number.to_bytes(8, "big"), tag=number)
        await inbound
        await outbound
        return int.from_bytes(into, "big")

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(count)))

    assert asyncio.run(all_of_them()) == list(range(count))


def test_the_loop_runs_while_a_request_is_awaited(pair: Pair) -> None:
    async def talk() -> int:
        ticks = 0
        inbound = asyncio.ensure_future(_awaited(pair.b.recv(bytearray(1))))
        while ticks < 20:
            await asyncio.sleep(0.002)
            ticks += 1
        assert not inbound.done()
        await pair.to_b.send(b"!")
        await inbound
        return ticks

    assert asyncio.run(talk()) == 20


async def _awaited(request: crossrail.Request) -> crossrail.Receipt:
    return await request


def test_no_thread_is_started_and_nothing_stays_registered(pair: Pair) -> None:
    async def talk() -> None:
        before = threading.active_count()
        inbound = asyncio.ensure_future(_awaited(pair.b.recv(bytearray(1))))
        await asyncio.sleep(0.01)
        assert threading.active_count() == before
        assert len(_async._readers) == 1
        await pair.to_b.send(b"!")
        await inbound
        assert not _async._readers
        assert not asyncio.get_running_loop().remove_reader(pair.b.event_fd())

    asyncio.run(talk())


def test_failures_are_raised_where_it_is_awaited(pair: Pair) -> None:
    async def talk() -> None:
        inbound = pair.b.recv(bytearray(2))
        outbound = pair.to_b.send(b"too long")
        for request in (inbound, outbound):
            with pytest.raises(crossrail.TruncatedError):
                await request

    asyncio.run(talk())


def test_the_wait_is_bounded_by_the_contexts_timeout(connected: Callable[..., Pair]) -> None:
    pair = connected(timeout="150ms")

    async def talk() -> None:
        request = pair.b.recv(bytearray(9))
        began = time.monotonic()
        with pytest.raises(crossrail.TimeoutError, match=r"not finished.*0 of 9 bytes done, after 0\.150 s"):
            await request
        assert 0.14 < time.monotonic() - began < 20
        with pytest.raises(crossrail.TimeoutError, match=r"0\.150 s"):
            await pair.b.accept_async()
        # It went on.
        outbound = pair.to_b.send(b"late")
        assert (await request).bytes == 4
        await outbound

    asyncio.run(talk())


def test_a_shorter_limit_by_asyncio(pair: Pair) -> None:
    buffer = bytearray(9)

    async def talk() -> None:
        request = pair.b.recv(buffer)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, 0.05)
        # To cancel the task cancels the request.
        with pytest.raises(crossrail.CancelledError):
            request.wait(5)

    asyncio.run(talk())
    buffer.append(0)


def test_a_cancelled_task_cancels_its_request(pair: Pair) -> None:
    async def talk() -> None:
        request = pair.b.recv(bytearray(9), tag=1)
        task = asyncio.ensure_future(_awaited(request))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(crossrail.CancelledError):
            request.wait(5)
        other = pair.b.recv(bytearray(9), tag=1)
        await asyncio.gather(pair.to_b.send(b"for the next", tag=2), pair.b.recv(bytearray(12), tag=2))
        await asyncio.gather(pair.to_b.send(b"next", tag=1), other)

    asyncio.run(talk())


def test_accept_async(connected: Callable[..., Pair]) -> None:
    pair = connected()

    async def talk() -> None:
        with crossrail.Worker(pair.context, name="c") as third:
            accepting = asyncio.ensure_future(pair.b.accept_async())
            await asyncio.sleep(0.05)
            assert not accepting.done()
            began = time.monotonic()
            endpoint = await asyncio.to_thread(third.connect, pair.b.address())
            accepted = await accepting
            assert time.monotonic() - began < 20
            assert accepted.peer == "c"
            inbound = third.recv(bytearray(2))
            await accepted.send(b"hi")
            assert (await inbound).peer == "b" and endpoint.is_alive
            with pytest.raises(crossrail.TimeoutError):
                await pair.b.accept_async(timeout=0.02)

    asyncio.run(talk())


def test_loops_come_and_go(shm: Pair) -> None:
    for number in range(5):

        async def talk(number: int = number) -> None:
            await asyncio.gather(shm.b.recv(bytearray(1), tag=number), shm.to_b.send(b"!", tag=number))

        asyncio.run(talk())
    gc.collect()
    assert not _async._readers
