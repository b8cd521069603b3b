"""What arrays of others are taken for: PyTorch's, CuPy's, Numba's, our own; and what is refused, with which words."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import GPUS
from far import as_bytes, pattern
from foreign import CUDA, CUDA_HOST, HOST, MANAGED, Dlpack, Interface, Said
from pairs import Pair

import crossrail

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["shm,cuda_ipc", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two workers of this process."""
    context = crossrail.Context(tls=request.param, timeout=30, log="error")
    with crossrail.Worker(context, name="a") as a, crossrail.Worker(context, name="b") as b:
        to_b = a.connect(b.address())
        yield Pair(context, a, b, to_b, b.accept())


def moved(pair: Pair, source: Any, target: Any) -> int:
    inbound = pair.b.recv(target)
    pair.to_b.send(source).wait()
    return inbound.wait().bytes


def zeros(nbytes: int, device: str = "cuda:0") -> Any:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def driver(call: str, *arguments: Any) -> None:
    """A call of the CUDA driver's, in PyTorch's context."""
    torch.zeros(1, device="cuda:0")
    code = getattr(ctypes.CDLL("libcuda.so.1"), call)(*arguments)
    assert code == 0, f"{call}: {code}"


def allocated(nbytes: int) -> int:
    """Memory as cudaMalloc's, of which no cache keeps anything when it is freed; of zeros."""
    torch.cuda.set_device(0)
    address = ctypes.c_uint64()
    driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
    torch.cuda.synchronize()
    return address.value


def freed(address: int) -> None:
    """Gives it back to the driver."""
    torch.cuda.synchronize()
    driver("cuMemFree_v2", ctypes.c_uint64(address))


class TestMemory:
    def test_others_see_it_without_a_copy(self, pair: Pair) -> None:
        memory = pair.context.alloc(1 << 20, "cuda:0")
        assert memory.device == "cuda:0" and "on cuda:0" in repr(memory) and len(memory) == 1 << 20
        tensor = torch.from_dlpack(memory)
        assert tensor.device == torch.device("cuda:0") and tensor.shape == (1 << 20,)
        assert tensor.dtype == torch.uint8 and int(tensor.max()) == 0, "zeroed"
        assert tensor.data_ptr() == memory.__cuda_array_interface__["data"][0]
        assert torch.as_tensor(memory, device="cuda:0").data_ptr() == tensor.data_ptr()
        tensor[5] = 7
        torch.cuda.synchronize()
        memory.copy_to(seen := bytearray(10))
        assert seen == b"\0\0\0\0\0\7\0\0\0\0"
        memory.fill_from(b"abc", (1 << 20) - 3)
        assert bytes(tensor[-3:].cpu().tolist()) == b"abc"

    def test_what_was_made_of_it_keeps_it(self, pair: Pair) -> None:
        tensor = torch.from_dlpack(pair.context.alloc(1 << 20, 0))
        gc.collect()
        tensor.fill_(3)
        assert int(tensor.sum()) == 3 << 20

    def test_it_moves(self, pair: Pair) -> None:
        for size in (0, 1, 4097, (5 << 20) + 3):
            source, target = pair.context.alloc(size, "cuda:0"), pair.context.alloc(size, "cuda:0")
            torch.from_dlpack(source).copy_(pattern(size, 6, "cuda:0"))
            torch.cuda.synchronize()
            assert moved(pair, source, target) == size
            assert torch.equal(torch.from_dlpack(source), torch.from_dlpack(target))

    def test_the_host_cannot_look_into_it(self, pair: Pair) -> None:
        memory = pair.context.alloc(100, "cuda:0")
        with pytest.raises(BufferError, match="cuda:0"):
            memoryview(memory)  # type: ignore[arg-type]
        with pytest.raises(crossrail.UsageError, match="copy_to"):
            memory.numpy()

    def test_too_much_of_it(self, pair: Pair) -> None:
        with pytest.raises(crossrail.ExhaustedError, match="free"):
            pair.context.alloc(1 << 43, "cuda:0")
        with pytest.raises(crossrail.UsageError, match=f"cuda:{GPUS}|{GPUS}"):
            pair.context.alloc(1, GPUS)

    def test_info_is_plain(self, pair: Pair) -> None:
        info = pair.context.info()
        assert json.loads(json.dumps(info))["cuda"] == info["cuda"]
        assert info["cuda"]["present"] and len(info["cuda"]["devices"]) == GPUS

    def test_devices_by_their_own_objects(self, pair: Pair) -> None:
        assert pair.context.alloc(1, torch.device("cuda:0")).device == "cuda:0"
        assert pair.context.alloc(1, torch.device("cpu")).device == "cpu"


