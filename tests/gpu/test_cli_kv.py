"""`crossrail bench kv` on GPU memory: every row verified, by one kernel and over TCP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Rows = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
def test_pages_between_two_processes(rows: Rows, transport: str) -> None:
    grid = ("--preset=dsv4", "--isl=1K", "--page=16,64", "--bulk")
    made = rows("kv", *grid, "--iters=2", "--rounds=1", "--device=cuda:0", f"--transport={transport}")
    assert len(made) == 2 * 2 * 2
    for row in made:
        assert row["verified"] is True
        assert (row["device"], row["transport"]) == ("cuda:0", transport)
