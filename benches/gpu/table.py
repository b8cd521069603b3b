"""The goals of runs as tables of Markdown, for docs/performance.md.

python benches/gpu/table.py benches/results/gpu/summary-*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    """Prints them."""
    if len(sys.argv) < 2:
        print("usage: table.py SUMMARY.json ...", file=sys.stderr)
        return 2
    print("\n\n".join(markdown(json.loads(path.read_text()), path) for path in map(Path, sys.argv[1:])))
    return 0


def markdown(summary: dict[str, object], path: Path) -> str:
    """A line for each outcome."""
    lines = [
        f"<!-- table of {path} -->",
        "| work | ours | peer | ratio | to reach | met |",
        "|---|---|---|---|---|---|",
    ]
    outcomes = summary["outcomes"]
    assert isinstance(outcomes, list)
    for outcome in outcomes:
        met = "**failed**" if outcome["failed"] else {True: "yes", False: "**no**", None: "-"}[outcome["met"]]
        cells = [outcome[name] for name in ("work", "ours", "peer", "ratio", "to_reach")]
        lines.append("| " + " | ".join([*cells, met]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
