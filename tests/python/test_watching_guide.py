"""docs/guides/watching.md: its job gets stuck as it says, and its commands and programs show it."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import COMMAND, clean_environment, run
from test_cli_store import store

from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.doctor.table import CHECKS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "watching.md").read_text(encoding="utf-8")
LATE, CHECK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS: list[str] = re.findall(r"^    (crossrail .+)$", PAGE, re.MULTILINE)
STARTS: list[str] = re.findall(r"^    python late.py (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", sorted({*COMMANDS, *re.findall(r"`(crossrail top[^`]*)`", PAGE)}))
def test_a_command_can_be_parsed(line: str) -> None:
    parse_arguments(shlex.split(line)[1:])


def test_the_late_rank_of_the_page_is_named(tmp_path: Path) -> None:
    """The ranks, `top` and the check of the page, against a store on a free port."""
    (tmp_path / "late.py").write_text(LATE)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "crossrail").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (bin_folder / "crossrail").chmod(0o755)
    environment = clean_environment({"CROSSRAIL_PAGES": str(tmp_path)})
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    (shown,) = (line for line in COMMANDS if "--once" in line and "--job" in line)
    with contextlib.ExitStack() as ends, store("--listen=127.0.0.1:0") as (_, address):
        ranks = []
        for words in STARTS:
            rank = subprocess.Popen(
                [sys.executable, "late.py", *words.replace("tcp://127.0.0.1:7400", address).split()],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ends.callback(rank.wait, 30)
            ends.callback(rank.kill)
            ranks.append(rank)
        line = ""
        deadline = time.monotonic() + 60
        while not line and time.monotonic() < deadline:
            # Until all ranks have joined and two have waited for half a second. Before that they may wait elsewhere.
            done = run(*shlex.split(shown.replace("tcp://127.0.0.1:7400", address))[1:])
            line = next(
                (each for each in done.stdout.splitlines() if re.match("rank 2 .* entered sync .* rank 0, 1 of", each)),
                "",
            )
        form = re.search(r"^    (rank 2 .*)$", PAGE, re.MULTILINE)
        assert form is not None
        wanted = re.escape(form[1]).replace("host:4711", r"\S+:\d+").replace(r"3\.2", r"\d+(\.\d+)?")
        assert re.fullmatch(wanted.replace(r"\ s\ for", r"\ (ms|s)\ for"), line), (line, wanted)
        checked = subprocess.run(
            [sys.executable, "-c", CHECK, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr
        assert re.fullmatch(r"rank 2 keeps 2 waiting since \d+ s: has not entered sync \d+\n", checked.stdout)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.stdin = None
        for rank in ranks:
            _, said = rank.communicate(timeout=60)
            assert rank.returncode == 0, said


def test_metrics_and_settings_of_the_page_exist() -> None:
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"crossrail_\w+", PAGE))
    assert len(named) == 3
    assert [name for name in named if f"| `{name}` |" not in metrics] == []
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in settings for name in re.findall(r"CROSSRAIL_[A-Z]+", PAGE))


def test_what_the_page_names_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "python" / "crossrail_tools" / "cli" / "top").glob("*.py"))
    for state in ("has not entered", "does not answer", "has not joined, or has ended", "waits itself"):
        assert state in PAGE and state in sources
    for column in ("stalls", "resent segments", "lost", "masked", "oldest waits"):
        assert column in PAGE and f'"{column}"' in sources
    known = {check.id for check in CHECKS}
    for names in re.findall(r"doctor --only ([a-z,-]+)", PAGE):
        assert set(names.split(",")) <= known
