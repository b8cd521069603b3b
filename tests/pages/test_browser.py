"""Pages in a real browser: nothing overflows or overlaps, everything can be read, and works by keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import NAMES, Browser, found
from test_report_page import EVERY_KIND, mesh
from test_sweep import sweep

from crossrail_tools.report.page.comparison import comparison_section
from crossrail_tools.report.page.html import page
from crossrail_tools.report.page.model import Document, Figure, Lines, Section, Series, Table
from crossrail_tools.report.page.write import html
from crossrail_tools.report.sources import parse_source

REPORTS = Path(__file__).parents[2] / "docs" / "reports"
COMMITTED = sorted(REPORTS.glob("*.html"))
WIDTHS = (390, 400, 800, 1280, 1600)

MISTAKES = r"""(() => {
const wrong = [], page = document.documentElement, seen = r => r.width > 0 && r.height > 0;
const say = (what, of) => wrong.push(what + ': ' + (of.textContent || of.className || of.tagName).trim().slice(0, 60));
if (page.scrollWidth > innerWidth) wrong.push('the page is ' + page.scrollWidth + ' wide, not ' + innerWidth);
for (const one of document.querySelectorAll('body *')) {
  if (one.closest('.scroll table') || one.closest('.skip') || one.closest('svg') && one.tagName != 'svg') continue;
  const r = one.getBoundingClientRect();
  if (seen(r) && (r.right > innerWidth + 0.5 || r.left < -0.5)) say('outside the window', one);
}
for (const one of document.querySelectorAll('svg[role=img]')) {
  const all = one.getBoundingClientRect(), texts = [...one.querySelectorAll('text')];
  const boxes = texts.map(t => t.getBoundingClientRect());
  boxes.forEach((b, i) => {
    if (b.left < all.left - 1 || b.right > all.right + 1 || b.top < all.top - 1 || b.bottom > all.bottom + 1)
      say('text outside its chart', texts[i]);
    for (let j = 0; j < i; j++) {
      const o = boxes[j], by = 1.5;
      if (b.left < o.right - by && o.left < b.right - by && b.top < o.bottom - by && o.top < b.bottom - by)
        say('text on text (' + texts[j].textContent + ')', texts[i]);
    }
  });
  const font = texts.length ? parseFloat(getComputedStyle(texts[0]).fontSize) : 12;
  const size = font * all.width / one.viewBox.baseVal.width;
  if (size < 7.5) say('text of ' + size.toFixed(1) + ' px', one);
}
const boxes = [...document.querySelectorAll('.legend li, .tiles li, figure, h1, h2, h3, .facts div')].map(
  e => [e, e.getBoundingClientRect()]).filter(([, r]) => seen(r));
boxes.forEach(([e, r], i) => { for (let j = 0; j < i; j++) { const [f, o] = boxes[j];
  if (!e.contains(f) && !f.contains(e) && r.left < o.right - 1 && o.left < r.right - 1 && r.top < o.bottom - 1 &&
      o.top < r.bottom - 1) say('on another', e); } });
return JSON.stringify(wrong.slice(0, 12)); })()"""

CONTRAST = r"""(() => {
const light = c => { const p = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]; };
const parse = s => s.match(/[\d.]+/g).map(Number), low = new Map();
const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
for (const e of document.querySelectorAll('h1,h2,h3,p,li,dt,dd,td,th,summary,a,svg[role=img] text')) {
  if (/\bqt\d/.test(e.getAttribute('class') || '') || e.closest('.skip') || !e.getClientRects().length) continue;
  const style = getComputedStyle(e), ink = parse(e.tagName == 'text' ? style.fill : style.color).slice(0, 3);
  const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) low.set(e.tagName + '.' + (e.getAttribute('class') || ''), ratio.toFixed(2));
}
return JSON.stringify([...low]); })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = found()
    if program is None:
        pytest.fail(f"no browser here: none of {', '.join(NAMES)} is installed; apt-get install chromium")
    with Browser(program) as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of chart, long names, and a matrix of many ranks."""
    path = tmp_path_factory.mktemp("pages") / "every-kind.html"
    rates = {number: [5.0 + number] * 5 for number in range(4)}
    found = [*EVERY_KIND, mesh(26), parse_source(sweep(rates).dumps(), "sweep.json")]
    title = "Every kind of chart, " + "with a title that is rather long, " * 3
    path.write_text(html(found, title, [comparison_section(EVERY_KIND, EVERY_KIND)]))
    return path


def pages(made: Path) -> list[Path]:
    return [made, *COMMITTED]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "tables open"])
def test_nothing_overflows_or_overlaps(browser: Browser, made: Path, width: int, opened: bool) -> None:
    for path in pages(made):
        browser.show(path, width)
        if opened:
            browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert json.loads(browser.ask(MISTAKES)) == [], f"{path.name} at {width}"


HIDDEN = r"""(() => {
const wrong = [];
for (const one of document.querySelectorAll('.scroll')) {
  if (one.clientWidth && one.scrollWidth > one.clientWidth + 1) wrong.push('cut: ' + one.getAttribute('aria-label'));
  for (const cell of one.querySelectorAll('td')) {
    const name = getComputedStyle(cell, '::before').content;
    if (!name || name == 'none' || name == '""') wrong.push('no name: ' + cell.textContent);
    const r = cell.getBoundingClientRect();
    if (r.width > 0 && (r.left < -0.5 || r.right > innerWidth + 0.5)) wrong.push('outside: ' + cell.textContent);
  }
}
return JSON.stringify(wrong.slice(0, 12)); })()"""


def test_tables_fit_a_telephone(browser: Browser, made: Path) -> None:
    """Nothing of them is cut, and each value stands next to the name of its column."""
    for path in pages(made):
        browser.show(path, 390)
        browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert json.loads(browser.ask(HIDDEN)) == [], path.name


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_stand_out(browser: Browser, made: Path, dark: bool) -> None:
    for path in pages(made):
        browser.show(path, 1600, dark=dark)
        assert json.loads(browser.ask(CONTRAST)) == [], path.name
        ground = browser.ask("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 21, 24)") == dark


@pytest.mark.parametrize("figures", [1, 2, 3, 4, 7])
def test_charts_fill_the_width(browser: Browser, tmp_path: Path, figures: int) -> None:
    """However many there are in a section; at 1280 pixels three stand side by side."""
    lines = Lines("Time", "size", "us", [Series("Crossrail", [(1.0, 1.0), (2.0, 2.0)])])
    table = Table(["size", "us"], [["1", "1"], ["2", "2"]])
    section = Section("latency", "Latency", "", [Figure(lines, table)] * figures)
    path = tmp_path / "page.html"
    path.write_text(page(Document("Times", [], [], [section]), "{}"))
    browser.show(path, 1280)
    edges = json.loads(browser.ask(EDGES))
    assert edges["right"] <= 1 and edges["left"] <= 1, edges
    assert edges["page"] >= 1200


EDGES = r"""(() => {
const grid = document.querySelector('.grid'), all = grid.getBoundingClientRect();
const boxes = [...grid.querySelectorAll('figure > *')].map(one => one.getBoundingClientRect());
const cards = [...grid.querySelectorAll('figure')].map(one => one.getBoundingClientRect());
const inside = Math.max(...boxes.map(one => one.right)) + 17;
return JSON.stringify({right: all.right - Math.max(...cards.map(one => one.right), inside),
  left: Math.min(...cards.map(one => one.left)) - all.left, page: all.width}); })()"""


def test_arrow_keys_step_through_the_values_of_a_chart(browser: Browser, made: Path) -> None:
    browser.show(made, 800)
    browser.ask("document.querySelector('figure svg[role=img]').focus()")
    said = []
    for _ in range(2):
        browser.press("ArrowRight")
        said.append(browser.ask("document.querySelector('figure .read').textContent"))
    assert all(said) and said[0] != said[1]
    browser.press("ArrowLeft")
    assert browser.ask("document.querySelector('figure .read').textContent") == said[0]


def test_a_page_works_without_scripts(browser: Browser, made: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.show(made, 800)
        assert browser.ask("document.querySelectorAll('svg[role=img] .ln').length") > 3
        assert browser.ask("document.querySelector('figure svg[role=img]').tabIndex") == -1
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
