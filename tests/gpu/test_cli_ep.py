"""`crossrail bench ep` and `bench control` in GPU memory: a rank for each GPU, verified before and after the timing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import GPUS

Rows = Callable[..., list[dict[str, Any]]]

SMALL = ("--device=cuda", "--tokens=64", "--hidden=2048", "--topk=4", "--experts=32", "--iters=5", "--warmup=1")
BOUND = "--timeout=10s"


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_both_layouts_verify_in_both_types(rows: Rows, layout: str) -> None:
    found = rows("ep", *SMALL, BOUND, f"--layout={layout}", "--sweep=dtype=fp8,bf16")
    assert [(row["what"], row["dtype"]) for row in found] == [
        (mode, dtype) for dtype in ("fp8", "bf16") for mode in ("dispatch", "combine", "e2e")
    ]
    for row in found:
        assert row["verified"]
        assert len(row["samples_us"]) == len(row["host_us"]) == 5 * row["ranks"]
        assert min(row["samples_us"]) > 0
        assert row["heap_bytes"] > 0
        # The host's clock has the launch and the answer besides; events have a resolution.
        assert row["p50_us"] <= 1.1 * row["host_p50_us"]


@pytest.mark.gpus(2)
def test_a_token_goes_once_to_each_rank(rows: Rows) -> None:
    found = rows("ep", *SMALL, BOUND, "--layout=rank", "--routing=next", "--dtype=bf16", "--mode=dispatch", "--cached")
    # All experts of a token are on the next rank.
    assert found[0]["bytes_wire"] == 64 * 2 * 2048
    assert found[0]["bytes_logical"] == 4 * found[0]["bytes_wire"]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_nodes_are_reached_by_the_network_and_their_bytes_told_apart(rows: Rows, layout: str) -> None:
    options = (f"--layout={layout}", "--dtype=bf16", "--mode=dispatch")
    split, whole = (rows("ep", *SMALL, BOUND, *options, f"--nodes={nodes}")[0] for nodes in (2, 1))
    assert split["verified"] and whole["verified"]
    assert split["bytes_wire"] == whole["bytes_wire"] > 0
    assert whole["bytes_network"] == 0 < split["bytes_network"] <= split["bytes_wire"]
    assert (split["bytes_network"] == split["bytes_wire"]) == (split["ranks"] == 2), "NVLink has the rest"


def test_other_scales_given_rows_and_few_multiprocessors_verify(rows: Rows) -> None:
    options = ("--layout=expert", "--mode=e2e", "--scale=ue8m0", "--given=fp8", "--sweep=num-sms=4,32")
    assert [row["num_sms"] for row in rows("ep", *SMALL, BOUND, *options)] == [4, 32]


def test_a_buffers_life_is_timed(rows: Rows) -> None:
    # Two ranks at least, also where they share a GPU.
    ranks = f"--num-processes={max(GPUS, 2)}"
    found = rows("control", "--device=cuda", ranks, "--experts-per-rank=8", "--rounds=3", BOUND)
    assert [row["what"] for row in found] == ["init", "connect", "disconnect", "reconnect", "destroy"]
    assert all(row["device"] == "cuda" for row in found), json.dumps(found)
    parts = {row["what"]: row.get("stages_us", {}) for row in found}
    assert {"context", "kernels", "heap"} <= parts["init"].keys()
    assert {"endpoints", "hello", "map", "all ready"} <= parts["connect"].keys() == parts["reconnect"].keys()


@pytest.mark.gpus(2)
def test_peers_take_turns_with_ours(rows: Rows) -> None:
    pytest.importorskip("torch")
    found = rows("ep", *SMALL, BOUND, "--layout=expert", "--compare=drop-in,nccl", "--rounds=1")
    for row in found:
        assert {name: peer.get("error") for name, peer in row["peers"].items()} == {"drop-in": None, "nccl": None}
        own = row["peers"]["drop-in"]
        assert 0 < own["kernel_us"] < own["host_p50_us"], own
        assert 0 < own["p50_us"] < own["host_p50_us"], own
        assert row["peers"]["nccl"]["p50_us"] > 0
