"""A report is written whole or not at all."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_samples import p2p_report

from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.writing import WriteError, check_destination, write_text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    write_text(p2p_report().dumps(), str(path))
    assert json.loads(path.read_text())["schema"] == "crossrail-bench/1"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_dash_is_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write_text(p2p_report().dumps(), "-")
    assert json.loads(capsys.readouterr().out)["rows"]


def test_a_symlink_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("before")
    link.symlink_to(target)
    write_text("after", str(link))
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_device_is_written_not_replaced() -> None:
    with pytest.raises(WriteError, match="No space left on device; free some space"):
        write_text(p2p_report().dumps(), "/dev/full")
    assert not Path("/dev/full").is_file()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("mounting a small file system needs root and mount")
        pytest.skip("mounting a small file system needs root and mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_what_was_there(small_disk: Path) -> None:
    path = small_disk / "out.json"
    path.write_text("before")
    with pytest.raises(WriteError) as caught:
        write_text("x" * 100_000, str(path))
    assert str(path) in str(caught.value)
    assert "No space left on device; free some space" in str(caught.value)
    assert path.read_text() == "before"
    assert list(small_disk.iterdir()) == [path]


def test_a_bad_place_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="does not exist"):
        check_destination(str(tmp_path / "missing" / "out.json"))
    with pytest.raises(WriteError, match="is a folder"):
        check_destination(str(tmp_path))
    check_destination(str(tmp_path / "out.json"))
    check_destination("-")
    check_destination("out.json")


def test_the_environment_is_captured_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", "do not tell")
    monkeypatch.setenv("CROSSRAIL_TLS", "tcp")
    found = capture_environment({"ucx": "1.13"}, {"CROSSRAIL_TLS": "shm"})
    assert found.settings["CROSSRAIL_SECRET"] == "(hidden)"
    assert found.settings["CROSSRAIL_TLS"] == "shm"
    assert found.peers == {"ucx": "1.13"}
    assert "do not tell" not in str(found)
    assert found.cpu
    assert found.memory_gib > 0
    assert found.python.endswith(".".join(map(str, sys.version_info[:3])))
    assert set(found.cores_allowed) == os.sched_getaffinity(0)
