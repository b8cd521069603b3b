"""Starts ranks by forking a process that has imported what they need, in place of an interpreter for each.

An interpreter, NumPy and Crossrail cost 0.15 s of processor time for each rank. What is forked has no context yet, and
what a rank begins with is as if it had been started: arguments, environment, working folder, stdin, stdout, stderr, no
other descriptor, and its end is that of an interpreter.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

MOST = 1 << 20
NUMBER = struct.Struct("<q")
_server: tuple[socket.socket, int] | None = None


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Meanwhile, `Forked` can be used."""
    global _server
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with requests, theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A thread of OpenBLAS would not be there in a forked child.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        _server = requests, process.pid
        try:
            yield
        finally:
            _server = None
            requests.close()
            process.wait(30)


def forks(environment: Mapping[str, str]) -> bool:
    """Whether a process with these additions to the environment can be forked: those that are read once it runs."""
    return _server is not None and all(name.startswith("CROSSRAIL_") for name in environment)


def children() -> list[str]:
    """The processes of the server that have not ended."""
    if _server is None:
        return []
    return Path(f"/proc/{_server[1]}/task/{_server[1]}/children").read_text().split()


class Forked:
    """As much of `subprocess.Popen` as tests of ranks use, with pipes for stdin and stdout."""

    def __init__(self, start: str, environment: Mapping[str, str], stderr: IO[bytes]) -> None:
        """`start`: what it runs, in Python."""
        assert _server is not None
        self.returncode: int | None = None
        (stdin, to_stdin), (from_stdout, stdout) = os.pipe(), os.pipe()
        self._keeper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stdin, self.stdout = os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb")
        request = pickle.dumps((start, dict(environment), str(Path.cwd())))
        with os.fdopen(stdin, "rb"), os.fdopen(stdout, "wb"), theirs:
            socket.send_fds(_server[0], [request], [stdin, stdout, stderr.fileno(), theirs.fileno()])
        self.pid = self._next()

    def _next(self) -> int:
        data = self._keeper.recv(NUMBER.size)
        if not data:
            raise RuntimeError("the process that forks ranks has ended")
        return int(NUMBER.unpack(data)[0])

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._keeper], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0)
            self.returncode = self._next()
            self._keeper.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        # As long as its end was not awaited, its number stays its own.
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(requests: socket.socket) -> str:
    """Forks whatever is asked for; returns in each rank, what to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, MOST, 4)
        if not data:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target, inheritable=target < 3)
    if rank := os.fork():
        keep(rank, socket.socket(fileno=3))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start, environment, folder = pickle.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c"]
    return str(start)


def keep(rank: int, test: socket.socket) -> None:
    """Tells the test which process it is and how it ends, and reaps it once the test knows. Does not return."""
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    os.closerange(0, 3)
    with contextlib.suppress(OSError):
        test.send(NUMBER.pack(rank))
    ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    with contextlib.suppress(OSError):
        test.send(NUMBER.pack(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
        test.recv(1)
    os.waitpid(rank, 0)
    os._exit(0)


if __name__ == "__main__":
    import ep_tasks  # noqa: F401  # what ranks need, imported once

    exec(serve(socket.socket(fileno=int(sys.argv[1]))), {"__name__": "__main__"})
