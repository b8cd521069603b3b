"""Measurements of the rails to another machine, by pair."""

from __future__ import annotations

from dataclasses import dataclass, field

from .links import Rail
from .netlink import Route
from .probes import Load


@dataclass
class Way:
    """From one rail here to one rail there. ``used``: transfers pair these two.

    ``open``: the other end answers, at ``port``; ``why``: why it does not, at all or on the ports ``closed``. Rates are
    in both directions, alone and with all other ways that are used. ``data``: bytes of a verified transfer of the
    library that this rail carried; ``data_why``: why it carried none.
    """

    mine: Rail
    theirs: Rail
    used: bool
    open: bool = False
    why: str = ""
    port: int | None = None
    closed: list[int] = field(default_factory=list)
    rtt_s: float | None = None
    there: Route | None = None
    back: Route | None = None
    mtu_there: int | None = None
    mtu_back: int | None = None
    alone: tuple[Load, Load] | None = None
    together: tuple[Load, Load] | None = None
    data: int | None = None
    data_why: str = ""

    @property
    def name(self) -> str:
        """``eth1 to eth2``."""
        return f"{self.mine.name} to {self.theirs.name}"


@dataclass
class Survey:
    """Measurements between this machine and the peer.

    ``offset_s``: how much the peer's clock is ahead, to within ``uncertainty_s``. ``named``: CROSSRAIL_PORTS there.
    ``idle``: the smallest share of the processors here that was idle while all rails carried data. ``dropped``: packets
    lost meanwhile, by rail and end.
    """

    peer: str
    ways: list[Way]
    offset_s: float
    uncertainty_s: float
    theirs: list[Rail]
    named: str = ""
    idle: float | None = None
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def used(self) -> list[Way]:
        """The ways that transfers use."""
        return [way for way in self.ways if way.used]
