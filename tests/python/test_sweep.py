"""`crossrail sweep`: what is run in which order, what is kept, and what is said about the best setting."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from commands import COMMAND, clean_environment, one_error, run
from leftovers import no_files_left
from report_samples import environment, parse_source

from crossrail_tools.cli import main
from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.failure import Failure
from crossrail_tools.cli.reporting import restore_terminal
from crossrail_tools.cli.sweep import SweepOptions
from crossrail_tools.cli.sweep_ends import checked
from crossrail_tools.report.page.write import html
from crossrail_tools.report.schema import Row, SchemaError
from crossrail_tools.report.sweeping import FEW, Plan, Sweep, Trial, ranked, sweep_views, verdict
from crossrail_tools.report.tables import console

QUICK = ("--size=4K", "--iters=3", "--warmup=0", "--transport=tcp", "--rails=127.0.0.1")
VARIED = {"--chunk": ["512K", "1M"], "--window": ["8", "16"]}


def sweep(rates: dict[int, list[float]], varied: dict[str, list[str]] | None = None) -> Sweep:
    """A sweep with these rates, in GB/s, of each setting."""
    repeats = max(map(len, rates.values()))
    made = Sweep(Plan(["p2p"], varied or VARIED, repeats, 1), environment())
    for number, values in rates.items():
        for repeat, rate in enumerate(values):
            made.add(Trial(number, repeat, [Row("p2p", "tcp", 1 << 20, gb_per_s=rate, samples_us=[1.0], p50_us=1.0)]))
    return made


def test_every_setting_runs_once_in_each_repeat_in_an_order_of_its_own() -> None:
    plan = Plan(["p2p"], VARIED, 3, 1)
    assert len(plan.settings()) == 4
    order = plan.order()
    blocks = [[number for number, repeat in order if repeat == which] for which in range(3)]
    assert [sorted(block) for block in blocks] == [[0, 1, 2, 3]] * 3
    assert len({tuple(block) for block in blocks}) > 1
    assert order == plan.order() != replace(plan, seed=2).order()
    assert [repeat for _, repeat in order] == sorted(repeat for _, repeat in order)


def test_the_best_is_found_and_what_may_be_as_good_is_said() -> None:
    found = sweep(
        {0: [5.0, 5.1, 4.9, 5.0, 5.2], 1: [9.0, 9.1, 9.2, 9.0, 9.3], 2: [9.1, 9.0, 9.3, 8.9, 9.2], 3: [1.0] * 5}
    )
    ((label, settings),) = ranked(found).items()
    assert label == "p2p, 1M"
    assert [one.middle for one in settings] == [9.1, 9.1, 5.0, 1.0]
    assert [one.apart for one in settings[1:]] == [False, True, True]
    assert sum(one.chance for one in settings) == pytest.approx(1.0)
    assert settings[2].low == pytest.approx(4.9) and settings[2].high == pytest.approx(5.2)
    text = verdict(label, settings, timed=False)
    assert "not distinguishable from it: --chunk" in text and "1 more" not in text


def test_what_slows_a_whole_repeat_does_not_hide_a_difference() -> None:
    slow = [1.0, 0.3, 0.9, 0.5, 0.7, 1.1, 0.4]
    found = sweep({0: [10 * part for part in slow], 1: [11 * part for part in slow]}, {"--chunk": ["1M", "2M"]})
    ((_, settings),) = ranked(found).items()
    assert settings[0].setting == {"--chunk": "2M"} and settings[1].apart is True


def test_a_time_is_better_when_it_is_shorter() -> None:
    made = Sweep(Plan(["latency"], {"--memory": ["shared", "ordinary"]}, FEW, 1), environment())
    for repeat in range(FEW):
        for number, time_us in ((0, 2.0), (1, 1.0)):
            made.add(Trial(number, repeat, [Row("latency", "shm", 8, p50_us=time_us + repeat / 100)]))
    ((_, settings),) = ranked(made).items()
    assert settings[0].setting == {"--memory": "ordinary"} and settings[1].apart is True


def test_few_repeats_tell_nothing_apart() -> None:
    ((label, settings),) = ranked(
        sweep({0: [1.0] * (FEW - 1), 1: [9.0] * (FEW - 1)}, {"--chunk": ["1M", "2M"]})
    ).items()
    assert settings[1].apart is None
    assert "cannot tell settings apart" in verdict(label, settings, timed=False)


def test_a_sweep_reads_back_and_knows_what_is_left() -> None:
    whole = sweep({0: [1.0, 2.0], 1: [3.0, 4.0], 2: [5.0, 6.0]})
    whole.add(Trial(3, 0, error="no such device"))
    again = Sweep.loads(whole.dumps())
    assert (again.plan, again.trials, again.environment) == (whole.plan, whole.trials, whole.environment)
    assert again.left() == []
    cut = sweep({0: [1.0, 2.0], 1: [3.0]})
    assert sorted(Sweep.loads(cut.dumps()).left()) == [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    out = console(io.StringIO())
    with out.capture() as shown:
        for one in sweep_views(whole):
            out.print(one)
    assert "failed: --chunk 1M --window 16: no such device" in shown.get()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"schema": "crossrail-bench/1"}',
        '{"schema": "crossrail-sweep/1", "plan": {}}',
        sweep({0: [1.0]}).dumps().replace('"setting":0', '"setting":9'),
        sweep({0: [1.0]}).dumps().replace('"repeats":1', '"repeats":999999999'),
        sweep({0: [1.0]}, {f"--{name}": list("abcdefgh") for name in "abcdefghij"}).dumps(),
        sweep({0: [1.0]}).dumps().replace('"what":"p2p"', '"what":7'),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        Sweep.loads(text)


def test_a_page_shows_a_sweep() -> None:
    rates = {0: [5.0] * FEW, 1: [9.0] * FEW, 2: [8.9] * FEW, 3: [1.0] * FEW}
    text = html([parse_source(sweep(rates).dumps(), "sweep.json")], "A sweep")
    assert 'id="sweeps"' in text and "best for p2p, 1M: --chunk 512K --window 16" in text


def test_it_runs_keeps_every_run_and_resumes(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    words = ("sweep", "p2p", *QUICK, "--chunk=256K,1M", "--repeats=1", f"--json={file}")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "best for p2p, 4K: " in done.stdout and "default" in done.stdout
    data = json.loads(file.read_text())
    order = Plan([], {"--chunk": ["256K", "1M"]}, 1, 1, default=True).order()
    assert [(one["setting"], one["repeat"]) for one in data["trials"]] == order
    one_error(run(*words), 2, "3 of 3 runs", "--resume")
    one_error(run(*words, "--resume", "--window=8"), 2, "another sweep", "the bench there")
    data["trials"] = data["trials"][:1]
    file.write_text(json.dumps(data))
    again = run(*words, "--resume")
    assert again.returncode == 0 and "1 run in" in again.stderr, again.stderr
    assert len(json.loads(file.read_text())["trials"]) == 3
    one_error(run(*words[:-1], f"--json={file}.absent", "--resume"), 2, "absent does not exist")


@contextmanager
def listening(bench: str = "p2p") -> Iterator[str]:
    """The listening end of a sweep; its address."""
    command = [*COMMAND, "sweep", bench, "--listen=127.0.0.1:0"]
    with subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"listening on ([0-9.:]+)", process.stderr.readline())
            assert found
            yield found.group(1)
        finally:
            process.kill()


def test_the_listening_end_follows_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    with listening() as address:
        # Chunk and window must be the same at both ends, or these do not connect.
        ends = (f"--connect={address}", "--repeats=1", f"--json={file}")
        done = run("sweep", "p2p", *QUICK[:-1], "--chunk=256K,1M", "--set=CROSSRAIL_WINDOW=4,8", *ends)
        assert done.returncode == 0, done.stderr
        found = {(row.chunk, row.window) for one in Sweep.loads(file.read_text()).trials for row in one.rows}
        assert found == {(chunk << 10, window) for chunk in (256, 1024) for window in (4, 8)} | {(2 << 20, 16)}
        one_error(
            run("sweep", "latency", "--chunk=256K,1M", *ends[:1]), 1, "this end runs `crossrail sweep p2p --listen`"
        )
    one_error(run("sweep", "p2p", "--chunk=256K,1M", *ends[:1]), 1, f"start `crossrail sweep p2p --listen {address}`")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "sent no settings"),
        ({"options": {"json": "/etc/passwd"}, "variables": {}}, "does not follow 'json'"),
        ({"options": {"net_plugin": "evil.so"}, "variables": {}}, "does not follow 'net_plugin'"),
        ({"options": {}, "variables": {"LD_PRELOAD": "evil.so"}}, "does not follow 'LD_PRELOAD'"),
        ({"options": {}, "variables": {"CROSSRAIL_SECRET": "mine"}}, "does not follow 'CROSSRAIL_SECRET'"),
        ({"options": {"chunk": "1M\n"}, "variables": {}}, "invalid value for chunk"),
        ({"options": {"chunk": 7}, "variables": {}}, "invalid value for chunk"),
        ({"options": {"rails": "x" * 257}, "variables": {}}, "invalid value for rails"),
    ],
)
def test_settings_of_the_other_end_are_checked(request_: dict[str, object], says: str) -> None:
    good: dict[str, object] = {"options": {"chunk": "1M"}, "variables": {"CROSSRAIL_BOUNCE": "64M"}}
    assert checked(good) == ({"chunk": "1M"}, {"CROSSRAIL_BOUNCE": "64M"})
    with pytest.raises(Failure, match=says):
        checked(request_)


def test_a_setting_that_fails_is_named_and_the_others_run() -> None:
    done = run("sweep", "p2p", *QUICK[:3], "--set=CROSSRAIL_CHUNK=1M,nonsense", "--repeats=2")
    assert done.returncode == 1
    assert "failed: CROSSRAIL_CHUNK=nonsense: CROSSRAIL_CHUNK: " in done.stdout
    assert "best for p2p, 4K: " in done.stdout
    assert "1 of 3 settings failed" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("p2p",), "nothing to sweep"),
        (("p2p", "--chunk=1M"), "nothing to sweep"),
        (("p2p", "--rails=eth1,eth2"), "nothing to sweep"),
        (("p2p", "--chunk=1M,nonsense"), "nonsense"),
        (("p2p", "--chunk=1M,1M"), "twice"),
        (("p2p", "--colour=red,blue"), "--colour"),
        (("ep", "--listen"), "bench ep has no listening end"),
        (("ep", "--vary=tokens=1", "--vary=tokens=2", "--connect=node7"), "bench ep has no listening end"),
        (("p2p", "--listen", "--chunk=1M,2M"), "--listen takes the settings from the end that sweeps"),
        (("p2p", "--connect=node7", "--set=CROSSRAIL_LOG=off,info"), "the other end does not follow it"),
        (("p2p", "--chunk=1M,2M", "--trace=trace.json"), "--trace is for `crossrail bench`"),
        (("p2p", "--set=CHUNK=1,2"), "--set CHUNK=1,2"),
        (("p2p", "--vary=rails"), "--vary rails"),
        (("p2p", "--chunk=1M,2M", "--resume"), "--resume needs --json"),
        (("p2p", "--rails=127.0.0.1", "--vary=rails=nowhere9", "--vary=rails=127.0.0.2"), "nowhere9"),
        (("p2p", "--chunk=1M,2M", "--json=-"), "name of one"),
        (("p2p", "--chunk=1M,2M", "--repeats=9999999"), "more than 10000 runs"),
        (("walk", "--chunk=1M,2M"), "walk"),
        ((), "BENCH"),
    ],
)
def test_bad_usage_is_one_line_before_anything_runs(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and says in shown.err


def test_a_run_that_ctrl_c_ends_is_no_failure_of_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sweep.json"
    options = parse_arguments(["sweep", "p2p", "--chunk=256K,1M", f"--json={file}"])

    def killed(self: SweepOptions, number: int, repeat: int) -> Trial:
        restore_terminal()
        return Trial(number, repeat, error="its process was killed by SIGKILL")

    monkeypatch.setattr(SweepOptions, "_trial", killed)
    options.run()
    assert not file.exists()


def test_a_full_disk_ends_it_with_one_line_and_keeps_the_tables() -> None:
    done = run("sweep", "p2p", *QUICK, "--chunk=256K,1M", "--repeats=1", "--json=/dev/full")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert len(errors) == 1 and "No space left" in errors[0]


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    words = ["sweep", "p2p", *QUICK, "--chunk=256K,1M", "--repeats=500", f"--json={file}"]
    with (
        no_files_left(),
        subprocess.Popen(
            [*COMMAND, *words], env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)  # the file of another process: there is no event for it
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "best for p2p, 4K" in out and "--resume continues" in err and "Traceback" not in err
    assert Sweep.loads(file.read_text()).trials
