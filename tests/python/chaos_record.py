"""What a chaos run leaves on record: its figures as JSON, with the commit that it ran from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def commit() -> str | None:
    """The commit that this is run from, if it is one; as it was when this was asked first."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout.strip() or None


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all samples do not exceed."""
    return sorted(samples)[max(0, -int(-share * len(samples) // 1) - 1)]


def text(result: dict[str, Any]) -> str:
    """The result as JSON, with lists of numbers on one line each."""
    lists = json.dumps(result, indent=2)
    return re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", lists) + "\n"


def write(result: dict[str, Any], path: Path | None) -> None:
    """Writes the result to ``path``, if there is one: at any moment the file has the whole of one result."""
    if path is not None:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text(result))
        fresh.replace(path)


def show(result: dict[str, Any], path: Path | None) -> int:
    """Prints the result and writes it to ``path``, if there is one; the exit code: 1 where it has errors."""
    sys.stdout.write(text(result))
    write(result, path)
    return 1 if result["errors"] else 0
