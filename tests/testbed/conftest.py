"""Fixtures of the test bed: skipped visibly where it cannot be made, failed in CI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from bed import Bed, why_not
from distribution import pytest_xdist_make_scheduler
from strict import pytest_configure, pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_xdist_make_scheduler",
]


@pytest.fixture
def make_bed() -> Iterator[Callable[..., Bed]]:
    """Makes beds that are removed after the test."""
    reason = why_not()
    if reason is not None and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Bed(*arguments, **options))
