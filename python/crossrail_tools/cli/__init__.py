"""The command `crossrail`: arguments, exit codes, tables, progress. Measurements are made by the native module.

Data goes to stdout, messages go to stderr. Exit codes: 0 success, 1 the run failed or its data did not verify, 2 bad
usage, 129 terminal closed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from .failure import (
    EXIT_FAILED,
    EXIT_HUNG_UP,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_USAGE,
    Failure,
    ending,
    exit_code_of,
    print_error,
)
from .processes import kill_all, live_with_parent

if TYPE_CHECKING:
    from .parsing import Command


_AGAIN_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. A mistake of the user never ends in a traceback."""
    _open_standard_streams()
    gc.disable()
    try:
        from .command_line import parse_arguments

        command = parse_arguments(arguments)
    except ImportError as error:
        print_error(f"the native module cannot be loaded ({error}); reinstall Crossrail for this Python")
        return EXIT_FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    except Failure as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    finally:
        gc.freeze()  # exclude loaded modules from garbage collection, also from the one at exit
        gc.enable()
    if command.parent is not None:
        live_with_parent(command.parent)
    if getattr(command, "on_main_thread", False):
        return _on_main_thread(command)
    return _in_thread(lambda: _run(command))


def _open_standard_streams() -> None:
    """Opens /dev/null for each closed standard stream; otherwise a socket would reuse its number and get its output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = "r" if number == 0 else "w"
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _on_main_thread(command: Command) -> int:
    """Runs a command that is ended by a signal, on the main thread, which alone receives signals."""
    try:
        with _one_end():
            return _run(command)
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    except _Terminated as end:
        print_error(end.why)
        return end.code


def _in_thread(work: Callable[[], int]) -> int:
    """Runs ``work`` in another thread, so that Ctrl-C ends the command at once even while native code is running.

    The system may give a signal to a thread that starts a process, which does not wake this one: it sleeps on the
    descriptor to which Python writes for every signal, whatever the thread.
    """
    asleep, wake = socket.socketpair()
    wake.setblocking(False)
    outcome: list[int | BaseException] = []

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)
        finally:
            wake.send(b"\0")

    thread = threading.Thread(target=body, name="crossrail-command", daemon=True)
    try:
        with _one_end():
            before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            thread.start()
            while not outcome:
                asleep.recv(1)
            signal.set_wakeup_fd(before)
    except (KeyboardInterrupt, _Terminated) as end:
        if isinstance(end, _Terminated):
            _end_early(end.why, end.code)
        _end_early("interrupted", EXIT_INTERRUPTED)
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _end_early(why: str, exit_code: int) -> NoReturn:
    """Shows what was measured so far and exits. What a later signal does: `_one_end`."""
    ending.set()
    reporting = sys.modules.get(f"{__name__}.reporting")  # without it there is nothing to show
    try:
        if reporting is not None:
            reporting.restore_terminal()
        print_error(why)
        if reporting is not None:
            reporting.stop_runs()
    finally:
        with contextlib.suppress(OSError):  # killing the other processes causes errors that nobody needs to read
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        kill_all()
        # An ordinary exit would wait for a thread that is inside native code.
        os._exit(exit_code)


_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_HUNG_UP,
}


class _Terminated(BaseException):
    """SIGTERM was received; or SIGHUP, since the terminal was closed."""

    def __init__(self, number: int) -> None:
        self.code = _CODES[signal.Signals(number)]
        self.why = "terminated" if number == signal.SIGTERM else "the terminal was closed"


@contextlib.contextmanager
def _one_end() -> Iterator[None]:
    """Has the first SIGINT, SIGTERM or SIGHUP raise, and none after it, which would cut off what its end shows.

    A launcher or a closed terminal may send several at a time; one `_AGAIN_S` later is of a user who wants no more, and
    ends the process at once. Signals that are ignored stay so.
    """

    received = False

    def first(number: int, frame: object) -> None:
        nonlocal received
        received = True
        began, code = time.monotonic(), _CODES[signal.Signals(number)]

        def again(*unused: object) -> None:
            if time.monotonic() - began > _AGAIN_S:
                os._exit(code)

        for each in heard:
            signal.signal(each, again)
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated(number)

    heard = {each: signal.getsignal(each) for each in _CODES}
    heard = {each: handler for each, handler in heard.items() if handler != signal.SIG_IGN}
    for each in heard:
        signal.signal(each, first)
    try:
        yield
    finally:
        if not received:  # after a signal its handling continues
            for each, handler in heard.items():
                signal.signal(each, handler)


def _run(command: Command) -> int:
    """Runs ``command`` and reports every expected failure as one line."""
    import crossrail
    from crossrail_tools.report.writing import WriteError

    try:
        command.run()
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (Failure, crossrail.CrossrailError, WriteError) as error:
        if not ending.is_set():
            print_error(error)
        return exit_code_of(error)
    except OSError as error:
        if not ending.is_set():
            print_error(f"{error.filename or 'stdout'}: {error.strerror}")
        return EXIT_FAILED
    finally:
        kill_all()
    return EXIT_OK
