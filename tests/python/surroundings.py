"""Commands that start a command in surroundings that lack something: system calls, descriptors, memory, users.

As a program, ``surroundings.py deny ERRNO CALL,... COMMAND ...`` runs a command to which the kernel refuses those
system calls: with EPERM, as containers' default profiles do, or with ENOSYS, as older kernels do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The numbers of the calls on the machines that Crossrail is built for.
CALLS = {
    "x86_64": {
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "memfd_create": 319,
        "pidfd_open": 434,
        "pidfd_getfd": 438,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "mlock": 149,
        "sched_setaffinity": 203,
        "mbind": 237,
        "seccomp": 317,
    },
    "aarch64": {
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "memfd_create": 279,
        "pidfd_open": 434,
        "pidfd_getfd": 438,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "mlock": 228,
        "sched_setaffinity": 122,
        "mbind": 235,
        "seccomp": 277,
    },
}
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SET_FILTER, ALL_THREADS = 38, 1, 1


def denied(calls: Sequence[str], how: str) -> list[str]:
    """The command that starts another one without those calls; `how`: EPERM or ENOSYS."""
    return [sys.executable, __file__, "deny", how, ",".join(calls)]


def few_descriptors(limit: int) -> list[str]:
    """At most `limit` descriptors."""
    return ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"]


def little_memory(mib: int) -> list[str]:
    """At most `mib` MiB of address space."""
    return ["sh", "-c", f'ulimit -v {mib * 1024}; exec "$@"', "sh"]


def other_users(*options: str) -> list[str]:
    """A user namespace of its own."""
    return ["unshare", "--user", *options]


def full_disk(keep: Sequence[Path] = (ROOT, Path(sys.prefix), Path(sys.base_prefix))) -> list[str]:
    """Folders that Crossrail writes to, on a file system of its own that has no room left: those of pages and of this
    user's token. One above what is to be kept stays as it is: the command would lose its own files.
    """
    token = Path(f"/tmp/crossrail-{os.geteuid()}")
    folders = [folder for folder in (Path("/dev/shm"), token) if not any(path.is_relative_to(folder) for path in keep)]
    fill = " && ".join(
        f"mkdir -p -m 700 {folder} && mount -t tmpfs -o size=64k,mode={'0700' if folder == token else '1777'}"
        f" none {folder} && {{ dd if=/dev/zero of={folder}/full bs=4k 2>/dev/null; true; }}"
        for folder in folders
    )
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{fill} && exec "$@"', "sh"]


class Clock:
    """A wall clock that steps, for the processes that `command` starts; needs a C compiler."""

    def __init__(self, folder: Path) -> None:
        self._library, self._offset = folder / "stepping_clock.so", folder / "offset"
        source = Path(__file__).with_name("stepping_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True, timeout=60)
        self.step(0.0)

    def step(self, offset_s: float) -> None:
        """Has it differ that much from the machine's, from now on."""
        descriptor = os.open(self._offset, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(descriptor, struct.pack("=q", round(offset_s * 1e9)), 0)
        os.close(descriptor)

    def command(self) -> list[str]:
        """The command that starts another one with this clock."""
        return ["env", f"LD_PRELOAD={self._library}", f"STEPPING_CLOCK={self._offset}"]


def deny(calls: Sequence[str], number: int, *, everywhere: bool = False) -> None:
    """Has the kernel refuse those system calls to this thread and its children from now on; `everywhere`: also to all
    other threads of the process.
    """
    numbers = [CALLS[platform.machine()][call] for call in calls]
    rows = [(LOAD, 0, 0, 0)]  # the number of the call
    for place, call in enumerate(numbers):
        rows.append((EQUAL, len(numbers) - place, 0, call))
    rows += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | number)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    program = struct.pack("<H6xQ", len(rows), ctypes.addressof(code))
    held = ctypes.create_string_buffer(program)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*map(ctypes.c_ulong, (NO_NEW_PRIVILEGES, 1, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    # seccomp(2) returns the thread that could not take the filter, if there is one.
    install = CALLS[platform.machine()]["seccomp"], SET_FILTER, ALL_THREADS if everywhere else 0, ctypes.addressof(held)
    done = libc.syscall(*map(ctypes.c_ulong, install))
    if done != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {done}")


def main() -> None:
    """Denies the calls and becomes the command."""
    _, what, how, calls, *command = sys.argv
    if what != "deny":
        raise SystemExit(__doc__)
    deny(calls.split(","), getattr(errno, how))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
