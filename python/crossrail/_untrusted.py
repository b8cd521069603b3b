"""Bytes of a peer: whatever is wrong with them is one of Crossrail's errors, which names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crossrail.errors import CrossrailError, ProtocolError


@contextmanager
def parsing(malformed: Callable[[], CrossrailError]) -> Iterator[None]:
    """Raises `malformed` in place of anything that Python or NumPy raises while it parses bytes of a peer.

    Nothing else belongs inside: a peer must not be able to hide an error of this end.
    """
    try:
        yield
    except CrossrailError:
        raise
    except Exception:  # of any class: a peer chooses which, MemoryError and RecursionError among them
        raise malformed() from None


def of_rank(operation: str, rank: int, message: bytes) -> Callable[[], CrossrailError]:
    """The error of a rank that sent something else, for `parsing`."""

    def error() -> CrossrailError:
        detail = f"{len(message)} bytes of rank {rank} are not a message of this operation"
        return ProtocolError(f"{operation}: {detail}", operation=operation, detail=detail, peer=f"rank {rank}")

    return error
