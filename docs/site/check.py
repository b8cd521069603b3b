"""Checks a built site: it opens offline, every link within it leads somewhere, and the search knows the pages.

python docs/site/check.py FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags with a resource that a browser fetches, and the attribute with its address."""
NOT_LOADED = {"canonical", "next", "prev", "index", "search", "author", "copyright", "genindex"}


class _Page(HTMLParser):
    """The ids of a page, what it loads and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in NOT_LOADED:
            self.loads.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])


def faults(folder: Path) -> Iterator[str]:
    """Faults of the site in ``folder``, one line each."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    own = {path: page for path, page in pages.items() if path.relative_to(folder).parts[0] != "rust"}
    for path, page in own.items():
        name = path.relative_to(folder)
        yield from (f"{name}: loads {url}" for url in page.loads if urlsplit(url).netloc)
        yield from (f"{name}: {url} leads nowhere" for url in page.leads if not _is_there(url, path, pages))
    for style in folder.glob("_static/**/*.css"):
        found = re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", style.read_text(encoding="utf-8"))
        yield from (f"{style.relative_to(folder)}: loads {url}" for url in found)
    index = (folder / "searchindex.js").read_text(encoding="utf-8")
    known = set(json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["docnames"])
    generated = {"genindex", "search", "py-modindex"}
    for path in own:
        page = path.relative_to(folder).with_suffix("").as_posix()
        if page not in known | generated and not page.startswith("_"):
            yield f"{page}: the search does not know it"


def _is_there(url: str, path: Path, pages: Mapping[Path, _Page]) -> bool:
    """True if the target of a link of the page ``path`` exists; links to other sites are not followed."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target not in pages:
        return target.exists()
    return not parts.fragment or unquote(parts.fragment) in pages[target].ids


def main() -> int:
    """Prints the faults of the site named; returns the exit code."""
    folder = Path(sys.argv[1]).resolve()
    found = list(faults(folder))
    print("\n".join(found), file=sys.stderr)
    count = len(list(folder.rglob("*.html")))
    print(f"{folder / 'docs' / 'site' / 'index.html'}: {count} pages, {len(found)} faults")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
