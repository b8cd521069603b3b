"""The package crossrail-nixl, whose module is nixl: built, installed into a folder of its own, imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "crossrail-nixl"
LIMIT_S = 120


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed, from its wheel."""
    pytest.importorskip("flit_core")
    folder = tmp_path_factory.mktemp("nixl")
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
assert importlib.util.find_spec("nixl") is not None
import nixl, nixl._api, nixl._bindings as bindings, nixl._utils as utils
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixlBind
from nixl._bindings import nixlBackendError, nixlCancelledError, nixlRemoteDisconnectError, nixlXferTelemetry
from nixl.logging import get_logger
import crossrail.nixl as ours, sys
assert nixl._api is ours._api and bindings is ours._bindings is nixlBind and nixl._pkg is ours
assert nixl.nixl_agent is nixl_agent is ours.nixl_agent and nixl.DRAM_SEG == 0 and nixl.malloc_passthru
assert nixl.logging is ours.logging and nixl.get_logger is get_logger and "torch" not in sys.modules
print(importlib.metadata.version("crossrail-nixl"), importlib.metadata.requires("crossrail-nixl"))
"""
    done = python(program, site)
    assert done.returncode == 0, done.stderr
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert done.stdout.strip() == f"{version[1]} ['crossrail=={version[1]}']"


def beside(folder: Path, kind: str) -> str:
    """Makes something of another NIXL in a folder; gives what the refusal calls it."""
    if kind == "metadata":
        there = folder / "nixl-1.5.1.dist-info"
        there.mkdir()
        (there / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl\nVersion: 1.5.1\n", encoding="utf-8")
        return "nixl 1.5.1"
    file = folder / "nixl" / "__init__.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("kind", ["metadata", "module"])
def test_it_refuses_to_be_beside_another(site: Path, tmp_path: Path, kind: str) -> None:
    other = beside(tmp_path, kind)
    done = python("import nixl", site, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: nixl: crossrail-nixl is installed beside {other}; "), last
    assert "pip uninstall crossrail-nixl" in last
