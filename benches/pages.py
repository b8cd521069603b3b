"""The pages of committed results, which are not committed, and the picture of them in README, which is.

python benches/pages.py    writes docs/reports
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from crossrail_tools.report.page.document import document
from crossrail_tools.report.page.model import Chart
from crossrail_tools.report.page.picture import picture
from crossrail_tools.report.page.write import html
from crossrail_tools.report.sources import Source, read_sources

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "results"
REPORTS = ROOT / "docs" / "reports"


@dataclass(frozen=True)
class Page:
    """One page: its title, and the results that it shows."""

    title: str
    pattern: str

    def sources(self) -> list[Source]:
        return [source for path in sorted(RESULTS.glob(self.pattern)) for source in read_sources(path)]


PAGES = {
    "host.html": Page("Crossrail on one host", "[!r]*.json"),
    "rails.html": Page("Crossrail over rails", "rails-*.json"),
    "gpu-2.html": Page("Crossrail on two GPUs", "gpu/[!e]*-2.json"),
    "experts-2.html": Page("Dispatch and combine on two GPUs", "gpu/e*-2.json"),
    "gpu-4.html": Page("Crossrail on four GPUs", "gpu/*-4.json"),
}

PICTURE = "charts.svg"
PICTURED = (
    ("host.html", "bandwidth", "64 in flight"),
    ("gpu-2.html", "latency", "One-way latency"),
    ("gpu-4.html", "mesh", "Each pair alone: rate"),
)
"""The charts of the picture: a page, a section, and a part of the chart's title."""

ABOUT = "Three charts of a page: bandwidth by message size, latency by message size, and the rate of every pair of GPUs"


def main() -> int:
    """Writes the pages and the picture."""
    REPORTS.mkdir(exist_ok=True)
    found = {name: page.sources() for name, page in PAGES.items()}
    for name in PAGES:
        (REPORTS / name).write_text(made(name), encoding="utf-8")
    charts = [chart(found, *where) for where in PICTURED]
    sources = [source for name in dict.fromkeys(name for name, _, _ in PICTURED) for source in found[name]]
    (REPORTS / PICTURE).write_text(picture(charts, ABOUT, sources), encoding="utf-8")
    return 0


def made(name: str) -> str:
    """The HTML of one page."""
    return html(PAGES[name].sources(), PAGES[name].title)


def chart(found: dict[str, list[Source]], page: str, section: str, title: str) -> Chart:
    """The first chart of a section whose title has these words."""
    made = document(found[page], PAGES[page].title)
    figures = next(one.figures for one in made.sections if one.name == section)
    return next(one.chart for one in figures if title in one.chart.title)


if __name__ == "__main__":
    sys.exit(main())
