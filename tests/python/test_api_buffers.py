"""What can be moved: the buffer protocol, NumPy, DLPack, Memory; and what is refused, with which words."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pairs import Pair

import crossrail


def moved(pair: Pair, source: Any, target: Any) -> int:
    inbound = pair.b.recv(target)
    pair.to_b.send(source).wait()
    return inbound.wait().bytes


@pytest.mark.parametrize(
    "source",
    [
        b"some bytes",
        bytearray(b"some bytes"),
        memoryview(b"xxsome bytesxx")[2:12],
        array.array("B", b"some bytes"),
        (ctypes.c_char * 10)(*b"some bytes"),
        np.frombuffer(b"some bytes", dtype=np.uint8),
        np.frombuffer(b"some bytes", dtype="S2"),
    ],
    ids=lambda source: type(source).__name__,
)
def test_anything_with_the_buffer_protocol(shm: Pair, source: Any) -> None:
    target = bytearray(10)
    assert moved(shm, source, target) == 10 and target == b"some bytes"


def test_numpy_arrays_of_any_type_and_shape(pair: Pair) -> None:
    for dtype in ("u1", "i8", "f4", "c16", "?"):
        for shape in ((), (0,), (7,), (3, 5, 2), (1000, 300)):
            source = (np.arange(np.prod(shape, dtype=int)) % 97).reshape(shape).astype(dtype)
            target = np.zeros(shape, dtype)
            assert moved(pair, source, target) == source.nbytes
            assert (source == target).all()


def test_parts_of_an_array_that_lie_in_one_piece(shm: Pair) -> None:
    source, target = np.arange(100, dtype="i4").reshape(10, 10), np.zeros((10, 10), "i4")
    assert moved(shm, source[2:4], target[5:7]) == 80
    assert (target[5:7] == source[2:4]).all() and not target[:5].any() and not target[7:].any()


def test_a_mapped_file_and_an_array_of_integers(shm: Pair) -> None:
    numbers = array.array("q", [1, 2, 3])
    with mmap.mmap(-1, 24) as mapped:
        assert moved(shm, numbers, mapped) == 24
        assert mapped[:] == numbers.tobytes()
        gc.collect()


@pytest.mark.parametrize("source", [np.zeros((4, 4))[:, 1], np.zeros((4, 4)).T, memoryview(b"12345678")[::2]])
def test_what_does_not_lie_in_one_piece_is_refused(shm: Pair, source: Any) -> None:
    with pytest.raises(crossrail.UsageError, match="not contiguous in C order") as caught:
        shm.to_b.send(source)
    assert caught.value.operation == "send" and "ascontiguousarray" in (caught.value.hint or "")


def test_a_constant_cannot_be_received_into(shm: Pair) -> None:
    constant = np.zeros(4)
    constant.flags.writeable = False
    key_target = shm.b.register(bytearray(32))
    for target in (b"1234", memoryview(b"1234"), constant):
        for receive in (
            lambda target=target: shm.b.recv(target),
            lambda target=target: shm.to_b.read(target, key_target.key()),
            lambda target=target: shm.to_b.batch([("recv", target, 0, 0)]),
        ):
            with pytest.raises(crossrail.UsageError, match="read-only"):
                receive()
    assert moved(shm, constant, bytearray(32)) == 32, "but it can be sent"
    key_target.deregister()


@pytest.mark.parametrize(
    ("source", "what"),
    [("text", "a str"), (7, "an int"), (None, "a NoneType"), ([1, 2], "a list"), (object(), "an object")],
)
def test_what_has_no_memory_is_refused(shm: Pair, source: Any, what: str) -> None:
    with pytest.raises(crossrail.UsageError, match=f"{what} has neither the buffer protocol nor DLPack"):
        shm.to_b.send(source)


class _Structure(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p))


REFERENCES = {
    "object": np.array(["a", "b"], dtype=object),
    "structured": np.zeros(3, [("Offset", "f8"), ("parts", [("one", "O")])]),
    "no format": np.zeros(3, np.dtypes.StringDType()),
    "py_object": (ctypes.py_object * 2)(),
    "pointer": (ctypes.POINTER(ctypes.c_int) * 2)(),
    "wide text": (ctypes.c_wchar_p * 2)(),
    "function": (ctypes.CFUNCTYPE(None) * 2)(),
    "structure": (_Structure * 2)(),
}


@pytest.mark.parametrize("array", REFERENCES.values(), ids=REFERENCES)
def test_items_that_are_references_are_refused_by_dtype_wherever_memory_comes_in(shm: Pair, array: Any) -> None:
    words = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else "format "
    words = r"the items of the \w+ are references \(" + re.escape(words)
    target = shm.b.register(bytearray(1024))
    memory = shm.context.alloc(1024)
    uses: dict[str, Callable[[], object]] = {
        "send": lambda: shm.to_b.send(array),
        "recv": lambda: shm.b.recv(array),
        "write": lambda: shm.to_b.write(array, target.key()),
        "read": lambda: shm.to_b.read(array, target.key()),
        "register": lambda: shm.a.register(array),
        "fill_from": lambda: memory.fill_from(array),
        "copy_to": lambda: memory.copy_to(array),
    }
    for operation, use in uses.items():
        with pytest.raises(crossrail.UsageError, match=words) as refused:
            use()
        assert refused.value.operation == operation
    target.deregister()


def test_items_as_wide_as_a_pointer_that_are_plain_data_move(shm: Pair) -> None:
    for dtype in ("M8[ns]", "m8[s]", "c8", "c16", "U4", [("Offset", "f8"), ("X", "i8")]):
        source = np.frombuffer(bytes(range(96)), dtype)
        target = np.zeros_like(source)
        assert moved(shm, source, target) == 96 and target.tobytes() == source.tobytes()


class Tensor:
    """An array seen through DLPack alone."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), versions: bool = True) -> None:
        self.array = array
        self.device = device
        self.versions = versions

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.versions:
            raise TypeError("an exporter from before versions")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("versions", [True, False])
