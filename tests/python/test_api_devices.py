"""Arrays that say they are on a GPU or that say nonsense, on a machine without one: named errors, and no address that
they name is ever touched."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from foreign import CUDA, CUDA_HOST, HOST, MANAGED, NOWHERE, Dlpack, Interface, Said
from pairs import Pair

import crossrail

REFUSED = (crossrail.UnsupportedError, crossrail.UsageError)


def starts(pair: Pair, array: Any, key: crossrail.RegionKey) -> list[tuple[str, Callable[[], object]]]:
    """Every operation that takes memory."""
    return [
        ("send", lambda: pair.to_b.send(array)),
        ("send", lambda: pair.to_b.batch([("send", array, 0)])),
        ("recv", lambda: pair.b.recv(array)),
        ("recv", lambda: pair.to_b.batch([("recv", array, 0, 0)])),
        ("write", lambda: pair.to_b.write(array, key)),
        ("write", lambda: pair.to_b.batch([("write", array, key, 0, None)])),
        ("read", lambda: pair.to_b.read(array, key)),
        ("read", lambda: pair.to_b.batch([("read", array, key, 0)])),
        ("register", lambda: pair.b.register(array)),
    ]


def still_moves(pair: Pair) -> None:
    target = bytearray(5)
    inbound = pair.b.recv(target)
    pair.to_b.send(b"hello").wait()
    inbound.wait()
    assert target == b"hello"


@pytest.mark.parametrize("kind", [CUDA, MANAGED])
@pytest.mark.parametrize("versions", [True, False])
def test_a_claim_to_be_on_a_gpu(shm: Pair, kind: int, versions: bool) -> None:
    array = Dlpack(Said(device=(kind, 0)), versions=versions)
    region = shm.b.register(bytearray(64))
    why = shm.context.info()["cuda"]["reason"] or "no memory that the CUDA driver knows"
    for operation, start in starts(shm, array, region.key()):
        with pytest.raises(REFUSED, match="cuda:0") as caught:
            start()
        assert why in str(caught.value)
        assert caught.value.operation == operation or array.asked
    assert array.returned == len(array.asked)
    still_moves(shm)
    region.deregister()


def test_a_claim_to_be_on_a_gpu_by_interface(shm: Pair) -> None:
    region = shm.b.register(bytearray(64))
    for version in range(4):
        for operation, start in starts(shm, Interface(version=version), region.key()):
            with pytest.raises(REFUSED, match=r"cuda|CUDA|GPU") as caught:
                start()
            assert caught.value.operation == operation
    still_moves(shm)
    region.deregister()


def test_a_gpu_that_cannot_be(shm: Pair) -> None:
    for ordinal in (-1, 1 << 20, 2**31 - 1):
        with pytest.raises(REFUSED, match="cuda"):
            shm.to_b.send(Dlpack(Said(device=(CUDA, ordinal))))
    with pytest.raises(crossrail.UnsupportedError, match="rocm:3"):
        shm.to_b.send(Dlpack(Said(device=(10, 3))))
    still_moves(shm)


NONSENSE = {
    "negative extent": Said(shape=(4, -1)),
    "no shape": Said(shape=None, ndim=2),
    "negative axes": Said(ndim=-1),
    "too many axes": Said(ndim=2**31 - 1),
    "items overflow": Said(shape=(2**40, 2**40)),
    "bytes overflow": Said(shape=(2**62,), dtype=(2, 64, 1)),
    "longer than memory": Said(shape=(2**61,)),
    "past the end of memory": Said(data=2**64 - 8, shape=(64,)),
    "offset past the end of memory": Said(data=NOWHERE, offset=2**64 - 1),
    "no address": Said(data=None),
    "no address, but an offset": Said(data=None, offset=4096),
    "items of no bits": Said(dtype=(1, 0, 1)),
    "items of no lanes": Said(dtype=(1, 8, 0)),
}
IN_PIECES = {
    "backwards": Said(shape=(64,), strides=(-1,)),
    "every other": Said(shape=(8, 4), strides=(8, 1)),
    "transposed": Said(shape=(8, 4), strides=(1, 8)),
    "all the same": Said(shape=(8, 4), strides=(0, 0)),
    "a stride that overflows": Said(shape=(2, 2), strides=(2**63 - 1, 1)),
}


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("device", [(HOST, 0), (CUDA_HOST, 0)])
@pytest.mark.parametrize(("words", "cases"), [("is malformed", NONSENSE), ("not contiguous in C order", IN_PIECES)])
def test_tensors_that_are_no_piece_of_memory(
    shm: Pair, words: str, cases: dict[str, Said], device: tuple[int, int], versions: bool
) -> None:
    for name, said in cases.items():
        array = Dlpack(said._replace(device=device), versions=versions)
        for start in (shm.to_b.send, shm.b.recv, shm.b.register):
            with pytest.raises(crossrail.UsageError, match=words):
                start(array)
        assert array.returned == 3, f"{name}: given back each time"
    still_moves(shm)


def test_the_strides_are_named(shm: Pair) -> None:
    with pytest.raises(crossrail.UsageError, match=r"shape \[8, 4\] with strides \[1, 8\] \(items\)"):
        shm.to_b.send(Dlpack(IN_PIECES["transposed"]._replace(device=(HOST, 0))))
    with pytest.raises(crossrail.UsageError, match=r"shape \[8, 4\] with strides \[4, 32\] \(bytes\)"):
        shm.to_b.send(Interface(shape=(8, 4), typestr="<f4", strides=(4, 32)))


def test_a_capsule_of_another_device_than_was_said(shm: Pair) -> None:
    for said, there in (((HOST, 0), (CUDA, 0)), ((CUDA_HOST, 0), (MANAGED, 1)), ((HOST, 0), (10, 0))):
        array = Dlpack(Said(device=there), device=said)
        for start in (shm.to_b.send, shm.b.recv):
            with pytest.raises(crossrail.UsageError, match="claims to be on the host, its capsule is on"):
                start(array)
        assert array.returned == 2
    still_moves(shm)


def test_versions_of_dlpack(shm: Pair) -> None:
    source, target = (ctypes.c_char * 64)(*b"tensor" * 10), bytearray(64)
    here = Said(data=ctypes.addressof(source), device=(HOST, 0))
    for said in (
        here,
        here._replace(version=(1, 99)),
        here._replace(read_only=True),
        here._replace(offset=2, shape=(62,)),
    ):
        array = Dlpack(said)
        inbound = shm.b.recv(target)
        shm.to_b.send(array).wait()
        inbound.wait()
        crossrail.wait_all([])
        assert bytes(target)[:58] == bytes(source)[said.offset :][:58]
        assert array.asked == [{"max_version": (1, 0)}] and array.returned == 1
    with pytest.raises(TypeError, match="DLPack version 2"):
        shm.to_b.send(future := Dlpack(here._replace(version=(2, 0))))
    assert future.returned == 1
    with pytest.raises(crossrail.UsageError, match="read-only"):
        shm.b.recv(constant := Dlpack(here._replace(read_only=True)))
    assert constant.returned == 1
    with pytest.raises(crossrail.UsageError, match="is malformed"):
        shm.to_b.send(Dlpack(here._replace(ndim=-1), deleter=False))


def test_tensors_of_no_bytes(pair: Pair) -> None:
    for said in (Said(shape=(0,)), Said(data=None, shape=(0, 5)), Said(shape=(2**62, 2**62, 0))):
        array = Dlpack(said._replace(device=(HOST, 0)))
        inbound = pair.b.recv(array)
        assert pair.to_b.send(array).wait().bytes == 0 and inbound.wait().bytes == 0


def test_items_of_less_than_a_byte(shm: Pair) -> None:
    source = (ctypes.c_char * 2)(*b"ab")
    said = Said(data=ctypes.addressof(source), device=(HOST, 0), shape=(3,), dtype=(1, 4, 1))
    inbound = shm.b.recv(target := bytearray(4))
    assert shm.to_b.send(Dlpack(said)).wait().bytes == 2
    assert inbound.wait().bytes == 2 and target == b"ab\0\0"


class Refusing:
    """Raises when it is asked for its memory, as PyTorch does for a tensor that requires gradients."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (HOST, 0)

    def __dlpack__(self, **_options: Any) -> Any:
        raise self.error


