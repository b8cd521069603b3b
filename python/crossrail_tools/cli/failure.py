"""Failures of the command: one line on stderr, and an exit code that tells bad usage from a failed run."""

from __future__ import annotations

import contextlib
import sys
import threading

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HUNG_UP = 129
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

ERROR = "crossrail: error: "
"""The beginning of every line that reports why the command failed."""


_MOST = 2000
"""Characters of an error that are shown; more are of an argument or a file that it quotes."""

ending = threading.Event()
"""Set once a signal ends the command: what that causes is not reported."""


class Failure(Exception):
    """The run failed, or its data did not verify: exit 1."""

    exit_code = EXIT_FAILED


class UsageFailure(Failure):
    """The command line or a setting is invalid: exit 2."""

    exit_code = EXIT_USAGE


def exit_code_of(error: Exception) -> int:
    """The exit code for an error of the command or of the library."""
    from crossrail import errors

    if isinstance(error, Failure):
        return error.exit_code
    return EXIT_USAGE if isinstance(error, (errors.UsageError, errors.ConfigError)) else EXIT_FAILED


def print_notice(text: str) -> None:
    """Prints one line on stderr; nothing where that is closed or full."""
    # In one write, because several threads print at the same time.
    lines = "\n".join(map(_plain, text.split("\n")))
    with contextlib.suppress(OSError):
        print(f"crossrail: {lines}\n", end="", file=sys.stderr, flush=True)


def print_error(error: Exception | str) -> None:
    """Prints one line on stderr with what failed and what to do; nothing where stderr is closed or full."""
    text = _plain(" ".join(str(error).split()))
    with contextlib.suppress(OSError):
        print(ERROR + (text if len(text) <= _MOST else f"{text[:_MOST]}..."), file=sys.stderr, flush=True)


def _plain(text: str) -> str:
    """A line that may quote peers and files, as a terminal may show it."""
    from crossrail_tools.report.schema import plain

    return str(plain(text))
