"""What every test here gets: a check that nothing is left behind, and pairs of connected workers."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator

import fork_server
import pytest
from distribution import pytest_xdist_make_scheduler
from leftovers import held, more
from pairs import Pair
from strict import pytest_configure, pytest_make_collect_report, pytest_runtest_makereport

import crossrail

collect_ignore = [] if os.environ.get("NIXL_TESTS") else ["test_nixl_own.py"]

__all__ = [
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_xdist_make_scheduler",
]


def pytest_collection_finish() -> None:
    """What importing the tests made stays for good: the collections around each test need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def signals_are_watched() -> None:
    """The first wait that takes long starts the process's watch for signals, which stays for good."""
    with crossrail.Worker(crossrail.Context(log="error")) as worker, pytest.raises(crossrail.TimeoutError):
        worker.accept(timeout=0.2)  # longer than a busy machine takes for the unwatched beginning of a wait


@pytest.fixture(autouse=True, scope="session")
def ranks_are_forked() -> Iterator[None]:
    """Ranks that need nothing else are forked from one process."""
    with fork_server.running():
        yield


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which there are more descriptors, children or shared segments than before."""
    gc.collect()
    before = held()
    yield
    request.node.funcargs.clear()  # pytest would keep the test's own arguments alive until after this
    deadline = time.monotonic() + 30
    gc.collect()
    while (left := more(before, held())) and time.monotonic() < deadline:
        time.sleep(0.02)  # threads of closed workers and killed peers end on their own time
        gc.collect()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def ucx() -> None:
    """UCX's contexts, which stay for good once a lane was made. Skips where UCX cannot be used."""
    context = crossrail.Context(tls="ucx:tcp", log="error")
    (row,) = (row for row in context.info()["transports"] if row["name"] == "ucx")
    if not row["usable"]:
        assert os.environ.get("CI") != "true", row["reason"]
        pytest.skip(f"{row['reason']}; {row['fix']}")
    with crossrail.Worker(context) as a, crossrail.Worker(context) as b:
        a.connect(b.address())
        b.accept()


@pytest.fixture
def connected() -> Iterator[Callable[..., Pair]]:
    """Makes a pair with these settings."""
    workers: list[crossrail.Worker] = []

    def make(**settings: str | int | float) -> Pair:
        context = crossrail.Context(**{"timeout": 20, "log": "error"} | settings)
        a, b = crossrail.Worker(context, name="a"), crossrail.Worker(context, name="b")
        workers.extend((a, b))
        to_b = a.connect(b.address())
        return Pair(context, a, b, to_b, b.accept())

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, connected: Callable[..., Pair]) -> Pair:
    """Two workers connected over each transport in turn."""
    return connected(tls=request.param)


@pytest.fixture
def shm(connected: Callable[..., Pair]) -> Pair:
    return connected(tls="shm")
