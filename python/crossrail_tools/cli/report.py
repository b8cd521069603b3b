"""`crossrail report`: results of any benches, and of other programs, as a page, Markdown, CSV, or tables."""

from __future__ import annotations

import argparse
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path

from crossrail_tools.report.export import comma_separated, markdown, renderables
from crossrail_tools.report.page.comparison import beside_section, comparison_section
from crossrail_tools.report.page.document import document
from crossrail_tools.report.page.write import TooLarge, html
from crossrail_tools.report.sources import Source, SourceError, read_sources
from crossrail_tools.report.tables import console
from crossrail_tools.report.writing import STDOUT, write_text

from .failure import Failure, UsageFailure, print_notice
from .options import fields_of
from .parsing import Command, Parser, destination
from .reporting import check_json


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """`crossrail report`."""

    files: list[str]
    html: str | None = None
    markdown: str | None = None
    csv: str | None = None
    title: str | None = None
    baseline: list[str] = field(default_factory=list)
    open: bool = False
    parent: int | None = None

    def run(self) -> None:
        """Reads the files and writes what was asked for. Raises Failure, WriteError and OSError."""
        sources = read(self.files)
        title = self.title or f"Measurements of {', '.join(source.name for source in sources[:3])}" + (
            f" and {len(sources) - 3} more" if len(sources) > 3 else ""
        )
        two = beside_section(sources)
        first = [comparison_section(sources, read(self.baseline))] if self.baseline else [two] if two else []
        if self.html is not None:
            try:
                write_text(html(sources, title, first), self.html, "--html")
            except TooLarge as error:
                raise Failure(str(error)) from None
            if self.open:
                _open(self.html)
        if self.markdown is not None:
            write_text(markdown(document(sources, title, first)), self.markdown, "--markdown")
        if self.csv is not None:
            write_text(comma_separated(sources), self.csv, "--csv")
        if self.html is None and self.markdown is None and self.csv is None:
            out = console()
            for one in renderables(document(sources, title, first)):
                out.print(one)


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    text = (
        "JSON of `crossrail bench`, `crossrail sweep`, `make bench`, iperf3 -J or nccl-tests -J; or what ucx_perftest, "
        "OSU's benchmarks, nixlbench or DeepEP's tests printed"
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=text)
    old = "an earlier run of the same work, to compare with row by row; again for each of its files"
    parser.add_argument("--baseline", metavar="FILE", action="append", default=[], help=old)
    out = parser.add_argument_group("what comes out (tables, unless one of these is given; `-` is stdout)")
    out.add_argument(
        "--html", type=destination, metavar="FILE", help="one page with charts that opens offline, of at most 300 kB"
    )
    out.add_argument("--markdown", type=destination, metavar="FILE", help="every chart as a table")
    out.add_argument("--csv", type=destination, metavar="FILE", help="every row as a line, without raw samples")
    out.add_argument("--title", metavar="TEXT", help="the title (the names of the files)")
    out.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    given = {"--html": parsed.html, "--markdown": parsed.markdown, "--csv": parsed.csv}
    if list(given.values()).count(STDOUT) > 1:
        parser.error("only one of --html, --markdown and --csv can go to stdout")
    written = [(option, Path(name).resolve()) for option, name in given.items() if name not in (None, STDOUT)]
    for place, (option, path) in enumerate(written):
        other = next((name for name, there in written[:place] if there == path), None)
        if other is not None:
            parser.error(f"{other} and {option} name the same file: {given[option]}")
        if path.is_file() and path in {Path(name).resolve() for name in [*parsed.files, *parsed.baseline]}:
            parser.error(f"{option} would overwrite {given[option]}, which is to be read")
    if parsed.open and parsed.html in (None, STDOUT):
        parser.error("--open needs --html FILE")
    for option, name in given.items():
        check_json(name, option)
    return ReportOptions(**fields_of(parsed))


def read(files: list[str]) -> list[Source]:
    """Reads every file, or fails with the first that is not one of results. Raises UsageFailure."""
    sources: list[Source] = []
    seen: set[Path] = set()
    for name in files:
        if not name:
            raise UsageFailure("the name of a file is empty")
        path = Path(name)
        # A pipe gives other bytes each time that it is read.
        if path.is_file():
            if path.resolve() in seen:
                print_notice(f"{name} is named more than once, and read once")
                continue
            seen.add(path.resolve())
        try:
            sources += read_sources(path)
        except SourceError as error:
            raise UsageFailure(str(error)) from None
        except OSError as error:
            raise UsageFailure(f"{name}: {error.strerror}") from None
    if not any(
        source.rows or source.outcomes or source.others or (source.sweep and source.sweep.trials) for source in sources
    ):
        raise UsageFailure(f"{', '.join(files)}: no row was measured, so there is nothing to report")
    return sources


def _open(page: str) -> None:
    if not webbrowser.open(Path(page).resolve().as_uri()):
        raise Failure(f"no browser was found here; open {page} in one")
    print_notice(f"{page} is shown in a browser")
