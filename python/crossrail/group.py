"""A group of ranks: who is in it, what they tell each other, where they meet."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable
from types import TracebackType

from crossrail import _native
from crossrail.errors import CrossrailError
from crossrail.records import Member, RankState

__all__ = ["Group"]

_joined: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """One process's place in a group of ranks.

    `rank`, `size`, `local_rank` and `store` come from the arguments, from CROSSRAIL_STORE with RANK and WORLD_SIZE, or
    from the variables that torchrun, Slurm and Open MPI set; `bootstrap` says which. A rank that nothing names is the
    lowest free one; `size` is the most ranks there may be. Rank 0 also runs the built-in store when the address is its
    own and nobody listens there. `Group(size=1)` is this process alone.

    `lease`: how many seconds after its last sign of life a member counts as dead. `timeout`: seconds that joining, and
    every wait without a limit of its own, may take at most (None: CROSSRAIL_TIMEOUT). `node`: members of equal node
    share memory (None: this machine and network namespace). `context` gives the settings.

    While the store is unreachable, what needs no store goes on; a line on stderr and `control_error` say so.
    As a context manager, it leaves at the end. Any thread may use it.

    Raises ConfigError (nothing says where the store is; a variable is missing or bad), UsageError (a bad name, rank,
    size or lease), UnreachableError (no store there in time), MismatchError (the rank is taken, or another rank was
    told another size), ExhaustedError (all ranks are taken), RefusedError (secret).
    """

    def __init__(
        self,
        *,
        name: str = "default",
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        node: str | None = None,
        store: str | None = None,
        lease: float = 1.0,
        timeout: float | None = None,
        context: _native.Context | None = None,
    ) -> None:
        self._context = context if context is not None else _native.Context()
        self._native = _native.Group(self._context, name, rank, size, local_rank, node, store, lease, timeout)
        _joined.add(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    @property
    def context(self) -> _native.Context:
        """The context whose settings it has."""
        return self._context

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._native.rank

    @property
    def size(self) -> int:
        """The most ranks the group may have; they go from 0 to `size - 1`."""
        return self._native.size

    @property
    def local_rank(self) -> int:
        """This process's number among the members of its node."""
        return self._native.local_rank

    @property
    def node(self) -> str:
        """Members of equal node share memory."""
        return self._native.node

    @property
    def name(self) -> str:
        """The group's name."""
        return self._native.name

    @property
    def bootstrap(self) -> str:
        """What said rank, size and store, in one line."""
        return self._native.bootstrap

    @property
    def store_address(self) -> str:
        """Where the store is: `tcp://host:port` or `etcd://host:port[,host:port]`."""
        return self._native.store_address

    @property
    def serves_store(self) -> bool:
        """Whether the store runs in this process."""
        return self._native.serves_store

    @property
    def control_error(self) -> CrossrailError | None:
        """Why the store cannot be reached at the moment; None: it can, as far as is known."""
        return self._native.control_error

    @property
    def changes(self) -> int:
        """How often other members came, left or died since this process joined."""
        return self._native.changes

    def barrier(self, name: str = "", ranks: Iterable[int] | None = None, timeout: float | None = None) -> None:
        """Waits until all of `ranks` (None: all that there may be), this one among them, have come.

        May be used any number of times; each name and set of ranks has its own.

        Raises TimeoutError naming those that did not come, PeerDeadError at once when one has died or left,
        UsageError, ClosedError, UnreachableError (the store).
        """
        self._native.barrier(name, self._ranks(ranks), timeout)

    def publish(self, key: str, value: bytes) -> None:
        """Tells the others `value` (64 KiB at most) under `key`, until withdrawn or this process leaves or dies."""
        self._native.publish(key, value)

    def withdraw(self, key: str) -> None:
        """Takes back what was told under `key`, if there is anything."""
        self._native.withdraw(key)

    def collect(self, key: str, ranks: Iterable[int] | None = None, timeout: float | None = None) -> list[bytes]:
        """What each of `ranks` (None: all that there may be) tells under `key`; waits for those that have not yet.

        Raises as `barrier`. To wait for the successor of a rank that died, `wait_members` first.
        """
        return self._native.collect(key, self._ranks(ranks), timeout)

    def wait_members(self, ranks: Iterable[int] | None = None, timeout: float | None = None) -> None:
        """Waits until all of `ranks` are in the group; those that died or left count as not there yet.

        Raises TimeoutError naming those that did not come, UsageError, ClosedError.
        """
        self._native.wait_members(self._ranks(ranks), timeout)

    def members(self) -> list[Member]:
        """Who is in the group now, by rank, this process included."""
        return [Member(*member) for member in self._native.members()]

    def state(self, rank: int) -> RankState:
        """What is known of a rank; asks nobody."""
        return RankState(*self._native.state(rank))

    def wait_change(self, timeout: float | None = None) -> bool:
        """Waits until another member comes, leaves or dies; whether one did since the last call (or since joining)."""
        return self._native.wait_change(timeout)

    def leave(self) -> None:
        """Leaves; what this rank told is gone, its number is free. The second time nothing happens.

        A process that serves the store waits up to 2 s for the others to leave too, then ends the store.
        """
        self._native.leave()

    def _ranks(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(self.size) if ranks is None else ranks)

    def __repr__(self) -> str:
        return f"<crossrail.Group {self.name!r} rank {self.rank} of {self.size}, {self.store_address}>"


@atexit.register
def _leave_all() -> None:
    """The others need not wait for a lease to end when an interpreter does."""
    for group in list(_joined):
        group.leave()
