"""One rank as a process of its own: runs `body` between joining and leaving, and talks over stdin and stdout."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

from free_ports import free_port

PROLOGUE = """
import os, signal, sys, time
import crossrail
def say(*what): print(*what, flush=True)
def heard(): return sys.stdin.readline().strip()
"""


class Rank:
    """A process that runs PROLOGUE and `body`, with `variables` instead of any launcher's; killed at the end.

    `within`: a command that runs a command, such as `ip netns exec NAME`.
    """

    def __init__(self, body: str, *within: str, **variables: str | int) -> None:
        launchers = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_",
            "MASTER_",
            "TORCHELASTIC_",
            "SLURM_",
            "OMPI_",
            "PMIX_",
            "CROSSRAIL_",
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
        environment |= {"CROSSRAIL_TIMEOUT": "20"} | {name: str(value) for name, value in variables.items()}
        self.process = subprocess.Popen(
            [*within, sys.executable, "-c", PROLOGUE + body],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """What it says next; fails when it has ended."""
        assert self.process.stdout is not None and self.process.stderr is not None
        text = self.process.stdout.readline()
        assert text, f"ended: {self.process.stderr.read()}"
        return text.strip()

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> tuple[int, str, str]:
        """Exit code, and the rest of stdout and stderr."""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()


def torchrun(rank: int, size: int, port: int) -> dict[str, str | int]:
    """What torchrun sets for a rank of one machine."""
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@contextlib.contextmanager
def ranks(body: str, size: int) -> Iterator[list[Rank]]:
    """`size` ranks as torchrun starts them."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Rank(body, **torchrun(rank, size, port))) for rank in range(size)]
