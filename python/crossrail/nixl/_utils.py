"""Helpers of NIXL's own tests: plain memory by address. Not for programs."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

_ALIGNMENT = 4096


def malloc_passthru(size: int) -> int:
    """Allocates `size` bytes, aligned to pages; the address."""
    address = _libc.aligned_alloc(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
    if not address:
        raise MemoryError(f"{size} bytes")
    return int(address)


def free_passthru(address: int) -> None:
    """Frees what `malloc_passthru` has allocated."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills memory with the byte 0xba."""
    ctypes.memset(address, 0xBA, size)


def verify_transfer(address1: int, address2: int, size: int) -> None:
    """Raises AssertionError unless both pieces of memory are equal."""
    if ctypes.string_at(address1, size) != ctypes.string_at(address2, size):
        raise AssertionError(f"{size} bytes at {address1:#x} and {address2:#x} differ")
