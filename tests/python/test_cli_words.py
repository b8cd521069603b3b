"""The words of messages: counts, articles, suggestions, options as they were typed, other programs' spellings."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from commands import one_error, run
from report_samples import environment

from crossrail._words import kind
from crossrail_tools.report.schema import RankTimes, Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.units import counted
from crossrail_tools.report.viewing import print_report


def test_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    done = run("bench", "control", "--num-processes=1", "--rounds=1", "--op=init", "--hidden=512", "--tokens=8")
    assert done.returncode == 0, done.stderr
    assert "control: 1 rank x 8 experts, 1 round, store" in done.stdout
    assert not re.search(r"\b1 (ranks|rounds|experts)\b", done.stdout + done.stderr)


@pytest.mark.parametrize(("value", "said"), [(1, "an int"), ([], "a list"), (1.0, "a float"), (b"", "a bytes")])
def test_types_have_their_article(value: object, said: str) -> None:
    assert kind(value) == said


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("bench", "p2p", "--transports", "tcp"), "--transport"),
        (("bench", "latency", "--iter=3"), "--iters"),
        (("bench", "ep", "--num_processes=2"), "--num-processes"),
        (("bench", "control", "--num-procs=2"), "--num-processes"),
        (("info", "--jsno=x"), "--json"),
        (("bench", "p2p", "--colour=red"), None),
        (("bench", "p2p", "--use-gpu"), None),
    ],
)
def test_an_unknown_option_names_one_that_is_close(arguments: tuple[str, ...], meant: str | None) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr
    found = re.search(r"did you mean (--[a-z-]+)\?", done.stderr)
    assert (found and found.group(1)) == meant


def test_a_check_of_the_doctor_is_suggested() -> None:
    one_error(
        run("doctor", "--only", "netwrok"), 2, "'netwrok' is not a check (did you mean network?); known: settings"
    )
    assert "did you mean" not in run("doctor", "--only", "colour").stderr


def test_a_setting_is_suggested_only_when_close() -> None:
    near = run("bench", "latency", settings={"CROSSRAIL_TSL": "tcp"})
    assert near.returncode == 2 and "did you mean CROSSRAIL_TLS?" in near.stderr
    far = run("bench", "latency", settings={"CROSSRAIL_COLOUR": "red"})
    assert (
        far.returncode == 2 and "did you mean" not in far.stderr and "`crossrail info` lists all settings" in far.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("p2p", "--window=100000"), "--window"),
        (("p2p", "--chunk=1"), "--chunk"),
        (("p2p", "--timeout=soon"), "--timeout"),
        (("latency", "--transport=carrier-pigeon"), "--transport"),
    ],
)
def test_an_error_names_the_option_as_it_was_typed(arguments: tuple[str, ...], option: str) -> None:
    done = run("bench", *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert line.startswith(f"crossrail: error: {option}: ")
    assert "CROSSRAIL_" not in line


def test_what_the_environment_set_is_named_as_it_was_set() -> None:
    done = run("bench", "p2p", settings={"CROSSRAIL_WINDOW": "100000"})
    assert done.returncode == 2
    assert "CROSSRAIL_WINDOW" in done.stderr


def test_log_lines_have_a_time_and_a_level_and_debug_says_more() -> None:
    size = ("bench", "latency", "--size=8", "--iters=10", "--transport=shm")
    lines = {}
    for level in ("warn", "info", "debug"):
        done = run(*size, settings={"CROSSRAIL_LOG": level})
        assert done.returncode == 0
        lines[level] = re.findall(r"^crossrail: \d\d:\d\d:\d\d\.\d{3}Z (\w+): ", done.stderr, re.MULTILINE)
    assert lines["warn"] == []
    assert set(lines["info"]) == {"info"}
    assert set(lines["debug"]) == {"info", "debug"}


def test_spellings_of_nixl_and_others_are_accepted() -> None:
    small = ("--num-processes=1", "--tokens=8", "--hidden=512")
    done = run("bench", "ep", *small, "--iters=2", "--nvlink-backend=ipc", "--skip-nic-discovery", "--use-tcp-store")
    assert done.returncode == 0, done.stderr
    done = run("bench", "control", *small, "--rounds=1", "--test=init", "--use-tcp-store")
    assert done.returncode == 0, done.stderr
    assert "init" in done.stdout and "connect" not in done.stdout
    assert run("bench", "ep", "--nvlink-backend=rdma").returncode == 2


def test_one_rank_in_a_table() -> None:
    row = Row(what="init", transport="", size=0, experts_per_rank=1, store="tcp", samples_us=[1.0], avg_us=1.0)
    row = replace(row, rank_times=[RankTimes(0, 1.0, 1.0, 1.0)])
    out = console()
    with out.capture() as shown:
        print_report(Report(environment(), [], [row]), out)
    assert "control: 1 rank x 1 expert, 1 round" in shown.get()
