"""The test bed: two network namespaces joined by one control link and several data links of chosen rates.

    left                                right
    eth0  10.77.0.1 ------------------- eth0  10.77.0.2     control, as fast as it goes
    eth1  10.77.1.1 ------------------- eth1  10.77.1.2     data, shaped at both ends
    ...

Each link is a veth pair; a data link has a token bucket (`tc ... tbf`) at both ends, so that each direction carries its
rate. Everything lives in the namespaces alone and goes with them. Needs root, iproute2 and, for firewalls, nftables.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

Side = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")
BURST, QUEUE = "256k", "20ms"
EQUAL_MBIT = (2000, 2000, 2000, 2000)
UNEVEN_MBIT = (2000, 2000, 1000, 500)
EIGHT_MBIT = (1000, 800, 600, 400, 300, 200, 100, 50)
LINKS_S = 60.0
COMMAND_S = 120.0  # of one call of ip or tc, which take no time but wait for a processor
_NOWHERE = "02:00:00:00:de:ad"


def why_not() -> str | None:
    """Why the bed cannot be made here, or None when it can."""
    if os.geteuid() != 0:
        return "the test bed needs root"
    missing = [program for program in ("ip", "tc", "nft") if shutil.which(program) is None]
    return f"the test bed needs {' and '.join(missing)} (Debian: iproute2, nftables)" if missing else None


class Bed:
    """A context manager: the bed exists inside, and nothing of it is left afterwards."""

    def __init__(
        self,
        mbit: Sequence[int] = EQUAL_MBIT,
        *,
        queues: Sequence[str] = (),
        congestion: str | None = None,
        ipv4: bool = True,
        ipv6: bool = True,
    ) -> None:
        """Data links of ``mbit`` Mbit/s each, named eth1 and on, with addresses of the families asked for.

        ``queues``: how long a packet may wait before each link, as `tc` writes times; 20ms without. ``congestion``: the
        congestion control of the namespaces; one that goes by losses, as `reno`, fills a queue to its end.
        """
        if not mbit or min(mbit) <= 0:
            raise ValueError(f"{mbit} Mbit/s: give one rate above 0 for each data link")
        if queues and len(queues) != len(mbit):
            raise ValueError(f"{len(queues)} queues for {len(mbit)} links: give one for each")
        self.mbit = tuple(mbit)
        self.queues = tuple(queues) or (QUEUE,) * len(mbit)
        self.congestion = congestion
        self.ipv4 = ipv4
        self.ipv6 = ipv6
        tag = uuid.uuid4().hex[:8]
        self.namespace = {side: f"crossrail-{tag}-{side}" for side in SIDES}

    @property
    def rails(self) -> list[str]:
        """The data links' names, the same at both ends."""
        return [f"eth{number}" for number in range(1, len(self.mbit) + 1)]

    @property
    def gb_per_s(self) -> float:
        """What the data links carry together by their nominal rates, in GB/s."""
        return sum(self.mbit) / 8e3

    def __enter__(self) -> Bed:
        try:
            for name in self.namespace.values():
                _ip("netns", "add", name)
            for side in SIDES:
                self._settings(side)
            links = range(len(self.mbit) + 1)
            _batch("ip", [self._pair(number) for number in links])
            for side in SIDES:
                commands = ["link set lo up", *(command for number in links for command in self._up(side, number))]
                _batch("ip", commands, "-n", self.namespace[side])
                _batch("tc", [self._shape(number) for number in links if number > 0], "-n", self.namespace[side])
            for side in SIDES:
                self._wait_for_links(side)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._remove()

    def _settings(self, side: Side) -> None:
        settings = {f"net/ipv6/conf/{which}/keep_addr_on_down": "1" for which in ("all", "default")}
        if self.congestion is not None:
            settings["net/ipv4/tcp_congestion_control"] = self.congestion
        written = " && ".join(f"echo {value} > /proc/sys/{name}" for name, value in settings.items())
        _run(*self.inside(side, "sh", "-c", written))

    def _pair(self, number: int) -> str:
        left, right = (self.namespace[side] for side in SIDES)
        return f"link add eth{number} netns {left} type veth peer name eth{number} netns {right}"

    def _up(self, side: Side, number: int) -> list[str]:
        nic = f"eth{number}"
        ends = {4: f"/24 dev {nic}", 6: f"/64 dev {nic} nodad"}
        commands = [f"addr add {self.address(side, nic, version)}{ends[version]}" for version in self._versions()]
        return [*commands, f"link set {nic} up"]

    def _shape(self, number: int) -> str:
        rate, queue = f"{self.mbit[number - 1]}mbit", self.queues[number - 1]
        return f"qdisc add dev eth{number} root tbf rate {rate} burst {BURST} latency {queue}"

    def _wait_for_links(self, side: Side) -> None:
        """Waits until the kernel says that every link is up: it does so a moment after it is."""
        deadline = time.monotonic() + LINKS_S
        while time.monotonic() < deadline:
            links = json.loads(_output("ip", "-n", self.namespace[side], "-j", "link", "show", "type", "veth"))
            if all(link["operstate"] == "UP" for link in links):
                return
            time.sleep(0.05)  # the kernel may take a second, and each look is a process
        raise RuntimeError(f"the links of {self.namespace[side]} did not come up within {LINKS_S:g} s")

    def _remove(self) -> None:
        for name in self.namespace.values():
            for pid in _output("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def inside(self, side: Side, *command: str) -> list[str]:
        """``command`` as run in the namespace of ``side``."""
        return ["ip", "netns", "exec", self.namespace[side], *command]

    def address(self, side: Side, nic: str, version: Literal[4, 6] = 4) -> str:
        """The address of ``nic`` at ``side``."""
        number, host = int(nic.removeprefix("eth")), SIDES.index(side) + 1
        return f"10.77.{number}.{host}" if version == 4 else f"fd77:{number}::{host}"

    def set_down(self, side: Side, nic: str) -> None:
        """Switches ``nic`` off at ``side``; the other end loses its carrier."""
        _ip("-n", self.namespace[side], "link", "set", nic, "down")

    def set_up(self, side: Side, nic: str) -> None:
        """Switches ``nic`` on again."""
        _ip("-n", self.namespace[side], "link", "set", nic, "up")

    @contextlib.contextmanager
    def flapping(self, nic: str, every: float) -> Iterator[None]:
        """Switches ``nic`` off and on at the left side for half of ``every`` seconds each, and on at last."""
        stop = threading.Event()

        def flap() -> None:
            while not stop.is_set():
                self.set_down("left", nic)
                stop.wait(every / 2)
                self.set_up("left", nic)
                stop.wait(every / 2)

        thread = threading.Thread(target=flap)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def swallow(self, nic: str) -> None:
        """Makes a black hole of ``nic``: it stays up with its carrier at both ends, and no packet arrives any more.

        Each end is told a hardware address for the other that nobody has.
        """
        for side, other in (SIDES, SIDES[::-1]):
            peers = [self.address(other, nic, version) for version in self._versions()]
            commands = [f"neigh replace {peer} lladdr {_NOWHERE} dev {nic} nud permanent" for peer in peers]
            _batch("ip", commands, "-n", self.namespace[side])

    def firewall(self, side: Side, *rules: str) -> None:
        """Lets nothing in at ``side`` but answers and what ``rules`` accept, in their order."""
        always = ("iif lo accept", "ct state established,related accept", "icmpv6 type { 135, 136 } accept")
        lines = ["type filter hook input priority 0; policy drop;", *always, *rules]
        chain = "\n".join(("add table inet filter", "flush table inet filter", "table inet filter { chain input {"))
        _run(*self.inside(side, "nft", "-f", "-"), given="\n".join([chain, *lines, "}", "}", ""]))

    def _versions(self) -> list[Literal[4, 6]]:
        versions: list[Literal[4, 6]] = []
        if self.ipv4:
            versions.append(4)
        if self.ipv6:
            versions.append(6)
        return versions

    def sent_bytes(self, side: Side, nic: str) -> int:
        """Bytes that left ``nic`` at ``side``, headers included, by the interface's own counter."""
        text = _output("ip", "-n", self.namespace[side], "-s", "-j", "link", "show", "dev", nic)
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _batch(program: str, commands: Sequence[str], *options: str) -> None:
    """Runs many commands of ``ip`` or ``tc`` in one process."""
    _run(program, *options, "-batch", "-", given="".join(f"{command}\n" for command in commands))


def _run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode != 0:
        told = f" of\n{given}" if given else ""
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}{told}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S).stdout