def test_dlpack(pair: Pair, versions: bool) -> None:
    source, target = np.arange(70_000, dtype="f8"), np.zeros((700, 100), "f8")
    assert moved(pair, Tensor(source, versions=versions), Tensor(target, versions=versions)) == source.nbytes
    assert (target.ravel() == source).all()
    assert moved(pair, Tensor(source[100:110], versions=versions), Tensor(target[3:4], versions=versions)) == 80
    assert (target[3, :10] == source[100:110]).all()


def test_dlpack_tensors_are_given_back(shm: Pair) -> None:
    source = np.arange(10)
    before = sys.getrefcount(source)
    for _ in range(20):
        assert moved(shm, Tensor(source), bytearray(80)) == 80
    strided = np.zeros((4, 4))
    held = sys.getrefcount(strided)
    with pytest.raises(crossrail.UsageError, match="not contiguous"):
        shm.to_b.send(Tensor(strided.T))
    gc.collect()
    assert sys.getrefcount(source) == before and sys.getrefcount(strided) == held


def test_dlpack_on_another_device_is_refused_by_name(shm: Pair) -> None:
    with pytest.raises(crossrail.UnsupportedError, match="metal:3") as caught:
        shm.to_b.send(Tensor(np.zeros(4), device=(8, 3)))
    assert "host" in (caught.value.hint or "")
    with pytest.raises(crossrail.UnsupportedError, match="device type 99"):
        shm.to_b.send(Tensor(np.zeros(4), device=(99, 0)))


def test_a_read_only_tensor_cannot_be_received_into(shm: Pair) -> None:
    constant = np.zeros(4)
    constant.flags.writeable = False
    assert moved(shm, Tensor(constant), bytearray(32)) == 32
    with pytest.raises(crossrail.UsageError, match="read-only"):
        shm.b.recv(Tensor(constant))


