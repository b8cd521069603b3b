"""Texts that the committed results render to: tables of the command, Markdown, CSV, and the charts of pages.

    python tests/python/golden.py --record    writes tests/data/golden anew, which only a person does

Texts are kept whole. Of what repeats them in another form (narrow terminals, the document on a terminal, drawings) only
the digest is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import sys
from pathlib import Path

from crossrail_tools.report.export import comma_separated, markdown, renderables
from crossrail_tools.report.page.document import document
from crossrail_tools.report.page.draw import colours_of, draw
from crossrail_tools.report.sources import Source, read_sources
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import views

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches"))
import pages  # noqa: E402

RESULTS = ROOT / "benches" / "results"
GOLDEN = ROOT / "tests" / "data" / "golden"
WIDTHS = (80, 120)


PAGES_TEXT = "pages"


def names() -> list[str]:
    """Every committed result, and the pages of them."""
    return [*(str(path.relative_to(RESULTS)) for path in sorted(RESULTS.rglob("*.json"))), PAGES_TEXT]


def place(name: str) -> Path:
    """The file with the recorded text of a result."""
    return GOLDEN / f"{name.removesuffix('.json').replace('/', '-')}.txt"


def rendered(name: str) -> str:
    """Everything that a result renders to; of the pages, whose style all share, the digest of each."""
    if name == PAGES_TEXT:
        return "".join(f"{_digest(pages.made(page))}  {page}\n" for page in pages.PAGES)
    sources = read_sources(RESULTS / name)
    made = document(sources, name)
    charts = [(section.name, figure.chart) for section in made.sections for figure in section.figures]
    colours = colours_of([chart for _, chart in charts])
    parts = {
        "tables": _tables(sources, None),
        "markdown": markdown(made),
        "csv": comma_separated(sources),
        "digests": "".join(
            f"{_digest(text)}  {what}\n"
            for what, text in [
                *((f"tables at {width} columns", _tables(sources, width)) for width in WIDTHS),
                ("document on a terminal", _printed(renderables(made), None)),
                *((f"{section}: {chart.title}", draw(chart, "chart", colours)) for section, chart in charts),
            ]
        ),
    }
    return "".join(f"== {part} ==\n{text}" for part, text in parts.items())


def _tables(sources: list[Source], width: int | None) -> str:
    return "".join(_printed(views(source.rows), width) for source in sources)


def _printed(shown: list[object], width: int | None) -> str:
    file = io.StringIO()
    to = console(file)
    for one in shown:
        to.print(one, width=width)
    return file.getvalue()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    """Records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--record", action="store_true", required=True, help=f"write {GOLDEN.relative_to(ROOT)}")
    parser.parse_args()
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    for name in names():
        place(name).write_text(rendered(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
