"""Words in messages."""

from __future__ import annotations


def kind(value: object) -> str:
    """The type of ``value`` with its indefinite article: ``an int``."""
    noun = type(value).__name__
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
