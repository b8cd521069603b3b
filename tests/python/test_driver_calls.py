"""How often calls of crossrail.deep_ep go to the CUDA driver: each time takes some of the host's, which eager programs
feel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import driver_libraries
import pytest
from driver_calls import PAIRS

HERE = Path(__file__).parent
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    driver_libraries.make(compiler, folder)
    return folder


def told(folder: Path, program: str, *options: str) -> dict[str, Any]:
    """What a program prints that runs on the driver without a GPU."""
    settings = {"LD_LIBRARY_PATH": str(folder), "CROSSRAIL_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, HERE / program, folder, *options],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def counted(driver: Path) -> dict[str, dict[str, int]]:
    """Calls of the driver in `PAIRS` pairs, by calling pattern."""
    return told(driver, "driver_calls.py")


@pytest.mark.parametrize("how", ["attributes", "table"])
def test_prepared_operations_give_kernels_the_same_arguments(driver: Path, how: str) -> None:
    said = told(driver, "driver_args.py", *([how] if how == "table" else []))
    assert len(said) == 22 and set(said.values()) == {"same"}, said


def test_wrong_calls_are_refused_before_anything_is_enqueued(driver: Path) -> None:
    assert told(driver, "driver_refusals.py") == {
        "tokens": "5 tokens are more than max_tokens_per_rank, 4",
        "fp8": "x is fp8 rows with scales, and the buffer's dispatch_dtype is bf16",
        "alignment": "expert_alignment is 0",
        "handle": "2 tokens where the handle is of 3",
    }


def test_sync_counts_bytes_by_link_at_most_once_a_second(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSRAIL_PAGES", str(tmp_path))
    once = {"dispatch": 1, "combine": 1}
    assert told(driver, "driver_links.py") == [{}, {}, once, once]


def test_outputs_are_made_while_the_host_waits(driver: Path) -> None:
    said = told(driver, "driver_ahead.py")
    layout, combine, waits = ["int32", "int32", "bool"], ["bfloat16", "float32"], "in the wait"
    assert said == {
        "first": {"layout": layout, "dispatch": [], waits: [], "combine": combine},
        "second": {"layout": layout, "dispatch": ["uint8"], waits: [*combine, *layout], "combine": []},
        "with handles that are held": {
            "layout": [],
            "dispatch": ["uint8"],
            waits: [*combine, *layout],
            "combine": [],
        },
        "with fewer tokens": {"layout": ["bool"], "dispatch": [], waits: [*combine, *layout], "combine": []},
        "interrupted": {"layout": [], "dispatch": [], waits: ["bfloat16"], "combine": ["float32"]},
        "captured": {"layout": layout},
        "in another stream": {"layout": layout, "dispatch": ["uint8"], waits: layout, "combine": combine},
        "two of one memory": 0,
    }


@pytest.mark.parametrize(
    ("pattern", "launches", "waits", "others"),
    # Of one pair: kernels, waits of streams, and what is asked or set beside them.
    [
        ("plain", 2, 0, 10),
        ("hook", 4, 0, 18),
        ("async_finish", 2, 4, 18),
        ("normal bf16", 3, 0, 18),
        ("normal fp8", 3, 0, 18),
        ("normal fp8 as bytes", 3, 0, 18),
        ("normal ue8m0", 3, 0, 18),
        ("elastic", 2, 0, 15),
        ("elastic sync", 2, 0, 15),
        ("normal async", 3, 0, 18),
        ("elastic async", 2, 0, 15),
    ],
)
def test_a_pair_makes_few_calls(
    counted: dict[str, dict[str, int]], pattern: str, launches: int, waits: int, others: int
) -> None:
    calls = dict(counted[pattern])
    assert calls.pop("general") == 0, "usual calls are prepared"
    assert calls.pop("launch") == launches * PAIRS
    assert calls.pop("early") == 0, "outside of graphs kernels are launched in order"
    assert calls.pop("wait") == waits * PAIRS
    lent = int(
        "normal" in pattern or "elastic" in pattern
    )  # a part of the buffer's memory, until its reader's stream has come here
    assert calls.pop("record") <= (launches + waits // 2 + lent) * PAIRS, (
        "an event for each launch, and for what it comes after"
    )
    assert sum(calls.values()) <= (others + 1) * PAIRS, calls


def test_captured_kernels_may_begin_before_those_before_them_have_ended(counted: dict[str, dict[str, int]]) -> None:
    assert counted["captured"]["early"] == counted["captured"]["launch"] == 2 * PAIRS
