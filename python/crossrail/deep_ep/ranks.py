"""The ranks of a buffer: rendezvous, and small host-side exchanges."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import itertools
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from crossrail import _native
from crossrail._drop_in import beyond_loopback, has_secret, wildcard
from crossrail.deep_ep.checks import wrong
from crossrail.errors import CrossrailError, ProtocolError
from crossrail.group import Group

__all__ = ["Peers", "Ranks", "hosts_of", "joined"]

_HELLO = 1
"""The tag of a connection's first message; exchanges have larger ones."""
_IN_A_CALL = 8
"""Tags per call: one more than the maximum number of exchanges in a call."""
_LAST_S = 2.0
"""How long rank 0 waits for the others to leave before its store ends."""
_numbers: weakref.WeakKeyDictionary[Group, Iterator[int]] = weakref.WeakKeyDictionary()
"""Numbers the buffers of each group, in order of creation."""


class Ranks(Protocol):
    """Host-side exchanges with the other ranks."""

    rank: int
    size: int

    def exchange(self, message: bytes, /) -> list[bytes]:
        """All-gather of equally long messages: one per rank, this one included."""

    def next_call(self) -> None:
        """Enters the next collective call: advances the tag, so that unread messages of earlier calls cannot match."""

    def close(self) -> None:
        """Ends all connections."""


@dataclass
class Joined:
    """A crossrail.Group, the name of a buffer in it, and the resources that the buffer owns."""

    group: Group
    name: str
    owned: contextlib.ExitStack


def joined(group: Any, comm: Any) -> Joined:
    """The crossrail.Group of `group`: that itself, or one over the ranks of a process group or of an MPI communicator.

    Raises UsageError for something else.
    """
    if isinstance(group, Group):
        number = next(_numbers.setdefault(group, itertools.count()))
        return Joined(group, f"deep_ep-{number}", contextlib.ExitStack())
    if group is not None and callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None)):
        return _rendezvous(group.rank(), group.size(), lambda message: _all_gather(group, message))
    for maybe in (comm, group):
        if hasattr(maybe, "Get_rank") and hasattr(maybe, "allgather"):
            return _rendezvous(maybe.Get_rank(), maybe.Get_size(), maybe.allgather)
    kind = type(comm if group is None else group).__name__
    raise wrong("Buffer", f"group is a {kind}", "a torch.distributed process group, a crossrail.Group, or comm= of MPI")


def _all_gather(group: Any, message: Any) -> list[Any]:
    """All-gathers an object over a process group."""
    distributed = importlib.import_module("torch.distributed")
    gathered: list[Any] = [None] * group.size()
    distributed.all_gather_object(gathered, message, group=group)
    return gathered


def _rendezvous(rank: int, size: int, gather: Callable[[Any], list[Any]]) -> Joined:
    """A group of the ranks that `gather` reaches; rank 0 runs its store for the lifetime of the buffer."""
    hosts = gather(_host())
    far = len(set(hosts)) > 1
    context, owned = _native.Context(), contextlib.ExitStack()
    offer: Any = None
    if rank == 0:
        try:
            offer = _offer(context, owned, far)
        except Exception as error:  # sent to the other ranks, which wait for the offer
            offer = error
    offer = gather(offer)[0]
    if isinstance(offer, Exception):
        raise offer
    address, secret = offer
    if secret is not None:
        context = _native.Context(secret=secret)
    with contextlib.ExitStack() as undo:
        undo.callback(owned.close)
        group = Group(name="deep_ep", rank=rank, size=size, store=address, context=context)
        undo.pop_all()
    owned.callback(group.leave)
    if rank == 0:
        owned.callback(_wait_for_others, group)
    return Joined(group, "deep_ep", owned)


def _wait_for_others(group: Group) -> None:
    """Waits up to `_LAST_S` for the other ranks to leave, which need rank 0's store for that."""
    deadline = time.monotonic() + _LAST_S
    with contextlib.suppress(CrossrailError):
        while len(group.members()) > 1 and (left := deadline - time.monotonic()) > 0:
            group.wait_change(left)


