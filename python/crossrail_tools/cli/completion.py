"""`crossrail completion SHELL`: a script that completes commands and options, made from their declarations."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from .parsing import Command, Parser

SHELLS = ("bash", "zsh", "fish")

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


_FISH = """\
function __crossrail_words
    switch (string join -- " " (commandline -opc)[2..])
{cases}
    end
end
complete -c crossrail -a "(__crossrail_words)"
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
    text = (
        'the shell; in its startup file: eval "$(crossrail completion bash)"; fish: crossrail completion fish | source'
    )
    parser.add_argument("shell", choices=SHELLS, help=text)
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return CompletionOptions(shell=parsed.shell)


def script(shell: str) -> str:
    """The completion script for ``shell``."""
    from .command_line import command_words

    # The longest command first: `bench p2p` also begins with `bench`.
    ordered = sorted(command_words().items(), key=lambda item: -len(item[0]))
    # Values belong where their option is the last word.
    ordered = [(command if "*" in command else f"{command}*", words) for command, words in ordered]
    if shell == "fish":
        lines = [
            f"        case '{command}'\n            string split ' ' -- '{' '.join(words)}'"
            for command, words in ordered
        ]
        return _FISH.format(cases="\n".join(lines))
    patterns = [('"{}"'.format(command.replace("*", '"*"')), words) for command, words in ordered]
    cases = "\n".join(f'        {pattern}) words="{" ".join(words)}" ;;' for pattern, words in patterns)
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return zsh + _SCRIPT.format(cases=cases)
