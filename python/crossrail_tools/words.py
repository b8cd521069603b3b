"""Words in messages: the indefinite article."""

from __future__ import annotations


def a(noun: str) -> str:
    """``noun`` with its indefinite article: ``an int``, ``a list``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def kind(value: object) -> str:
    """The type of ``value`` with its indefinite article: ``an int``."""
    return a(type(value).__name__)
