"""The command in a real terminal: what is cut short is shown and marked, the cursor is back, nothing is too wide."""

from __future__ import annotations

import itertools
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from terminal import HIDE_CURSOR, SHOW_CURSOR, Terminal, plain, run_in_terminal

from crossrail_tools.report.schema import Report

CROSSRAIL = [sys.executable, "-m", "crossrail"]
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
ENDLESS = "--iters=2000000000"
OWN_SCREEN, FORMER_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def cut_short(arguments: Sequence[str], shown: str, folder: Path, how: str = "\x03") -> tuple[int, str, Report | None]:
    """Interrupts a bench once ``shown`` is on the screen; its exit status, what it printed, and its JSON."""
    path = folder / "out.json"
    with Terminal([*CROSSRAIL, *arguments, f"--json={path}"], 100) as terminal:
        before = terminal.read_until(shown)
        if how == "\x03":
            terminal.press(how)
        else:
            terminal.process.send_signal(signal.SIGTERM)
        status = terminal.end(20)
    report = Report.loads(path.read_text()) if path.exists() else None
    return status, terminal.raw[len(before) :], report


@pytest.mark.parametrize(("how", "status", "word"), [("\x03", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_what_p2p_has_measured_is_shown_and_written(how: str, status: int, word: str, tmp_path: Path) -> None:
    p2p = ["bench", "p2p", "--size=1M", "--transport=tcp", "--verify=none", ENDLESS]
    code, text, report = cut_short(p2p, r"[1-9][0-9]*/2000000003", tmp_path, how)
    assert code == status
    assert f"crossrail: error: {word}" in text
    assert report is not None and report.partial
    (row,) = report.rows
    assert row.iterations and len(row.iterations) == len(row.samples_us)
    assert "verdict:" in text
    assert "Traceback" not in text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


def test_finished_sizes_survive_ctrl_c(tmp_path: Path) -> None:
    latency = ["bench", "latency", "--sizes=8,16,32", "--transport=shm", "--iters=1000000"]
    code, text, report = cut_short(latency, r"latency 16 \(2 of 3\)", tmp_path)
    assert code == 130
    assert report is not None and report.partial
    assert [row.size for row in report.rows] == [8]
    assert "measured until then" in text
    assert re.search(r"^8 +shm ", "\n".join(plain(text)), re.MULTILINE)
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


def test_rounds_of_control_survive_ctrl_c(tmp_path: Path) -> None:
    control = ["bench", "control", "--num-processes=2", "--experts-per-rank=1,2", "--hidden=512", "--tokens=8"]
    code, text, report = cut_short([*control, "--rounds=100000"], r"[2-9]/200000", tmp_path)
    assert code == 130
    assert report is not None and report.partial
    assert [row.what for row in report.rows] == ["init", "connect", "disconnect", "reconnect", "destroy"]
    assert all(len(row.samples_us) == len(report.rows[0].samples_us) >= 2 * 2 for row in report.rows)
    assert "measured until then" in text


def test_pairs_of_a_mesh_survive_ctrl_c(tmp_path: Path) -> None:
    mesh = ["bench", "mesh", "--ranks=3", "--size=1M", "--iters=1000", "--warmup=1", "--transport=shm"]
    code, text, report = cut_short(mesh, "[12]/6", tmp_path)
    assert code == 130
    assert report is not None and report.partial
    pairs = [(row.source, row.target) for row in report.rows if row.part == "pair"]
    assert 1 <= len(pairs) < 6 and pairs == list(itertools.permutations(range(3), 2))[: len(pairs)]
    assert [row.part for row in report.rows] == ["pair"] * len(pairs) + ["latency"] * len(pairs)
    assert all(len(row.samples_us) == 1000 for row in report.rows if row.part == "pair")
    assert "measured until then" in text and "data: every pair verified" in text


def test_iterations_of_a_mode_survive_ctrl_c(tmp_path: Path) -> None:
    ep = ["bench", "ep", "--num-processes=2", "--tokens=16", "--hidden=512", "--warmup=10", ENDLESS]
    beyond_the_first_part = r"(2[1-9]|[3-9][0-9]|[1-9][0-9]{2,})/2000000010"
    code, text, report = cut_short(ep, beyond_the_first_part, tmp_path)
    assert code == 130
    assert report is not None and report.partial
    (row,) = report.rows
    assert (row.what, row.ranks, len(row.rounds)) == ("dispatch", 2, 1)
    assert len(row.samples_us) == 2 * len(row.slowest_us) >= 2 * 10
    assert row.bytes_wire and row.p50_us
    assert "measured until then" in text


def test_nothing_measured_yet_is_said_and_no_file_is_written(tmp_path: Path) -> None:
    code, text, report = cut_short(["bench", "latency", "--sizes=8", ENDLESS], r"[0-9]+/2000000100", tmp_path)
    assert (code, report) == (130, None)
    assert "nothing was measured yet" in text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("mesh", "--ranks=2", "--size=1M", "--iters=1000000"), "mesh: pairs"),
        (("ep", "--num-processes=2", "--tokens=16", "--hidden=512", ENDLESS), "dispatch|verify"),
        (("control", "--num-processes=2", "--rounds=1000000"), "control: 2 ranks"),
    ],
)
def test_ctrl_c_leaves_the_terminal_in_order(arguments: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    code, text, _ = cut_short(["bench", *arguments], shown, tmp_path)
    assert code == 130
    assert "Traceback" not in text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("doctor", "--only=nic-load"), "network: nic-load"),
        (("sweep", "p2p", "--size=4K", "--iters=3", "--chunk=256K,1M", "--repeats=500"), "sweep of p2p"),
    ],
)
def test_ctrl_c_shows_the_cursor_again(arguments: tuple[str, ...], shown: str) -> None:
    with Terminal([*CROSSRAIL, *arguments], 100) as terminal:
        terminal.read_until(shown)
        terminal.press("\x03")
        assert terminal.end(20) == 130
    assert "crossrail: error: interrupted" in terminal.raw and "Traceback" not in terminal.raw
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR) >= 0


