"""The tables of pages, made of files of results.

    python benches/gpu/table.py docs/performance.md docs/performance-experts.md    writes them into the pages anew
    python benches/gpu/table.py benches/results/gpu/summary-2.json                 prints that of one file

In a page a table stands between two comments, of which the first says what it is of, from the repository's root:

    <!-- table of benches/results/gpu/summary-2.json: TCP -->
    <!-- end -->

`table`: goals, a line for each; after a colon, only those whose work begins with one of the words (A | B).
`ways`: what dispatch and combine took, ours and the peers', counted in three ways.
`sweep`: what they took with each number changed alone.
`latency`: small transfers of ours and of both peers, side by side.
`machine`: where and when it was measured.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from crossrail_tools.report.goals import COLUMNS, Outcome
from crossrail_tools.report.packing import with_lists
from crossrail_tools.report.units import counted

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- (?P<kind>\w+) of (?P<path>[\w./-]+)(?:: (?P<only>.+?))? -->\n(?P<old>.*?)<!-- end -->", re.S)
VARIED = ("tokens", "hidden", "topk", "experts", "routing", "dtype", "num_sms")
NAMED = {"topk": "top-k", "routing": "routing", "num_sms": "SMs"}
NOTHING = "Not measured yet.\n"
MODES = {"dispatch": "dispatch", "combine": "combine", "e2e": "both"}


def main() -> int:
    """Writes pages or prints tables."""
    if len(sys.argv) < 2:
        print("usage: table.py PAGE.md|RESULTS.json ...", file=sys.stderr)
        return 2
    for path in map(Path, sys.argv[1:]):
        try:
            if path.suffix == ".md":
                path.write_text(written(path.read_text()))
            else:
                print(f"<!-- table of {path} -->\n{goals(read(path))}<!-- end -->\n")
        except (OSError, KeyError, ValueError) as error:
            print(f"table.py: {path}: {error}", file=sys.stderr)
            return 1
    return 0


def written(page: str) -> str:
    """A page with every table as its file has it now."""

    def block(found: re.Match[str]) -> str:
        kind, path, only = found["kind"], found["path"], found["only"]
        if kind not in KINDS:
            raise ValueError(f"{kind} of {path}: there are {', '.join(KINDS)}")
        there = ROOT / path
        made = KINDS[kind](read(there), only) if there.exists() else NOTHING
        head = found[0].partition("\n")[0]
        return f"{head}\n{made}<!-- end -->"

    return BLOCK.sub(block, page)


def read(path: Path) -> dict[str, Any]:
    """A file of results; packed lists of times are lists again."""
    data: dict[str, Any] = with_lists(json.loads(path.read_text()))
    return data


def goals(data: dict[str, Any], only: str | None = None) -> str:
    """A line for each outcome."""
    words = tuple(word.strip() for word in (only or "").split("|"))
    lines = []
    for outcome in data["outcomes"]:
        if outcome["work"].startswith(words):
            lines.append(Outcome(**outcome).cells({True: "yes", False: "**no**", None: "-"}, "**failed**"))
    return markdown(COLUMNS, lines) if lines else NOTHING


def ways(data: dict[str, Any], _: str | None = None) -> str:
    """Ours and each peer: kernels alone, events, the host's clock; and what was moved."""
    lines = []
    several = len({row["tokens"] for row in data["rows"]}) > 1
    for row in data["rows"]:
        tokens = counted(row["tokens"], "token")
        what = f"{MODES[row['what']]}, {row['dtype']}" + (f", {tokens}" if several else "")
        what += ", cached handle" if row.get("cached") else ""
        logical = row["bytes_logical"]
        # In the rank layout the drop-in takes as many multiprocessors as DeepEP does.
        own = row.get("peers", {}).get("drop-in", {}).get("kernel_us") if row["layout"] == "expert" else None
        ours = [us(own), us(row["p50_us"]), us(row["host_p50_us"]), rate(logical, row["p50_us"])]
        lines.append([what, "ours", *ours, rate(row["bytes_wire"], row["p50_us"]), mib(row.get("heap_bytes"))])
        for name, peer in row.get("peers", {}).items():
            if "error" in peer:
                lines.append([what, name, peer["error"], *["-"] * 5])
                continue
            took = [us(peer.get(key)) for key in ("kernel_us", "p50_us", "host_p50_us")]
            lines.append([what, name, *took, rate(logical, peer["p50_us"]), "-", mib(peer.get("heap_bytes"))])
    heads = ["work", "by", "kernels, us", "events, us", "host, us", "logical GB/s", "wire GB/s", "memory"]
    return markdown(heads, lines, left=2)


