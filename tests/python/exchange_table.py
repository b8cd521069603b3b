"""DLPack's table of C functions about tensors, as PyTorch has it from version 2.10 on, for host_torch's tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

__all__ = ["ATTRIBUTE", "Table"]

ATTRIBUTE = "__dlpack_c_exchange_api__"
NAME = b"dlpack_exchange_api"
CODES = {"bool": 6, "uint8": 1, "float8_e4m3fn": 10, "bfloat16": 4}
"""DLPack's kinds, where NumPy's letters do not tell."""
LETTERS = {"i": 0, "u": 1, "f": 2}
HOST = 1
MAJOR, MINOR = 1, 3


class Described(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


LOOK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Described))


class Functions(ctypes.Structure):
    """`DLPackExchangeAPI`; of the functions, the one that describes a tensor."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("former", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("look", LOOK),
        ("stream", ctypes.c_void_p),
    ]


tables: list[Table] = []
"""All of them: a table stays for as long as the process runs."""


class Table:
    """A table, and how often it was used. `refuses`: tensors that it does not describe."""

    def __init__(self, major: int = MAJOR) -> None:
        tables.append(self)
        self.looks = 0
        self.refuses: list[Any] = []
        self._functions = Functions(version=(major, MINOR), look=LOOK(self._look))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule = new(ctypes.addressof(self._functions), NAME, None)

    def _look(self, tensor: Any, out: Any) -> int:
        self.looks += 1
        if any(tensor is one for one in self.refuses):
            return -1
        array, dtype = tensor.array, tensor.dtype
        steps = [step // array.itemsize for step in array.strides]
        tensor.extents = np.array([*array.shape, *steps], np.int64)  # which live as long as the tensor
        at = int(tensor.extents.ctypes.data)
        said = out.contents
        said.data, said.ndim, said.byte_offset = int(array.ctypes.data), array.ndim, 0
        said.device[:] = (HOST, 0)
        said.code = CODES.get(dtype.name, LETTERS.get(array.dtype.kind, 3))
        said.bits, said.lanes = 8 * array.itemsize, 1
        said.shape, said.strides = at, at + 8 * array.ndim
        return 0
