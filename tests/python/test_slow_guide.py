"""docs/guides/slow.md: its commands run, print what the page says, and its program shows where time goes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import clean_environment

from crossrail.records import ReceiptRecord
from crossrail_tools.cli.command_line import parse_arguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "slow.md").read_text(encoding="utf-8")
COMMANDS: list[str] = re.findall(r"^    (crossrail .+)$", PAGE, re.MULTILINE)
ENDS: list[str] = re.findall(r"^    (?:left|right)\$ +(crossrail .+)$", PAGE, re.MULTILINE)
QUICK = {"bench p2p": ["--iters=1"], "bench latency": ["--iters=200"], "bench ep": ["--iters=2"]}
"""Fewer iterations than the page's commands make."""

ELSEWHERE = ("crossrail doctor", "crossrail bench latency --sizes 8 --json now.json")
"""Commands of the page that other tests run much like this."""

SHOWN = {
    "doctor --only": ["severity", "what was found", "cma", "processors"],
    "info": ["shm", "tcp"],
    "bench p2p": ["lanes", "retransmits", "where the time went", "wire", "match", "plain TCP sockets", "verdict:"],
    "bench latency": ["p50 us"],
    "bench ep": ["logical", "wire", "where the time went", "wait", "copy", "sum", "cast"],
    "plan": ["off by"],
    "report": [],
}
"""What the page says that the output has, by the beginning of the command."""


@pytest.mark.parametrize("line", [line for line in COMMANDS if line not in ELSEWHERE])
def test_a_command_prints_what_the_page_says(line: str, tmp_path: Path) -> None:
    (tmp_path / "benches").symlink_to(ROOT / "benches")
    (tmp_path / "now.json").symlink_to(ROOT / "benches" / "results" / "shm-latency.json")
    words = shlex.split(line)
    beginning = next(name for name in SHOWN if line.startswith(f"crossrail {name}"))
    more = next((options for name, options in QUICK.items() if line.startswith(f"crossrail {name}")), [])
    done = subprocess.run(
        [sys.executable, "-m", *words, *more],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = 1 if beginning == "doctor --only" else 0  # a machine may have something to find
    assert done.returncode in (0, found), done.stderr
    assert [word for word in SHOWN[beginning] if word not in done.stdout] == []


def test_the_page_has_its_commands() -> None:
    assert (len(COMMANDS), len(ENDS)) == (9, 2)
    assert {next(name for name in SHOWN if line.startswith(f"crossrail {name}")) for line in COMMANDS[1:]} == set(SHOWN)


@pytest.mark.parametrize("line", sorted({*COMMANDS, *ENDS, *re.findall(r"`(crossrail [a-z][^`]*)`", PAGE)}))
def test_a_command_can_be_parsed(line: str) -> None:
    parse_arguments(shlex.split(line)[1:])


def test_the_program_shows_where_time_went() -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "shm" in done.stdout
    assert "available" in done.stdout


def test_names_of_the_page_exist() -> None:
    assert {"match_us", "window_us", "wire_us", "copy_us", "protocol"} <= set(ReceiptRecord.__annotations__)
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(name in settings for name in re.findall(r"CROSSRAIL_[A-Z]+", PAGE))
    sources = "".join(path.read_text() for path in (ROOT / "python" / "crossrail_tools" / "cli").rglob("*.py"))
    assert all(f'"{option}"' in sources for option in re.findall(r"`(--[a-z-]+)", PAGE))
