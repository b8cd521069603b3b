"""The text of a page, within its limit of size: what does not fit of the raw data stays in the files."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..packing import compact
from ..schema import as_plain
from ..sources import Source
from .document import document
from .html import page
from .model import Document, Section

MOST_BYTES = 300_000
"""Maximum size of a page."""

SCHEMA = "crossrail-page/1"

_FEW_ROWS = 60


class TooLarge(ValueError):
    """The files do not fit on one page; the text says by how much."""


def html(sources: Sequence[Source], title: str, first: Sequence[Section] = ()) -> str:
    """The HTML page of ``sources``. Raises TooLarge."""
    made = document(sources, title, first)
    size = 0
    for text in _tries(made, sources):
        size = len(text.encode())
        if size <= MOST_BYTES:
            return text
    most = _fitting(sources, title)
    names = [source.name for source in sources]
    hint = f"the first {most} fit: {', '.join(names[:most])}" if most else "give fewer files"
    raise TooLarge(f"the page would have {size // 1000} kB, and its limit is {MOST_BYTES // 1000} kB; {hint}")


def _fitting(sources: Sequence[Source], title: str) -> int:
    """The number of files, from the first, that fit on one page."""

    def fits(count: int) -> bool:
        part = sources[:count]
        return any(len(text.encode()) <= MOST_BYTES for text in _tries(document(part, title), part))

    return bisect.bisect_left(range(1, len(sources)), True, key=lambda count: not fits(count))


def _tries(made: Document, sources: Sequence[Source]) -> Iterator[str]:
    """Texts of one page, each smaller than the one before."""
    files = [{**_about(source), "rows": _rows(source)} for source in sources]
    yield page(made, _json(files, samples=True))
    for one in files:
        one["rows"] = [{name: value for name, value in row.items() if name not in _RAW} for row in one["rows"]]
    yield page(made, _json(files, samples=False))
    yield page(made, _json(files, samples=False), most_rows=_FEW_ROWS)
    yield page(made, _json([_about(source) for source in sources], samples=False), most_rows=_FEW_ROWS)


_RAW = frozenset(("samples_us", "slowest_us", "host_us", "gpu_us", "raw_tcp_us", "iterations", "messages"))
"""Fields of rows with samples and what is counted for each."""


def _json(files: Sequence[dict[str, Any]], *, samples: bool) -> str:
    whole = {"schema": SCHEMA, "samples": samples, "files": files}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False)


def _about(source: Source) -> dict[str, Any]:
    return {"name": source.name, "by": source.program, "sha256": source.sha256, "bytes": source.size}


def _rows(source: Source) -> list[dict[str, Any]]:
    """The rows of a file as plain JSON, with their samples packed."""
    packed: list[dict[str, Any]] = json.loads(compact({"rows": as_plain(source.rows)}, pack=True))["rows"]
    return packed
