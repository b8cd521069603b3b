"""Lanes over libfabric's providers that need no NIC, between two processes."""

from __future__ import annotations

import json

import pytest
from commands import rows_of, run


def fabric_or_skip(provider: str) -> str:
    """CROSSRAIL_TLS for that provider; skips a test where libfabric does not have it."""
    tls = f"fabric:{provider}"
    known = json.loads(run("info", "--json=-", settings={"CROSSRAIL_TLS": tls}).stdout)["info"]["transports"]
    (state,) = (row for row in known if row["name"] == "fabric")
    if not state["usable"]:
        pytest.skip(state["reason"])
    return tls


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_chunks_arrive_while_both_ends_sleep(provider: str) -> None:
    """Over shm nothing wakes the thread of a lane: it has to poll."""
    tls = fabric_or_skip(provider)
    options = ("--window=1", "--size=1M", "--iters=20", "--warmup=2")
    (row,) = rows_of("bandwidth", *options, settings={"CROSSRAIL_TLS": tls, "CROSSRAIL_TIMEOUT": "10s"})
    assert row.transport == "fabric"


def test_the_command_takes_a_provider() -> None:
    tls = fabric_or_skip("tcp")
    (row,) = rows_of("latency", f"--transport={tls}", "--sizes=8", "--iters=50", "--warmup=5")
    assert row.transport == "fabric" and row.p50_us
