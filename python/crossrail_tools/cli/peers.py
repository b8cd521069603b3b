"""Peers of the benches of two ends, measured in the same run: ucx_perftest, with and without ``-e``, and iperf3.

The server of a peer is started by the listening end and its client by the driving end, each in the network namespace
and on the processor of that end. Both run once per round and have ended afterwards.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .failure import Failure, UsageFailure
from .parsing import ports_at
from .processes import Process

KNOWN = ("ucx", "ucx-e", "iperf3")
"""``ucx-e`` is ``ucx_perftest -e``: its endpoints report failures, as ours do."""
SERVER_START_S = 10.0
PORTS_TRIED = 3
"""A port that was free may be taken before a server listens there."""
LONGEST_S = 600.0
_PROGRAMS = {"ucx": "ucx_perftest", "ucx-e": "ucx_perftest", "iperf3": "iperf3"}
_PACKAGES = {"ucx": "ucx-utils", "ucx-e": "ucx-utils", "iperf3": "iperf3"}
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:@%-]{0,63}")
_MIB = 1024 * 1024
_LISTENING = "0A"


class PeerFailure(Failure):
    """A peer has no figure; the text names the peer and the operation, and quotes its output."""


@dataclass(frozen=True)
class PeerJob:
    """One measurement by a peer, which is sent to the listening end as JSON.

    ``hosts`` are the addresses at which iperf3 listens, one stream each; UCX uses the first for its handshake only.
    ``devices`` are the interfaces that UCX may use; if there are none, it chooses by itself.
    """

    peer: str
    what: str
    size: int
    transport: str
    iterations: int
    seconds: int = 1
    hosts: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    zerocopy: bool = False
    timeout: float = 60.0

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> PeerJob:
        """Parses and checks what the other end sent. Raises Failure if it is not a valid job."""
        try:
            work = PeerJob(**message)
        except TypeError as error:
            raise Failure(f"the other end sent a malformed job for a peer: {error}") from None
        if not isinstance(work.hosts, list) or not isinstance(work.devices, list):
            raise Failure("the other end sent a malformed job for a peer: hosts and devices must be lists")
        names = [*work.hosts, *work.devices]
        counts = [work.size, work.iterations, work.seconds]
        sane = all(isinstance(name, str) and _NAME.fullmatch(name) for name in names) and bool(work.hosts)
        sane = sane and all(type(count) is int and count > 0 for count in counts)
        if work.peer not in KNOWN or not sane or not 0 < work.timeout <= LONGEST_S:
            raise Failure("the other end sent an invalid job for a peer")
        return work


@dataclass(frozen=True)
class Figure:
    """What one run of a peer measured."""

    p50_us: float | None = None
    avg_us: float | None = None
    gb_per_s: float | None = None


def missing(peer: str) -> UsageFailure | None:
    """The error for a peer that is not installed, or None."""
    if shutil.which(_PROGRAMS[peer]):
        return None
    package = _PACKAGES[peer]
    return UsageFailure(
        f"{_PROGRAMS[peer]} is not installed; apt-get install {package}, or leave {peer} out of --compare"
    )


def version(peer: str) -> str:
    """The version that a peer reports, or ``unknown``."""
    command = ["iperf3", "--version"] if peer == "iperf3" else ["ucx_info", "-v"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    found = re.search(r"(?:Version|iperf) ([0-9][0-9A-Za-z.]*)", done.stdout)
    return found.group(1) if found else "unknown"


def unsuited(peer: str, what: str, transport: str) -> str | None:
    """Why a peer cannot measure this, or None if it can."""
    if peer == "iperf3" and what == "latency":
        return "iperf3 measures no latency"
    if peer == "iperf3" and transport != "tcp":
        return f"iperf3 only supports TCP, and this measurement used {transport}"
    if peer == "ucx-e" and transport == "shm":
        return "UCX reports no failures over shared memory"
    if peer != "iperf3" and transport not in ("shm", "tcp", "ucx"):
        return f"UCX has no setting equivalent to {transport}"
    return None


def describe(work: PeerJob) -> str:
    """The command line of the peer, for the report."""
    if work.peer == "iperf3":
        zerocopy = " -Z" if work.zerocopy else ""
        return f"iperf3{zerocopy}, {max(len(work.hosts), 1)} at once, {work.seconds} s each"
    test = _ucx_test(work)
    environment = " ".join(f"{name}={value}" for name, value in _ucx_environment(work).items())
    errors = " -e" if work.peer == "ucx-e" else ""
    return f"{environment} ucx_perftest{errors} -t {test} -s {work.size} -n {work.iterations}".strip()


@contextlib.contextmanager
def servers(work: PeerJob) -> Iterator[list[int]]:
    """Starts the peer's servers at this end and yields their ports once they listen. Raises PeerFailure."""
    with contextlib.ExitStack() as stack:
        yield [_start_server(stack, work, host) for host in (work.hosts if work.peer == "iperf3" else work.hosts[:1])]


def _start_server(stack: contextlib.ExitStack, work: PeerJob, host: str) -> int:
    for attempt in range(PORTS_TRIED):
        port = _free_port(host)
        if work.peer == "iperf3":
            command = ["iperf3", "-s", "-1", "-p", str(port), "-B", host]
        else:
            command = ["ucx_perftest", "-p", str(port), *_ucx_options(work, host)]
        process = _started(command, _ucx_environment(work))
        stack.enter_context(process)
        deadline = time.monotonic() + SERVER_START_S
        while not _listens(process.popen.pid, port):
            if process.popen.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.01)  # the kernel has no event for another process's port
        else:
            return port
        said = _last_words(process)
        # Another program has taken the port since, or has it at another address.
        if "already in use" not in said or attempt + 1 == PORTS_TRIED:
            break
    raise PeerFailure(f"{command[0]} did not start listening on port {port}: {said}")