class TestCupy:
    def test_arrays_and_their_streams(self, pair: Pair) -> None:
        cupy = pytest.importorskip("cupy")
        with cupy.cuda.Stream(non_blocking=True):
            source = cupy.arange(1_000_000, dtype=cupy.float32).reshape(1000, 1000)
            target = cupy.zeros((500, 1000), cupy.float32)
            assert moved(pair, source[100:600], target) == 2_000_000
            assert bool((target == source[100:600]).all())
        with pytest.raises(crossrail.UsageError, match="contiguous"):
            pair.to_b.send(source.T)

    def test_by_interface_alone(self, pair: Pair) -> None:
        cupy = pytest.importorskip("cupy")
        source, target = cupy.arange(1000, dtype="i8"), cupy.zeros(1000, "i8")
        cupy.cuda.get_current_stream().synchronize()

        def alone(array: Any, **changed: Any) -> Interface:
            return Interface(**{**array.__cuda_array_interface__, **changed})

        own = cupy.cuda.Stream()
        for stream in (None, 1, 2, own.ptr):
            target[:] = 0
            cupy.cuda.get_current_stream().synchronize()
            assert moved(pair, alone(source, stream=stream), alone(target, stream=stream)) == 8000
            assert bool((source == target).all())

    def test_the_stream_in_an_interface_comes_first(self, pair: Pair) -> None:
        side, tensor, target = torch.cuda.Stream("cuda:0"), zeros(10_000), zeros(10_000)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
            tensor.fill_(5)
        data = (tensor.data_ptr(), False)
        assert moved(pair, Interface(shape=(10_000,), data=data, stream=side.cuda_stream), target) == 10_000
        assert int(target.min()) == 5

    def test_managed_memory(self, pair: Pair) -> None:
        cupy = pytest.importorskip("cupy")
        source = cupy.ndarray((1 << 18,), cupy.uint8, cupy.cuda.malloc_managed(1 << 18))
        target = cupy.ndarray((1 << 18,), cupy.uint8, cupy.cuda.malloc_managed(1 << 18))
        source[:], target[:] = 7, 0
        cupy.cuda.get_current_stream().synchronize()
        assert moved(pair, source, target) == 1 << 18
        assert bool((target == 7).all())


def test_numba_arrays(pair: Pair) -> None:
    cuda = pytest.importorskip("numba.cuda")
    source, target = cuda.to_device(np.arange(1000)), cuda.device_array(1000, np.int64)
    cuda.synchronize()
    assert moved(pair, source, target) == 8000
    assert (target.copy_to_host() == np.arange(1000)).all()


def test_what_is_not_contiguous_is_refused_with_its_strides(pair: Pair) -> None:
    table = torch.zeros(10, 20, device="cuda:0")
    for part in (table.t(), table[:, ::2], table[:, 3:5], table[:1].expand(5, 20), table[::3]):
        for start in (pair.to_b.send, pair.b.recv, pair.b.register):
            with pytest.raises(crossrail.UsageError, match=r"not contiguous in C order: shape \[.*strides \["):
                start(part)
    assert moved(pair, table[:1, ::1], table[3:4]) == 80


def test_tensors_that_pytorch_does_not_lend(pair: Pair) -> None:
    for tensor in (
        torch.zeros(4, device="cuda:0", requires_grad=True),
        torch.zeros(4, 4, device="cuda:0").to_sparse(),
        torch.zeros(4, dtype=torch.complex64, device="cuda:0").conj(),
        torch.zeros(4, device="meta"),
    ):
        with pytest.raises(crossrail.CrossrailError):
            pair.to_b.send(tensor)
    assert moved(pair, torch.ones(4, device="cuda:0", requires_grad=True).detach(), zeros(16)) == 16


