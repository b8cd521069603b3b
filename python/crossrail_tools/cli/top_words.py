"""Words of `crossrail top`: names of programs, and how often something happens."""

from __future__ import annotations

from pathlib import Path

_NAME_MAX = 24
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of the interpreter that take a value."""


def program_of(command: str) -> str:
    """The name of a command's program; of a Python interpreter, that of the script or module that it runs."""
    words = command.split()
    if not words:
        return ""
    name = Path(words[0]).name
    if name.startswith("python"):
        rest = iter(words[1:])
        for word in rest:
            if word in _WITH_VALUE:
                next(rest, None)
            elif word == "-c":
                break
            elif not word.startswith("-"):
                name = Path(word).name
                break
    return name[:_NAME_MAX]


def frequency(per_s: float) -> str:
    """`12 /s`, with three digits."""
    return "0 /s" if per_s == 0 else f"{per_s:.3g} /s" if per_s < 1000 else f"{per_s / 1000:.3g} k/s"
