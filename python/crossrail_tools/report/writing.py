"""Files: written completely or not at all, and read within bounds."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
import tempfile
import time
from pathlib import Path

STDOUT = "-"


class WriteError(Exception):
    """The report could not be written; the text says where, why, and what to do."""


def check_destination(destination: str, option: str = "--json") -> None:
    """Checks, before anything is measured, that ``destination`` can be written.

    ``option``: the one that named it, for errors. Raises WriteError for a folder that is missing or not writable, or a
    path that is itself a folder.
    """
    if destination == STDOUT:
        return
    path = Path(destination)
    if path.is_dir():
        raise WriteError(f"{destination or 'an empty name'} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise WriteError(f"{folder} does not exist; create it, or choose another file with {option}")
    if not os.access(folder if not path.exists() else path, os.W_OK):
        raise WriteError(f"{destination} is not writable; choose another file with {option}")


PIPE_PATIENCE = 10.0
"""Seconds within which a pipe must have given all it has."""


def read_bounded(path: str | Path, most_bytes: int, patience: float = PIPE_PATIENCE) -> bytes:
    """What is in a file, or comes out of a pipe within ``patience`` seconds.

    Raises OSError, also for a device, for a pipe that goes on, and for more than ``most_bytes``.
    """
    data, deadline = bytearray(), time.monotonic() + patience
    with io.FileIO(str(path), opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise OSError(errno.EINVAL, "neither a file nor a pipe")
        ready = select.poll()
        ready.register(file, select.POLLIN)
        while len(data) <= most_bytes:
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise TimeoutError(errno.ETIMEDOUT, f"whoever writes into this pipe did not finish in {patience:g} s")
            piece = file.read(most_bytes + 1 - len(data))
            if not piece:
                return bytes(data)
            data += piece
    raise OSError(errno.EFBIG, f"longer than {most_bytes >> 20} MiB, which no file of this kind is")


def write_text(text: str, destination: str, option: str = "--json") -> None:
    """Writes ``text`` to a file, or to stdout when ``destination`` is ``-``; ``option`` named it, for errors.

    A file appears whole or not at all: the text goes to a temporary file beside it, which is renamed at the end. What
    was there before stays until then, and stays for good when writing fails.

    Characters that UTF-8 does not have, as in the names of some files, are written as JSON escapes them.

    Raises WriteError, also for a full disk.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    if destination == STDOUT:
        _write_stream(text, option)
        return
    path = Path(destination)
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            with path.open("w", encoding="utf-8") as device:  # a pipe or device cannot be replaced by renaming
                device.write(text)
            return
        _replace(path.resolve(), text)
    except OSError as error:
        raise WriteError(f"cannot write {destination}: {error.strerror}; {_advice(error, option)}") from error


def _write_stream(text: str, option: str) -> None:
    try:
        sys.stdout.flush()
        # UTF-8, as in a file, whatever encoding a terminal here would have.
        if (stream := getattr(sys.stdout, "buffer", None)) is None:
            sys.stdout.write(text)
        else:
            stream.write(text.encode())
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(f"cannot write to stdout: {error.strerror}; {_advice(error, option)}") from error


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _advice(error: OSError, option: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space, or name another place with {option}"
    return f"name another place with {option}"
