"""The listening end as a child process, for benches that run both ends on this machine, and for sweeps."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from ..ends import LAST_WORDS_S, End
from ..failure import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED, Failure, ending, print_notice
from ..processes import Message
from .options import BenchOptions

START_S = 30.0


@contextlib.contextmanager
def listening_end(what: str, words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[End, Message]]:
    """Starts the listening end of a bench, and ends it with the context; and what it announces. Raises Failure."""
    command = [sys.executable, "-m", "crossrail", "bench", what, *words, f"--parent={os.getpid()}"]
    end = End("the other end", command, environment={"PYTHONSAFEPATH": "1", **environment})
    try:
        yield end, _announced(end)
        end.end(grace=2.0)
    finally:
        end.end()


def _announced(end: End) -> Message:
    try:
        return end.answer(START_S)
    except Failure:
        if end.error:
            raise end.failure(end.error) from None
        show_output(end)
        raise


@contextlib.contextmanager
def other_end(options: BenchOptions) -> Iterator[tuple[End, bytes]]:
    """The other end on this machine, and the address of its worker. Raises Failure."""
    words = ["--listen=:0", f"--pin={_pin_text(options)}", *options.for_child()]
    environment = {} if options.trace_parts is None else {"CROSSRAIL_TRACE": options.trace_parts}
    with listening_end(options.what, words, environment) as (end, announced):
        yield end, bytes.fromhex(str(announced.get("address", "")))
    show_output(end)


def report_failure(end: End) -> None:
    """Prints the end's stderr if it failed by itself. To be called when this end fails, before it closes."""
    failed = False
    with contextlib.suppress(subprocess.TimeoutExpired):
        failed = end.process.popen.wait(LAST_WORDS_S) != 0
    if not ending.is_set() and (killed := end.process.how_it_was_killed()) is not None:
        print_notice(f"the other end: {killed}")
    if failed:
        show_output(end)


def show_output(end: End) -> None:
    """Forwards what the end printed on stderr, unless a signal ends the command, and the end with it."""
    by_signal = end.process.popen.poll() in (EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED)
    if end.said and not ending.wait(LAST_WORDS_S if by_signal else 0.0):  # it may get the signal first
        print_notice("the other end said:\n" + "\n".join(end.said))


def _pin_text(options: BenchOptions) -> str:
    if options.pin == "auto" and options.cpu(driver=False) is None:
        return "none"
    return ",".join(map(str, options.pin)) if isinstance(options.pin, list) else options.pin
