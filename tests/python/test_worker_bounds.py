"""Memory and descriptors that peers take from a worker stay bounded, however often they connect."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

import crossrail

FEW = 256
VICTIM = """
import os, resource, sys, crossrail
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
worker = crossrail.Worker(crossrail.Context(log="error"), name="victim", admit=sys.argv[2] == "admit")
print(worker.control_addresses()[0], flush=True)
for line in sys.stdin:
    if line == "accept\\n":
        worker.accept(5)
    elif line == "open\\n":
        [os.close(fd) for fd in [os.dup(0) for _ in range(20)]]
    elif line == "notices\\n":
        worker.notices()
    memory = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
    print(memory, len(os.listdir("/proc/self/fd")), flush=True)
"""


class Victim:
    """A worker in a process that may have few descriptors."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self.address = self._output.readline().strip()

    def does(self, what: str) -> tuple[int, int]:
        """Its memory in MiB and its descriptors afterwards."""
        self._input.write(what + "\n")
        self._input.flush()
        memory, descriptors = self._output.readline().split()
        return int(memory), int(descriptors)


@contextmanager
def victim(descriptors: int, *, admit: bool) -> Iterator[Victim]:
    command = [sys.executable, "-c", VICTIM, str(descriptors), "admit" if admit else "accept"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Victim(process)
        finally:
            process.kill()


@pytest.mark.parametrize("tls", ["shm", "tcp"])
@pytest.mark.parametrize("admit", [True, False])
def test_a_hundred_connections_leave_a_process_descriptors(
    tls: str, admit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", tls)
    with victim(FEW, admit=admit) as of, crossrail.Worker(crossrail.Context(log="error"), name="many") as worker:
        endpoints, refused = [], None
        for _ in range(400):
            try:
                endpoints.append(worker.connect(of.address, timeout=5))
            except crossrail.CrossrailError as error:
                refused = error
                break
        assert refused is not None and len(endpoints) > 10
        assert "descriptors" in str(refused) or (not admit and "wait to be accepted" in str(refused))
        of.does("open")
        if "wait to be accepted" in str(refused):
            # Handshakes in progress at the limit may have gone beyond it, so a few are accepted before there is room.
            for _ in range(8):
                of.does("accept")
                with suppress(crossrail.CrossrailError):
                    endpoints.append(worker.connect(of.address, timeout=5))
                    break
            else:
                pytest.fail("a peer was refused after 8 were accepted")
        for endpoint in endpoints:
            with suppress(crossrail.CrossrailError):
                endpoint.close(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > FEW, "of this process alone"


def test_a_peer_that_leaves_and_comes_again_holds_no_more_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", "tcp")
    notice = os.urandom(1) * ((4 << 20) - 64)
    with victim(1024, admit=True) as of:
        before, _ = of.does("nothing")
        refused = 0
        for _ in range(20):
            with crossrail.Worker(crossrail.Context(log="error"), name="again") as worker:
                endpoint = worker.connect(of.address)
                try:
                    for _ in range(3):
                        endpoint.notify(notice).wait(20)
                except crossrail.ExhaustedError as error:
                    assert "unread notices" in str(error) and "read notices" in (error.hint or "")
                    refused += 1
        after, _ = of.does("nothing")
        assert refused >= 15
        assert after - before < 100, f"{before} -> {after} MiB"
        of.does("notices")
        with crossrail.Worker(crossrail.Context(log="error"), name="again") as worker:
            worker.connect(of.address).notify(notice).wait(20)
