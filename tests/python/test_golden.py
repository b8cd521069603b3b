"""The committed results render as they did when they were recorded: byte for byte, in every form."""

from __future__ import annotations

import golden
import pytest


@pytest.mark.parametrize("name", golden.names())
def test_a_result_renders_as_recorded(name: str) -> None:
    hint = "if the new text is right: python tests/python/golden.py --record"
    kept = golden.place(name).read_text(encoding="utf-8").splitlines()
    assert golden.rendered(name).splitlines() == kept, hint


def test_every_recorded_text_is_of_a_result() -> None:
    assert {golden.place(name) for name in golden.names()} == set(golden.GOLDEN.iterdir())
