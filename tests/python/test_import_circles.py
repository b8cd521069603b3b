"""Files of a Python package can be read one after the other: no circles of imports."""

from __future__ import annotations

from pathlib import Path

from import_circles import ROOT, circles_of


def test_there_are_no_circles() -> None:
    assert circles_of(ROOT) == []


def test_what_is_a_circle_in_python(tmp_path: Path) -> None:
    package = tmp_path / "python" / "crossrail"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "from crossrail.one import f",
        "one.py": "from .inner import two\n\ndef f():\n    import crossrail",
        "inner/__init__.py": "",
        "inner/two.py": "import crossrail.one",
        "three.py": "from crossrail import one",
        "four.py": "if TYPE_CHECKING:\n    from .five import g",
        "five.py": "from .four import h",
    }.items():
        (package / name).write_text(text)
    two = [package / "inner" / "two.py", package / "one.py"]
    assert circles_of(tmp_path) == [two, [package / "five.py", package / "four.py"]]
