"""Checks a built site: it opens offline, every link within it leads somewhere, the search knows the pages, and the
reference has the text of `help()` for every public object.

python docs/site/check.py FOLDER
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MODULES = ("crossrail", "crossrail.kv", "crossrail.nixl", "crossrail.mooncake", "crossrail.deep_ep")
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


class _Texts(HTMLParser):
    """The words of each object of a page of the reference: those of its ``dt``, which has its id, and of its ``dd``."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words: dict[str, Counter[str]] = {}
        self._open: list[tuple[str, str]] = []
        """Tags that are open, outermost first, each with the object that its text belongs to."""
        self._described = ("", 0)
        """The object whose ``dt`` has ended, and how many tags were open around it: its ``dd`` follows."""
        self._text: dict[str, list[str]] = {}
        self.feed(text)
        self.words = {name: _words("".join(parts)) for name, parts in self._text.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "dt" and "sig-object" in (given.get("class") or ""):
            self._open.append((tag, given.get("id") or ""))
        elif tag == "dd" and self._described[0] and self._described[1] == len(self._open):
            self._open.append((tag, self._described[0]))
            self._described = ("", 0)
        elif tag in ("dt", "dd"):
            self._open.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("dt", "dd") and self._open:
            tag, name = self._open.pop()
            if tag == "dt" and name:
                self._described = (name, len(self._open))

    def handle_data(self, data: str) -> None:
        for name in {name for _, name in self._open if name}:
            self._text.setdefault(name, []).append(data)


def _words(text: str) -> Counter[str]:
    """The words of a text, without the headings of NumPy's sections, which a page may call otherwise."""
    return Counter(re.findall(r"\w+", re.sub(r"^[A-Z]\w+(?: \w+)?\n-{4,}$", "", text, flags=re.MULTILINE)))


def public() -> Iterator[tuple[str, Any]]:
    """Every public class and function of the library, and the methods and properties of each class."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            of = getattr(module, name)
            if not callable(of) or not getattr(of, "__module__", "").startswith("crossrail") or id(of) in seen:
                continue
            seen.add(id(of))
            yield f"{module_name}.{name}", of
            if inspect.isclass(of) and not issubclass(of, tuple):
                for member, value in vars(of).items():
                    has_text = callable(value) or isinstance(value, (classmethod, property, types.GetSetDescriptorType))
                    if has_text and not member.startswith("_") and value.__doc__:
                        yield f"{module_name}.{name}.{member}", value


def differences(folder: Path) -> Iterator[str]:
    """Objects whose page lacks words of their text in `help()`."""
    on_pages: dict[str, Counter[str]] = {}
    for page in sorted((folder / "docs" / "site" / "api").glob("*.html")):
        on_pages |= _Texts(page.read_text(encoding="utf-8")).words
    for name, of in public():
        text = inspect.getdoc(of) or ""
        if name not in on_pages:
            yield f"{name}: on no page"
        elif lacking := _words(text) - on_pages[name]:
            yield f"{name}: its page lacks {' '.join(list(lacking)[:8])}"


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
        document = path.relative_to(folder).with_suffix("").as_posix()
        if document not in known | generated and not document.startswith("_"):
            yield f"{document}: the search does not know it"


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
    found = [*faults(folder), *differences(folder)]
    print("\n".join(found), file=sys.stderr)
    count = len(list(folder.rglob("*.html")))
    print(f"{folder / 'docs' / 'site' / 'index.html'}: {count} pages, {len(found)} faults")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