class TestWrongClaims:
    def refused(self, pair: Pair, array: Any, words: str) -> None:
        for start in (pair.to_b.send, pair.b.recv, pair.b.register):
            with pytest.raises(crossrail.UsageError, match=words):
                start(array)
        target = zeros(3)
        assert moved(pair, b"abc", target) == 3 and target.tolist() == list(b"abc"), "the workers go on"

    def test_host_memory_as_a_gpus(self, pair: Pair) -> None:
        ordinary, pinned = torch.zeros(4096), torch.zeros(4096).pin_memory()
        for tensor, words in ((ordinary, "no memory that the CUDA driver knows"), (pinned, "pinned host memory")):
            for kind in (CUDA, MANAGED):
                self.refused(pair, Dlpack(Said(data=tensor.data_ptr(), device=(kind, 0))), words)
        self.refused(pair, Interface(data=(ordinary.data_ptr(), False)), "no memory that the CUDA driver knows")

    def test_nobodys_memory(self, pair: Pair) -> None:
        self.refused(pair, Dlpack(Said()), "no memory that the CUDA driver knows")
        self.refused(pair, Interface(), "no memory that the CUDA driver knows")
        self.refused(pair, Dlpack(Said(data=1)), "no memory that the CUDA driver knows")

    def test_more_than_there_is(self, pair: Pair) -> None:
        memory = pair.context.alloc(2 << 20, "cuda:0")
        at = memory.__cuda_array_interface__["data"][0]
        self.refused(pair, Dlpack(Said(data=at, shape=(1 << 40,))), "only the first|what follows")
        self.refused(pair, Interface(data=(at, False), shape=(1 << 40,)), "only the first|what follows")

    def test_a_gpus_memory_as_the_hosts(self, pair: Pair) -> None:
        tensor = zeros(4096)
        for kind in (HOST, CUDA_HOST):
            array = Dlpack(Said(data=tensor.data_ptr(), device=(CUDA, 0)), device=(kind, 0))
            self.refused(pair, array, "its capsule is on cuda:0")
            assert array.returned == 3

    def test_a_gpu_that_is_not_there(self, pair: Pair) -> None:
        self.refused(pair, Dlpack(Said(device=(CUDA, GPUS))), f"cuda:{GPUS}")

    @pytest.mark.gpus(2)
    def test_another_gpus(self, pair: Pair) -> None:
        tensor = zeros(4096, "cuda:1")
        self.refused(pair, Dlpack(Said(data=tensor.data_ptr(), device=(CUDA, 0))), "memory of cuda:1")
        with pytest.raises(crossrail.UsageError, match="stream"):
            pair.to_b.send(zeros(10), stream=torch.cuda.Stream("cuda:1"))

    def test_memory_that_was_freed(self, pair: Pair) -> None:
        address = allocated(64 << 20)
        array = Dlpack(Said(data=address, shape=(64 << 20,)))
        try:
            assert moved(pair, array, zeros(64 << 20)) == 64 << 20
        finally:
            freed(address)
        self.refused(pair, array, "no memory that the CUDA driver knows")

    def test_memory_that_is_freed_while_it_is_registered(self, pair: Pair) -> None:
        """An error or what was there: never the end of the process or of its workers."""
        address = allocated(64 << 20)
        region = pair.b.register(Dlpack(Said(data=address, shape=(64 << 20,))))
        source = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
        try:
            pair.to_b.write(source, region.key()).wait()
            there = Interface(shape=(64 << 20,), data=(address, False))
            assert int(torch.as_tensor(there, device="cuda:0").min()) == 1
        finally:
            freed(address)
        try:
            pair.to_b.write(source, region.key()).wait()
        except crossrail.CrossrailError as error:
            assert error.detail
        region.deregister()
        assert moved(pair, source, torch.empty_like(source)) == 64 << 20


@pytest.mark.gpus(2)
class TestTwoGpus:
    """In one process, where one of them is the current one."""

    @pytest.mark.parametrize("current", [0, 1])
    def test_each_to_the_other(self, pair: Pair, current: int) -> None:
        with torch.cuda.device(current):
            for size in (1, 4097, (9 << 20) + 1):
                for here, there in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:1", "cuda:1")):
                    target = zeros(size, there)
                    assert moved(pair, pattern(size, 3, here), target) == size
                    assert torch.equal(target, pattern(size, 3, there))
            assert torch.cuda.current_device() == current, "left as it was"

    def test_streams_of_the_other(self, pair: Pair) -> None:
        stream, source, target = torch.cuda.Stream("cuda:1"), zeros(1 << 20, "cuda:1"), zeros(1 << 20, "cuda:0")
        torch.cuda.synchronize("cuda:1")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(300_000_000)
            source.fill_(6)
        inbound = pair.b.recv(target)
        pair.to_b.send(source, stream=stream).wait()
        inbound.wait()
        assert int(target.min()) == 6

    def test_the_same_memory_for_both(self, pair: Pair) -> None:
        tensors = [pattern(100_000, at, f"cuda:{at % 2}") for at in range(8)]
        targets = [zeros(100_000, f"cuda:{(at // 2) % 2}") for at in range(8)]
        inbound = [pair.b.recv(target, tag) for tag, target in enumerate(targets)]
        pair.to_b.batch([("send", tensor, tag) for tag, tensor in enumerate(tensors)]).wait()
        crossrail.wait_all(inbound)
        for tensor, target in zip(tensors, targets, strict=True):
            assert torch.equal(as_bytes(tensor).cpu(), as_bytes(target).cpu())
