"""A group of ranks: its members, the values they publish, and the barriers at which they meet."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable
from types import TracebackType

import crossrail._native as _native
from crossrail.errors import CrossrailError
from crossrail.records import Member, RankState

__all__ = ["Group"]

_joined: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """The membership of this process in a group of ranks.

    Rank, size, local rank and store come from the arguments, from CROSSRAIL_STORE
    with RANK and WORLD_SIZE, or from the variables that torchrun, Slurm and Open MPI
    set; `bootstrap` says which. ``Group(size=1)`` is this process alone. As a
    context manager, it leaves the group at the end of the block.

    Parameters
    ----------
    name : str
        Name of the group; several groups can share a store.
    rank : int, optional
        Number of this process. If nothing specifies it, the lowest free one.
    size : int, optional
        Maximum number of ranks.
    local_rank : int, optional
        Number of this process among the members of its node.
    node : str, optional
        Members with the same node share memory. By default this machine and
        network namespace, and the name in CROSSRAIL_NODE.
    store : str, optional
        Address of the store, ``tcp://host:port`` or ``etcd://host:port``. Rank 0
        also runs the built-in store if the address is its own and nothing listens
        there.
    lease : float
        Seconds without a sign of life after which a member counts as dead.
    timeout : float, optional
        Maximum seconds for joining, and for every wait without a timeout of its
        own; CROSSRAIL_TIMEOUT by default.
    context : Context, optional
        Source of the settings; a new one by default.

    Raises
    ------
    ConfigError
        Nothing specifies the store, or a variable is missing or malformed.
    UsageError
        A name, rank, size or lease is invalid.
    UnreachableError
        The store could not be reached in time.
    MismatchError
        The rank is taken, or another rank specified another size.
    ExhaustedError
        All ranks are taken.
    RefusedError
        The store has another secret.

    Notes
    -----
    Thread safety: any thread may use the group.

    While the store is unreachable, everything that does not need it continues. A
    line on stderr and `control_error` report the outage.
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
        """The context whose settings the group uses."""
        return self._context

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._native.rank

    @property
    def size(self) -> int:
        """Maximum number of ranks; ranks are numbered from 0 to ``size - 1``."""
        return self._native.size

    @property
    def local_rank(self) -> int:
        """The number of this process among the members of its node."""
        return self._native.local_rank

    @property
    def node(self) -> str:
        """The node of this process; members with the same node share memory."""
        return self._native.node

    @property
    def name(self) -> str:
        """The name of the group."""
        return self._native.name

    @property
    def bootstrap(self) -> str:
        """Where rank, size and store were read from, in one line."""
        return self._native.bootstrap

    @property
    def store_address(self) -> str:
        """Address of the store: ``tcp://host:port`` or ``etcd://host:port[,host:port]``."""
        return self._native.store_address

    @property
    def serves_store(self) -> bool:
        """Whether this process runs the store."""
        return self._native.serves_store

    @property
    def control_error(self) -> CrossrailError | None:
        """Why the store cannot be reached at present; None if it can, as far as is known."""
        return self._native.control_error

    @property
    def changes(self) -> int:
        """Number of times that another member joined, left or died since this process joined."""
        return self._native.changes

    def barrier(self, name: str = "", ranks: Iterable[int] | None = None, timeout: float | None = None) -> None:
        """Wait until all of `ranks`, which include this one, have called this.

        May be repeated. Each combination of name and ranks is a barrier of its own.

        Parameters
        ----------
        name : str
            Name of the barrier.
        ranks : iterable of int, optional
            Participants; by default all ranks up to `size`.
        timeout : float, optional
            Maximum seconds to wait; by default the timeout of the group.

        Raises
        ------
        TimeoutError
            Some ranks did not arrive in time; the text names them.
        PeerDeadError
            A participant died or left; raised at once.
        UnreachableError
            The store cannot be reached.
        UsageError, ClosedError
        """
        self._native.barrier(name, self._ranks(ranks), timeout)

    def publish(self, key: str, value: bytes) -> None:
        """Publish `value` under `key` for the other ranks.

        It stays until `withdraw`, or until this process leaves or dies.

        Parameters
        ----------
        key : str
        value : bytes
            At most 64 KiB.

        Raises
        ------
        UsageError
            The value is too long, or the key is invalid.
        UnreachableError
            The store cannot be reached.
        ClosedError
        """
        self._native.publish(key, value)

    def withdraw(self, key: str) -> None:
        """Withdraw the value that this rank published under `key`, if any.

        Raises UnreachableError if the store cannot be reached, and ClosedError.
        """
        self._native.withdraw(key)

    def collect(self, key: str, ranks: Iterable[int] | None = None, timeout: float | None = None) -> list[bytes]:
        """Return the values that `ranks` published under `key`, waiting for missing ones.

        To wait for the successor of a rank that died, call `wait_members` first.

        Parameters
        ----------
        key : str
        ranks : iterable of int, optional
            By default all ranks up to `size`.
        timeout : float, optional
            Maximum seconds to wait; by default the timeout of the group.

        Returns
        -------
        list of bytes
            One value per rank, in the order of `ranks`.

        Raises
        ------
        TimeoutError, PeerDeadError, UnreachableError, UsageError, ClosedError
            As for `barrier`.
        """
        return self._native.collect(key, self._ranks(ranks), timeout)

    def wait_members(self, ranks: Iterable[int] | None = None, timeout: float | None = None) -> None:
        """Wait until all of `ranks` are members. Ranks that died or left count as absent.

        Parameters
        ----------
        ranks : iterable of int, optional
            By default all ranks up to `size`.
        timeout : float, optional
            Maximum seconds to wait; by default the timeout of the group.

        Raises
        ------
        TimeoutError
            Some ranks did not join in time; the text names them.
        UsageError, ClosedError
        """
        self._native.wait_members(self._ranks(ranks), timeout)

    def members(self) -> list[Member]:
        """The present members in order of ranks, including this process."""
        return [Member(*member) for member in self._native.members()]

    def state(self, rank: int) -> RankState:
        """The last known state of `rank`, without asking the store. Raises nothing: an unknown rank is absent."""
        return RankState(*self._native.state(rank))

    def wait_change(self, timeout: float | None = None) -> bool:
        """Wait until another member joins, leaves or dies.

        Parameters
        ----------
        timeout : float, optional
            Maximum seconds to wait; by default the timeout of the group.

        Returns
        -------
        bool
            Whether there was a change since the last call, or since joining. False after the timeout; nothing is
            raised.
        """
        return self._native.wait_change(timeout)

    def leave(self) -> None:
        """Leave the group. Calling it again has no effect.

        The values of this rank are withdrawn and its number is free. A process that
        runs the store waits up to 2 s for the other members to leave, then stops it.
        """
        self._native.leave()

    def _ranks(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(self.size) if ranks is None else ranks)

    def __repr__(self) -> str:
        return f"<crossrail.Group {self.name!r} rank {self.rank} of {self.size}, {self.store_address}>"


@atexit.register
def _leave_all() -> None:
    """Leaves every group at exit, so that the others need not wait for a lease to expire."""
    for group in list(_joined):
        group.leave()
