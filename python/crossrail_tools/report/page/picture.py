"""A few charts side by side as one SVG file, for a page of documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from ..sources import Source
from .draw import WIDTH, Colours, colours_of, draw, legend, swatch
from .model import Bars, Chart, Stack
from .scales import clipped, width_of
from .style import MARKERS, STYLE

_PAD, _TITLE, _LINE = 18.0, 15.0, 17.0
_PANEL = WIDTH + 2 * _PAD
_GAP = 14.0


def picture(charts: Sequence[Chart], about: str, sources: Sequence[Source]) -> str:
    """The SVG text of ``charts``, light or dark as the reader's system is; ``about`` describes it to screen readers.

    Its metadata names the files that the charts are made of.
    """
    colours = colours_of(charts)
    panels = [_panel(chart, f"p{number}", colours) for number, chart in enumerate(charts)]
    height = max(height for _, height in panels) + 2 * _PAD
    width = len(panels) * _PANEL + (len(panels) - 1) * _GAP
    body = []
    for number, (content, _) in enumerate(panels):
        x = number * (_PANEL + _GAP)
        body.append(
            f'<g transform="translate({x:.0f} 0)"><rect class="panel" x="0.5" y="0.5" width="{_PANEL - 1:.0f}" '
            f'height="{height - 1:.0f}" rx="6"/><g transform="translate({_PAD:.0f} {_PAD:.0f})">{content}</g></g>'
        )
    files = json.dumps({source.name: source.sha256 for source in sources}, separators=(",", ":"))
    symbols = "".join(f'<symbol id="m{n}"><path class="mk" d="{path}"/></symbol>' for n, path in enumerate(MARKERS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(about)}">\n<metadata>{escape(files)}</metadata>\n<style>{_style()}</style>\n'
        f"{symbols}\n{''.join(body)}\n</svg>\n"
    )


_RULES = (
    "svg text",
    "svg .",
    ".g{",
    ".ref",
    ".s",
    ".ln",
    ".up",
    ".d1",
    ".d5",
    ".iv",
    "symbol",
    ".mk",
    ".b{",
    ".na",
    ".q",
)
"""The beginnings of the lines of a page's style that charts need."""


def _style() -> str:
    """The rules of a page that a picture needs: its colours, and those of charts."""
    kept = []
    inside = False
    for line in STYLE.strip().splitlines():
        inside = inside or line.startswith(("@media (prefers-color-scheme", ":root"))
        if inside or line.startswith(_RULES):
            kept.append(line)
        inside = inside and not line.endswith("}")
    own = (
        "svg{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',Arial,sans-serif}"
        ".panel{fill:var(--panel);stroke:var(--line)}svg .ti{font-size:14px;font-weight:600}"
    )
    return "\n".join([*kept, own])


def _panel(chart: Chart, name: str, colours: Colours) -> tuple[str, float]:
    parts = [f'<text class="ti" x="0" y="12">{escape(clipped(chart.title, WIDTH, 14))}</text>']
    y, x = _TITLE + 8, 0.0
    shapes = not isinstance(chart, (Bars, Stack))
    for colour, shape, label in legend(chart, colours):
        shown = clipped(label, WIDTH - 34, 12)
        wide = 32 + width_of(shown, 12) + 14
        if x and x + wide > WIDTH:
            x, y = 0.0, y + _LINE
        sample = swatch(colour, shape if shapes else None, 5)
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">{sample}</g>')
        parts.append(f'<text x="{x + 32:.0f}" y="{y + 10:.0f}">{escape(shown)}</text>')
        x += wide
    y += _LINE + 8 if legend(chart, colours) else 4
    drawn = draw(chart, name, colours)
    head = drawn.index('viewBox="') + len('viewBox="')
    height = float(drawn[head : drawn.index('"', head)].split()[3])
    placed = drawn.replace("<svg ", f'<svg y="{y:.0f}" width="{WIDTH:.0f}" height="{height:.0f}" ', 1)
    return "".join([*parts, placed]), y + height
