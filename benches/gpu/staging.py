"""GPU memory over TCP beside host memory: what each setting does to it, on loopback rails.

    PYTHONPATH=target/gpu-site python benches/gpu/staging.py --out staging.json

One setting is changed at a time, and the best of a few together; every line is one `crossrail bench p2p`. It ends with
one table, and stops when its time is used up. Exit 0: every line ran; 1: one did not, or there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from steps import gpu_count  # noqa: E402

from crossrail_tools.report import Report, Row, console, median, table  # noqa: E402
from harness import bench  # noqa: E402

RAILS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
COUNTS = (4, 2, 1)
STAGES = ("wire_us", "pack_us", "unpack_us", "slot_us", "window_us")
HOST = "host memory"


@dataclass(frozen=True)
class Variant:
    """What differs from the defaults."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)
    host: bool = False
    unpack: str = "kernel"


def of(host: bool = False, **settings: str) -> Variant:
    """Settings by the ends of their names, as ``chunk="1M"``."""
    name = ", ".join([HOST] * host + [f"{key} {value}" for key, value in settings.items()])
    return Variant(name, {f"CROSSRAIL_{key.upper()}": value for key, value in settings.items()}, host)


VARIANTS = (
    Variant(HOST, host=True),
    Variant("defaults"),
    of(chunk="1M"),
    of(bounce="256M"),
    of(chunk="1M", bounce="256M", window="32"),
    of(io_threads="2"),
    of(io_threads="8", channels="2"),
    of(True, io_threads="8", channels="2"),
    Variant("unpack d2d", unpack="d2d"),
    Variant("unpack host", unpack="host"),
    Variant("defaults, again"),
    Variant("host memory, again", host=True),
)
# With fewer rails than the most, only these.
ALWAYS = (VARIANTS[0], VARIANTS[1])


@dataclass(frozen=True)
class Line:
    """What one run gave; ``failed`` says why it gave nothing."""

    rails: int
    variant: Variant
    row: Row | None = None
    failed: str = ""


def main() -> int:
    """Runs the sweep; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="FILE", help="for all raw samples, as JSON")
    parser.add_argument("--size", default="64M", help="bytes per transfer (64M)")
    parser.add_argument("--iters", type=int, default=24, metavar="N", help="timed transfers a line (24)")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds in all (60)")
    parser.add_argument("--cpu", action="store_true", help="host memory only: to try this out without a GPU")
    arguments = parser.parse_args()
    present, why_not = gpu_count()
    if not present and not arguments.cpu:
        print(f"this needs a GPU: {why_not}", file=sys.stderr)
        return 1
    device = "--device=cuda:0,cuda:1" if present > 1 else "--device=cuda:0"
    lines, reports = [], []
    with tempfile.TemporaryDirectory(prefix="crossrail-staging-") as scratch:
        for line, report in sweep(arguments, device, Path(scratch)):
            lines.append(line)
            reports += [json.loads(report.dumps())] if report else []
            if arguments.out:
                arguments.out.write_text(json.dumps({"schema": "crossrail-staging/1", "reports": reports}) + "\n")
    show(lines)
    return 0 if all(line.row for line in lines) else 1


def sweep(arguments: argparse.Namespace, device: str, scratch: Path) -> Iterator[tuple[Line, Report | None]]:
    """Every variant with every number of rails, until time is up."""
    until = time.monotonic() + arguments.budget
    longest = 0.0
    for count in COUNTS:
        for variant in VARIANTS if count == COUNTS[0] else ALWAYS:
            if arguments.cpu and not variant.host:
                continue
            started = time.monotonic()
            if started + longest > until:
                yield Line(count, variant, failed="no time was left"), None
                continue
            options = ["p2p", f"--size={arguments.size}", f"--iters={arguments.iters}", "--warmup=3"]
            options += ["--transport=tcp", f"--rails={','.join(RAILS[:count])}"]
            options += [] if variant.host else [device, f"--unpack={variant.unpack}"]
            try:
                report = bench(scratch, *options, settings=variant.settings)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr)
                yield Line(count, variant, failed=" ".join(str(error).split())[-60:]), None
            else:
                yield Line(count, variant, report.rows[0]), report
            longest = max(longest, time.monotonic() - started)


def show(lines: list[Line]) -> None:
    """One table: the median, the best, what part of host memory's rate that is, how much later than the receiver the
    sender heard of the end at worst, chunks of a transfer, and the stages."""
    host = {line.rails: rate(line.row) for line in lines if line.row and line.variant.name == HOST}
    heads = ["rails", "what", "GB/s", "best", "of host", "sockets", "late", "chunks"]
    heads += [name.removesuffix("_us") for name in STAGES]
    made = table("64M by TCP, stages in microseconds", heads, left=2)
    for line in sorted(lines, key=lambda line: (line.rails, VARIANTS.index(line.variant))):
        if line.row is None:
            made.add_row(str(line.rails), line.variant.name, line.failed, *[""] * (len(heads) - 3))
            continue
        row, own = line.row, rate(line.row)
        beside = f"{own / host[line.rails]:.2f}" if line.rails in host else "-"
        best = row.size / min(row.samples_us) / 1e3
        stages = [f"{getattr(row.stages, name):.0f}" if row.stages else "-" for name in STAGES]
        raw = f"{row.raw_tcp_gb_per_s:.1f}" if row.raw_tcp_gb_per_s else "-"
        late = max((i.us_sender - i.us_receiver for i in row.iterations or ()), default=0.0)
        chunks = sum(lane.chunks for lane in row.lanes or ()) / len(row.samples_us)
        figures = [f"{own:.2f}", f"{best:.2f}", beside, raw, f"{late:.0f}", f"{chunks:.0f}"]
        made.add_row(str(line.rails), line.variant.name, *figures, *stages)
    console().print(made)


def rate(row: Row | None) -> float:
    """GB/s by the median sample."""
    return row.size / median(row.samples_us) / 1e3 if row else 0.0


if __name__ == "__main__":
    sys.exit(main())
