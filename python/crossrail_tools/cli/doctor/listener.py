"""The doctor that listens: answers the probes of one other end after the other, until it is interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

import crossrail

from ..control_link import listening, serve_each
from ..failure import Failure, print_notice
from ..parsing import place_to_listen
from ..point_to_point.channel import Channel
from ..processes import Message
from .links import Rail, loopback_rails
from .netlink import dropped_by_rail, route
from .probes import Responder
from .survey import ANSWER_S, DOCTOR_PORT, MOST_RAILS, version_in
from .transfer import return_data

REQUEST_S = 60.0
"""How long the other end may be silent between two requests."""

LONGEST_S = 600.0
"""How long one run of the other end may take."""


def listen(where: str, secret_file: str | None, rails: Callable[[], list[Rail]]) -> NoReturn:
    """Serves until it is interrupted, each run with the ``rails`` that there are then; a run that fails is reported.

    Raises UsageFailure and the library's errors if it cannot listen.
    """
    with listening(place_to_listen(where, default_port=DOCTOR_PORT), secret_file, ANSWER_S) as (context, worker):
        places = ", ".join(worker.control_addresses())
        print_notice(f"listening on {places}; run `crossrail doctor --peer` with this address on the other machine")
        serve_each(context, worker, lambda channel: serve(channel, _offered(rails(), secret_file), secret_file))


def _offered(rails: list[Rail], secret_file: str | None) -> list[Rail]:
    """The rails to probe: without a secret only those of loopback, as for every listener."""
    secret = secret_file or os.environ.get("CROSSRAIL_SECRET") or os.environ.get("CROSSRAIL_SECRET_FILE")
    return rails if secret else loopback_rails(rails)


def serve(channel: Channel, rails: list[Rail], secret_file: str | None = None) -> None:
    """One run of the other end. Raises Failure and the library's errors."""
    deadline = time.monotonic() + LONGEST_S
    hello = channel.receive(REQUEST_S)
    if "doctor" not in hello:
        raise Failure("this end runs `crossrail doctor --listen`; the other end must run `crossrail doctor --peer`")
    if hello.get("version") != crossrail.__version__:
        raise Failure(
            f"the ends run different versions: {crossrail.__version__} at the listening end, {version_in(hello)} at "
            "the other; install the same version at both"
        )
    by_name = {rail.name: rail for rail in rails}
    with contextlib.ExitStack() as run:
        responder = run.enter_context(Responder(rails[:MOST_RAILS]))
        channel.send(
            {
                "version": crossrail.__version__,
                "host": os.uname().nodename,
                "rails": [dataclasses.asdict(rail) for rail in rails[:MOST_RAILS]],
                "ports": {name: [ports.tcp, ports.udp, *ports.others] for name, ports in responder.ports.items()},
                "named": os.environ.get("CROSSRAIL_PORTS", ""),
                "why_not": responder.why_not,
                "token": responder.token.hex(),
            }
        )
        while (request := channel.receive(REQUEST_S)).get("do") != "bye":
            if time.monotonic() > deadline:
                raise Failure(f"the run took more than {LONGEST_S:g} s")
            if request.get("do") == "data":
                run.close()  # the probes, whose ports the transfer uses
                return_data(channel, _rails_named(request.get("rails"), by_name), secret_file, run)
            else:
                channel.send(_answer(request, by_name))


def _rails_named(names: Any, rails: dict[str, Rail]) -> list[Rail]:
    if not isinstance(names, list) or not names or len(names) > MOST_RAILS or not all(name in rails for name in names):
        raise Failure("the other end asked for a transfer over rails that are none here")
    return [rails[name] for name in names]


def _answer(request: Message, rails: dict[str, Rail]) -> Message:
    match request.get("do"):
        case "clock":
            return {"time": time.time()}
        case "routes":
            return {"routes": [_route(pair, rails) for pair in _pairs(request.get("to"))]}
        case "dropped":
            return {"dropped": dropped_by_rail()}
        case other:
            raise Failure(f"the other end requested {str(other)[:40]!r}, which this version does not support")


def _pairs(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_RAILS:
        raise Failure(f"the other end requested routes without a list of at most {MOST_RAILS} pairs")
    return value


def _route(pair: Any, rails: dict[str, Rail]) -> dict[str, Any]:
    """How this kernel would send from one of its rails to an address of the other end."""
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise Failure("the other end requested a route for something other than a pair of a rail and an address")
    name, to = pair
    if name not in rails:
        raise Failure(f"the other end asked for the route from {name[:40]!r}, which is no rail here")
    try:
        return dataclasses.asdict(route(to, rails[name].address))
    except OSError as error:
        raise Failure(f"the other end asked for the route to {to[:60]!r}: {error.strerror or error}") from None