def test_what_is_no_capsule_is_refused(shm: Pair) -> None:
    class Liar(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            return "a capsule"

    with pytest.raises(TypeError, match="DLPack capsule"):
        shm.to_b.send(Liar(None))


class TestMemory:
    def test_it_has_the_buffer_protocol(self, shm: Pair) -> None:
        memory = shm.context.alloc(1000)
        assert len(memory) == memory.nbytes == 1000 and "1000 bytes" in repr(memory)
        view = memoryview(memory)
        assert view.nbytes == 1000 and view.format == "B" and not view.readonly and view.contiguous
        assert bytes(view) == bytes(1000)
        view[10:13] = b"abc"
        assert bytes(memory)[9:14] == b"\0abc\0"

    def test_it_outlives_its_name(self, shm: Pair) -> None:
        view = memoryview(shm.context.alloc(1 << 20))
        array_ = shm.context.alloc(1 << 20).numpy("i4")
        gc.collect()
        view[-1] = 7
        array_[:] = 3
        assert view[-1] == 7 and array_.sum() == 3 * (1 << 18)

    def test_numpy(self, shm: Pair) -> None:
        memory = shm.context.alloc(80)
        assert memory.numpy().dtype == np.uint8 and memory.numpy().shape == (80,)
        memory.numpy("f8")[3] = 2.5
        assert memory.numpy(np.float64)[3] == 2.5
        with pytest.raises(crossrail.UsageError, match="no whole number"):
            shm.context.alloc(81).numpy("f8")
        assert moved(shm, memory.numpy("f8"), memory.numpy("f8").copy()) == 80

    def test_all_of_it_and_parts_of_it_move(self, pair: Pair) -> None:
        source, target = pair.context.alloc(3 << 20), pair.context.alloc(3 << 20)
        source.numpy()[:] = np.arange(3 << 20) % 251
        assert moved(pair, source, target) == 3 << 20
        assert (source.numpy() == target.numpy()).all()
        target.numpy()[:] = 0
        assert moved(pair, memoryview(source)[1000:901_001], memoryview(target)[5:900_006]) == 900_001
        assert (target.numpy()[5:900_006] == source.numpy()[1000:901_001]).all()
        assert not target.numpy()[:5].any() and not target.numpy()[900_006:].any()

    def test_the_constructor_is_alloc(self, shm: Pair) -> None:
        assert type(shm.context.alloc(8)) is crossrail.Memory
        assert len(crossrail.Memory(shm.context, 8)) == 8
        with pytest.raises(TypeError):
            crossrail.Memory(7, 8)  # type: ignore[arg-type]

    def test_too_much_is_an_error_that_names_the_sum(self, shm: Pair) -> None:
        with pytest.raises(crossrail.ExhaustedError, match=str(1 << 60)):
            shm.context.alloc(1 << 60)
        with pytest.raises(OverflowError):
            shm.context.alloc(-1)


def views(array: np.ndarray) -> list[Any]:
    return [array, array[:], array[4:], memoryview(array), memoryview(array)[1:], array.reshape(4, -1)]


@pytest.mark.parametrize("which", range(6))
def test_an_array_in_use_is_not_resized_in_place(shm: Pair, which: int) -> None:
    """NumPy checks references only if it is asked to, and frees the memory if it is not."""
    array = np.zeros(64, "u1")
    target = views(array)[which]
    inbound = shm.b.recv(target, tag=3)
    with pytest.raises(ValueError, match="resize"):
        array.resize(1 << 20, refcheck=False)
    shm.to_b.send(bytes(range(target.nbytes)), tag=3).wait()
    assert inbound.wait().bytes == target.nbytes and array.any()
    del target, inbound
    gc.collect()
    array.resize(1 << 20, refcheck=False)
    assert array.nbytes == 1 << 20


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_that_do_not_fit_are_usage_errors(shm: Pair, value: int) -> None:
    data, region = bytearray(8), shm.b.register(bytearray(8))
    calls: list[Callable[[], Any]] = [
        lambda: shm.to_b.send(data, tag=value),
        lambda: shm.b.recv(data, tag=value),
        lambda: shm.b.recv(data, 0, value),
        lambda: shm.to_b.write(data, region.key(), value),
        lambda: shm.to_b.write(data, region.key(), 0, value),
        lambda: shm.to_b.read(data, region.key(), value),
        lambda: shm.to_b.batch([("send", data, value)]),
        lambda: shm.to_b.batch([("write", data, region.key(), 0, value)]),
    ]
    for call in calls:
        with pytest.raises(crossrail.UsageError, match=f"{value} is not an unsigned number"):
            call()


def test_an_endpoint_of_another_worker_is_no_source(shm: Pair) -> None:
    with pytest.raises(crossrail.UsageError, match="another worker"):
        shm.b.recv(bytearray(8), source=shm.to_b)