def test_sigterm_gives_the_terminal_back() -> None:
    with Terminal([*CROSSRAIL, "top"], 100) as terminal:
        terminal.read_until(re.escape(OWN_SCREEN) + r"[^$]*process")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end(20) == 143
    assert terminal.raw.rfind(FORMER_SCREEN) > terminal.raw.rfind(OWN_SCREEN) >= 0
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR)
    assert "crossrail: error: terminated" in terminal.raw


def test_rows_appear_as_they_are_measured() -> None:
    command = [*CROSSRAIL, "bench", "latency", "--sizes=8,16", "--transport=shm", "--iters=1000000"]
    with Terminal(command, 100) as terminal:
        before = "\n".join(plain(terminal.read_until(r"latency 16 \(2 of 2\)")))
        assert re.search(r"\n8 +shm +eager +[0-9.]+", before), before
        assert re.search(r"[0-9]/s", before), "the bar has a rate"
        assert re.search(r"[0-9]:[0-9][0-9]", before), "the bar has the time that is left"


def test_p2p_shows_the_rate_of_each_rail_while_it_runs() -> None:
    rails = "--rails=127.0.0.1,127.0.0.2"
    with Terminal([*CROSSRAIL, "bench", "p2p", "--size=1M", "--transport=tcp", rails, ENDLESS], 120) as terminal:
        terminal.read_until(r"GB/s now: tcp/127\.0\.0\.1 [0-9.]+, tcp/127\.0\.0\.2 [0-9.]+")


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        ("bench", "latency", "--sizes=8", "--iters=100"),
        ("bench", "bandwidth", "--sizes=4K", "--iters=10"),
        ("bench", "p2p", "--size=1M", "--transport=tcp", "--rails=127.0.0.1,127.0.0.2"),
        ("bench", "mesh", "--ranks=2", "--size=64K", "--iters=2"),
        ("bench", "ep", "--num-processes=2", "--tokens=8", "--hidden=512", "--iters=3"),
        ("bench", "control", "--num-processes=2", "--rounds=1", "--hidden=512", "--tokens=8"),
    ],
    ids=lambda arguments: arguments[-1] if isinstance(arguments, str) else arguments[min(1, len(arguments) - 1)],
)
def test_nothing_is_cut_at_60_and_80_columns(arguments: tuple[str, ...], columns: int) -> None:
    status, raw = run_in_terminal([*CROSSRAIL, *arguments], columns)
    lines = plain(raw.rpartition(SHOW_CURSOR)[2])
    assert status == 0, raw
    assert ELLIPSIS not in "\n".join(lines)
    assert max(map(len, lines)) <= columns, max(lines, key=len)


