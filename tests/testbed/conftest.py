"""Fixtures of the test bed: skipped visibly where it cannot be made, failed in CI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from bed import Bed, why_not
from strict import pytest_configure, pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_configure", "pytest_make_collect_report", "pytest_runtest_makereport"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Beds use both processors: where tests run side by side, those of beds run one after the other."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("testbed"))


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
