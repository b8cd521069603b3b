"""Files of a crate or package can be read one after the other: few circles of imports, of two files each."""

from __future__ import annotations

from pathlib import Path

import pytest
from import_circles import ROOT, circles_of

MOST = 8


def test_circles_are_few_and_of_two_files() -> None:
    found = [" ".join(str(path.relative_to(ROOT)) for path in circle) for circle in circles_of(ROOT)]
    assert len(found) <= MOST, "\n".join(found)
    assert not [circle for circle in found if len(circle.split()) > 2]


RUST = {
    "lib.rs": "mod a;\nmod b;\nmod c;\npub use c::{Third, inner::{self, Deep as Deeper}};",
    "a.rs": "use crate::b::Second;\npub struct First(Second);",
    "b.rs": "pub struct Second(pub Vec<super::Third>);",
    "c.rs": "pub mod inner;\npub struct Third;",
    "c/inner.rs": "pub struct Deep;",
}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("c.rs", "", []),
        ("c.rs", "fn f(_: crate::a::First) {}", [["a.rs", "b.rs", "c.rs"]]),
        ("c.rs", "use super::a::{self, First};", [["a.rs", "b.rs", "c.rs"]]),
        ("c.rs", '// crate::a::First\nconst TEXT: &str = "crate::a::First";', []),
        ("c.rs", "#[cfg(test)]\nmod tests { use crate::a::First; fn f() {} }", []),
        ("c/inner.rs", "use super::Third;", []),
        ("c/inner.rs", "use crate::b::Second;", []),
        ("b.rs", "use crate::Deeper;\nfn f(_: Deeper, _: crate::a::First) {}", [["a.rs", "b.rs"]]),
        ("a.rs", "use std::collections::b;", []),
    ],
)
def test_what_is_a_circle_in_rust(file: str, text: str, expected: list[list[str]], tmp_path: Path) -> None:
    source = tmp_path / "crates" / "one" / "src"
    for name, before in RUST.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"{before}\n{text if name == file else ''}\n")
    found = circles_of(tmp_path)
    assert [[str(path.relative_to(source)) for path in circle] for circle in found] == expected


def test_what_is_a_circle_in_python(tmp_path: Path) -> None:
    package = tmp_path / "python" / "crossrail"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "from crossrail.one import f",
        "one.py": "from .inner import two\n\ndef f():\n    import crossrail",
        "inner/__init__.py": "",
        "inner/two.py": "import crossrail.one",
        "three.py": "from crossrail import one",
    }.items():
        (package / name).write_text(text)
    assert circles_of(tmp_path) == [[package / "inner" / "two.py", package / "one.py"]]