def test_exporters_that_refuse(shm: Pair) -> None:
    for error in (BufferError("use tensor.detach()"), RuntimeError("use tensor.detach()")):
        with pytest.raises(crossrail.UsageError, match=r"does not export its memory.*use tensor\.detach\(\)") as caught:
            shm.to_b.send(Refusing(error))
        assert caught.value.__cause__ is error
    with pytest.raises(KeyboardInterrupt):
        shm.to_b.send(Refusing(KeyboardInterrupt()))
    still_moves(shm)


@pytest.mark.parametrize("device", [None, 2, (2,), ("cuda", 0), (2**40, 0), ValueError])
def test_exporters_that_do_not_say_where(shm: Pair, device: Any) -> None:
    class Vague(Refusing):
        def __dlpack_device__(self) -> Any:
            if device is ValueError:
                raise ValueError("Unknown device type meta")
            return device

    with pytest.raises(crossrail.UsageError, match="the Vague does not export its memory"):
        shm.to_b.send(Vague(BufferError("not even asked")))


def test_pytorchs_items_without_a_dlpack_name_go_as_bytes(shm: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor(Refusing):
        """What PyTorch's tensors have that matters here."""

        requires_grad = False
        size = 1

        def element_size(self) -> int:
            return self.size

        def view(self, dtype: str) -> Any:
            assert dtype == "torch.uint8"
            return np.frombuffer(b"eight bits", "u1")

    tensor = Tensor(BufferError("float8 types are not supported by dlpack"))
    with pytest.raises(crossrail.UsageError, match="float8"):
        shm.to_b.send(tensor)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, uint8="torch.uint8"))
    inbound = shm.b.recv(target := bytearray(10))
    shm.to_b.send(tensor).wait()
    assert inbound.wait().bytes == 10 and target == b"eight bits"
    for name, value in (("requires_grad", True), ("size", 2)):
        with monkeypatch.context() as patch, pytest.raises(crossrail.UsageError, match="float8"):
            patch.setattr(tensor, name, value)
            shm.to_b.send(tensor)


