"""Random faults on several rails between two processes that check every message: ``make chaos``.

Between two network namespaces run streams of messages (`chaos_end.py`), while links go down, drop packets one way or
both, are reset, shrink, lose their address or route, become slow; while the control link goes down or is reset; while
processes are stopped. Everything is drawn from a seed, which replays it.

Two modes. ``healthy``: one rail has no fault, and no operation may fail. ``windows``: no rail works but one, another
each time, for one second in every ten.

Needs root and iproute2; a kernel without INET_DIAG_DESTROY leaves out the resets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bed import COMMAND_S, SIDES, Bed, Side, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import chaos_record

PORT = 18178
START_S = 30.0
END_S = 120.0
NOWHERE = "02:00:00:00:de:ad"
SLOW = ("3mbit", "32k", "100k")
LOSSY = ("100kbit", "2k", "4k")
PERIOD_S, WINDOW_S = 10.0, 1.0
Mode = Literal["healthy", "windows"]


@dataclass(frozen=True)
class Fault:
    """One fault of the plan: ``what`` happens to ``nic`` (or a process) as seen from ``side``."""

    at: float
    until: float
    what: str
    nic: str
    side: Side


RAIL_FAULTS = ("down", "one way", "black hole", "lossy", "slow", "mtu", "address", "route", "unreachable", "reset")
OTHER_FAULTS = ("control down", "control reset", "stop")


def plan(seed: int, seconds: float, rails: Sequence[str], healthy: str) -> list[Fault]:
    """The faults of a run in the order of their times: every kind comes up before one does so again."""
    dice = random.Random(seed)
    deck: list[str] = []

    def draw(kinds: Sequence[str], left: list[str]) -> str:
        if not left:
            left.extend(dice.sample(kinds, len(kinds)))
        return left.pop()

    faults = []
    scale = min(1.0, seconds / 60)
    times = {nic: dice.uniform(0.1, 0.5) for nic in rails if nic != healthy}
    while times:
        nic = min(times, key=lambda nic: times[nic])
        at = times[nic]
        if at >= seconds:
            del times[nic]
            continue
        what = draw(RAIL_FAULTS, deck)
        lasts = 0.0 if what == "reset" else dice.choice((0.2, 0.6, 1.5, 4.0)) * dice.uniform(0.5, 1.5) * max(scale, 0.2)
        faults.append(Fault(at, min(at + lasts, seconds), what, nic, dice.choice(SIDES)))
        times[nic] = at + lasts + dice.expovariate(1.0) * max(scale, 0.3) + 0.05
    at, others = 0.0, list[str]()
    while True:
        at += dice.uniform(2.0, 10.0) * max(scale, 0.2)
        if at >= seconds:
            break
        what = draw(OTHER_FAULTS, others)
        lasts = 0.0 if what == "control reset" else dice.uniform(0.1, 4.0) * max(scale, 0.2)
        faults.append(Fault(at, min(at + lasts, seconds), what, "eth0", dice.choice(SIDES)))
        at += lasts
    return sorted(faults, key=lambda fault: fault.at)


@dataclass
class Wreck:
    """Does the faults to a bed and its processes, and undoes them."""

    bed: Bed
    pids: dict[Side, int] = field(default_factory=dict)
    resets: int = 0
    _macs: dict[tuple[Side, str], str] = field(default_factory=dict)

    def _address(self, side: Side, nic: str) -> str:
        return self.bed.address(side, nic, 4 if self.bed.ipv4 else 6)

    def _bracketed(self, side: Side, nic: str) -> str:
        return self._address(side, nic) if self.bed.ipv4 else f"[{self._address(side, nic)}]"

    def _with_prefix(self, side: Side, nic: str) -> list[str]:
        """The address as `ip addr` takes it; without the second in which IPv6 looks for a duplicate."""
        return [f"{self._address(side, nic)}/24"] if self.bed.ipv4 else [f"{self._address(side, nic)}/64", "nodad"]

    def _run(self, side: Side, *command: str) -> None:
        subprocess.run(self.bed.inside(side, *command), capture_output=True, check=False, timeout=COMMAND_S)

    def _other(self, side: Side) -> Side:
        return "right" if side == "left" else "left"

    def _shape(self, side: Side, nic: str, rate: str, burst: str, limit: str) -> None:
        shape = ("root", "tbf", "rate", rate, "burst", burst, "limit", limit)
        self._run(side, "tc", "qdisc", "replace", "dev", nic, *shape)

    def mac(self, side: Side, nic: str) -> str:
        """The hardware address of ``nic`` at ``side``."""
        if (side, nic) not in self._macs:
            command = self.bed.inside(side, "ip", "-j", "link", "show", "dev", nic)
            links = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=COMMAND_S).stdout)
            self._macs[side, nic] = links[0]["address"]
        return self._macs[side, nic]

    def cut(self, side: Side, nic: str) -> None:
        """Nothing that ``side`` sends over ``nic`` arrives any more."""
        self._neighbour(side, nic, NOWHERE)

    def join(self, side: Side, nic: str) -> None:
        """Undoes `cut`."""
        self._neighbour(side, nic, self.mac(self._other(side), nic))

    def _neighbour(self, side: Side, nic: str, mac: str) -> None:
        other = self._address(self._other(side), nic)
        self._run(side, "ip", "neigh", "replace", other, "lladdr", mac, "dev", nic, "nud", "permanent")

    def reset(self, side: Side, nic: str) -> None:
        """Resets every connection over ``nic``."""
        self._run(side, "ss", "--tcp", "--kill", "dst", self._bracketed(self._other(side), nic))
        self.resets += 1

    def begin(self, fault: Fault) -> None:
        """Does ``fault``."""
        bed, side, nic = self.bed, fault.side, fault.nic
        other = self._address(self._other(side), nic)
        match fault.what:
            case "down" | "control down":
                bed.set_down(side, nic)
            case "one way":
                self.cut(side, nic)
            case "black hole":
                self.cut("left", nic)
                self.cut("right", nic)
            case "lossy":
                self._shape(side, nic, *LOSSY)
            case "slow":
                self._shape(side, nic, *SLOW)
            case "mtu":
                # Below 1280 a device loses IPv6 and its addresses for good.
                self._run(side, "ip", "link", "set", nic, "mtu", "900" if bed.ipv4 else "1280")
            case "address":
                self._run(side, "ip", "addr", "del", self._with_prefix(side, nic)[0], "dev", nic)
            case "route":
                self._run(side, "ip", "route", "add", "blackhole", other)
            case "unreachable":
                self._run(side, "ip", "route", "add", "unreachable", other)
            case "reset" | "control reset":
                self.reset(side, nic)
            case "stop":
                os.kill(self.pids[side], signal.SIGSTOP)

    def end(self, fault: Fault) -> None:
        """Undoes ``fault``."""
        bed, side, nic = self.bed, fault.side, fault.nic
        other = self._address(self._other(side), nic)
        match fault.what:
            case "down" | "control down":
                bed.set_up(side, nic)
            case "one way":
                self.join(side, nic)
            case "black hole":
                self.join("left", nic)
                self.join("right", nic)
            case "lossy" | "slow":
                rate = bed.mbit[bed.rails.index(nic)]
                self._shape(side, nic, f"{rate}mbit", "256k", str(256 * 1024 + rate * 125 * 20))
            case "mtu":
                self._run(side, "ip", "link", "set", nic, "mtu", "1500")
            case "address":
                self._run(side, "ip", "addr", "add", *self._with_prefix(side, nic), "dev", nic)
            case "route":
                self._run(side, "ip", "route", "del", "blackhole", other)
            case "unreachable":
                self._run(side, "ip", "route", "del", "unreachable", other)
            case "stop":
                os.kill(self.pids[side], signal.SIGCONT)


class Process:
    """One end (`chaos_end.py`), whose lines are JSON objects."""

    def __init__(self, bed: Bed, side: Side, arguments: Sequence[str], log: Path | None) -> None:
        """Starts the end of ``side``; its log goes to ``log``, or nowhere."""
        script = str(Path(__file__).with_name("chaos_end.py"))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        environment = {
            **clean,
            "CROSSRAIL_TLS": "tcp",
            "CROSSRAIL_NET_DEVICES": ",".join(bed.rails),
            "CROSSRAIL_CONTROL_DEVICE": "eth0",
            "CROSSRAIL_SECRET": "a secret for the chaos",
            "CROSSRAIL_LOG": "info" if log is not None else "off",
        }
        self.side = side
        self.log = log.open("w") if log is not None else None
        self.process = subprocess.Popen(
            bed.inside(side, sys.executable, script, f"--side={side}", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log if self.log is not None else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._said: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._said.update(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._said.setdefault("ended", True)
            self._changed.notify_all()

    def has_said(self, what: str) -> bool:
        """True if the output has a line of ``what`` so far."""
        with self._changed:
            return what in self._said

    def wait_to_say(self, *words: str, timeout: float) -> Any:
        """The value of the first of ``words`` that it says; an error when it ends or the time is over before."""
        with self._changed:
            found = lambda: next((word for word in words if word in self._said), None)  # noqa: E731
            self._changed.wait_for(lambda: found() or "ended" in self._said, timeout)
            word = found()
            if word is None:
                raise AssertionError(f"the {self.side} end said nothing of {words}; it said {self._said}")
            return self._said[word]

    def tell(self, line: str) -> None:
        """One line on its stdin."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Its output so far."""
        with self._changed:
            return dict(self._said)

    def kill(self) -> None:
        """Ends it if it still runs."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        if self.log is not None:
            self.log.close()


@dataclass
class Chaos:
    """One run, and what it has counted."""

    seed: int
    seconds: float
    mbit: Sequence[int] = (300, 300, 300, 300)
    mode: Mode = "healthy"
    tags: int = 2
    logs: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs to the end. ``errors`` of the result is empty where nothing was wrong."""
        with Bed(self.mbit, ipv6=False) as bed:
            wreck = Wreck(bed)
            healthy = bed.rails[random.Random(self.seed).randrange(len(bed.rails))]
            address = f"{bed.address('left', 'eth0')}:{PORT}"
            arguments = [f"--seed={self.seed}", f"--address={address}", f"--tags={self.tags}"]
            ends: list[Process] = []
            began = time.monotonic()
            counts: Counter[str] = Counter()
            errors: list[str] = []
            try:
                for side in SIDES:
                    log = self.logs / f"{side}.log" if self.logs is not None else None
                    ends.append(Process(bed, side, arguments, log))
                    if side == "left":
                        ends[0].wait_to_say("listening", timeout=START_S)
                for end in ends:
                    end.wait_to_say("connected", timeout=START_S)
                    wreck.pids[end.side] = end.process.pid
                began = time.monotonic()
                if self.mode == "windows":
                    self._windows(bed, wreck, ends, counts)
                else:
                    self._faults(wreck, plan(self.seed, self.seconds, bed.rails, healthy), ends, counts)
                took = time.monotonic() - began
                for end in ends:
                    end.tell("stop")
                for end in ends:
                    end.wait_to_say("finished", "wrong", timeout=END_S)
                for end in ends:
                    end.tell("close")
                for end in ends:
                    end.wait_to_say("wrong", timeout=END_S)
            except AssertionError as error:
                errors.append(str(error))
                took = time.monotonic() - began
            finally:
                for end in ends:
                    end.kill()
        results = {end.side: end.result() for end in ends}
        errors += [f"{side}: {wrong}" for side, result in results.items() for wrong in result.get("wrong", ())]
        for side, other in (SIDES, SIDES[::-1]):
            sent, received = results[side].get("sent"), results[other].get("received")
            if sent != received:
                errors.append(f"{side} has sent {sent} messages, {other} has received {received}")
        total = lambda what: sum(result.get(what, 0) for result in results.values())  # noqa: E731
        return {
            "mode": self.mode,
            "commit": chaos_record.commit(),
            "seed": self.seed,
            "seconds": round(took, 1),
            "rails_mbit": list(self.mbit),
            "healthy_rail": healthy if self.mode == "healthy" else None,
            "faults": dict(sorted(counts.items())),
            "num_faults": sum(counts.values()),
            "messages": total("received"),
            "bytes_checked": total("received_bytes"),
            "longest_wait_s": max(result.get("longest_wait_s", 0.0) for result in results.values()),
            "errors": errors,
        }

    def _faults(self, wreck: Wreck, faults: Sequence[Fault], ends: Sequence[Process], counts: Counter[str]) -> None:
        steps: list[tuple[float, Callable[[Fault], None], Fault]] = []
        for fault in faults:
            steps.append((fault.at, wreck.begin, fault))
            if fault.until > fault.at:
                steps.append((fault.until, wreck.end, fault))
        steps.sort(key=lambda step: step[0])
        began = time.monotonic()
        broken = False
        for at, step, fault in steps:
            broken = broken or self._pass_until(began + at, ends)
            if broken and step == wreck.begin:
                continue
            step(fault)
            counts[fault.what] += step == wreck.begin
        if not broken:
            self._pass_until(began + self.seconds, ends)

    def _windows(self, bed: Bed, wreck: Wreck, ends: Sequence[Process], counts: Counter[str]) -> None:
        dice = random.Random(self.seed)
        both = lambda what, nic: [what(side, nic) for side in SIDES]  # noqa: E731
        for nic in bed.rails:
            both(wreck.cut, nic)
        began = time.monotonic()
        number = 0
        while time.monotonic() < began + self.seconds:
            nic = dice.choice(bed.rails)
            if self._pass_until(began + number * PERIOD_S + PERIOD_S - WINDOW_S, ends):
                break
            both(wreck.join, nic)
            opened = time.monotonic()
            broken = self._pass_until(opened + WINDOW_S, ends)
            both(wreck.cut, nic)
            counts["window"] += 1
            number += 1
            if broken:
                break
        for nic in bed.rails:
            both(wreck.join, nic)

    def _pass_until(self, moment: float, ends: Sequence[Process]) -> bool:
        """Waits until then; whether an end has ended before."""
        while (left := moment - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # the plan's own times; an end that gives up is seen soon enough
            if any(end.has_said("wrong") or end.has_said("ended") for end in ends):
                return True
        return False


def main() -> int:
    """The command: exit code 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=None, help="replays that run")
    parser.add_argument("--mode", choices=("healthy", "windows"), default="healthy")
    parser.add_argument("--mbit", default="300,300,300,300", help="the rails' rates")
    parser.add_argument("--tags", type=int, default=2, help="streams of messages in each direction")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of both ends")
    parser.add_argument("--json", type=Path, help="where the result goes, too")
    options = parser.parse_args()
    chaos_record.commit()  # by now: another one may stand here when this ends
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", file=sys.stderr)
    mbit = tuple(int(rate) for rate in options.mbit.split(","))
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    result = Chaos(seed, options.seconds, mbit, options.mode, options.tags, options.logs).run()
    return chaos_record.show(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
