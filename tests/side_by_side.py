"""Runs two shell commands side by side, and shows their outputs one after the other.

    python tests/side_by_side.py "make lint-rust test-rust" "make lint-python test-python"

The first one's output appears as it comes; the second one's is kept until then, and ends the whole. Exit code: the
first that is not 0. Ctrl-C ends both, as they are of one process group, and the exit code is 130.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

SHOWN_EVERY_S = 0.5


def main() -> int:
    """Runs both; gives the exit code."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    # A description of its own for reading: a shared one would have one position for both.
    with tempfile.NamedTemporaryFile("ab") as kept, Path(kept.name).open("rb") as output:
        second = subprocess.Popen(sys.argv[2], shell=True, stdout=kept, stderr=subprocess.STDOUT)
        first = subprocess.Popen(sys.argv[1], shell=True)
        code = first.wait()
        show(second, output)
    if code:
        print(f"side_by_side.py: {sys.argv[1]}: exit code {code}; see above", file=sys.stderr)
    return code or second.returncode


def show(process: subprocess.Popen[bytes], output: BinaryIO) -> None:
    """Copies what a process has written, and writes, until it has ended."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SHOWN_EVERY_S)
        shutil.copyfileobj(output, sys.stdout.buffer)
        sys.stdout.flush()
        if process.returncode is not None:
            return


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
