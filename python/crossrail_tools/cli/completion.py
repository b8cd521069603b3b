"""`crossrail completion SHELL`: a script that completes commands and options, made from their declarations."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from .parsing import Command, Parser

SHELLS = ("bash", "zsh")

_SCRIPT = """\
_crossrail() {{
    local line="${{COMP_WORDS[*]:1:COMP_CWORD-1}}" words=""
    case "$line" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _crossrail crossrail
"""


@dataclass(frozen=True)
class CompletionOptions:
    """`crossrail completion`."""

    shell: str
    parent: int | None = None

    def run(self) -> None:
        """Prints the script."""
        print(script(self.shell), end="")


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    text = 'the shell; in its start-up file: eval "$(crossrail completion bash)"'
    parser.add_argument("shell", choices=SHELLS, help=text)
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return CompletionOptions(shell=parsed.shell)


def script(shell: str) -> str:
    """The completion script for ``shell``."""
    from .command_line import command_words

    # The longest command first: `bench p2p` also begins with `bench`.
    ordered = sorted(command_words().items(), key=lambda item: -len(item[0]))
    cases = "\n".join(f'        "{command}"*) words="{" ".join(words)}" ;;' for command, words in ordered)
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return zsh + _SCRIPT.format(cases=cases)