def test_an_object_whose_buffer_is_refused_may_be_a_gpus(shm: Pair) -> None:
    class Both(bytearray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA, 0)

        def __dlpack__(self, **_options: Any) -> Any:
            raise BufferError("asked for it all the same")

    inbound = shm.b.recv(target := bytearray(3))
    shm.to_b.send(Both(b"abc")).wait()
    assert inbound.wait().bytes == 3 and target == b"abc", "memory of the host as long as it lends that"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"shape": (-1,)}, "an extent of -1"),
        ({"shape": (2**40, 2**40)}, "exceeds the maximum size"),
        ({"shape": (2**64,)}, "shape"),
        ({"shape": [64]}, "shape"),
        ({"shape": ("many",)}, "shape"),
        ({"shape": ...}, "has no shape"),
        ({"shape": (1,) * 65}, "65 axes"),
        ({"strides": (1, 1)}, "with strides"),
        ({"strides": (-1,)}, "not contiguous"),
        ({"strides": 7}, "strides 7"),
        ({"typestr": "<f4", "strides": (1,)}, "not contiguous"),
        ({"typestr": ""}, "typestr"),
        ({"typestr": "<f"}, "typestr"),
        ({"typestr": "<f99999999999"}, "typestr"),
        ({"typestr": "é4"}, "typestr"),
        ({"typestr": "|V0"}, "items of no size"),
        ({"typestr": "|O8"}, "Python objects"),
        ({"typestr": "|t1"}, "single bits"),
        ({"typestr": b"|u1"}, "typestr"),
        ({"data": ...}, "has no data"),
        ({"data": (0, False)}, "at address 0"),
        ({"data": (None, False)}, "at address 0"),
        ({"data": (-1, False)}, "data"),
        ({"data": (2**64, False)}, "data"),
        ({"data": (2**64 - 8, False)}, "is malformed"),
        ({"data": b"bytes"}, "data"),
        ({"data": NOWHERE}, "data"),
        ({"version": 4}, "version 4"),
        ({"version": -1}, "version -1"),
        ({"version": "3"}, "version"),
        ({"mask": [1]}, "mask"),
        ({"stream": 0}, "stream 0"),
        ({"stream": -1}, "stream -1"),
        ({"stream": "torch"}, "stream"),
    ],
    ids=str,
)
def test_interfaces_that_make_no_sense(shm: Pair, entries: dict[str, Any], words: str) -> None:
    for start in (shm.to_b.send, shm.b.recv):
        with pytest.raises(crossrail.UsageError, match=words):
            start(Interface(**entries))


