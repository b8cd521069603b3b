"""`crossrail bench unpack`: the ways into GPU memory, one after the other, and the report."""

from __future__ import annotations

import sys
from typing import Any

import crossrail
from crossrail._native import bench_unpack
from crossrail.report import Report, Row, capture_environment, format_size, unpack_rows

from .gpus import known_gpus
from .progress import Progress
from .unpack_arguments import UnpackOptions


def measure(options: UnpackOptions, progress: Progress) -> Report:
    """Runs the whole bench. Raises Failure where there is no GPU, and the library's errors."""
    settings: dict[str, Any] = dict(options.settings())
    context = crossrail.Context(**settings)
    known_gpus(context, [options.device])
    rows: list[Row] = []
    for source in options.sources:
        for size in options.sizes:
            for fragment in options.fragments:
                title = f"unpack {format_size(size)} from {source}, fragments of {format_size(fragment)}"
                total = (1 + len(options.modes)) * (options.warmup + options.iters)
                with progress.task(title, total) as tick:
                    found = bench_unpack(
                        context,
                        {
                            "device": options.device,
                            "size": size,
                            "fragment": fragment,
                            "source": source,
                            "modes": options.modes,
                            "iters": options.iters,
                            "warmup": options.warmup,
                        },
                        on_progress=tick,
                    )
                like = Row("unpack", "", size, device=options.device, fragment=fragment, origin=source, verified=True)
                rows += unpack_rows(found, like)
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment({}, overrides), ["crossrail", *sys.argv[1:]], rows)
