"""Help pages end in examples that can be parsed, and a shell completes what they show."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from terminal import plain, run_in_terminal

from crossrail_tools.cli import manual
from crossrail_tools.cli.command_line import (
    BENCHES,
    COMMANDS,
    EXAMPLES,
    command_parsers,
    command_words,
    parse_arguments,
)
from crossrail_tools.cli.completion import script

ROOT = Path(__file__).parents[2]
PAGES = ["", *(name for name in COMMANDS), *(f"bench {name}" for name in BENCHES)]


def test_every_page_has_examples() -> None:
    assert set(PAGES) - {"nccl-plugin"} <= set(EXAMPLES)


@pytest.mark.parametrize("line", sorted({line for lines in EXAMPLES.values() for line in lines}))
def test_every_example_can_be_parsed(line: str) -> None:
    words = shlex.split(re.split(r" +# | > ", line)[0])
    assert words[0] == "crossrail"
    parse_arguments(words[1:])


@pytest.mark.parametrize("page", ["bench p2p", "bench ep", "info", "bench"])
def test_examples_stand_at_the_end_of_the_page(page: str) -> None:
    text = run(*page.split(), "--help").stdout
    examples = text.index("examples:")
    assert text.index("--help") < examples < text.index("exit codes:")
    assert all(f"  {line}" in text[examples:] for line in EXAMPLES[page])


@pytest.mark.parametrize("page", ["", "info", "bench", "bench p2p", "bench ep", "sweep", "report"])
def test_pages_fit_80_columns(page: str) -> None:
    status, raw = run_in_terminal([sys.executable, "-m", "crossrail", *page.split(), "--help"], 80)
    assert status == 0
    assert max(map(len, plain(raw))) <= 80, max(plain(raw), key=len)


def completed(line: str) -> list[str]:
    """What bash offers for the last word of ``line``."""
    words = line.split(" ")
    given = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}"
    ask = f'{given}; _crossrail; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script("bash") + ask], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.split()


COMPLETED = [
    ("crossrail be", ["bench"]),
    ("crossrail bench p", ["p2p"]),
    ("crossrail bench p2p --veri", ["--verify"]),
    ("crossrail bench p2p --size 1G --rai", ["--rails"]),
    ("crossrail bench latency --veri", []),
    ("crossrail info --j", ["--json"]),
    ("crossrail bench p2p --memory sh", ["shared"]),
    ("crossrail bench control --op re", ["reconnect"]),
    ("crossrail bench ep --mode dis", ["dispatch"]),
    ("crossrail bench latency --compare ip", ["iperf3"]),
    ("crossrail doctor --only rail-r", ["rail-route", "rail-reach"]),
    ("crossrail bench p2p --transport tcp --veri", ["--verify"]),
]


@pytest.mark.parametrize(("line", "offered"), COMPLETED)
def test_bash_completes(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


@pytest.mark.parametrize(("line", "offered"), COMPLETED)
def test_fish_completes(line: str, offered: list[str], tmp_path: Path) -> None:
    shell = shutil.which("fish")
    if shell is None:
        if os.environ.get("CI"):
            pytest.fail("fish is missing")
        pytest.skip("fish is not installed")
    (tmp_path / "crossrail.fish").write_text(script("fish"))
    command = f"source crossrail.fish; complete --do-complete {shlex.quote(line)}"
    done = subprocess.run(
        [shell, "--no-config", "--command", command],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    words = {one.partition("\t")[0] for one in done.stdout.splitlines()}
    assert {word for word in words if word.startswith(line.rpartition(" ")[2])} - {"crossrail.fish"} == set(offered)


def test_scripts_of_all_shells() -> None:
    for shell in ("bash", "zsh"):
        done = run("completion", shell)
        assert done.returncode == 0
        assert "complete -o default -F _crossrail crossrail" in done.stdout
    assert "bashcompinit" in run("completion", "zsh").stdout
    fish = run("completion", "fish").stdout
    assert "complete -c crossrail -a" in fish and "case 'bench p2p* --memory'" in fish and "case 'bench p2p*'" in fish
    assert "--parent" not in run("completion", "bash").stdout
    assert all(words for words in command_words().values())


MANUAL = {
    "markdown": ROOT / "docs" / "command.md",
    "man": ROOT / "packaging" / "data" / "data" / "share" / "man" / "man1" / "crossrail.1",
}


@pytest.mark.parametrize("form", MANUAL)
def test_the_manual_is_what_the_help_pages_are_made_of(form: str) -> None:
    assert MANUAL[form].read_text(encoding="utf-8") == manual.FORMS[form](), "run: make pages"


def test_the_manual_has_every_command_and_option() -> None:
    text = MANUAL["man"].read_text(encoding="utf-8").replace("\\-", "-")
    for name, parser in command_parsers():
        section = text.partition(f".SH CROSSRAIL {name.upper()}\n")[2].partition("\n.SH ")[0]
        missing = [option for option in parser.options() if option != "--help" and option not in section]
        assert section and not missing, (name, missing)


def test_the_man_page_is_formatted_without_warnings() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-P-cbou", "-ww", str(MANUAL["man"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert "CROSSRAIL_TLS" in done.stdout
