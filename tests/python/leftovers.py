"""What a process holds of the machine: compared before and after a test, it tells what the test left behind."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fork_server


class Held(NamedTuple):
    """What this process holds of the machine."""

    descriptors: Counter[str]
    children: frozenset[str]
    segments: int


def held() -> Held:
    descriptors: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor that lists the others
        descriptors[target.split(":")[0]] += 1
    children: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children.update((task / "children").read_text().split())
    children.update(fork_server.children())
    segments = sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return Held(descriptors, frozenset(children), segments)


def more(before: Held, after: Held) -> str:
    """What ``after`` has that ``before`` had not; empty if nothing."""
    parts = []
    if left := after.descriptors - before.descriptors:
        parts.append(f"descriptors {dict(left)}")
    if born := after.children - before.children:
        parts.append(f"child processes {sorted(born)}")
    if after.segments > before.segments:
        parts.append(f"{after.segments - before.segments} mapped memfds")
    return ", ".join(parts)


FOLDERS = (Path("/dev/shm"), Path("/tmp"))
GONE_S = 60.0


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """Fails when what appeared in the machine's folders for temporary files meanwhile stays there.

    Other tests that run at the same time have files there too, and remove theirs as well.
    """
    before = _ours()
    yield
    made, deadline = _ours() - before, time.monotonic() + GONE_S
    while (left := [path for path in made if path.exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)  # nothing tells when another test is done with its own
    assert not left, f"left behind: {left}"


def _ours() -> set[Path]:
    """Files and folders of Crossrail, without the pages of dead processes: the next process removes those; and without
    the folders of users' tokens (``crossrail-UID``), which stay.
    """
    found = {path for folder in FOLDERS if folder.is_dir() for path in folder.glob("*crossrail*")}
    return {path for path in found if not _is_of_dead(path.name) and not _is_of_user(path.name)}


def _is_of_user(name: str) -> bool:
    return name.removeprefix("crossrail-").isdigit()


def _is_of_dead(name: str) -> bool:
    parts = name.split("-")
    return name.startswith("crossrail-page-") and not Path("/proc", parts[2]).exists()