def run_client(work: PeerJob, ports: Sequence[int]) -> Figure:
    """Runs the peer's clients against the servers on ``ports``. Raises PeerFailure."""
    if work.peer != "iperf3":
        return _run_ucx(work, ports[0])
    with contextlib.ExitStack() as stack:
        clients = []
        for host, port in zip(work.hosts, ports, strict=True):
            command = [
                "iperf3",
                "-c",
                host,
                "-p",
                str(port),
                "-t",
                f"{work.seconds}",
                "-J",
                "--connect-timeout",
                "5000",
            ]
            clients.append(_started([*command, *(["-Z"] if work.zerocopy else [])], {}))
            stack.enter_context(clients[-1])
        deadline = time.monotonic() + work.timeout
        rates = [parse_iperf3(_output(client, "iperf3", deadline)) for client in clients]
    return Figure(gb_per_s=sum(rates))


def _run_ucx(work: PeerJob, port: int) -> Figure:
    warmup = max(1, min(work.iterations // 10, 10_000))
    command = ["ucx_perftest", work.hosts[0], "-p", str(port), "-t", _ucx_test(work), "-s", str(work.size)]
    command += ["-n", str(work.iterations), "-w", str(warmup), "-f", "-v", *_ucx_options(work, work.hosts[0])]
    with _started(command, _ucx_environment(work)) as client:
        output = _output(client, "ucx_perftest", time.monotonic() + work.timeout)
    return parse_ucx(output, work.what)


def parse_ucx(output: str, what: str) -> Figure:
    """Parses the output of ``ucx_perftest -f -v``: latency is half a round trip in us, and "MB" is 2^20 bytes."""
    rows = [line for line in csv.reader(output.splitlines()) if line]
    header = next((index for index, line in enumerate(rows) if line[0] == "iterations"), None)
    if header is None or header + 1 >= len(rows) or len(rows[header + 1]) < len(rows[header]):
        raise PeerFailure(f"ucx_perftest printed no result: {_clip(output)}")
    figures = dict(zip(rows[header], rows[header + 1], strict=False))
    try:
        if what == "latency":
            return Figure(p50_us=float(figures["50.0_percentile_lat"]), avg_us=float(figures["overall_lat"]))
        return Figure(gb_per_s=float(figures["overall_bw"]) * _MIB / 1e9)
    except (KeyError, ValueError) as error:
        raise PeerFailure(f"ucx_perftest printed unexpected output ({error}): {_clip(output)}") from error


def parse_iperf3(output: str) -> float:
    """Parses the output of ``iperf3 -J``: the rate at the receiver, in GB/s."""
    try:
        result = json.loads(output)
    except ValueError as error:
        raise PeerFailure(f"iperf3 printed no JSON: {_clip(output)}") from error
    if "error" in result:
        raise PeerFailure(f"iperf3: {result['error']}")
    try:
        return float(result["end"]["sum_received"]["bits_per_second"]) / 8e9
    except (KeyError, TypeError, ValueError) as error:
        raise PeerFailure(f"iperf3 printed no result: {_clip(output)}") from error


def _ucx_test(work: PeerJob) -> str:
    return "tag_lat" if work.what == "latency" else "tag_bw"


def _ucx_options(work: PeerJob, host: str) -> list[str]:
    """The options that both ends of ucx_perftest need."""
    return [*(["-6"] if ":" in host else []), *(["-e"] if work.peer == "ucx-e" else [])]


def _ucx_environment(work: PeerJob) -> dict[str, str]:
    if work.peer == "iperf3":
        return {}
    if work.transport == "ucx":
        # What carried our lanes; without names of UCX's own, UCX chooses for both.
        names = os.environ.get("CROSSRAIL_TLS", "").partition("ucx:")[2]
        return {"UCX_TLS": f"{names},self"} if names else {}
    environment = {"UCX_TLS": "shm,self" if work.transport == "shm" else "tcp,self"}
    if work.transport == "tcp" and work.devices:
        environment["UCX_NET_DEVICES"] = ",".join(work.devices)
        environment["UCX_MAX_RNDV_RAILS"] = str(len(work.devices))
    return environment


def _started(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    try:
        return Process(command, environment=environment)
    except OSError as error:
        raise PeerFailure(f"cannot run {command[0]}: {error.strerror}") from error


def _output(client: Process, name: str, deadline: float) -> str:
    try:
        out, error = client.popen.communicate(timeout=max(deadline - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        raise PeerFailure(f"{name} did not finish in time and was killed") from None
    text = out.decode(errors="replace")
    if client.popen.returncode != 0 and not text.strip().startswith("{"):
        raise PeerFailure(f"{name} failed ({client.popen.returncode}): {_clip(error.decode(errors='replace') or text)}")
    return text


def _last_words(process: Process) -> str:
    process.popen.kill()
    out, error = process.popen.communicate()
    return _clip((error or out).decode(errors="replace")) or "it printed nothing"


def _clip(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 300 else words[:297] + "..."


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        reason: str | None = None
        for port in [*reversed(ports_at(host))] or [0]:
            try:
                probe.bind((host, port))
            except OSError as error:
                reason = error.strerror
            else:
                return int(probe.getsockname()[1])
        raise PeerFailure(f"no free port on {host}: {reason}")


def _listens(pid: int, port: int) -> bool:
    """Whether process ``pid`` listens on ``port``. A connection would disturb the peer."""
    wanted = f"{port:04X}"
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            own = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            is_wanted = fields[3] == _LISTENING and fields[1].rpartition(":")[2] == wanted
            if is_wanted and f"socket:[{fields[9]}]" in own:
                return True
    return False
