"""packaging/release.py: what a check tries, and what it reports as not tried."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packaging"))

import bills
import programs
import release
import roots


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of dist."""
    monkeypatch.setattr(release, "DIST", tmp_path)
    return tmp_path


def with_bills(dist: Path, sums: list[str]) -> None:
    """Bills in which the parts have these sums."""
    parts = [
        {"type": "library", "bom-ref": one, "name": "a", "version": "1", "hashes": [{"alg": "SHA-256", "content": one}]}
        for one in sums
    ]
    for language in ("rust", "python"):
        document = bills.bill(f"crossrail ({language})", "1", parts, {})
        path = dist / f"crossrail-{release.version()}-{language}.cdx.json"
        path.write_text(json.dumps(document), encoding="utf-8")


def test_bills_of_materials_have_the_wheels_as_they_are(dist: Path) -> None:
    wheel = dist / "crossrail-1-py3-none-any.whl"
    wheel.write_bytes(b"as it was made")
    with_bills(dist, [hashlib.sha256(wheel.read_bytes()).hexdigest()])
    report = release.Report()
    release.check_bills(report)
    assert report.done == ["bills of materials: 1 of rust and 1 of python"]
    wheel.write_bytes(b"made again")
    with pytest.raises(release.Failed, match=r"lacks crossrail-1-py3-none-any\.whl"):
        release.check_bills(report)


@pytest.mark.parametrize("root", [name for name in roots.ROOTS if "-musl-" in name])
def test_a_root_of_musl_gets_no_packages_for_glibc(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(release, "run", lambda *words, **_: ran.append([str(word) for word in words]))
    machine = root.partition("-")[0]
    wheel = Path(f"crossrail-0.1.0-cp310-abi3-musllinux_1_2_{machine}.whl")
    release.fetch_for(tmp_path / root, wheel, tmp_path)
    first, pip = ran
    platforms = {word for option, word in itertools.pairwise(first) if option == "--platform"}
    assert platforms == {f"musllinux_1_2_{machine}"}
    assert str(tmp_path / roots.WHEELS) in first and pip[-1] == "pip"


def test_everything_that_makes_a_root_is_asked_for_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(roots, "make", lambda folder, name: pytest.fail(f"{name} was begun"))
    monkeypatch.setattr(sys, "argv", ["roots.py", str(tmp_path)])
    assert roots.main() == 1
    (said,) = capsys.readouterr().err.splitlines()
    _, _, packages = said.partition("(Debian: ")
    machine = os.uname().machine
    others = {f"qemu-{name.partition('-')[0]}-static" for name in roots.ROOTS if not name.startswith(machine)}
    assert all(name in said for name in others | {"python3.11"})
    assert set(packages.rstrip(")").split(", ")) == {
        *("apt", "dpkg", "proot", "qemu-user-static", "make", "binutils", "python3.11")
    }


def test_what_is_missing_is_named_with_its_package(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs.missing(["sh"]) == ""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert programs.missing(["ld", "make", "ar"]) == "ld, make, ar: not installed (Debian: binutils, make)"
    monkeypatch.setenv("PATH", str(dist))
    with pytest.raises(release.Failed, match=r"readelf: not installed \(Debian: binutils\)"):
        release.run("readelf", "--version")
    report = release.Report()
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    release.check_c_library(report)
    assert "cc, c++: not installed (Debian: gcc, g++)" in report.missing[-1]
    monkeypatch.setattr(release, "run", lambda *words, **_: str(dist / "none"))
    for target in release.TARGETS[1:]:
        release.make_wheel(target, report)
        assert f"rustup target add {target}" in report.missing[-1]
        assert ("rust-web-src" if target.endswith("-musl") else "libstd-rust-web-dev:arm64") in report.missing[-1]


def test_a_root_keeps_its_bytecode(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    settings: list[dict[str, str]] = []

    def run(*words: object, env: dict[str, str] | None = None, **_: object) -> str:
        settings.append({**os.environ, **(env or {})})
        return "tried"

    def fetched(root: Path, wheel: Path, to: Path) -> None:
        (to / "pip-1-py3-none-any.whl").touch()

    monkeypatch.setattr(release, "run", run)
    monkeypatch.setattr(release, "fetch_for", fetched)
    monkeypatch.setattr(roots, "enter", lambda root: ["python3"])
    wheel = dist / "crossrail-1-cp310-abi3-manylinux_2_28_aarch64.whl"
    wheel.touch()
    assert release.check_root(dist / "aarch64-gnu-3.11", wheel, [], release.Report())
    assert settings and all(one["PYTHONDONTWRITEBYTECODE"] == "" for one in settings)


def test_each_python_that_is_not_tried_is_told(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = os.uname().machine
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}.get(machine, "x86_64")
    wheels = [f"crossrail-{release.version()}-cp310-abi3-manylinux_2_28_{one}.whl" for one in (machine, other)]
    for name in wheels:
        (dist / name).touch()
    for step in ("check_sums", "check_contents", "check_bills", "check_c_library"):
        monkeypatch.setattr(release, step, lambda report: None)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "home", lambda: dist)
    monkeypatch.setattr(release, "check_root", lambda *given: True)
    folder = dist / "roots"
    (folder / f"{machine}-gnu-3.15").mkdir(parents=True)
    monkeypatch.setattr(roots, "ROOTS", (f"{machine}-gnu-3.15",))
    report = release.Report()
    release.check(report, None, False, folder)
    told = "\n".join(report.missing)
    for name in ("python3.10", "python3.14", "python3.13t", "python3.15t"):
        assert f"{wheels[0]} by {name}: not on this machine" in report.missing
    assert f"{wheels[0]} by python3.15:" not in told, "it was tried in a root"
    assert "python3.12t" not in told, "there is no such Python"
    every = ", ".join(f"python3.{minor}" for minor in range(10, 16))
    assert f"{wheels[1]} by {every}: no {other}-gnu-* of packaging/roots.py" in report.missing
    assert "left out by --no-sources" in told
    assert f"wheel for {machine}-unknown-linux-musl tried: dist has none" in report.missing
    assert f"{machine}-unknown-linux-gnu" not in told
