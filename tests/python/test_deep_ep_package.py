"""The package crossrail-deep-ep, whose module is deep_ep: built, installed into a folder of its own, imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "crossrail-deep-ep"
LIMIT_S = 120


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed, from its wheel."""
    pytest.importorskip("flit_core")
    folder = tmp_path_factory.mktemp("deep_ep")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "dist", PACKAGE)
    pip("install", "--no-deps", "--no-index", "--target", folder / "site", *(folder / "dist").glob("*.whl"))
    return folder / "site"


def python(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds modules in `path`, and crossrail where this process found it."""
    import crossrail

    there = [*path, Path(crossrail.__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, there))}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_it_is_found_and_is_ours(site: Path) -> None:
    program = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deep_ep") is not None
import deep_ep, deep_ep.utils
from crossrail import deep_ep as ours
assert all(getattr(deep_ep, name) is getattr(ours, name) for name in ours.__all__)
assert deep_ep.__all__ == ours.__all__ and deep_ep.utils.EventOverlap is ours.EventOverlap
assert deep_ep.__version__ == ours.__version__
try:
    deep_ep.no_such_thing
except AttributeError:
    pass
print(importlib.metadata.version("crossrail-deep-ep"), importlib.metadata.requires("crossrail-deep-ep"))
"""
    done = python(program, site)
    assert done.returncode == 0, done.stderr
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert done.stdout.strip() == f"{version[1]} ['crossrail=={version[1]}']"


def beside(folder: Path, kind: str) -> str:
    """Makes something of another DeepEP in a folder; gives what the refusal calls it."""
    if kind == "metadata":
        there = folder / "deep_ep-1.2.1.dist-info"
        there.mkdir()
        (there / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n", encoding="utf-8")
        return "deep_ep 1.2.1"
    file = folder / ("deep_ep_cpp.py" if kind == "extension" else "deep_ep/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("kind", ["metadata", "extension", "module"])
def test_it_refuses_to_be_beside_another(site: Path, tmp_path: Path, kind: str) -> None:
    other = beside(tmp_path, kind)
    done = python("import deep_ep", site, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: deep_ep: crossrail-deep-ep is installed beside {other}; "), last
    assert "pip uninstall crossrail-deep-ep" in last
