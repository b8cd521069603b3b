"""One process per rank of a peer: started together, ended together, with the figures of rank 0 as the result."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from crossrail_tools.cli.ends import ENDED, End, Inbox

Rows = list[dict[str, Any]]
Work = Callable[[argparse.Namespace, int, Path], None]
"""The program of a rank. Takes the options, its number, and a folder shared by all."""

POLL_S = 0.02
END_S = 10.0
"""How long ranks may take to end after the measurement."""
REASON_LINES = 3


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every peer has."""
    parser.add_argument("--sizes", type=sizes, default=[64 << 20], metavar="A,B,C", help="bytes")
    parser.add_argument("--iters", type=int, default=20, help="timed samples")
    parser.add_argument("--warmup", type=int, default=3, help="untimed samples before the timed ones")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one GPU each")
    parser.add_argument("--limit", type=float, default=50.0, metavar="S", help="timeout of the run, in seconds (50)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def sizes(text: str) -> list[int]:
    """Parses sizes as the command does: 64K, 2M, 1G, or a list of those."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        return [int(part.rstrip("KMG")) * units.get(part[-1:], 1) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes as 4K,64K,1M") from None


def run(arguments: argparse.Namespace, work: Work, needs: Sequence[str] = ()) -> int:
    """In a rank, runs its work. In the process called, starts the ranks and prints rank 0's figures as JSON; 1 if a
    module that the peer `needs` is not installed."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{Path(sys.argv[0]).name}: needs {' and '.join(missing)}", file=sys.stderr)
        return 1
    if arguments.rank is not None:
        # stdout is for what is kept: any other output goes to stderr.
        ANSWERS.append(os.fdopen(os.dup(1), "w", encoding="utf-8"))
        os.dup2(2, 1)
        work(arguments, arguments.rank, arguments.folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="crossrail-peer-") as folder:
        kept = start(arguments.ranks, arguments.limit, Path(folder))
    if kept is not None:
        print(json.dumps(kept))
    return 0 if kept is not None else 1


ANSWERS: list[IO[str]] = []


def keep(rows: Rows, versions: dict[str, str]) -> None:
    """Saves the figures of rank 0 after the measurement; later failures do not affect them."""
    ANSWERS[0].write(json.dumps({"versions": versions, "rows": rows}) + "\n")
    ANSWERS[0].flush()


def start(ranks: int, limit_s: float, folder: Path) -> dict[str, Any] | None:
    """Runs this command once per rank; what rank 0 kept. The first failure, or the timeout, ends all ranks."""
    command = [sys.executable, *sys.argv, f"--folder={folder}"]
    inbox: Inbox = queue.SimpleQueue()
    kept, why, left = None, "", set(range(ranks))
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        ends = [End(f"rank {rank}", [*command, f"--rank={rank}"], inbox=inbox, rank=rank) for rank in range(ranks)]
        for end in ends:
            stack.callback(end.end)
        while left and not why:
            try:
                end, message = inbox.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                why = f"the ranks did not end within {END_S if kept else limit_s:g} s"
                break
            if message.get("event") != ENDED:
                kept, deadline = message, time.monotonic() + END_S
                continue
            left.discard(end.rank)
            if end.failed():
                why = f"{end.name} ended with code {end.process.popen.returncode}: {reason(end.said)}"
    for end in ends:
        print(*end.said, sep="\n", file=sys.stderr)
    if why:
        print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    return kept


def reason(said: Iterable[str]) -> str:
    """Why a rank ended, in one line: the end of its output, without the traceback."""
    lines = [line.strip() for line in said if re.match(r"\S", line) and not line.startswith("Traceback")]
    return "; ".join(lines[-REASON_LINES:]) or "it printed nothing"


def exchange(folder: Path, rank: int, what: str, mine: bytes) -> bytes:
    """Exchanges bytes with the other rank. The wait ends with the timeout of the run."""
    new = folder / f"{what}.{rank}.new"
    new.write_bytes(mine)
    new.rename(folder / f"{what}.{rank}")
    theirs = folder / f"{what}.{1 - rank}"
    while not theirs.exists():
        time.sleep(POLL_S / 20)
    return theirs.read_bytes()
