"""Links of pages to other files: source code, examples, data. On the site they lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


class Links:
    """Rewrites links of a repository's pages. Raises ValueError for one that leads nowhere."""

    def __init__(self, root: Path) -> None:
        self._root = root
        found = re.search(r'^repository = "(.+)"$', (root / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
        if found is None:
            raise ValueError("Cargo.toml names no repository")
        self._tree = f"{found[1]}/blob/main"

    def rewrite(self, app: Any, page: str, source: list[str]) -> None:
        """Handles Sphinx's event `source-read`."""
        here = (self._root / page).parent
        pages = app.env.found_docs

        def one(link: re.Match[str]) -> str:
            target = (here / link[2]).resolve()
            if not target.exists():
                raise ValueError(f"{page}: {link[2]} does not exist")
            name = target.relative_to(self._root).as_posix()
            if name.removesuffix(".md") in pages:
                return link[0]
            return f"[{link[1]}]({self._tree}/{name}{link[3] or ''})"

        source[0] = _LINK.sub(one, source[0])
