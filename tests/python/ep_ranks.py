"""Ranks as processes, started and told what to do by a test."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ep_rank
import fork_server
from ep_rank import Failed
from free_ports import free_port

HERE = Path(__file__).parent
START = "import ep_tasks; ep_tasks.main()"
ANSWER_S = 120.0


class RankProcess:
    """One rank's process."""

    def __init__(
        self, before: Sequence[str] = (), environment: Mapping[str, str] | None = None, start: str = START
    ) -> None:
        """`before`: the command that starts it somewhere else; `start`: what it runs, in Python."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        paths = [str(HERE), *filter(None, [kept.get("PYTHONPATH")])]
        self.said_file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        wanted = {**kept, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        self.process: subprocess.Popen[bytes] | fork_server.Forked
        if not before and fork_server.forks(environment or {}):
            self.process = fork_server.Forked(start, wanted, self.said_file)
        else:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-c", start],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.said_file,
                env=wanted,
            )
        self._came = b""

    def tell(self, task: str, *arguments: Any, **options: Any) -> None:
        """Asks for a task; the answer comes when it is done."""
        assert self.process.stdin is not None
        ep_rank.write(self.process.stdin, (task, arguments, options))  # type: ignore[arg-type]

    def answer(self, timeout: float = ANSWER_S) -> Any:
        """The answer to the oldest request that has none yet."""
        deadline = time.monotonic() + timeout
        head = self._bytes(8, deadline)
        return pickle.loads(self._bytes(struct.unpack("<Q", head)[0], deadline))

    def _bytes(self, count: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while len(self._came) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise AssertionError(f"no answer in time; it said:\n{self.said()}")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise AssertionError(f"it ended with {self.process.wait(30)}; it said:\n{self.said()}")
            self._came += data
        data, self._came = self._came[:count], self._came[count:]
        return data

    def said(self) -> str:
        """What it said on stderr so far."""
        return os.pread(self.said_file.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and its end awaited."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def close(self, timeout: float = 10) -> None:
        """Lets it end, and ends it if it does not."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self.said_file.close()


class Ranks:
    """A group of ranks, each a process. A context manager: nobody is left afterwards."""

    def __init__(
        self,
        count: int,
        *,
        size: int | None = None,
        nodes: Sequence[str] | None = None,
        timeout: float = 20.0,
        lease: float = 1.0,
        environment: Mapping[str, str] | None = None,
        store: str | None = None,
        before: Mapping[int, Sequence[str]] | None = None,
        start: str = START,
    ) -> None:
        """`count` of `size` ranks are started. `nodes`: the node of each; where it runs if not given. `store`: its
        address, on this machine's loopback if not given. `before`: the command that starts each rank somewhere else.
        `start`: what each runs, in Python."""
        self.start_with = start
        self.size = count if size is None else size
        self.nodes = nodes
        self.timeout = timeout
        self.lease = lease
        self.environment = environment or {}
        self.store = f"tcp://127.0.0.1:{free_port()}" if store is None else store
        self.before = before or {}
        self.processes: dict[int, RankProcess] = {}
        self._first = range(count)

    def __enter__(self) -> Ranks:
        try:
            self.start(self._first)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        # Rank 0 goes last: the others take their leave from the store that it runs.
        others = [process for rank, process in self.processes.items() if rank != 0]
        for several in (others, [self.processes[0]] if 0 in self.processes else []):
            for process in several:
                with contextlib.suppress(BrokenPipeError):
                    process.tell("leave")
            for process in several:
                process.close()
        self.processes.clear()

    def __len__(self) -> int:
        return len(self.processes)

    def start(self, ranks: Iterable[int]) -> None:
        """Starts processes for `ranks`, which join the group."""
        ranks = list(ranks)
        for rank in ranks:
            self.processes[rank] = RankProcess(self.before.get(rank, ()), self.environment, self.start_with)
        for rank in ranks:
            self.processes[rank].tell("join", **self.membership(rank))
        for rank in ranks:
            joined = self.processes[rank].answer()
            assert joined == (rank, self.size), getattr(joined, "trace", joined)

    def membership(self, rank: int) -> dict[str, Any]:
        """The arguments of the group of `rank`."""
        node = None if self.nodes is None else self.nodes[rank]
        options = {"name": "test", "rank": rank, "size": self.size, "local_rank": rank, "node": node}
        return options | {"store": self.store, "lease": self.lease, "timeout": self.timeout}

    def attempt(
        self,
        task: str,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        each: Mapping[int, tuple[Any, ...]] | None = None,
        timeout: float = ANSWER_S,
        **options: Any,
    ) -> dict[int, Any]:
        """What each of `ranks` (all if not given) answers to the task; `each`: arguments of its own, before the shared
        ones."""
        asked = list(self.processes if ranks is None else ranks)
        for rank in asked:
            self.processes[rank].tell(task, *(each or {}).get(rank, ()), *arguments, **options)
        return {rank: self.processes[rank].answer(timeout) for rank in asked}

    def call(self, task: str, *arguments: Any, **options: Any) -> dict[int, Any]:
        """As `attempt`, and no rank may fail."""
        answers = self.attempt(task, *arguments, **options)
        failed = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}
        text = "\n".join(f"rank {rank}: {one.trace}" for rank, one in failed.items())
        assert not failed, text
        return answers

    def said(self) -> str:
        """What all of them said on stderr."""
        return "".join(process.said() for process in self.processes.values())
