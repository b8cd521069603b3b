"""Measurements of benches, as plain data. A case is declared once: its fields are the order that another end receives,
the job of a rank, and the argument of the native loop (crates/bench/src/case.rs, which checks them).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

import crossrail

from .failure import Failure
from .processes import Message

Verify = Literal["full", "quick", "none"]


@dataclass(frozen=True)
class Case:
    """One measurement, the same at every end."""

    what: ClassVar[str]

    def order(self) -> Message:
        """The case as JSON has it."""
        return {"what": self.what, **asdict(self)}

    def run(
        self,
        context: crossrail.Context,
        worker: crossrail.Worker | None = None,
        endpoints: Sequence[crossrail.Endpoint | None] = (),
        **end: Any,
    ) -> Any:
        """Runs this end's part; the samples. ``end``: as of `crossrail.bench`, whose errors it raises."""
        return json.loads(crossrail.bench(json.dumps(self.order()), context, worker, endpoints, **end))


@dataclass(frozen=True)
class Transfers(Case):
    """Messages between two ends: bytes of each, how many are timed, and how many precede those."""

    size: int
    iters: int
    warmup: int


@dataclass(frozen=True)
class Latency(Transfers):
    """Round trips of one message each way."""

    what = "latency"


@dataclass(frozen=True)
class Write(Transfers):
    """Round trips of one-sided writes."""

    what = "write"


@dataclass(frozen=True)
class Bandwidth(Transfers):
    """Windows of messages one way."""

    what = "bandwidth"
    window: int


@dataclass(frozen=True)
class P2p(Transfers):
    """One transfer at a time."""

    what = "p2p"
    verify: Verify = "full"


@dataclass(frozen=True)
class NetPlugin(Case):
    """Transfers through a network plugin of NCCL; each end has its own path."""

    what = "net-plugin"
    path: str
    transfers: P2p


@dataclass(frozen=True)
class RawTcp(Case):
    """Plain TCP sockets over the driver's ``devices``; an order leaves them empty."""

    what = "raw-tcp"
    size: int
    iters: int
    channels: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeshAll(Case):
    """Every rank to every other at once. ``small`` and ``trips``: bytes and round trips for latency; ``patience``:
    seconds that a rank waits for others that are measuring."""

    what = "mesh-all"
    size: int
    iters: int
    warmup: int
    window: int
    small: int
    trips: int
    patience: float


@dataclass(frozen=True)
class MeshPair(Case):
    """One ordered pair of ranks, while all others wait."""

    what = "mesh-pair"
    pair: tuple[int, int]
    plan: MeshAll


@dataclass(frozen=True)
class Unpack(Case):
    """Fragments in ``source`` memory (``pinned`` or ``device``) into contiguous GPU memory, by each of ``modes``."""

    what = "unpack"
    device: str
    size: int
    fragment: int
    source: str
    modes: Sequence[str]
    iters: int
    warmup: int


@dataclass(frozen=True)
class Control(Case):
    """The life cycle of a buffer; ``only``: the one step that is reported."""

    what = "control"
    only: str | None
    rounds: int
    warmup: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str
    device: str | None


@dataclass(frozen=True)
class Experts(Case):
    """Dispatch, combine or both (``e2e``) in host memory; ``cached``: dispatches reuse the routing of the first."""

    what = "experts"
    mode: str
    layout: str
    cached: bool
    iters: int
    warmup: int


Ordered: TypeAlias = Latency | Write | Bandwidth | P2p | RawTcp | Unpack
"""Cases that another machine may order."""

_ORDERED: dict[str, type[Ordered]] = {kind.what: kind for kind in (Latency, Write, Bandwidth, P2p, RawTcp, Unpack)}


def ordered(order: object) -> Ordered:
    """The case that another end orders. Raises Failure if it is none, or has no size."""
    given = dict(order) if isinstance(order, dict) else {}
    what = given.pop("what", None)
    kind = _ORDERED.get(what) if isinstance(what, str) else None
    if kind is None:
        raise Failure(f"the driving end requested {str(what)[:40]!r}, which this version does not support")
    if given.keys() != {one.name for one in fields(kind)}:
        raise Failure(f"the driving end requested {what} with {', '.join(map(str, given))[:200]}, which is invalid")
    size = given["size"]
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise Failure(f"the driving end requested size {str(size)[:40]!r}, which is invalid")
    return kind(**given)