def test_interfaces_that_are_none(shm: Pair) -> None:
    class Odd:
        __cuda_array_interface__ = 7

    class Raising:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("use tensor.detach()")

    with pytest.raises(crossrail.UsageError, match="no dictionary"):
        shm.to_b.send(Odd())  # type: ignore[arg-type]
    with pytest.raises(crossrail.UsageError, match=r"tensor\.detach"):
        shm.to_b.send(Raising())
    with pytest.raises(crossrail.UsageError, match="read-only"):
        shm.b.recv(Interface(data=(NOWHERE, True)))


def test_an_interface_of_no_bytes(pair: Pair) -> None:
    empty = Interface(shape=(0, 7), typestr="<f4", data=(0, False))
    inbound = pair.b.recv(empty)
    assert pair.to_b.send(empty).wait().bytes == 0 and inbound.wait().bytes == 0


@pytest.mark.parametrize("stream", ["default", 1.5, -1, 2**64, Ellipsis, b"7"], ids=str)
def test_what_is_no_stream(shm: Pair, stream: Any) -> None:
    region = shm.b.register(target := bytearray(8))
    for start in (
        lambda: shm.to_b.send(b"abc", stream=stream),
        lambda: shm.b.recv(target, stream=stream),
        lambda: shm.to_b.write(b"abc", region.key(), stream=stream),
        lambda: shm.to_b.read(bytearray(8), region.key(), stream=stream),
    ):
        with pytest.raises(crossrail.UsageError, match="is not a CUDA stream"):
            start()
    region.deregister()


