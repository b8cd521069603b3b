"""Hooks of all tests that need no GPU: a skip is a failure in CI, and Ctrl-C works in a run in the background."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

__all__ = ["pytest_configure", "pytest_make_collect_report", "pytest_runtest_makereport"]

IN_CI = os.environ.get("CI") == "true"


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, which every process that a test starts would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return refused(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return refused(report)


def refused(report: Any) -> Any:
    """In CI a test, or a module of tests, that is skipped has failed: what it needs must be installed."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"CI=true, but the test does not run here: {reason}"
    return report
