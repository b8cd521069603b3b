"""The pages of results, which are made, and their picture, which is committed, are of the committed results."""

from __future__ import annotations

import hashlib
import html
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches"))
import pages  # noqa: E402


def digests(*patterns: str) -> dict[str, str]:
    found = [path for pattern in patterns for path in sorted(pages.RESULTS.glob(pattern))]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_of_the_results_as_they_are_now(name: str) -> None:
    text = pages.made(name)
    block = re.search(r'id="crossrail-data">(.*?)</script>', text, re.DOTALL)
    assert block
    embedded = {one["name"]: one["sha256"] for one in json.loads(block[1])["files"]}
    assert embedded == digests(pages.PAGES[name].pattern)


def test_the_picture_is_of_the_results_as_they_are_now() -> None:
    path = pages.REPORTS / pages.PICTURE
    files = re.search(r"<metadata>(.*?)</metadata>", path.read_text(encoding="utf-8"))
    assert files
    names = list(dict.fromkeys(name for name, _, _ in pages.PICTURED))
    of = digests(*(pages.PAGES[name].pattern for name in names))
    assert json.loads(html.unescape(files[1])) == of, f"run `make pages`, and commit docs/reports/{pages.PICTURE}"
    assert path.stat().st_size <= 60_000


def test_the_picture_is_linked_and_every_page_is_named() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert f"reports/{pages.PICTURE}" in text
    assert all(name in text for name in pages.PAGES)
