"""Every operation on PyTorch's tensors, between two processes, over every way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from conftest import GPUS, WAYS, Link
from far import Far, as_bytes, pattern

import crossrail

torch = pytest.importorskip("torch")

FETCHED = 1 << 20
"""What the receiver copies itself, over cuda_ipc."""
FIRST_FRAME = 4096
"""At least so many bytes go with a message's first frame, over every link that is no direct copy."""
SIZES = [0, 1, 7, 4096, 65_537, 1_000_003, FETCHED + 1, (33 << 20) + 4097]
DTYPES = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
]


def went_by(link: Link, size: int, *receipts: dict[str, Any]) -> bool:
    """Whether that many bytes went the way that the link is for, as the two ends tell it."""
    protocols = {receipt["protocol"] for receipt in receipts}
    if link.name == "cuda_ipc":
        return "direct(cuda_ipc)" in protocols
    lanes = {lane["name"].split("/")[0] for receipt in receipts for lane in receipt["lanes"]}
    return protocols == ({"chunks"} if size > FIRST_FRAME else {"eager"}) and lanes == {link.name}


@pytest.mark.parametrize("size", SIZES)
def test_send_and_receive(link: Link, size: int) -> None:
    for offset in (0, 3):
        whole = torch.zeros(offset + size + 16, dtype=torch.uint8, device=link.device)
        there_and_back = whole[offset : offset + size]
        there_and_back.copy_(pattern(size, 5, link.device))
        link.far.do("make", name="target", nbytes=size, offset=offset)
        link.far.ask("recv", name="target", tag=3)
        sent = link.endpoint.send(there_and_back, tag=3).wait()
        received = link.far.answer()
        assert sent.bytes == received["bytes"] == size
        if size >= 4096:
            assert went_by(link, size, sent.as_dict(), received), (sent, received)
        long = link.name == "cuda_ipc" and size > FETCHED
        assert sent.pushed is received["pushed"] is long, "the sender's GPU copies what is long"
        assert link.far.do("wrong", name="target", seed=5) == 0

        there_and_back.zero_()
        link.far.ask("send", name="target", tag=4)
        assert link.worker.recv(there_and_back, tag=4, source=link.endpoint).wait().bytes == size
        link.far.answer()
        assert torch.equal(there_and_back, pattern(size, 5, link.device))
        assert int((whole != 0).sum()) == int((there_and_back != 0).sum()), "nothing around it was touched"
    link.far.do("drop")


@pytest.mark.parametrize("own", [False, True])
def test_write_and_read(link: Link, own: bool) -> None:
    whole = (4 << 20) + 1001
    link.far.do("make", name="region", nbytes=whole, own=own, seed=1)
    key = crossrail.RegionKey.from_bytes(bytes.fromhex(link.far.do("register", name="region")))
    expected = pattern(whole, 1, link.device)
    for size in (1, 4095, 100_000, (3 << 20) + 5):
        offset = (whole - size) // 3
        source = pattern(size, size, link.device)
        assert link.endpoint.write(source, key, offset).wait().bytes == size
        expected[offset : offset + size] = source
        back = torch.zeros(size + 2, dtype=torch.uint8, device=link.device)
        assert link.endpoint.read(back[1:-1], key, offset).wait().bytes == size
        assert torch.equal(back[1:-1], source) and int(back[0]) == int(back[-1]) == 0
    everything = torch.empty_like(expected)
    link.endpoint.read(everything, key).wait()
    assert torch.equal(everything, expected)
    for request in (link.endpoint.write(expected, key, 1), link.endpoint.read(everything, key, 1)):
        with pytest.raises(crossrail.RegionError):
            request.wait()
    link.far.do("deregister", name="region")
    with pytest.raises(crossrail.RegionError):
        link.endpoint.write(expected, key).wait()
    link.far.do("drop")


def test_immediates_come_after_their_bytes(link: Link) -> None:
    size = 3 << 20
    target = torch.zeros(size, dtype=torch.uint8, device=link.device)
    region = link.worker.register(target)
    link.far.do("make", name="source", nbytes=size, seed=9)
    link.far.do("write", name="source", key=bytes(region.key()).hex(), imm=7)
    region.wait_imm(7)
    assert torch.equal(target, pattern(size, 9, link.device))
    region.deregister()
    link.far.do("drop")


