"""The screen of `crossrail top`: the part of the tables that fits, and the keys that move it."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.segment import Segments
from rich.text import Text

from ..bar import joined


class Window:
    """The part of what there is to show that fits on the screen."""

    def __init__(self, to: Console) -> None:
        self._console = to
        self._first = 0
        self._rows = 0

    def shown(self, whole: RenderableType) -> RenderableType:
        """The lines from the first one shown on; where not all fit, a line says how many there are."""
        lines = self._console.render_lines(whole, pad=False)
        self._rows = max(self._console.height - 1, 1)
        if len(lines) <= self._rows:
            self._first = 0
            return Segments(list(joined(lines)))
        self._first = max(0, min(self._first, len(lines) - self._rows))
        last = self._first + self._rows
        more = f"lines {self._first + 1} to {last} of {len(lines)}: arrows and page keys scroll, q ends"
        return Group(Segments(list(joined(lines[self._first : last]))), Text(more, style="reverse", end=""))

    def scroll(self, key: str) -> None:
        """Moves by a line, or by a screen."""
        page = max(self._rows - 1, 1)
        self._first += {"up": -1, "down": 1, "page up": -page, "page down": page}.get(key, 0)
        self._first = {"home": 0, "end": sys.maxsize}.get(key, self._first)


_KEYS = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    **dict.fromkeys(("\x1b[5~", "b"), "page up"),
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "g"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "G"), "end"),
    **dict.fromkeys(("q", "Q"), "q"),
}


_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|.", re.DOTALL)
_BEGUN = re.compile(r"\x1b(?:O?|\[[0-9;]*)")


class Keyboard:
    """Keys of a terminal, of which one read may bring several, or only the first bytes of one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    def pressed(self, seconds: float) -> str | None:
        """The name of the next key, empty for one without a use here; None if there is none within ``seconds``."""
        if self._is_incomplete():
            if not select.select([self._descriptor], [], [], max(seconds, 0.0))[0]:
                return None
            piece = os.read(self._descriptor, 16)
            if not piece:
                return "q"
            self._text += self._decoder.decode(piece)
        found = None if self._is_incomplete() else _KEY.match(self._text)
        if found is None:
            return ""
        self._text = self._text[found.end() :]
        return _KEYS.get(found.group(), "")

    def _is_incomplete(self) -> bool:
        return not self._text or _BEGUN.fullmatch(self._text) is not None


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str | None]]:
    """Yields a function that waits that many seconds for a key and returns its name, or None.

    Without a terminal as stdin it only waits.
    """
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(max(seconds, 0.0))
        return
    terminal = sys.stdin.fileno()
    former = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield Keyboard(terminal).pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, former)
