"""The two ends of a sweep between two machines.

Before each run, the one that sweeps tells the one that listens with which settings to run its half. These are checked
there, and go to a child process of that end.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import crossrail
from crossrail.errors import CrossrailError

from .control_link import connected, listen_text, listening, serve_each
from .failure import Failure, print_notice
from .parsing import DEFAULT_PORT, join, parse_address, permitted, place_to_listen, resolve
from .point_to_point.channel import Channel
from .point_to_point.child import START_S, listening_end
from .point_to_point.options import BenchOptions
from .processes import Message

BENCHES = ("latency", "bandwidth", "p2p")
"""Those with a listening end."""

FOLLOWED = ("transport", "rails", "chunk", "channels", "unpack", "window")
"""The options that both ends need."""

VARIABLES = frozenset(
    f"CROSSRAIL_{name}"
    for name in (
        "TLS",
        "NET_DEVICES",
        "CHUNK",
        "WINDOW",
        "CHANNELS",
        "BOUNCE",
        "UNPACK",
        "IO_THREADS",
        "AFFINITY",
        "CHECKSUM",
    )
)
"""Settings that the listening end accepts from the sweeping end: none that names a file or affects trust."""

ANSWER_S = START_S + 10.0
IDLE_S = 60.0
"""How long the listening end waits for the next run, beyond the longest that one may take."""

LONGEST_RUN_S = 86_400
_VALUE = re.compile(r"[ -~]{1,256}")


class OtherEnd:
    """The listening end, as the sweeping end sees it."""

    def __init__(self, channel: Channel, host: str) -> None:
        self._channel = channel
        self._host = host

    def start(self, options: BenchOptions, variables: Mapping[str, str]) -> str:
        """Has it listen for one run with these settings; the address. Raises Failure with its reason if it cannot, and
        the library's errors if it is gone."""
        names = [name for name in FOLLOWED if name != "window" or options.what == "p2p"]
        given = {name: str(getattr(options, name)) for name in names if getattr(options, name) is not None}
        answer = self._channel.request({"do": "run", "options": given, "variables": dict(variables)}, ANSWER_S)
        if "failed" in answer:
            raise Failure(f"the listening end: {str(answer['failed'])[:500]}")
        port = answer.get("port")
        if type(port) is not int or not 0 < port < 1 << 16:
            raise Failure("the listening end named no port")
        return join(self._host, port)


@contextlib.contextmanager
def other_end(peer: str, bench: str, secret_file: str | None, limit: int) -> Iterator[OtherEnd]:
    """The listening end at ``peer``, for runs of at most ``limit`` seconds. Raises Failure and the library's errors."""
    address = resolve(peer)
    start = f"crossrail sweep {bench} --listen {listen_text(address, permitted(DEFAULT_PORT))}"
    with connected(address, secret_file, ANSWER_S, start) as channel:
        met = channel.request({"sweep": bench, "version": crossrail.__version__, "limit": limit}, ANSWER_S)
        if met.get("version") != crossrail.__version__:
            raise Failure(f"{peer} runs another version than {crossrail.__version__}: install the same at both ends")
        yield OtherEnd(channel, parse_address(address)[0])
        with contextlib.suppress(CrossrailError):
            channel.leave()


def listen(where: str, bench: str, secret_file: str | None) -> NoReturn:
    """Runs the listening half of sweeps of ``bench`` until it is interrupted; one that fails is reported.

    Raises UsageFailure and the library's errors if it cannot listen.
    """
    address = place_to_listen(where)
    with listening(address, secret_file, ANSWER_S) as (context, worker):
        places = ", ".join(worker.control_addresses())
        print_notice(
            f"listening on {places}; run `crossrail sweep {bench} --connect` with this address on the other machine"
        )
        host = parse_address(address)[0]
        serve_each(context, worker, lambda channel: serve(channel, host, bench, secret_file))


def serve(channel: Channel, host: str, bench: str, secret_file: str | None) -> None:
    """One sweep of the other end. Raises Failure and the library's errors."""
    hello = channel.receive(IDLE_S)
    if hello.get("sweep") != bench or hello.get("version") != crossrail.__version__:
        raise Failure(
            f"this end runs `crossrail sweep {bench} --listen` of version {crossrail.__version__}; run the same"
        )
    limit = hello.get("limit")
    if type(limit) is not int or not 0 < limit <= LONGEST_RUN_S:
        raise Failure("the sweeping end named no limit for its runs")
    channel.send({"version": crossrail.__version__})
    with contextlib.ExitStack() as run:
        while (request := channel.receive(limit + IDLE_S)).get("do") == "run":
            run.close()  # the last one has ended, or was given up
            try:
                options, variables = checked(request)
                words = [f"--listen={join(host, 0)}", "--pin=none"]
                words += [f"--{name}={value}" for name, value in options.items()]
                words += [] if secret_file is None else [f"--secret-file={secret_file}"]
                _, announced = run.enter_context(listening_end(bench, words, variables))
                place = str(announced.get("control", [""])[0])
                channel.send({"port": parse_address(place)[1]})
            except Failure as error:
                run.close()
                channel.send({"failed": str(error)})
        if request.get("do") != "bye":
            raise Failure("the sweeping end requested what this version does not support")


def checked(request: Message) -> tuple[dict[str, str], dict[str, str]]:
    """The options and variables of a request, which become part of a command. Raises Failure."""

    def valid(values: Any, names: Any) -> dict[str, str]:
        if not isinstance(values, dict):
            raise Failure("the sweeping end sent no settings")
        for name, value in values.items():
            if name not in names:
                raise Failure(f"the listening end does not follow {str(name)[:40]!r}")
            if not isinstance(value, str) or not _VALUE.fullmatch(value):
                raise Failure(f"the sweeping end sent an invalid value for {name}")
        return values

    return valid(request.get("options"), FOLLOWED), valid(request.get("variables"), VARIABLES)
