"""Pages, Markdown and CSV of results: everything is there, nothing is loaded, nothing in a file becomes markup."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import foreign_logs as logs
import pytest
from report_samples import bandwidth_report, latency_report, p2p_report, parse_source, read_source
from test_report_mesh import LIKE, measured

from crossrail.ref import Shape
from crossrail_tools.report.build import Round, with_samples
from crossrail_tools.report.export import comma_separated, markdown
from crossrail_tools.report.mesh import mesh_rows
from crossrail_tools.report.page.document import document
from crossrail_tools.report.page.draw import colours_of, draw, legend
from crossrail_tools.report.page.html import page
from crossrail_tools.report.page.model import (
    NEUTRAL,
    OURS,
    Bar,
    Bars,
    Document,
    Figure,
    HeatMap,
    Lines,
    Section,
    Series,
    Stack,
    Table,
)
from crossrail_tools.report.page.write import MOST_BYTES, TooLarge, html
from crossrail_tools.report.schema import Lane, PeerResult, Report, Row
from crossrail_tools.report.sources import Source, parse_sources
from crossrail_tools.verify.checking import Work
from crossrail_tools.verify.flows import traffic

RESULTS = Path(__file__).parents[2] / "benches" / "results"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A page's elements. Fails where one is not closed, or where two have one id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [found["id"] for _, found in self.seen if "id" in found]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def source(report: Report, name: str = "results.json") -> Source:
    return parse_source(report.dumps(), name)


def mesh(ranks: int) -> Source:
    rows = mesh_rows(measured(ranks, {(2, 1): 0.5}, {}, {}), replace(LIKE, ranks=ranks))
    return source(replace(latency_report(), rows=rows), f"mesh-{ranks}.json")


EVERY_KIND = [
    *(
        read_source(RESULTS / name)
        for name in ("rails-uneven.json", "control.json", "ep-killed.json", "ep-prefill.json")
    ),
    *(read_source(RESULTS / "gpu" / name) for name in ("latency-2.json", "unpack-2.json", "ep_sms-2.json")),
    *(source for name, text in vars(logs).items() if name.isupper() for source in parse_sources(text, name)),
    source(latency_report(), "latency.json"),
    source(bandwidth_report(), "bandwidth.json"),
    source(p2p_report(), "p2p.json"),
    mesh(4),
]


@pytest.fixture(scope="module")
def whole() -> str:
    return html(EVERY_KIND, "Everything")


def test_a_page_loads_nothing_and_is_well_formed(whole: str) -> None:
    page = Page(whole)
    for tag, attributes in page.seen:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert not {"src", "srcset", "data", "style"} - {"style"} & set(attributes), (tag, attributes)
        assert str(attributes.get("href", "#")).startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in whole and "@import" not in whole and "default-src 'none'" in whole
    assert len(whole.encode()) <= MOST_BYTES


def test_every_kind_of_result_has_its_section(whole: str) -> None:
    sections = {str(one["id"]) for one in Page(whole).all("section")}
    kinds = {"latency", "bandwidth", "transfers", "mesh", "experts", "control", "unpack", "streams", "others", "goals"}
    assert sections == kinds | {"files"}


def test_every_chart_has_a_name_and_its_figures_as_a_table(whole: str) -> None:
    page = Page(whole)
    charts = [one for one in page.all("svg") if one.get("role") == "img"]
    named = {str(one["id"]) for one in page.all("title") if "id" in one} | {str(one["id"]) for one in page.all("desc")}
    assert len(charts) == len(page.all("figure")) > 15
    for one in charts:
        assert set(str(one["aria-labelledby"]).split()) <= named
    scrolled = [one for one in page.all("div") if one.get("class") == "scroll"]
    assert len(scrolled) >= len(charts)
    assert all(one["tabindex"] == "0" and one["role"] == "region" and one["aria-label"] for one in scrolled)
    assert page.all("html")[0]["lang"] == "en" and len(page.all("h1")) == 1


def test_the_page_embeds_its_figures(whole: str) -> None:
    block = re.search(r'<script type="application/json" id="crossrail-data">(.*?)</script>', whole, re.DOTALL)
    assert block
    data = json.loads(block[1])
    assert [(one["name"], one["sha256"]) for one in data["files"]] == [(one.name, one.sha256) for one in EVERY_KIND]
    latency = next(one for one in data["files"] if one["name"] == "latency.json")
    assert [row["p50_us"] for row in latency["rows"]] == [0.22, 10.0]
    small = html([source(latency_report())], "Small")
    block = re.search(r'id="crossrail-data">(.*?)</script>', small, re.DOTALL)
    assert block and json.loads(block[1])["files"][0]["rows"][0]["samples_us"] == [0.2, 0.22, 0.24]


def test_the_headline_is_of_8_bytes_and_beside_its_peer() -> None:
    rows = latency_report().rows
    empty = with_samples(replace(rows[0], size=0, samples_us=[], peers={}, ratio={}), [Round([0.1, 0.11, 0.12])])
    tiles = document([source(replace(latency_report(), rows=[empty, *rows]))], "Latency").tiles
    assert (tiles[0].name, tiles[0].value, tiles[0].note) == (
        "Shortest latency",
        "0.22",
        "8 B over shm, host memory; 1.50 x ucx",
    )
    moved = document([source(p2p_report())], "Transfer").tiles
    assert moved[0].note == "tcp, 2 rails; 1.25 x iperf3"


def test_a_colour_means_one_thing_on_a_page() -> None:
    points = [(1.0, 1.0), (2.0, 2.0)]
    curves = [Series("Crossrail, shm", points), Series("ucx", points, by="ucx"), Series("Crossrail, tcp", points)]
    lines = Lines("Latency", "size", "us", curves)
    by = ["mpi", "ucx", OURS, NEUTRAL]
    bars = Bars("Rate", "GB/s", [("", [Bar(f"bar of {name}", 1.0, "1", name) for name in by])])
    parts = Stack("Time", "us", ["wait", "copy"], [("row", [1.0, 2.0], "3")])
    colours = colours_of([lines, bars, parts])
    assert len(set(colours.values())) == len(colours)
    # The same program has its colour in every chart, wherever it stands; several curves of Crossrail are shades of one.
    assert [colour for colour, _, _ in legend(lines, colours)] == [colours[OURS], colours["ucx"], "s5"]
    shown = re.findall(r'<g class="(\w+)"><rect class="b"', draw(bars, "bars", colours))
    assert shown == [colours[name] for name in by]
    assert not set(colours.values()) & set(re.findall(r'class="(\w+)"', draw(parts, "parts", colours)))
    key = page(Document("Page", [], [], [Section("s", "S", "", [Figure(bars, Table([], []))])]), "{}")
    assert re.findall(r"</svg><span>(\w+)</span>", key) == ["Crossrail", "mpi", "ucx"]


def test_figures_of_the_rows_are_on_the_page() -> None:
    text = "".join(Page(html([source(p2p_report())], "One transfer")).text)
    for word in ("tcp/eth1", "52%", "iperf3", "0.8 GB/s", "on the wire", "1000000 over tcp"):
        assert word in text, word


@pytest.mark.parametrize("write", ["html", "markdown"])
def test_nothing_in_a_file_becomes_markup(write: str) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = [
        replace(
            row,
            transport=evil,
            device=evil,
            memory=evil,
            peers=dict.fromkeys([evil], row.peers.get("ucx", PeerResult(evil, p50_us=1.0, gb_per_s=1.0))),
        )
        for row in [*latency_report().rows, *p2p_report().rows]
    ]
    environment = replace(latency_report().environment, cpu=evil, kernel=evil, host=evil, peers={evil: evil})
    found = parse_source(Report(environment, [evil], rows).dumps(), evil)
    if write == "html":
        page = Page(html([found], evil))
        assert len(page.all("script")) == 2 and not page.all("img")
    else:
        assert "<script" not in markdown(document([found], evil)) and "<img" not in markdown(document([found], evil))


def test_expert_traffic_is_a_heat_map_of_ranks_and_one_of_experts() -> None:
    work = Work(Shape(4, 64, 512, 32, 4), 64, routing="skewed:1.5")
    sent, loads = traffic(work)
    assert sum(loads) == 4 * 64 * 4 and len(loads) == 32
    assert all(0 < tokens <= 64 for row in sent for tokens in row)
    row = Row("e2e", "heap", 512, p50_us=9.0, ranks=4, tokens=64, topk=4, experts=32, routing="skewed:1.5")
    row = replace(row, traffic=sent, expert_tokens=loads)
    found = document([source(replace(latency_report(), rows=[row, replace(row, what="dispatch")]))], "Traffic")
    charts = [one.chart for section in found.sections for one in section.figures]
    maps = {one.title: one for one in charts if isinstance(one, HeatMap)}
    assert [len(one.values) for one in maps.values()] == [4, 4]
    assert maps["Tokens from rank to rank"].values == sent
    assert [value for line in maps["Tokens of each expert"].values for value in line] == loads
    assert "2." in maps["Tokens of each expert"].sub.partition("has")[2]
    # A line for each rank, with its busiest expert, not one for each expert.
    table = next(
        one.table for section in found.sections for one in section.figures if one.chart is maps["Tokens of each expert"]
    )
    assert [line[4] for line in table.rows] == [str(max(loads[8 * rank : 8 * rank + 8])) for rank in range(4)]


def test_bytes_of_every_link_of_experts_are_on_the_page() -> None:
    lanes = [Lane("tcp/eth0", 3000, 0.75), Lane("tcp/eth1", 1000, 0.25)]
    row = Row("e2e", "tcp", 512, p50_us=9.0, ranks=4, tokens=64, topk=4, experts=32, bytes_network=4000, lanes=lanes)
    found = document([source(replace(latency_report(), rows=[row]))], "Links")
    (table,) = next(section for section in found.sections if section.name == "experts").tables
    assert [line[2:] for line in table.rows] == [
        ["network", "4.00 kB"],
        ["tcp/eth0", "3.00 kB"],
        ["tcp/eth1", "1.00 kB"],
    ]


def test_the_slowest_pair_of_a_mesh_is_the_one_that_its_map_shows() -> None:
    """Of several runs both show each pair's best."""
    one = mesh(3)
    slower = [replace(row, gb_per_s=(row.gb_per_s or 0.0) / 2) for row in one.rows if row.part == "pair"]
    found = document([replace(one, rows=[*one.rows, *slower])], "Twice")
    tile = next(tile for tile in found.tiles if tile.name == "Slowest pair of a mesh")
    chart = next(f.chart for section in found.sections for f in section.figures if isinstance(f.chart, HeatMap))
    assert float(tile.value) == pytest.approx(min(v for line in chart.values for v in line if v is not None), rel=0.01)