class TestMemoryAsATensor:
    def test_numpy_takes_it(self, shm: Pair) -> None:
        memory = shm.context.alloc(4096)
        assert memory.__dlpack_device__() == (HOST, 0)
        array = np.from_dlpack(memory)
        array[:] = np.arange(4096) % 251
        assert bytes(memory) == array.tobytes() and array.dtype == np.uint8
        del memory
        gc.collect()
        assert array.sum() == (np.arange(4096) % 251).sum()

    def test_both_forms_of_capsules(self, shm: Pair) -> None:
        memory = shm.context.alloc(10)
        for asked, name in (
            ({}, "dltensor"),
            ({"max_version": (0, 8)}, "dltensor"),
            ({"max_version": (1, 1)}, "dltensor_versioned"),
        ):
            capsule = memory.__dlpack__(**asked)  # type: ignore[arg-type]
            assert f'"{name}"' in repr(capsule)
            # Nobody takes it: its own destructor gives it back.
            del capsule

    def test_it_comes_back_as_it_went(self, shm: Pair) -> None:
        class Alone:
            """Memory seen through DLPack alone."""

            def __init__(self, memory: crossrail.Memory, versions: bool) -> None:
                self.memory, self.versions = memory, versions

            def __dlpack_device__(self) -> tuple[int, int]:
                return self.memory.__dlpack_device__()

            def __dlpack__(self, **options: Any) -> Any:
                if not self.versions:
                    options.pop("max_version", None)
                return self.memory.__dlpack__(**options)

        for versions in (True, False):
            memory = shm.context.alloc(3)
            memoryview(memory)[:] = b"abc"
            inbound = shm.b.recv(target := bytearray(3))
            shm.to_b.send(Alone(memory, versions)).wait()
            assert inbound.wait().bytes == 3 and target == b"abc"

    def test_none_of_it(self, shm: Pair) -> None:
        assert np.from_dlpack(shm.context.alloc(0)).shape == (0,)

    def test_what_is_not_done(self, shm: Pair) -> None:
        memory = shm.context.alloc(10)
        for asked in ({"dl_device": (CUDA, 0)}, {"copy": True}):
            with pytest.raises(BufferError, match="without a copy"):
                memory.__dlpack__(**asked)  # type: ignore[arg-type]
        memory.__dlpack__(dl_device=(HOST, 0), copy=False)
        assert not hasattr(memory, "__cuda_array_interface__")

    @pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999999999", "CPU", -1, True])
    def test_what_is_no_device(self, shm: Pair, device: Any) -> None:
        with pytest.raises(crossrail.UsageError, match="is no device"):
            shm.context.alloc(10, device)

    def test_the_host_by_name(self, shm: Pair) -> None:
        assert shm.context.alloc(10, "cpu").device == shm.context.alloc(10, device=None).device == "cpu"
        assert crossrail.Memory(shm.context, 10, "cpu").nbytes == 10

    def test_a_gpu_that_is_not_there(self, shm: Pair) -> None:
        cuda = shm.context.info()["cuda"]
        for device in ("cuda:4096", 4096):
            with pytest.raises(REFUSED, match=r"4096|CUDA|libcuda") as caught:
                shm.context.alloc(10, device)
            assert cuda["present"] or (cuda["reason"] or "?") in str(caught.value)

    def test_bytes_in_and_out(self, shm: Pair) -> None:
        memory = shm.context.alloc(10)
        memory.fill_from(b"abc", 7)
        memory.fill_from(np.arange(2, dtype="u2"))
        memory.copy_to(target := bytearray(4), 6)
        assert target == b"\0abc" and bytes(memory) == b"\0\0\1\0\0\0\0abc"
        memory.fill_from(b"", 10)
        memory.copy_to(bytearray(), 10)
        for start in (lambda: memory.fill_from(b"abc", 8), lambda: memory.copy_to(bytearray(11))):
            with pytest.raises(crossrail.UsageError, match="of a memory of 10 bytes"):
                start()
        with pytest.raises(crossrail.UsageError, match="read-only"):
            memory.copy_to(b"constant")


def test_what_info_says_of_cuda(shm: Pair) -> None:
    cuda = shm.context.info()["cuda"]
    assert json.loads(json.dumps(cuda)) == cuda
    assert cuda["present"] == (cuda["reason"] is None)
    assert len(cuda["peer_access"]) == len(cuda["devices"])
    if not cuda["present"]:
        assert cuda["reason"] and cuda["driver"] is None and cuda["kernel_cache"] is None


def test_a_stream_orders_nothing_in_host_memory(shm: Pair) -> None:
    for data in (b"abc", np.zeros(3), shm.context.alloc(3), Dlpack(Said(device=(HOST, 0)))):
        with pytest.raises(crossrail.UsageError, match="memory of the host"):
            shm.to_b.send(data, stream=0)
    still_moves(shm)
