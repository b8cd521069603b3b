"""`crossrail report`: what it writes where, and one line for every file that it cannot use."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from pathlib import Path

import foreign_logs as logs
import pytest
from commands import one_error, run
from report_samples import bandwidth_report, latency_report

from crossrail_tools.report.build import Round, with_samples
from crossrail_tools.report.schema import Report


@pytest.fixture
def latency(tmp_path: Path) -> Path:
    path = tmp_path / "latency.json"
    path.write_text(latency_report().dumps())
    return path


def test_tables_a_page_markdown_and_csv(latency: Path, tmp_path: Path) -> None:
    osu = tmp_path / "osu.txt"
    osu.write_text(logs.OSU_LATENCY)
    shown = run("report", str(latency), str(osu))
    assert shown.returncode == 0 and shown.stderr == ""
    assert "Latency: One-way latency, host memory" in shown.stdout and "osu Latency" in shown.stdout
    page, words = tmp_path / "page.html", tmp_path / "page.md"
    done = run("report", str(latency), str(osu), f"--html={page}", f"--markdown={words}", "--csv=-", "--title=Two")
    assert done.returncode == 0 and done.stderr == ""
    assert page.read_text().startswith("<!DOCTYPE html>") and "<h1>Two</h1>" in page.read_text()
    assert words.read_text().startswith("# Two\n")
    assert [line["size"] for line in csv.DictReader(io.StringIO(done.stdout))] == ["8", "65536", "1", "8"]


def test_two_runs_are_side_by_side(latency: Path, tmp_path: Path) -> None:
    """The same work over shared memory and over TCP, whatever else is in either file."""
    other = tmp_path / "tcp.json"
    report = latency_report()
    slow = with_samples(replace(report.rows[0], transport="tcp"), [Round([0.88, 0.88])])
    moved = bandwidth_report().rows[0]
    fast = with_samples(replace(moved, transport="shm"), [Round([5000.0, 6000.0], 64 << 20)])
    other.write_text(replace(report, rows=[slow, moved]).dumps())
    latency.write_text(replace(report, rows=[*report.rows, fast]).dumps())
    shown = run("report", str(other), str(latency))
    assert shown.returncode == 0, shown
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    head = next(line for line in lines if line.startswith("row "))
    assert head == "row tcp.json: over latency.json: over tcp.json latency.json latency.json by time"
    assert "latency, 8 tcp, ordinary shm, ordinary 0.88 \N{MICRO SIGN}s 0.22 \N{MICRO SIGN}s saves 75%" in lines
    rate = next(line for line in lines if line.startswith("bandwidth, 1M, window 64 "))
    assert rate.endswith("6.1 GB/s 12.2 GB/s saves 50%")
    back = run("report", str(latency), str(other))
    assert "takes 4 times as long" in back.stdout
    assert "Side by side" not in run("report", str(latency)).stdout


def test_bad_input_is_one_line_and_exit_2(latency: Path, tmp_path: Path) -> None:
    half, makefile, empty = tmp_path / "half.json", tmp_path / "Makefile", tmp_path / "none.json"
    half.write_text(latency.read_text()[:900])
    makefile.write_text("all:\n")
    empty.write_text(Report(latency_report().environment, [], []).dumps())
    one_error(run("report", str(half)), 2, "half.json", "not whole JSON")
    one_error(run("report", str(latency), str(makefile)), 2, "Makefile", "unknown kind of file")
    one_error(run("report", str(tmp_path / "absent.json")), 2, "absent.json", "No such file")
    one_error(run("report", str(tmp_path)), 2, str(tmp_path), "directory")
    one_error(run("report", str(empty)), 2, "nothing to report")
    one_error(run("report", str(latency), "--html=/nowhere/page.html"), 2, "/nowhere", "--html")
    one_error(run("report", str(latency), "--csv=-", "--markdown=-"), 2, "only one of")
    one_error(run("report", str(latency), "--open"), 2, "--open needs --html")
    one_error(run("report"), 2, "FILE")


def test_a_name_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    """The report names its own file in its command, and is written after everything was measured."""
    path = tmp_path / os.fsdecode(b"\xff.json")
    done = run("bench", "latency", "--sizes=8", "--iters=10", "--transport=shm", "--json", str(path))
    assert done.returncode == 0, done
    assert run("report", str(path)).returncode == 0


def test_no_browser_and_a_full_disk_are_one_line(latency: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    nowhere = {"BROWSER": "", "PATH": str(tmp_path), "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    one_error(run("report", str(latency), f"--html={page}", "--open", settings=nowhere), 1, "no browser", str(page))
    assert page.exists()
    done = run("report", str(latency), "--html=/dev/full")
    one_error(done, 1, "No space left", "--html")
