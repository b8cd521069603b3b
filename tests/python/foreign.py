"""Arrays of others, made by hand: DLPack capsules and CUDA array interfaces that say whatever a test wants."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

HOST, CUDA, CUDA_HOST, MANAGED = 1, 2, 3, 13
NOWHERE = 0x7FFF_DEAD_0000
"""An unmapped address: any access raises SIGSEGV."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("id", ctypes.c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Plain(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Said(NamedTuple):
    """Metadata that a tensor exports; by default 64 bytes at an address that must not be accessed."""

    data: int | None = NOWHERE
    device: tuple[int, int] = (CUDA, 0)
    shape: Sequence[int] | None = (64,)
    strides: Sequence[int] | None = None
    ndim: int | None = None
    dtype: tuple[int, int, int] = (1, 8, 1)
    offset: int = 0
    read_only: bool = False
    version: tuple[int, int] = (1, 0)


_lent: dict[int, Dlpack] = {}
"""Whose tensors are out: an exporter must live as long as its tensors, since they call its deleter."""


class Dlpack:
    """An exporter of one tensor. Counts how often its tensors were given back; keeps what it was asked for."""

    def __init__(
        self, said: Said, device: tuple[int, int] | None = None, *, versions: bool = True, deleter: bool = True
    ) -> None:
        self.said = said
        self.device = said.device if device is None else device
        self.versions = versions
        self.asked: list[dict[str, Any]] = []
        self.returned = 0
        self._alive: list[Any] = []
        self._deleter = _Deleter(self._give_back) if deleter else _Deleter()

    def _give_back(self, tensor: int) -> None:
        self.returned += 1
        _lent.pop(tensor, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if "max_version" in options and not self.versions:
            raise TypeError("an exporter from before versions")
        self.asked.append(options)
        said = self.said
        managed: Any = _Versioned() if self.versions else _Plain()
        managed.deleter = self._deleter
        if self.versions:
            managed.major, managed.minor = said.version
            managed.flags = int(said.read_only)
        axes = [
            None if numbers is None else (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
            for numbers in (said.shape, said.strides)
        ]
        tensor = managed.tensor
        tensor.data, tensor.byte_offset = said.data, said.offset
        tensor.device = _Device(*said.device)
        tensor.dtype = _Dtype(*said.dtype)
        tensor.ndim = len(said.shape or ()) if said.ndim is None else said.ndim
        tensor.shape, tensor.strides = axes
        self._alive += [managed, *axes]
        if self._deleter:
            _lent[ctypes.addressof(managed)] = self
        name = b"dltensor_versioned" if self.versions else b"dltensor"
        return _new_capsule(ctypes.addressof(managed), name, None)


class Interface:
    """An object with `__cuda_array_interface__`: by default 64 bytes at an address that must not be accessed."""

    def __init__(self, **entries: Any) -> None:
        said = {"version": 3, "shape": (64,), "typestr": "|u1", "data": (NOWHERE, False), "stream": None} | entries
        self.__cuda_array_interface__ = {name: value for name, value in said.items() if value is not ...}
