"""Placement of the ranks of a group: how many this command starts, their processors and GPUs, and the group's store.

One command starts the ranks of one node. With several nodes, the command runs once on each, with the same options
except for the number of the node; the first node hosts the store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import crossrail
from crossrail._native import StoreServer, cpu_quota, host_memory
from crossrail_tools.report.units import counted, format_bytes

from .failure import Failure, UsageFailure, print_notice
from .launcher import GROUP, Launch, find_launch
from .options import Pin
from .parsing import STORE_PORT, Group, Parser, count, join, permitted, positive, resolve

MOST_RANKS = 1024

OVER_S = 60.0
"""How long the commands of a launcher's job wait for each other at the end."""

NODE_OPTIONS = ("num_processes", "processes", "world_size", "rank", "master_addr", "master_port", "what")
"""Names of the parsed arguments that `add_nodes` declares and `placement` reads."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet: the address of the store and the name of their group; the commands of several nodes."""

    store: str
    name: str
    commands: crossrail.Group | None = None


@dataclass(frozen=True)
class Placement:
    """``num_processes`` ranks on each of ``world_size`` nodes, of which this is number ``node``.

    ``store`` is the address of their store, which the first node's command hosts unless it is ``external``; None if the
    launcher's variables place it, or if this command starts one for itself. ``source`` names the variables that these
    values were read from. With a ``launch`` a node is one process of the launcher's job; several may be on one machine.
    """

    num_processes: int
    world_size: int = 1
    node: int = 0
    store: str | None = None
    external: bool = False
    source: str = ""
    launch: Launch | None = None

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.world_size if self.launch is None else self.launch.machines

    @property
    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return self.num_processes * (1 if self.launch is None else self.launch.local_size)

    def local_index(self, rank: int) -> int:
        """The number of a rank that this command starts among those of this machine."""
        before = 0 if self.launch is None else self.launch.local_rank * self.num_processes
        return before + rank - self.ranks[0]

    @property
    def size(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_processes * self.world_size

    @property
    def ranks(self) -> range:
        """The ranks that this command starts."""
        return range(self.node * self.num_processes, (self.node + 1) * self.num_processes)

    def node_label(self, rank: int, emulated: int = 1) -> str | None:
        """The node name of ``rank``, or None for the name of the machine.

        Every command is a node of its own, which is divided into ``emulated`` equal ones.
        """
        if emulated == 1 and (self.world_size == 1 or self.launch is not None):
            return None
        if self.launch is not None:
            return f"node {rank * emulated // self.size}"
        part = rank % self.num_processes * emulated // self.num_processes
        return f"node {self.node * emulated + part}"

    def announce(self, store: str) -> None:
        """Prints which of several nodes this is, and the address of the store."""
        if self.world_size > 1:
            print_notice(f"node {self.node} of {self.world_size}, store {store} ({self.source or 'options'})")

    def leave_report(self, destination: str | None) -> None:
        """Prints which node has the report, and that this one writes none."""
        unused = "" if destination is None else f"; --json {destination} has no effect here"
        print_notice(f"done; node 0 of {self.world_size} has the report{unused}")

    def member(self, rank: int, store: str, group: str, emulated: int = 1) -> dict[str, Any]:
        """The part of a rank's job that `rank_process.join` needs."""
        node = self.node_label(rank, emulated)
        return {"rank": rank, "size": self.size, "node": node, "store": store, "group": group}

    @contextlib.contextmanager
    def rendezvous(self, context: crossrail.Context) -> Iterator[tuple[str, str]]:
        """Address of the store, and name of the ranks' group; see `meet`."""
        with self.meet(context) as met:
            yield met.store, met.name

    @contextlib.contextmanager
    def meet(self, context: crossrail.Context) -> Iterator[Meeting]:
        """Meets the commands of all nodes. A store that one of them hosts runs until all are over.

        Raises the library's errors.
        """
        # Commands on several nodes must agree on the name; independent runs that share a store must not collide.
        name = "bench" if self.world_size > 1 else f"bench-{os.urandom(4).hex()}"
        if self.world_size == 1 and self.external:
            assert self.store is not None
            yield Meeting(self.store, name)
        elif self.world_size == 1 and self.launch is None:
            with StoreServer(context, resolve(":0")) as server:
                yield Meeting(server.address, name)
        else:
            by: dict[str, Any] = {}  # by a launcher's variables
            if self.launch is None or self.external:
                by = {"rank": self.node, "size": self.world_size, "store": self.store}
            with crossrail.Group(name=GROUP, context=context, **by) as group:
                yield Meeting(group.store_address, name, group)
                group.barrier("over", timeout=OVER_S)  # the store ends with the process that runs it


def add_nodes(parser: Parser, processes: int, *others: str) -> Group:
    """Adds the options for the number of ranks (``others``: aliases of its name) and nodes; returns their group."""
    group = parser.add_argument_group("the ranks (without the last four options all of them run here)")
    ranks = f"ranks per node ({processes})"
    group.add_argument(*others, "--num-processes", dest="num_processes", metavar="N", type=positive, help=ranks)
    parser.set_defaults(processes=processes)
    group.add_argument(
        "--world-size", metavar="N", type=positive, help="number of nodes; the command runs once on each (WORLD_SIZE)"
    )
    group.add_argument("--rank", metavar="N", type=count, help="the number of this node (RANK)")
    group.add_argument("--master-addr", metavar="HOST", help="node 0, which hosts the store (MASTER_ADDR)")
    port = f"port of the store ({STORE_PORT}; or MASTER_PORT + 1, because a launcher's store uses MASTER_PORT)"
    group.add_argument("--master-port", metavar="PORT", type=positive, help=port)
    return group


def placement(parser: Parser, parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Placement:
    """The placement by the options or, where they are missing, the environment. Mistakes end in `parser.error`."""
    read: list[str] = []

    def number(option: int | None, variable: str, least: int) -> int | None:
        if option is not None:
            return option
        text = environment.get(variable)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and least <= int(text) < 1 << 16):
            parser.error(f"{variable}={text!r} is not a whole number from {least} to 65535")
        read.append(f"{variable}={text}")
        return int(text)

    processes = parsed.num_processes or parsed.processes
    external = environment.get("CROSSRAIL_STORE")
    if (launch := _launch(parser, parsed, environment)) is not None:
        return Placement(
            parsed.num_processes or 1, launch.size, launch.rank, external or None, bool(external), str(launch), launch
        )
    nodes = number(parsed.world_size, "WORLD_SIZE", 1) or 1
    node = number(parsed.rank, "RANK", 0) or 0
    if node >= nodes:
        parser.error(f"node {node} (--rank, RANK) is not below {nodes}, the number of nodes (--world-size, WORLD_SIZE)")
    if processes * nodes > MOST_RANKS:
        parser.error(f"{processes} ranks on each of {nodes} nodes are more than {MOST_RANKS}")
    if external:
        return Placement(processes, nodes, node, external, True, " ".join([*read, "CROSSRAIL_STORE"]))
    if nodes == 1:
        return Placement(processes, source=" ".join(read))
    address = parsed.master_addr or environment.get("MASTER_ADDR")
    if address is None:
        parser.error(f"{nodes} nodes need the address of node 0: give it with --master-addr (MASTER_ADDR)")
    launcher = None if parsed.master_port is not None else number(None, "MASTER_PORT", 1)
    port = parsed.master_port or permitted(STORE_PORT if launcher is None else launcher + 1)
    store = f"tcp://{resolve(join(address, port))}"
    return Placement(processes, nodes, node, store, source=" ".join(read))


def _launch(parser: Parser, parsed: argparse.Namespace, environment: Mapping[str, str]) -> Launch | None:
    """The launcher's job, each process of which is one rank: unless options place this command, or torchrun starts one
    command per node, which then starts the ranks of its node."""
    options = (parsed.world_size, parsed.rank, parsed.master_addr, parsed.master_port)
    launch = find_launch(parser, environment) if options == (None,) * 4 else None
    if launch is None or (launch.name == "torchrun" and launch.local_size == 1):
        return None
    if launch.size * (parsed.num_processes or 1) > MOST_RANKS:
        parser.error(f"{launch.size} processes of {parsed.num_processes or 1} ranks are more than {MOST_RANKS} ranks")
    return launch


def known_gpus(context: crossrail.Context, wanted: Sequence[str] | str) -> list[str]:
    """The GPUs that ``wanted`` names (``all``: every GPU), as ``cuda:N``.

    Raises Failure with the reason and the fix if no GPU is usable, and UsageFailure for a GPU that does not exist.
    """
    cuda = context.info()["cuda"]
    known = [f"cuda:{device['ordinal']}" for device in cuda["devices"]]
    if not known:
        reason = "; ".join(part for part in (cuda["reason"], cuda["fix"]) if part)
        raise Failure(f"no GPU can be used: {reason or 'this machine has none'}")
    if wanted == "all":
        return known
    for name in wanted:
        if name != "cpu" and name not in known:
            raise UsageFailure(f"{name} does not exist here; known: {', '.join(known)}")
    return list(wanted)


def shared_gpus(where: Placement, context: crossrail.Context, every: bool) -> tuple[Placement, tuple[str, ...]]:
    """A placement and the GPU of each rank; if ``every``, with a rank for every GPU. Several ranks may share a GPU.

    Raises as `known_gpus`.
    """
    gpus = known_gpus(context, "all")
    if every:
        where = replace(where, num_processes=len(gpus))
    return where, tuple(gpus[where.local_index(rank) % len(gpus)] for rank in where.ranks)


def allowed_cpus() -> list[int]:
    """The processors that this process may use, whatever the calling thread is pinned to."""
    return sorted(os.sched_getaffinity(os.getpid()))


def check_memory(needed: int, whose: str) -> None:
    """Raises Failure if ``whose`` buffers take more memory than this machine, or the control group, has free."""
    memory = host_memory()
    if memory is not None and needed > memory["available"]:
        limited = "" if memory["limited_by"] is None else f" in this control group ({memory['limited_by']})"
        raise Failure(
            f"{whose} take {format_bytes(needed)}, and {format_bytes(memory['available'])} are free{limited}: give a "
            "smaller --size"
        )


def cpu_of(wanted: Pin, index: int, count: int) -> int | None:
    """The processor to pin one of ``count`` processes to, or None: one each, if there are enough.

    Raises UsageFailure for a processor that this process may not use.
    """
    return cpus_of(wanted, count)[index]


def cpus_of(wanted: Pin, count: int) -> list[int | None]:
    """The same for all ``count`` processes."""
    if isinstance(wanted, list):
        return [checked_cpu(wanted[index % len(wanted)]) for index in range(count)]
    allowed = allowed_cpus()
    return [*allowed[:count]] if wanted == "auto" and count <= len(allowed) else [None] * count


def describe_pins(cpus: Sequence[int | None], whose: str) -> str:
    """The line of a report that says how ``whose`` processes (``ranks``, ``ends``) of this node are pinned."""
    quota = cpu_quota()
    limit = "" if quota is None else f"; the control group leaves all of them {quota:g} processors"
    pinned = [str(cpu) for cpu in cpus if cpu is not None]
    if pinned:
        return f"{whose} pinned to {', '.join(pinned)}{limit}"
    return f"{whose} not pinned, {counted(len(allowed_cpus()), 'processor')} for {len(cpus)}{limit}"


class PinnedRanks:
    """How a bench pins the ranks of this node: part of its options, which have ``placement`` and ``pin``."""

    placement: Placement
    pin: Pin

    def unpinned(self, ranks: int) -> bool:
        """Whether `--pin auto` leaves ``ranks`` ranks unpinned."""
        raise NotImplementedError

    def ranks_here(self) -> int:
        """The number of ranks of this node."""
        return self.placement.local_size

    def cpus(self, ranks: int | None = None) -> list[int | None]:
        """The processor of each of ``ranks`` ranks here (all of them by default), None for those that have none."""
        ranks = self.ranks_here() if ranks is None else ranks
        return cpus_of("none" if self.pin == "auto" and self.unpinned(ranks) else self.pin, ranks)

    def pinning(self) -> str:
        """How the ranks here are pinned."""
        return describe_pins(self.cpus(), "ranks")


def checked_cpu(cpu: int) -> int:
    """``cpu``. Raises UsageFailure for a processor that this process may not use."""
    allowed = allowed_cpus()
    if cpu not in allowed:
        raise UsageFailure(f"--pin {cpu}: this process may use {', '.join(map(str, allowed))} only")
    return cpu


def pin_to(cpu: int | None) -> None:
    """Pins this thread, and those it starts later, to one processor; None leaves the affinity unchanged."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
