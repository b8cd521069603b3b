"""A transfer between the two doctors as programs make them: workers of their own, on the ports that data uses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import crossrail

from ..failure import Failure
from ..point_to_point.channel import Channel
from ..rails import missed, rail_of
from .links import Rail
from .second import pattern

DATA_BYTES = 16 << 20
DATA_S = 10.0
"""How long the transfer may take in each direction, and its connections to be made."""

_CHUNK = "256K"
"""Small, so that a slow rail carries some of them too."""

_THERE, _BACK = 1, 2


def _context(rails: Sequence[Rail], secret_file: str | None, **more: Any) -> crossrail.Context:
    devices = ",".join(rail.name for rail in rails)
    own: dict[str, Any] = {"tls": "tcp", "net_devices": devices, "chunk": _CHUNK, "log": "error", **more}
    return crossrail.Context(**own, secret_file=secret_file, timeout=DATA_S)


def send_data(
    channel: Channel, mine: Sequence[Rail], theirs: Sequence[Rail], secret_file: str | None
) -> tuple[dict[str, int], dict[str, str]]:
    """Sends data there and back over all of these rails: the bytes that each of ``mine`` carried, by name, or why it
    carried none. Raises Failure, also for data that differs, and the library's errors.
    """
    answer = channel.request({"do": "data", "rails": [rail.name for rail in theirs]}, DATA_S)
    try:
        address = bytes.fromhex(str(answer.get("address")))
    except ValueError:
        raise Failure("the other end sent no address for a transfer") from None
    # No peer connects to this end, so it needs none of the ports of CROSSRAIL_PORTS.
    with crossrail.Worker(_context(mine, secret_file, ports="1-65535")) as worker:
        endpoint = worker.connect(address, timeout=DATA_S)
        data = pattern(DATA_BYTES)
        back = np.zeros_like(data)
        receiving = worker.recv(back, _BACK)
        receipts = [endpoint.send(data, _THERE).wait(DATA_S), receiving.wait(DATA_S)]
        if not np.array_equal(data, back):
            raise Failure("the data that came back is not what was sent")
        lanes = [lane for receipt in receipts for lane in receipt.lanes]
        alive = {rail_of(lane) for lane in endpoint.lanes() if lane["alive"]}
        reasons = missed(endpoint)
    carried, why = {}, {}
    for rail in mine:
        name = f"tcp/{rail.name}"
        if name in alive:
            carried[rail.name] = sum(lane["bytes"] for lane in lanes if rail_of(lane) == name)
        else:
            why[rail.name] = reasons.get(name) or "its connections were lost"
    return carried, why


def return_data(channel: Channel, rails: Sequence[Rail], secret_file: str | None, run: ExitStack) -> None:
    """The listening end of `send_data`: sends back what it gets, over connections that are up until the ``run`` ends.

    Raises the library's errors.
    """
    worker = run.enter_context(crossrail.Worker(_context(rails, secret_file), listen=_listen_at(rails)))
    channel.send({"address": worker.address().hex()})
    endpoint = worker.accept(DATA_S)
    data = np.zeros(DATA_BYTES, np.uint8)
    worker.recv(data, _THERE, source=endpoint).wait(DATA_S)
    endpoint.send(data, _BACK).wait(DATA_S)


def _listen_at(rails: Sequence[Rail]) -> str:
    """Peers meet at the first rail: no other address is known to be open."""
    address = rails[0].address
    return f"[{address}]:0" if ":" in address else f"{address}:0"
