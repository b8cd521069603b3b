"""Building from source, where what it needs is missing."""

import base64
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_rust(tmp_path: Path) -> dict[str, str]:
    """An environment with the tools of the shell and make, and no cargo."""
    for tool in ("sh", "cat", "make"):
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"{tool} is not installed")
        (tmp_path / tool).symlink_to(found)
    return {"PATH": str(tmp_path), "HOME": str(tmp_path)}


HOOKS = ["get_requires_for_build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist"]


@pytest.mark.parametrize("hook", HOOKS)
def test_pip_without_rust_says_how_to_get_it_and_installs_none(hook: str, without_rust: dict[str, str]) -> None:
    pytest.importorskip("maturin")
    call = f"import sys; sys.path.insert(0, 'packaging'); import crossrail_build; print(crossrail_build.{hook}())"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=ROOT,
        env=without_rust,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    first, command = done.stderr.splitlines()[:2]
    assert "needs Rust" in first
    assert "rustup" in command


def test_pip_uses_that_backend() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'build-backend = "crossrail_build"' in text
    assert 'backend-path = ["packaging"]' in text


@pytest.mark.parametrize("goal", ["build", "wheels"])
def test_make_without_rust_begins_with_how_to_get_it(goal: str, without_rust: dict[str, str]) -> None:
    done = subprocess.run(
        ["make", "--silent", goal], cwd=ROOT, env=without_rust, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs Rust" in done.stderr.splitlines()[0]


def test_the_build_does_not_warn_of_its_own_backend() -> None:
    done = subprocess.run(
        ["make", "--silent", "--eval=show:; @env", "show"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "MATURIN_NO_MISSING_BUILD_BACKEND_WARNING=1" in done.stdout


@pytest.fixture
def repeatable() -> ModuleType:
    """packaging/repeatable.py."""
    spec = importlib.util.spec_from_file_location("repeatable", ROOT / "packaging" / "repeatable.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_wheel(path: Path, root: str, serial: str, files: list[str]) -> Path:
    """A wheel as a build in the folder `root` makes it."""
    info = "crossrail-0.1.0.dist-info"
    bill = {
        "bomFormat": "CycloneDX",
        "serialNumber": serial,
        "metadata": {"timestamp": serial, "component": {"bom-ref": f"path+file://{root}/crates/python#0.1.0"}},
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/sboms/crossrail-python.cyclonedx.json", json.dumps(bill))
        for name in files:
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, len(serial), 0, 0, 0)), name)
        archive.writestr(f"{info}/RECORD", "to be written anew")
    return path


def test_wheels_of_two_folders_and_times_are_the_same(tmp_path: Path, repeatable: ModuleType) -> None:
    one = a_wheel(tmp_path / "one.whl", "/home/a/crossrail", "urn:1", ["crossrail/a.py", "crossrail/b.py"])
    two = a_wheel(tmp_path / "two.whl", "/builds/7", "urn:22", ["crossrail/b.py", "crossrail/a.py"])
    assert one.read_bytes() != two.read_bytes()
    assert repeatable.rewrite(one, "/home/a/crossrail") == repeatable.rewrite(two, "/builds/7")
    with zipfile.ZipFile(one) as archive:
        bill = json.loads(archive.read("crossrail-0.1.0.dist-info/sboms/crossrail-python.cyclonedx.json"))
        assert bill["metadata"]["component"]["bom-ref"] == "path+file:///crossrail/crates/python#0.1.0"
        assert "serialNumber" not in bill
        lines = dict(line.split(",", 1) for line in archive.read("crossrail-0.1.0.dist-info/RECORD").decode().split())
        assert set(lines) == set(archive.namelist())
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"crossrail/a.py").digest()).decode().rstrip("=")
        assert lines["crossrail/a.py"] == f"sha256={digest},14"


def test_every_tool_is_pinned_with_hashes() -> None:
    def pins(text: str) -> set[tuple[str, str]]:
        found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE)
        return {(re.sub("[-_.]+", "-", name).lower(), version) for name, version in found}

    wanted = pins((ROOT / "packaging" / "requirements-dev.in").read_text(encoding="utf-8"))
    text = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    assert wanted - pins(text) == set(), "make pins"
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert blocks
    assert all("--hash=sha256:" in block for block in blocks)


def test_a_python_without_a_gil_is_refused_on_purpose() -> None:
    pytest.importorskip("maturin")
    call = (
        "import sys, sysconfig; sys.path.insert(0, 'packaging'); import crossrail_build\n"
        "known = sysconfig.get_config_var\n"
        "sysconfig.get_config_var = lambda name: 1 if name == 'Py_GIL_DISABLED' else known(name)\n"
        "crossrail_build.get_requires_for_build_wheel()"
    )
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "without a global interpreter lock" in done.stderr and "python3t" in done.stderr
    module = (ROOT / "crates" / "python" / "src" / "lib.rs").read_text(encoding="utf-8")
    assert "#[pymodule(gil_used = true)]" in module
    # Wheels are of the stable ABI, which interpreters without the lock do not load.
    assert "abi3-py310" in (ROOT / "Cargo.toml").read_text(encoding="utf-8")


def test_crates_are_published_behind_those_that_they_depend_on() -> None:
    done = subprocess.run(
        [sys.executable, "packaging/release.py", "crates"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    order = done.stdout.split()
    manifests = {
        found[1]: text
        for path in (ROOT / "crates").glob("*/Cargo.toml")
        if (found := re.search(r'^name = "(.+)"$', text := path.read_text(encoding="utf-8"), re.MULTILINE)) is not None
    }
    assert order[0] == "crossrail-types" and "crossrail" in order
    for at, name in enumerate(order):
        needed = manifests[name].partition("[dependencies]")[2].partition("\n[")[0]
        assert set(re.findall(r"^(crossrail[a-z-]*)\.", needed, re.MULTILINE)) <= set(order[:at]), name
    unpublished = {name for name, text in manifests.items() if "publish = false" in text}
    assert set(order) == set(manifests) - unpublished


def test_all_packages_have_one_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r'version = "=(.*?)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"))) == {version}
    for path in (ROOT / "packages").glob("*/pyproject.toml"):
        assert f'"crossrail=={version}"' in path.read_text(encoding="utf-8"), path
