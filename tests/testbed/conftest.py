"""Fixtures of the test bed: skipped visibly where it cannot be made, failed in CI."""

from __future__ import annotations

import os
import subprocess
import sys
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

# Before 1.18 tcp is there beneath ofi_rxm only, which ends a process whose link is lost. In a process of its own,
# because libfabric stays loaded.
VERSION = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).fi_version() < (1 << 16 | 18))"
LIBRARY = os.environ.get("CROSSRAIL_FABRIC_LIBRARY", "libfabric.so.1")
HAS_TCP = subprocess.run([sys.executable, "-c", VERSION, LIBRARY], capture_output=True, timeout=60, check=False)
collect_ignore = ["test_fabric.py"] if HAS_TCP.returncode else []


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