def _host() -> str:
    """An id of this boot and network namespace: equal for processes that share a loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + str(Path("/proc/self/ns/net").readlink())
    except OSError:  # hidden from a container: its name will do
        return socket.gethostname()


def hosts_of(joined: Joined) -> list[bytes]:
    """A name for the host of each rank, the same for ranks of one host."""
    key = f"{joined.name}/host"
    joined.group.publish(key, _host().encode())
    return joined.group.collect(key)


def _offer(context: _native.Context, owned: contextlib.ExitStack, far: bool) -> tuple[str, str | None]:
    """Starts a store; its address, and the secret of ranks on several machines where none was set."""
    if not far:
        host = _native.loopback()
        server = _native.StoreServer(context, f"[{host}]:0" if ":" in host else f"{host}:0")
        owned.callback(server.close)
        return server.address, None
    secret = None
    if not has_secret(context):
        secret = secrets.token_hex(32)
        context = _native.Context(secret=secret)
    server = _native.StoreServer(context, _own_place())
    owned.callback(server.close)
    return server.address, secret


def _own_place() -> str:
    """An address beyond loopback that this machine's name has, of IPv4 if there is one; else all addresses."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, *_, place in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            host = ipaddress.ip_address(str(place[0]).partition("%")[0])
            if family in (socket.AF_INET, socket.AF_INET6) and not host.is_loopback and not host.is_link_local:
                return f"[{host}]:0" if host.version == 6 else f"{host}:0"
    return wildcard()


class Peers:
    """Full mesh of connections for small messages, over shared memory or the network."""

    def __init__(self, group: Group, name: str) -> None:
        self.rank, self.size = group.rank, group.size
        self._number = _HELLO
        self._patience = group.context.timeout
        listen = beyond_loopback(group.context)
        self._worker = _native.Worker(group.context, name=f"{name}, rank {self.rank}", listen=listen)
        self._endpoints: dict[int, _native.Endpoint] = {}
        try:
            self._connect(group, f"{name}/exchange")
        except BaseException:
            self.close()
            raise

    def _connect(self, group: Group, key: str) -> None:
        """The later ranks connect, each to the nearest first: none serves all at once. The earlier ones accept."""
        group.publish(key, self._worker.address())
        addresses = group.collect(key)
        hellos = []
        for rank in reversed(range(self.rank)):
            endpoint = self._endpoints[rank] = self._worker.connect(addresses[rank])
            hellos.append(endpoint.send(struct.pack("<I", self.rank), _HELLO))
        for _ in range(self.rank + 1, self.size):
            endpoint = self._worker.accept()
            hello = bytearray(4)
            self._worker.recv(hello, _HELLO, source=endpoint).wait()
            rank = struct.unpack("<I", hello)[0]
            if not self.rank < rank < self.size or rank in self._endpoints:
                detail = f"{endpoint.peer} calls itself rank {rank} of {self.size}, which it cannot be"
                raise ProtocolError(f"crossrail.deep_ep: {detail}", operation="exchange", detail=detail)
            self._endpoints[rank] = endpoint
        for sent in hellos:
            sent.wait()

    def next_call(self) -> None:
        """See `Ranks`."""
        self._number = (self._number // _IN_A_CALL + 1) * _IN_A_CALL

    def exchange(self, message: bytes) -> list[bytes]:
        """See `Ranks`. Raises CrossrailError that names a rank that is lost or in another call."""
        self._number += 1
        received = {rank: bytearray(len(message)) for rank in self._endpoints}
        receives = {
            rank: self._worker.recv(received[rank], self._number, source=endpoint)
            for rank, endpoint in self._endpoints.items()
        }
        sends = [endpoint.send(message, self._number) for endpoint in self._endpoints.values()]
        for rank, request in receives.items():
            try:
                # A rank may still be in an operation that waits for others, up to its timeout.
                request.wait(2 * self._patience)
            except CrossrailError as error:
                detail = f"rank {rank} is not at the same call: {error.detail}"
                raise type(error)(f"crossrail.deep_ep: {detail}", operation="exchange", detail=detail) from error
        for request in sends:
            request.wait()
        return [bytes(received[rank]) if rank in received else message for rank in range(self.size)]

    def close(self) -> None:
        """See `Ranks`."""
        self._endpoints.clear()
        self._worker.close()
