"""Child processes: they die with this one, are waited for with timeouts, and are always reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossrail.records import HostMemory

Message = dict[str, Any]
"""A message between processes of the command: a JSON object."""

_PR_SET_PDEATHSIG = 1
_SIG_IGN = 1
_libc = ctypes.CDLL(None)
_running: set[Process] = set()
_folders: set[str] = set()
_guard = threading.Lock()

from_parent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
"""The lines received on stdin since :func:`live_with_parent`."""


class Process:
    """A process that ends with this one in any case: the kernel kills it when its parent dies.

    As a context manager, it is killed if it still runs, and reaped, at the end of the block.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
    ) -> None:
        """Starts ``command``. Raises OSError if it cannot be started."""
        parent = os.getpid()
        self._memory = _host_memory()
        # Blocked until the child ignores them; otherwise Ctrl-C would print its traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINALS)
        try:
            self.popen = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=None if environment is None else {**os.environ, **environment},
                # Between fork and exec, so that the parent cannot die unnoticed in between. It makes four system calls
                # and takes no lock that another thread could hold.
                preexec_fn=lambda: _begin(parent, mask),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with _guard:
            _running.add(self)

    def __enter__(self) -> Process:
        return self

    def how_it_was_killed(self) -> str | None:
        """Which signal killed the process, and whether the kernel did it for want of memory; None if none did."""
        code = self.popen.poll()
        if code is None or code >= 0:
            return None
        if code == -signal.SIGKILL and (text := self._out_of_memory()) is not None:
            return text
        return f"its process was killed by {signal.Signals(-code).name}"

    def _out_of_memory(self) -> str | None:
        before, now = self._memory, _host_memory()
        if before is None or now is None or (now["oom_kills"] or 0) <= (before["oom_kills"] or 0):
            return None
        limit = "" if now["limit"] is None else f" of {now['limit']} bytes ({now['limited_by']})"
        where = "the machine's memory" if now["limit"] is None else f"the limit{limit} of this control group"
        return (
            f"its process was killed by the kernel's out-of-memory killer (SIGKILL): {where} was used up; use less, or "
            "raise the limit"
        )

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def stop(self, grace: float = 0.0) -> None:
        """Waits ``grace`` seconds for the process to end, then kills it; reaps it either way."""
        try:
            self.popen.wait(grace)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self.popen.kill()
            self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with _guard:
            _running.discard(self)


def _host_memory() -> HostMemory | None:
    from crossrail._native import host_memory  # a broken installation is reported elsewhere

    return host_memory()


@contextlib.contextmanager
def scratch_folder(prefix: str, *, in_memory: int = 0) -> Iterator[str]:
    """A folder for files of another program, removed afterwards, also by an early exit (`kill_all`). `in_memory`: of so
    many bytes at most, in memory if they fit there."""
    shm = Path("/dev/shm")
    fits = in_memory > 0 and shm.is_dir() and shutil.disk_usage(shm).free >= in_memory
    folder = tempfile.mkdtemp(prefix=prefix, dir=shm if fits else None)
    with _guard:
        _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with _guard:
            _folders.discard(folder)


def kill_all() -> None:
    """Kills and reaps every process that still runs and removes scratch folders: the last step before an early exit."""
    with _guard:
        left = list(_running)
    for process in left:
        with contextlib.suppress(OSError):
            process.popen.kill()
    for process in left:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.popen.wait(5)
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    if (native := sys.modules.get("crossrail._native")) is not None:
        native.remove_pages()  # neither those processes nor this one, if it ends early, do it themselves


_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all processes in it, on Ctrl-C and when it is closed."""


def _begin(parent: int, mask: Iterable[int]) -> None:
    """Runs in the new process: ignores what a terminal sends, which the parent handles, and dies with the parent.

    ``mask``: the signals that the new process blocks.
    """
    for number in _OF_TERMINALS:
        _libc.signal(number, ctypes.c_void_p(_SIG_IGN))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _die_with(parent)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def live_with_parent(parent: int) -> None:
    """Ends this process when the process ``parent`` that started it ends, for whatever reason.

    In two ways: the kernel sends SIGKILL; and a thread watches for the end of stdin, a pipe from the parent, which also
    works if the parent is in another thread or namespace. SIGINT and SIGHUP are ignored: the parent ends this process
    itself.
    """
    for number in _OF_TERMINALS:
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    threading.Thread(target=_exit_with_stdin, name="crossrail-parent", daemon=True).start()


def _exit_with_stdin() -> None:
    with open(sys.stdin.fileno(), "rb", closefd=False) as stdin:
        for line in stdin:
            from_parent.put(line)
    os._exit(1)
