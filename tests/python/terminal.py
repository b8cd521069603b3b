"""A command in a real terminal: a pseudo-terminal of a given size, for what it prints where, and for Ctrl-C."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A command whose stdin, stdout and stderr are one terminal. As a context manager it kills what still runs."""

    def __init__(
        self, command: Sequence[str], columns: int, *, rows: int = 40, environment: Mapping[str, str] | None = None
    ) -> None:
        self._screen, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("CROSSRAIL_", "COLUMNS", "LINES"))
        }
        self.process = subprocess.Popen(
            list(command),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**kept, "TERM": "xterm", **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inside)
        self.raw = ""
        # A read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *unused: object) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._screen)

    def close(self) -> None:
        """Closes the terminal, as a lost connection does; the command is not killed."""
        os.close(self._screen)

    def press(self, key: str) -> None:
        """Types a key; ``\\x03`` is Ctrl-C."""
        os.write(self._screen, key.encode())

    def read_until(self, pattern: str, seconds: float = 60.0) -> str:
        """Reads until what was printed matches ``pattern``; returns everything so far."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.raw):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} was not printed in {seconds:g} s: {self.raw[-2000:]!r}"
            if select.select([self._screen], [], [], left)[0] and not self._read():
                raise AssertionError(f"it ended without {pattern!r}: {self.raw[-2000:]!r}")
        return self.raw

    def end(self, seconds: float = 60.0) -> int:
        """Reads to the end; returns the exit status."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            assert left > 0, f"it did not end in {seconds:g} s: {self.raw[-2000:]!r}"
            if select.select([self._screen], [], [], left)[0] and not self._read():
                return self.process.wait(max(left, 1.0))

    def _read(self) -> bool:
        try:
            piece = os.read(self._screen, 1 << 16)
        except OSError:  # nobody has the terminal open any more
            piece = b""
        self.raw += self._decoder.decode(piece, final=not piece)
        return bool(piece)

    @property
    def lines(self) -> list[str]:
        """What was printed, without control sequences."""
        return plain(self.raw)


def plain(raw: str) -> list[str]:
    """The lines of ``raw`` without control sequences and blanks at their ends."""
    return [line.rstrip() for line in _CONTROL.sub("", raw).split("\n")]


def run_in_terminal(command: Sequence[str], columns: int, *, seconds: float = 60.0) -> tuple[int, str]:
    """Runs a command to its end; returns its exit status, and all that it printed, with control sequences."""
    with Terminal(command, columns) as terminal:
        status = terminal.end(seconds)
        return status, terminal.raw
