"""`crossrail info`, `bench mesh` and `bench unpack` where there are GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rows = Callable[..., list[dict[str, Any]]]
Crossrail = Callable[..., Any]


def test_info_tells_of_gpus_and_of_what_we_use(crossrail_command: Crossrail) -> None:
    text = crossrail_command("info").stdout
    assert "cuda:0" in text
    cuda = json.loads(crossrail_command("info", "--json=-").stdout)["info"]["cuda"]
    assert cuda["present"] is True
    assert cuda["driver"]
    assert cuda["devices"][0]["ordinal"] == 0
    assert cuda["devices"][0]["arch"].startswith("sm_")
    assert len(cuda["peer_access"]) == len(cuda["devices"])
    assert cuda["compiler"].startswith("NVRTC ") and f"kernel compiler: {cuda['compiler']}" in text
    cache = cuda["kernel_cache"]
    assert cache is None or cache["folder"].startswith("/")


def test_doctor_moves_data_on_every_gpu(crossrail_command: Crossrail) -> None:
    done = crossrail_command("doctor", "--only=gpu-driver,gpu-kernel,gpu-pinned,gpu-export,gpu-ipc", "--json=-")
    found = json.loads(done.stdout)["findings"]
    assert {one["id"] for one in found if one["severity"] == "ok"} == {one["id"] for one in found}, found
    assert len({one["id"] for one in found}) == 5


@pytest.mark.gpus(2)
@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
def test_mesh_of_two(rows: Rows, transport: str) -> None:
    found = rows("mesh", "--devices=cuda:0,cuda:1", "--size=8M", f"--transport={transport}")
    assert all(row["what"] == "mesh" for row in found)
    assert all(row.get("verified", True) for row in found)
    assert any(row.get("gb_per_s") for row in found)


@pytest.mark.gpus(4)
def test_mesh_of_four(rows: Rows) -> None:
    found = rows("mesh", "--devices=all", "--size=16M", "--iters=3")
    together = [row for row in found if row["part"] == "all"]
    copies = [row["copies"] for row in together]
    assert copies and all(each["by_engine"] > 0 for each in copies), copies
    assert all(row["verified"] for row in together)


@pytest.mark.parametrize("source", ["device", "pinned"])
def test_unpack_by_all_three(rows: Rows, source: str) -> None:
    found = rows("unpack", "--device=cuda:0", "--fragments=4K,64K", "--size=8M", f"--from={source}")
    assert {row["unpack"] for row in found if "unpack" in row} >= {"kernel", "d2d", "host"}
    assert all(row["verified"] for row in found)


def test_a_gpu_that_is_not_there_names_those_that_are(crossrail_command: Crossrail) -> None:
    done = crossrail_command("bench", "p2p", "--device=cuda:99", code=2)
    assert done.stdout == ""
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert "cuda:99" in error and "cuda:0" in error


def test_unpack_is_a_view_of_its_rows(crossrail_command: Crossrail, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = crossrail_command("bench", "unpack", "--size=1M", "--fragments=4K,16K", "--iters=3", f"--json={path}")
    rows = json.loads(path.read_text())["rows"]
    ways = [(row["origin"], row["fragment"], row["unpack"]) for row in rows]
    expected = [
        (origin, fragment, way)
        for origin in ("device", "pinned")
        for fragment in (4096, 16384)
        for way in ("contiguous", "kernel", "d2d", "host")
    ]
    assert ways == expected
    assert all(row["verified"] and len(row["samples_us"]) == 3 for row in rows)
    assert "byte by byte" in done.stdout