@pytest.mark.parametrize("link", ["cuda_ipc", "tcp"], indirect=True)
@pytest.mark.parametrize("name", DTYPES)
def test_items_of_every_type(link: Link, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this PyTorch has no {name}")
    rows, columns = 301, 77
    items = pattern(rows * columns * dtype.itemsize, 11, link.device)
    table = (items % 2 if name == "bool" else items).view(dtype).reshape(rows, columns)
    link.far.do("make", name="target", nbytes=200 * columns * dtype.itemsize)
    link.far.ask("recv", name="target")
    link.endpoint.send(table[50:250]).wait()
    link.far.answer()
    link.far.ask("send", name="target")
    back = torch.zeros_like(table)
    link.worker.recv(back[50:250], source=link.endpoint).wait()
    link.far.answer()
    assert torch.equal(as_bytes(back[50:250]), as_bytes(table[50:250]))
    assert not as_bytes(back[:50]).any() and not as_bytes(back[250:]).any()
    link.far.do("drop")


def test_a_scalar(link: Link) -> None:
    scalar, target = torch.tensor(2.5, device=link.device), torch.tensor(0.0, device=link.device)
    link.far.do("make", name="scalar", nbytes=4)
    link.far.ask("recv", name="scalar")
    link.endpoint.send(scalar).wait()
    link.far.answer()
    link.far.ask("send", name="scalar")
    link.worker.recv(target, source=link.endpoint).wait()
    link.far.answer()
    assert float(target) == 2.5
    link.far.do("drop")


def test_host_memory_at_one_end(link: Link) -> None:
    size = (5 << 20) + 3
    for source in (pattern(size, 2, "cpu"), pattern(size, 2, "cpu").pin_memory()):
        link.far.do("make", name="target", nbytes=size)
        for part, wrong_if_whole in ((source[:1000], None), (source, 0)):
            link.far.ask("recv", name="target")
            assert link.endpoint.send(part).wait().bytes == part.numel()
            link.far.answer()
            if wrong_if_whole is not None:
                assert link.far.do("wrong", name="target", seed=2) == wrong_if_whole
        link.far.ask("send", name="target")
        back = torch.zeros_like(source)
        link.worker.recv(back, source=link.endpoint).wait()
        link.far.answer()
        assert torch.equal(back, source)
    link.far.do("drop")


def test_traffic_both_ways_at_once(link: Link) -> None:
    count, size = 12, (2 << 20) + 77
    inbound = []
    targets = [torch.zeros(size, dtype=torch.uint8, device=link.device) for _ in range(count)]
    sources = [pattern(size, seed, link.device) for seed in range(count)]
    for seed in range(count):
        link.far.do("make", name=f"in{seed}", nbytes=size)
        link.far.do("make", name=f"out{seed}", nbytes=size, seed=100 + seed)
    link.far.ask("exchange", count=count)
    for seed in range(count):
        inbound.append(link.worker.recv(targets[seed], tag=seed, source=link.endpoint))
    outbound = link.endpoint.batch([("send", sources[seed], seed) for seed in range(count)])
    outbound.wait()
    crossrail.wait_all(inbound)
    link.far.answer()
    for seed in range(count):
        assert torch.equal(targets[seed], pattern(size, 100 + seed, link.device))
        assert link.far.do("wrong", name=f"in{seed}", seed=seed) == 0
    link.far.do("drop")


@pytest.mark.gpus(2)
def test_every_gpu_with_this_one_at_once() -> None:
    """Several processes, each on a GPU of its own, to one and back, all under way at the same time."""
    count, size = 4, (24 << 20) + 77
    context = crossrail.Context(tls=WAYS["cuda_ipc"], timeout=30, log="error")
    with contextlib.ExitStack() as ends, crossrail.Worker(context, name="near") as worker:
        fars = [Far(worker, f"cuda:{gpu}", WAYS["cuda_ipc"]) for gpu in range(1, GPUS)]
        for far in fars:
            ends.callback(far.close)
        # Those of a far process begin at a hundred times its number.
        targets, sources = [], []
        for number, far in enumerate(fars):
            for tag in range(count):
                far.do("make", name=f"in{tag}", nbytes=size)
                far.do("make", name=f"out{tag}", nbytes=size, seed=100 * number + 50 + tag)
                targets.append((number, tag, torch.zeros(size, dtype=torch.uint8, device="cuda:0")))
                sources.append((number, tag, pattern(size, 100 * number + tag, "cuda:0")))
        inbound = [worker.recv(target, tag=tag, source=fars[number].endpoint) for number, tag, target in targets]
        for far in fars:
            far.ask("exchange", count=count)
        outbound = [fars[number].endpoint.send(source, tag=tag) for number, tag, source in sources]
        crossrail.wait_all([*inbound, *outbound])
        assert all(request.wait().pushed for request in (*inbound, *outbound))
        for number, far in enumerate(fars):
            far.answer()
            for tag in range(count):
                assert far.do("wrong", name=f"in{tag}", seed=100 * number + tag) == 0
        for number, tag, target in targets:
            assert torch.equal(target, pattern(size, 100 * number + 50 + tag, "cuda:0"))
        del inbound, outbound


def test_a_message_longer_than_its_target(link: Link) -> None:
    link.far.do("make", name="target", nbytes=1000)
    for size in (1001, 3 << 20):
        link.far.ask("recv_refused", name="target")
        with pytest.raises(crossrail.TruncatedError):
            link.endpoint.send(pattern(size, 1, link.device)).wait()
        assert link.far.answer() == "TruncatedError"
    link.far.do("drop")


def test_cancelled_operations_give_their_tensors_back(link: Link) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=link.device)
    for request in (link.endpoint.send(tensor, tag=77), link.worker.recv(tensor, tag=78)):
        request.cancel()
        with pytest.raises(crossrail.CancelledError):
            request.wait()
    tensor.fill_(1)
    assert int(tensor.sum()) == 1 << 20


def test_a_receive_cancelled_while_it_is_copied_is_written_no_more(link: Link) -> None:
    size = 192 << 20
    tensor = torch.zeros(size, dtype=torch.uint8, device=link.device)
    link.far.do("make", name="source", nbytes=size, seed=1)
    for value in range(1, 5):
        request = link.worker.recv(tensor, tag=79, source=link.endpoint)
        # Its announcement has come when the answer has a message behind it.
        behind = link.worker.recv(bytearray(1), tag=80, source=link.endpoint)
        link.far.do("begin", name="source", tag=79)
        behind.wait()
        request.cancel()
        with contextlib.suppress(crossrail.CancelledError):
            request.wait()
        tensor.fill_(value)
        assert link.far.do("end") in ("CancelledError", "nothing")
        assert [int(tensor.min()), int(tensor.max())] == [value, value], "it was written after its end"
    link.far.do("drop")