def test_a_thousand_iterations_are_percentiles_and_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    p2p = ["bench", "p2p", "--size=4K", "--iters=1000", "--transport=shm", f"--json={path}"]
    status, raw = run_in_terminal([*CROSSRAIL, *p2p], 100)
    assert status == 0
    lines = [line.split() for line in plain(raw) if line]
    numbered = [line[0] for line in lines if line[0].isdigit()]
    assert numbered == ["1", "2", "3", "4", "5", "996", "997", "998", "999", "1000"]
    assert {"fastest", "p50", "p90", "p99", "slowest", "average"} <= {line[0] for line in lines}
    assert ["(990", "more)"] in lines
    assert len(Report.loads(path.read_text()).rows[0].iterations) == 1000


@pytest.mark.parametrize(
    ("options", "verification", "said"),
    [
        (("--size=1M",), "full", "every transfer verified"),
        (("--size=1M", "--verify=quick"), "quick", "the first and the last transfer verified"),
        (("--size=1M", "--verify=none"), "none", "data: not verified"),
        (("--size=128M", "--iters=1", "--warmup=1"), "quick", "--verify full verifies every one"),
    ],
)
def test_how_much_was_verified_is_said(options: tuple[str, ...], verification: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, raw = run_in_terminal([*CROSSRAIL, "bench", "p2p", *options, f"--json={path}"], 200)
    assert status == 0, raw
    assert said in raw
    (row,) = Report.loads(path.read_text()).rows
    assert (row.verification, row.verified) == (verification, verification != "none")


def test_a_pipe_gets_no_control_sequences(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    command = f"{sys.executable} -m crossrail bench latency --sizes=8 --iters=100 >{out}"
    status, _ = run_in_terminal(["sh", "-c", command], 60)
    assert status == 0
    assert "\x1b" not in out.read_text()
    assert out.stat().st_size


@pytest.mark.parametrize(
    ("options", "verification", "said"),
    [
        (("--tokens=32",), "full", "2 of 2 ranks passed against the reference before"),
        (("--tokens=32", "--verify=quick"), "quick", "with a few tokens each before"),
        (("--tokens=32", "--verify=none"), "none", "data: not verified"),
        (("--tokens=2048", "--hidden=4224", "--layout=rank"), "quick", "--verify full compares all 2048"),
    ],
)
def test_how_much_of_an_exchange_was_verified_is_said(
    options: tuple[str, ...], verification: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    ep = ["bench", "ep", "--num-processes=2", "--hidden=512", "--iters=1", "--warmup=0", "--mode=e2e", *options]
    status, raw = run_in_terminal([*CROSSRAIL, *ep, f"--json={path}"], 200, seconds=150)
    assert status == 0, raw
    assert said in raw
    (row,) = Report.loads(path.read_text()).rows
    assert (row.verification, row.verified) == (verification, verification != "none")
    assert row.ranks_passed == (None if verification == "none" else 2)


def test_a_character_that_two_reads_bring_is_one() -> None:
    """Of this module's own reader: its half is read before the other one is written."""
    halves = "import os, tty; tty.setcbreak(0); os.write(1, b'a\\xe2\\x94'); os.read(0, 1); os.write(1, b'\\x80 end')"
    with Terminal([sys.executable, "-c", halves], 60) as terminal:
        terminal.read_until("a")
        terminal.press("x")
        assert terminal.read_until("end").endswith("a\N{BOX DRAWINGS LIGHT HORIZONTAL} end")


def test_a_terminal_that_is_closed_costs_nothing_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "crossrail",
        "bench",
        "p2p",
        "--size=1M",
        "--transport=tcp",
        "--verify=none",
        ENDLESS,
        f"--json={path}",
    ]
    terminal = Terminal(command, 120)
    try:
        terminal.read_until(r"[1-9][0-9]*/2000000003")
        terminal.close()
        assert terminal.process.wait(30) == 129
    finally:
        terminal.process.kill()
        terminal.process.wait(30)
    report = Report.loads(path.read_text())
    assert report.partial and report.rows[0].iterations
