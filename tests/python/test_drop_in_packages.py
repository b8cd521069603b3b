"""The packages that own another project's module name: built, installed into a folder of their own, imported."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120

DEEP_EP = """
import deep_ep, deep_ep.utils
from crossrail import deep_ep as ours
assert all(getattr(deep_ep, name) is getattr(ours, name) for name in ours.__all__)
assert deep_ep.__all__ == ours.__all__ and deep_ep.utils.EventOverlap is ours.EventOverlap
assert deep_ep.__version__ == ours.__version__
try:
    deep_ep.no_such_thing
except AttributeError:
    pass
"""

NIXL = """
import nixl, nixl._api, nixl._bindings as bindings, nixl._utils as utils
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixlBind
from nixl._bindings import nixlBackendError, nixlCancelledError, nixlRemoteDisconnectError, nixlXferTelemetry
from nixl.logging import get_logger
import crossrail.nixl as ours, sys
assert nixl._api is ours._api and bindings is ours._bindings is nixlBind and nixl._pkg is ours
assert nixl.nixl_agent is nixl_agent is ours.nixl_agent and nixl.DRAM_SEG == 0 and nixl.malloc_passthru
assert nixl.logging is ours.logging and nixl.get_logger is get_logger and "torch" not in sys.modules
"""

MOONCAKE = """
import mooncake.engine, sys
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from mooncake import engine
from crossrail.mooncake import engine as ours
assert mooncake.engine is engine is ours and TransferEngine is ours.TransferEngine and "torch" not in sys.modules
"""


@dataclass(frozen=True)
class Package:
    """``other``: a distribution of the other project. ``extension``: a module that comes with it. ``version``: that of
    the other project whose interface it has, where programs ask for it; by default Crossrail's."""

    module: str
    program: str
    other: str
    extension: str | None = None
    version: str | None = None

    @property
    def name(self) -> str:
        return f"crossrail-{self.module.replace('_', '-')}"


PACKAGES = (
    Package("deep_ep", DEEP_EP, "deep_ep", "deep_ep_cpp"),
    Package("nixl", NIXL, "nixl", version="1.5.1"),
    Package("mooncake", MOONCAKE, "mooncake-transfer-engine-cuda13"),
)


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def site_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Package], Path]:
    """Where a package is installed from its wheel, which is done once for each."""
    pytest.importorskip("flit_core")

    @functools.cache
    def install(package: Package) -> Path:
        folder = tmp_path_factory.mktemp(package.module)
        source = ROOT / "packages" / package.name
        pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "dist", source)
        pip("install", "--no-deps", "--no-index", "--target", folder / "site", *(folder / "dist").glob("*.whl"))
        return folder / "site"

    return install


@pytest.fixture
def installed(request: pytest.FixtureRequest, site_of: Callable[[Package], Path]) -> tuple[Package, Path]:
    """A package, and where it is installed."""
    return request.param, site_of(request.param)


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


@pytest.mark.parametrize("installed", PACKAGES, indirect=True, ids=lambda package: package.module)
def test_it_is_found_and_is_ours(installed: tuple[Package, Path]) -> None:
    package, site = installed
    found = (
        f"import importlib.metadata, importlib.util\nassert importlib.util.find_spec({package.module!r}) is not None"
    )
    said = f"print(importlib.metadata.version({package.name!r}), importlib.metadata.requires({package.name!r}))"
    done = python(f"{found}{package.program}{said}", site)
    assert done.returncode == 0, done.stderr
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert done.stdout.strip() == f"{package.version or version[1]} ['crossrail=={version[1]}']"


@pytest.mark.parametrize("installed", PACKAGES[1:2], indirect=True, ids=["nixl"])
def test_engines_find_the_version_of_nixl(installed: tuple[Package, Path]) -> None:
    asked = "import importlib.metadata as m; print([m.version(one) for one in m.packages_distributions()['nixl']])"
    assert python(asked, installed[1]).stdout.strip() == "['1.5.1']"


def by_metadata(package: Package, folder: Path) -> str:
    there = folder / f"{package.other.replace('-', '_')}-1.2.1.dist-info"
    there.mkdir()
    (there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.other}\nVersion: 1.2.1\n", encoding="utf-8")
    return f"{package.other} 1.2.1"


def by_module(package: Package, folder: Path) -> str:
    file = folder / package.module / "__init__.py"
    file.parent.mkdir()
    file.touch()
    return str(file)


def by_extension(package: Package, folder: Path) -> str:
    file = folder / f"{package.extension}.py"
    file.touch()
    return str(file)


WAYS = [(package, way) for package in PACKAGES for way in (by_metadata, by_module)]
WAYS += [(package, by_extension) for package in PACKAGES if package.extension is not None]


@pytest.mark.parametrize(("installed", "beside"), WAYS, indirect=["installed"])
def test_it_refuses_to_be_beside_another(
    installed: tuple[Package, Path], tmp_path: Path, beside: Callable[[Package, Path], str]
) -> None:
    """``beside`` makes something of another project in a folder, and gives what the refusal calls it."""
    package, site = installed
    other = beside(package, tmp_path)
    done = python(f"import {package.module}", site, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {package.module}: {package.name} is installed beside {other}; "), last
    assert f"pip uninstall {package.name}" in last
