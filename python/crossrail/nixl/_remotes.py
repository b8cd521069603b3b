"""Remote agents: what their metadata says, and the connections to them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import crossrail
from crossrail.nixl._kinds import (
    equivalent,
    error,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
    translated,
)
from crossrail.nixl.logging import get_logger

MAGIC = b"crossrail-nixl 1\n"
_KEPT_MAX = 64  # connections of removed agents, which are often added again
_CLOSE_S = 1.0
_SENDERS_MAX = 1024  # names of senders, beyond which those that have ended are forgotten

logger = get_logger("remotes")


class Remote:
    """A remote agent: its metadata, and its connection once established."""

    def __init__(self, name: str, description: crossrail.Description) -> None:
        self.name = name
        self.description = description
        self.connecting = threading.Lock()
        self.endpoint: crossrail.Endpoint | None = None
        self.removed = False


class Remotes:
    """The remote agents that one agent knows. `describe` returns the description of the agent itself.

    The lock is never held while a connection is made.
    """

    def __init__(self, name: str, worker: crossrail.Worker, describe: Callable[[], bytes]) -> None:
        self._name, self._worker, self._describe = name, worker, describe
        self._lock = threading.RLock()
        self._known: dict[str, Remote] = {}
        self._senders: dict[str, tuple[int, int]] = {}
        """Of agents that send without being known: worker and endpoint of the process that has the name."""
        self._kept: OrderedDict[int, crossrail.Endpoint] = OrderedDict()

    def load(self, metadata: bytes) -> str:
        """Adds the agent of this metadata, or merges it into the known agent; returns the agent's name."""
        if not metadata.startswith(MAGIC):
            theirs = metadata.startswith(b"nixlSerDes")
            why = "it is NVIDIA's nixl's; both ends need crossrail-nixl" if theirs else "not the metadata of an agent"
            raise error(nixlMismatchError, f"add_remote_agent: {why}")
        try:
            description = crossrail.Description(metadata[len(MAGIC) :])
        except crossrail.CrossrailError as cause:
            raise error(nixlMismatchError, str(cause)) from cause
        name = description.name
        if name == self._name:
            raise error(nixlInvalidParamError, "add_remote_agent: this agent's own metadata")
        with self._lock:
            known = self._known.get(name)
            gone = known is not None and known.endpoint is not None and not known.endpoint.is_alive
            if known is None or gone:
                remote = Remote(name, description)
                remote.endpoint = self._kept.pop(description.generation, None)
                if known is not None:
                    known.removed = True
                self._known[name] = remote
            elif known.description.generation == description.generation:
                with translated():
                    known.description = known.description.merge(description)
            else:
                raise error(
                    nixlNotAllowedError,
                    f"add_remote_agent: {name} is known as another process; remove it first",
                )
        return name

    def remove(self, name: str) -> bool:
        """Forgets an agent; False if it is unknown. Its connection stays cached."""
        with self._lock:
            remote = self._known.pop(name, None)
            if remote is None:
                return False
            remote.removed = True
            evicted = []
            if remote.endpoint is not None and remote.endpoint.is_alive:
                self._kept[remote.description.generation] = remote.endpoint
                while len(self._kept) > _KEPT_MAX:
                    evicted.append(self._kept.popitem(last=False)[1])
        for endpoint in evicted:
            with suppress(crossrail.CrossrailError):
                endpoint.close(_CLOSE_S)
        return True

    def forget(self, metadata: bytes) -> None:
        """A peer withdraws its own metadata; ignored unless it names the known process."""
        try:
            description = crossrail.Description(metadata[len(MAGIC) :])
        except crossrail.CrossrailError:
            return
        with self._lock:
            known = self._known.get(description.name)
            if known is not None and known.description.generation == description.generation:
                self.remove(description.name)

    def is_from(self, notice: crossrail.Notice) -> bool:
        """True if the process that owns the name sent this notice.

        The owner is the process that the metadata describes, until its connection ends; of an agent without metadata,
        the first process that has sent under this name, as long as it lives. Notices of other processes are ignored:
        programs free memory because of them.
        """
        name, worker = notice.peer, (notice.generation, notice.endpoint)
        with self._lock:
            known = self._known.get(name)
            if name == self._name:
                owner = crossrail.Description(self._describe()).generation
            elif known is not None and (known.endpoint is None or known.endpoint.is_alive):
                owner = known.description.generation
            else:
                held = self._senders.get(name, worker)
                if held[0] != notice.generation and self._worker.endpoint(held[1]) is None:
                    held = worker
                self._keep_sender(name, worker if held[0] == notice.generation else held)
                owner = held[0]
        if owner != notice.generation:
            logger.warning("a notification in the name of agent %s is ignored: it comes from another process", name)
        return owner == notice.generation

    def _keep_sender(self, name: str, worker: tuple[int, int]) -> None:
        if len(self._senders) >= _SENDERS_MAX and name not in self._senders:
            living = {endpoint.id for endpoint in self._worker.endpoints()}
            self._senders = {one: held for one, held in self._senders.items() if held[1] in living}
        self._senders[name] = worker

    def known(self, name: str) -> Remote | None:
        with self._lock:
            return self._known.get(name)

    def named(self, name: str) -> Remote:
        """The remote agent of this name; this agent itself for its own."""
        with self._lock:
            remote = self._known.get(name)
            if name == self._name:
                with translated():
                    description = crossrail.Description(self._describe())
                if remote is None:
                    remote = self._known[name] = Remote(name, description)
                remote.description = description
        if remote is None:
            raise error(nixlNotFoundError, f"no metadata of remote agent {name}: add_remote_agent first")
        return remote

    def connected(self, remote: Remote) -> crossrail.Endpoint:
        """The endpoint of a remote agent, connected on first use."""
        with remote.connecting:
            if remote.endpoint is None:
                try:
                    remote.endpoint = self._worker.connect(remote.description.address)
                except crossrail.CrossrailError as cause:
                    raise self.failed(remote, cause) from cause
            return remote.endpoint

    def failed(self, remote: Remote, cause: crossrail.CrossrailError) -> Exception:
        """NIXL's exception for `cause`; drops the metadata of an agent that is gone."""
        translation = equivalent(cause)
        if isinstance(translation, nixlRemoteDisconnectError):
            with self._lock:
                remote.removed = True
                if self._known.get(remote.name) is remote:
                    del self._known[remote.name]
        return translation