def sweep(data: dict[str, Any], _: str | None = None) -> str:
    """A table for each number that was changed while all others stayed."""
    tables = []
    for layout in dict.fromkeys(row["layout"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["layout"] == layout]
        usual = {name: Counter(row[name] for row in rows).most_common(1)[0][0] for name in VARIED}
        for name in VARIED:
            others = [other for other in VARIED if other != name]
            chosen = [row for row in rows if all(row[other] == usual[other] for other in others)]
            values = sorted({row[name] for row in chosen})
            if len(values) > 1:
                like = ", ".join(f"{NAMED.get(other, other)} {usual[other]}" for other in others)
                tables.append(f"{layout} layout, {like}:\n\n{_one_sweep(chosen, name, values)}")
    return "\n".join(tables)


def _one_sweep(rows: Sequence[dict[str, Any]], name: str, values: Sequence[Any]) -> str:
    at = {(row["what"], row[name]): row for row in rows}
    lines = []
    for mode in MODES:
        found = [at.get((mode, value)) for value in values]
        if any(found):
            lines.append([f"{MODES[mode]}, us", *(us(row and row["p50_us"]) for row in found)])
    for mode in ("dispatch", "combine"):
        found = [at.get((mode, value)) for value in values]
        if any(found):
            cells = ["-" if row is None else rate(row["bytes_wire"], row["p50_us"]) for row in found]
            lines.append([f"{mode}, wire GB/s", *cells])
    return markdown([NAMED.get(name, name), *map(str, values)], lines)


def latency(data: dict[str, Any], _: str | None = None) -> str:
    """By size, one way: medians of the turns' medians."""

    def peers(name: str, figure: str) -> dict[int, list[float]]:
        rows = [row for turn in data["peers"].get(name, []) for row in turn.get("rows", [])]
        return {
            size: [median(row[figure]) for row in rows if row["size"] == size] for size in {r["size"] for r in rows}
        }

    def ours(what: str) -> dict[int, list[float]]:
        rows = [row for row in data["rows"] if row["what"] == what]
        return {size: [row["p50_us"] for row in rows if row["size"] == size] for size in {r["size"] for r in rows}}

    columns = {
        "write": ours("write"),
        "message": ours("latency"),
        "NCCL, a host waits": peers("nccl", "wall_us"),
        "NIXL, a host waits": peers("nixl", "samples_us"),
        "put": peers("puts", "samples_us"),
        "NCCL in a graph": peers("nccl", "samples_us"),
    }
    sizes = sorted(set().union(*columns.values()))
    lines = [
        [f"{size >> 10} KiB", *(f"{median(at[size]):.2f}" if at.get(size) else "-" for at in columns.values())]
        for size in sizes
    ]
    return markdown(["us, one way", *columns], lines, left=1)


def machine(data: dict[str, Any], _: str | None = None) -> str:
    """A line about the machine, the versions and the commit."""
    there = data["environment"]
    names = Counter(gpu["name"] for gpu in there["gpus"])
    gpus = ", ".join(f"{there['gpus_used']} of {count} {name}" for name, count in names.items())
    driver = there["gpus"][0]["driver_version"] if there["gpus"] else "none"
    versions = ", ".join(f"{name} {version}" for name, version in there.get("peers", {}).items())
    commit = (there["commit"] or "unknown")[:7]
    command = " ".join(data.get("command", []))
    turns = re.search(r"--rounds[= ](\d+)", command)
    how = [f"turns: {turns[1]}" if turns else "", "fewer iterations" if "--quick" in command else ""]
    shared = "shared by two ranks through MPS" if there.get("shared_by_mps") else ""
    parts = [
        gpus,
        shared,
        f"driver {driver}",
        f"{there['cores']} cores",
        versions,
        f"commit {commit}",
        *how,
        there["time"],
    ]
    return "; ".join(part for part in parts if part) + "\n"


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int | None = None) -> str:
    """A table; columns from `left` on hold figures."""
    marks = ["---" if left is None or place < left else "---:" for place in range(len(heads))]
    made = [f"| {' | '.join(heads)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(made) + "\n"


def us(value: float | None) -> str:
    """Microseconds."""
    return "-" if value is None else f"{value:.1f}"


def rate(moved: int | None, time_us: float | None) -> str:
    """GB/s."""
    return f"{moved / time_us / 1e3:.0f}" if moved and time_us else "-"


def mib(size: int | None) -> str:
    """A size of memory."""
    if size is None:
        return "-"
    found = size / (1 << 20)
    return f"{found:.0f} MiB" if found >= 10 else f"{found:.1f} MiB"


KINDS: dict[str, Callable[[dict[str, Any], str | None], str]] = {
    "table": goals,
    "ways": ways,
    "sweep": sweep,
    "latency": latency,
    "machine": machine,
}

if __name__ == "__main__":
    sys.exit(main())
