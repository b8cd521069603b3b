"""Whatever a file of the right form holds, a page comes of it; whatever a log has become, one error does."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types
import typing
from typing import Any

import foreign_logs as logs
import pytest
from report_samples import environment, parse_source
from test_sweep import sweep

from crossrail_tools.report.export import comma_separated, markdown, renderables
from crossrail_tools.report.page.comparison import comparison_section
from crossrail_tools.report.page.document import document
from crossrail_tools.report.page.html import page
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.sources import SourceError, parse_sources

KINDS = "latency write put bandwidth pair p2p mesh unpack dispatch combine e2e init connect stream all_reduce all other"
TEXTS = (
    "shm",
    "tcp/eth1",
    "cuda:0",
    "cuda:0,cuda:1",
    "contiguous",
    "kernel",
    "\N{LATIN SMALL LETTER A WITH DIAERESIS}<b>|",
    "",
)
SEEDS = 40


def value(hint: Any, generator: random.Random, name: str) -> Any:
    """Any value of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        (inner,) = [one for one in arguments if one is not type(None)]
        return None if generator.random() < 0.5 else value(inner, generator, name)
    if origin is list:
        return [value(arguments[0], generator, name) for _ in range(generator.choice([0, 0, 1, 3]))]
    if origin is dict:
        return {
            generator.choice("abc"): value(arguments[1], generator, name) for _ in range(generator.choice([0, 1, 2]))
        }
    if dataclasses.is_dataclass(hint):
        return record(hint, generator)
    if hint is bool:
        return generator.random() < 0.5
    if hint is int:
        return generator.choice([0, 1, 2, 3, 8, 1024, 1 << 20, 1 << 34])
    if hint is float:
        return generator.choice([0.0, 1e-9, 0.5, 3.0, 1e4, 1e9])
    known = {"what": KINDS.split(), "part": ["pair", "latency", "all"]}
    return generator.choice(known.get(name, TEXTS))


def record(kind: Any, generator: random.Random) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{one.name: value(hints[one.name], generator, one.name) for one in dataclasses.fields(kind)})


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_any_rows_make_a_page(first: int) -> None:
    for seed in range(first, first + 10):
        generator = random.Random(seed)
        rows = [record(Row, generator) for _ in range(generator.choice([1, 2, 5, 30]))]
        found = [parse_source(Report(environment(), [], rows).dumps(), f"seed {seed}")]
        made = document(found, "Any rows", [comparison_section(found, found)])
        assert (
            page(made, "{}").endswith("</html>\n") and markdown(made) and comma_separated(found) and renderables(made)
        )


@pytest.mark.parametrize("name", [*(name for name in vars(logs) if name.isupper()), "SWEEP"])
def test_a_damaged_file_is_read_or_refused(name: str) -> None:
    text = sweep({0: [1.0, 2.0]}).dumps() if name == "SWEEP" else getattr(logs, name)
    generator = random.Random(name)
    for _ in range(60):
        place, length = generator.randrange(len(text)), generator.choice([1, 1, 2, 20])
        put = generator.choice(["", "-", "9", "1e999", "null", "[", '"', "\0", "nan", " "])
        damaged = text[:place] + put + text[place + length :] if generator.random() < 0.8 else text[:place]
        with contextlib.suppress(SourceError):
            page(document(parse_sources(damaged, name), "Damaged"), "{}")
