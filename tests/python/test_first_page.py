"""What a newcomer reads first holds: the README's program runs as it stands, and every command there is one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossrail_tools.cli.command_line import parse_arguments

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMING = (ROOT / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
SETTINGS = set(re.findall(r"`(CROSSRAIL_\w+)`", (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")))


def test_the_first_program_runs_as_it_stands() -> None:
    program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "8388608 bytes by" in done.stdout
    assert "correct: True" in done.stdout
    assert "shm" in done.stdout
    assert done.stderr == ""


def test_it_comes_before_anything_else_and_after_how_to_install() -> None:
    assert README.index("pip install") < README.index("```python") < README.index("## ")
    assert "Not there yet:" in README[: README.index("## ")]


def commands(text: str) -> list[str]:
    """The command lines of a page, without comments: those of its code blocks, and those quoted in tables."""
    blocks = re.findall(r"^    (crossrail .*?)(?: +#.*)?$", text, re.MULTILINE)
    return [*blocks, *re.findall(r"`(crossrail (?:info|store|bench [a-z])[^`]*)`", text)]


@pytest.mark.parametrize("line", sorted({*commands(README), *commands(COMING)}))
def test_every_command_can_be_parsed(line: str) -> None:
    parse_arguments(shlex.split(line)[1:])


def test_files_that_are_read_were_written_by_a_line_before() -> None:
    written: set[str] = set()
    for line in commands(README):
        words = shlex.split(line)
        read = {word for word in words[2:] if word.endswith(".json") and words[1] == "report"}
        assert read <= written, f"{line}: {read - written}"
        written |= {words[at + 1] for at, word in enumerate(words) if word == "--json"}
    assert written


def test_no_page_installs_from_an_index_what_is_not_there() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    found = 0
    for page in pages:
        for command in re.findall(r"pip install ([^#\n`]*)", page.read_text(encoding="utf-8")):
            for word in command.split():
                ours = "crossrail" in word
                found += ours
                assert not ours or word.endswith(".whl") or (ROOT / word).is_dir(), f"{page}: pip install {command}"
    assert found >= 5


def test_every_option_and_setting_exists() -> None:
    assert set(re.findall(r"CROSSRAIL_[A-Z_]*[A-Z]", COMING)) <= SETTINGS
    ours = {cell for row in COMING.splitlines() if row.startswith("|") for cell in row.split(" | ")[-1:]}
    known = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "python" / "crossrail_tools" / "cli").rglob("*.py")
    )
    for cell in ours:
        for option in re.findall(r"--[a-z][a-z-]+", cell):
            assert f'"{option}"' in known, f"{option} in {cell!r}"


def test_defaults_beside_those_of_nixl_are_ours() -> None:
    ep: Any = parse_arguments(["bench", "ep"])
    control: Any = parse_arguments(["bench", "control"])
    section = COMING[COMING.index("| NIXL EP's default | here |") : COMING.index("## UCX")]
    ours = [row.split(" | ")[1] for row in section.splitlines()[2:] if row.startswith("|")]
    assert f"{ep.tokens}: `--tokens 512`" in ours[0]
    assert ours[1].startswith(f"{ep.hidden}, top-{ep.topk}, {ep.experts_per_rank}: ")
    assert ours[2].startswith(f"{ep.placement.num_processes}, or one per GPU: ")
    assert ours[3].startswith(f"{control.rounds} rounds: ")


def test_names_that_people_of_ucx_look_for_are_there() -> None:
    for word in ("rc_mlx5", "MB/s, 2^20 bytes", "grep Avg:"):
        assert word in COMING, word
