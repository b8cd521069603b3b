"""A real etcd for one run: on free ports of loopback, its data in a temporary folder, ended with the run."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .failure import Failure, UsageFailure
from .processes import Process, scratch_folder

START_S = 20.0
ATTEMPTS = 3
"""Ports that were free when they were chosen may be taken by somebody else a moment later."""


@contextlib.contextmanager
def running_etcd() -> Iterator[str]:
    """The address of an etcd that is ready, as `etcd://host:port`. Raises Failure when it does not start."""
    program = shutil.which("etcd")
    if program is None:
        raise UsageFailure("etcd is not installed here: apt-get install etcd-server, or name one by CROSSRAIL_STORE")
    with scratch_folder("crossrail-etcd-") as folder, contextlib.ExitStack() as stack:
        for attempt in range(ATTEMPTS):
            started = _start(program, Path(folder, str(attempt)))
            if started is not None:
                process, address = started
                stack.callback(process.stop)
                break
        else:
            raise Failure(f"etcd did not start: {_said(Path(folder, str(ATTEMPTS - 1)))}")
        yield address


def _start(program: str, folder: Path) -> tuple[Process, str] | None:
    """One attempt; None: it ended at once, as it does when a port is taken."""
    folder.mkdir()
    client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
    command = [program, "--name=crossrail", f"--data-dir={folder / 'data'}", "--log-level=warn"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=crossrail={peer}"]
    # etcd tells when it is ready, as systemd's services do.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, (folder / "said").open("wb") as said:
        ready.bind(str(folder / "ready"))
        environment = {"NOTIFY_SOCKET": str(folder / "ready")}
        process = Process(command, environment=environment, stdout=subprocess.DEVNULL, stderr=said)
        try:
            if _wait_ready(ready, process, time.monotonic() + START_S):
                return process, f"etcd://{client.removeprefix('http://')}"
        except BaseException:
            process.stop()
            raise
        process.stop()
        return None


def _wait_ready(ready: socket.socket, process: Process, deadline: float) -> bool:
    """Whether it became ready; it may end instead."""
    ready.settimeout(0.1)
    while process.popen.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            if b"READY=1" in ready.recv(4096):
                return True
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _said(folder: Path) -> str:
    lines = (folder / "said").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it was not ready within {START_S:g} s"