def test_no_time_is_spent_on_the_traffic_of_large_exchanges() -> None:
    assert traffic(Work(Shape(128, 1, 512, 128, 1), 1)) == ([], [])
    assert traffic(Work(Shape(8, 1 << 16, 512, 288, 8), 1 << 16)) == ([], [])


def test_a_large_mesh_still_fits() -> None:
    text = html([mesh(25)], "A large mesh")
    assert len(text.encode()) <= MOST_BYTES
    assert "more rows are in the files themselves" in text


def test_too_much_for_a_page_is_said() -> None:
    goals = [{"work": "x" * 300, "ours": "1", "met": True}]
    files = [replace(parse_source(json.dumps({"outcomes": goals}), "many.json"), command=["x" * 9000])] * 40
    with pytest.raises(TooLarge, match="give fewer files"):
        html([replace(files[0], command=["x" * 400_000])], "Too much")
    with pytest.raises(TooLarge, match=r"the first \d+ fit: many.json") as failure:
        html(files, "Too much")
    fitting = int(str(failure.value).partition("the first ")[2].split()[0])
    assert 0 < fitting < len(files) and html(files[:fitting], "Fits")
    with pytest.raises(TooLarge):
        html(files[: fitting + 1], "Too much")


def test_markdown_has_every_chart_as_a_table() -> None:
    found = document([source(latency_report()), source(p2p_report(), "p2p.json")], "Two files")
    text = markdown(found)
    assert text.startswith("# Two files\n") and text.endswith("|\n")
    assert "| 8 B | Crossrail | 0.22 \N{MICRO SIGN}s |" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_csv_has_every_row_and_no_formula() -> None:
    row = Row("latency", "=HYPERLINK(1)", 8, samples_us=[1.0, 2.0], p50_us=1.5)
    found = [source(replace(latency_report(), rows=[row])), read_source(RESULTS / "gpu" / "latency-2.json")]
    lines = list(csv.DictReader(io.StringIO(comma_separated(found))))
    assert len(lines) == 1 + len(found[1].rows) + 15
    assert (lines[0]["transport"], lines[0]["p50_us"], lines[0]["samples"]) == ("'=HYPERLINK(1)", "1.5", "2")
    assert {line["by"] for line in lines} == {"crossrail", "puts", "nccl", "nixl"}
