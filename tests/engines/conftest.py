"""Fixtures of the tests of engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

collect_ignore = [] if os.environ.get("VLLM_TESTS") else ["test_vllm_own.py"]


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
