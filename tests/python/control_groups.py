"""Memory control groups for tests: a nested group with a limit of its own, of version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup")


def _own() -> tuple[Path, str]:
    """The memory control group of this process, and the name of the file with its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return MOUNT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return MOUNT, "memory.max"


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group that may use ``limit`` bytes, with another of no limit inside, which is yielded."""
    parent, name = _own()
    outer = parent / f"crossrail-{uuid.uuid4().hex[:8]}"
    inner = outer / "inner"
    try:
        outer.mkdir()
        (outer / name).write_text(str(limit))
        with contextlib.suppress(OSError):
            (outer / "cgroup.subtree_control").write_text("+memory")
        inner.mkdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            outer.rmdir()
        reason = f"memory control groups cannot be made here: {error}"
        pytest.skip(reason)
    try:
        yield inner
    finally:
        for group in (inner, outer):
            _remove(group)


def _remove(group: Path) -> None:
    """Removes a group once its last process is gone."""
    deadline = time.monotonic() + 30
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def run_in(group: Path, *command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a control group."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", enter, "sh", *command],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "python")])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
