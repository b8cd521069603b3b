"""The manual of the command, from the declarations of which `--help` is made.

python -m crossrail_tools.cli.manual man        the man page crossrail(1)
python -m crossrail_tools.cli.manual markdown   docs/command.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import crossrail

from .command_line import BENCHES, COMMANDS, EXAMPLES, command_parsers
from .parsing import EPILOG

_SUMMARY = "moves bytes between processes over every link of the machine, and measures it"
_HELP = "-h, --help"


def markdown() -> str:
    """The page of the site."""
    lines = [
        "# The command",
        "",
        "<!-- Written by `python -m crossrail_tools.cli.manual markdown`. Do not edit. -->",
        "",
        f"`crossrail` {_SUMMARY}. Standard output is",
        "data, standard error everything else. `man crossrail` and `crossrail COMMAND --help` have the same text.",
        "",
        *EPILOG.replace("exit codes:", "Exit codes:").splitlines(),
    ]
    for name, parser in command_parsers():
        lines += ["", f"## crossrail {name}", "", f"{_sentence(parser.description or '')}"]
        for title, rows in parser.sections():
            rows = [row for row in rows if row[0] != _HELP]
            if rows:
                lines += ["", f"**{title}**", "", "| argument | meaning |", "|---|---|"]
                lines += [f"| `{_cell(typed)}` | {_cell(text)} |" for typed, text in rows]
        if name in EXAMPLES:
            lines += ["", *(f"    {line}" for line in EXAMPLES[name])]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _roff(text: str) -> str:
    """Text of a man page: a line that begins with a control character, backslashes and hyphens are what they are."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def man() -> str:
    """The man page."""
    lines = [f'.TH CROSSRAIL 1 "" "Crossrail {crossrail.__version__}" "User Commands"']
    lines += [".SH NAME", _roff(f"crossrail - {_SUMMARY}"), ".SH SYNOPSIS", ".B crossrail", "COMMAND [OPTIONS]"]
    lines += [".SH DESCRIPTION", "Standard output is data, standard error everything else.", ".SH COMMANDS"]
    for name, (_, summary) in [*COMMANDS.items(), *((f"bench {name}", row) for name, row in BENCHES.items())]:
        lines += [".TP", f".B {_roff(f'crossrail {name}')}", _roff(_sentence(summary))]
    for name, parser in command_parsers():
        lines += [f".SH {_roff(f'crossrail {name}').upper()}", _roff(_sentence(parser.description or ""))]
        for title, rows in parser.sections():
            rows = [row for row in rows if row[0] != _HELP]
            if rows:
                lines += [f".SS {_roff(title)}"]
            for typed, text in rows:
                lines += [".TP", f".B {_roff(typed)}", _roff(" ".join(text.split()))]
        for line in EXAMPLES.get(name, ()):
            lines += [".PP", ".EX", _roff(line), ".EE"]
    lines += [".SH EXIT STATUS", *map(_roff, EPILOG.partition("exit codes: ")[2].splitlines())]
    lines += [".SH ENVIRONMENT"]
    for setting in crossrail.settings_reference():
        lines += [".TP", f".B {_roff(setting['name'])}", _roff(f"{setting['doc']} {_sentence(setting['accepts'])}")]
    return "\n".join(lines) + "\n"


FORMS: dict[str, Callable[[], str]] = {"man": man, "markdown": markdown}

if __name__ == "__main__":
    if sys.argv[1:] not in [[form] for form in FORMS]:
        sys.exit(f"usage: python -m crossrail_tools.cli.manual {'|'.join(FORMS)}")
    sys.stdout.write(FORMS[sys.argv[1]]())
