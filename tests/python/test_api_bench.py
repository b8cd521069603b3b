"""The measuring loops from Python, and the examples."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair

import crossrail

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "two_processes.py"


def both(pair: Pair, bench: Callable[..., Any], **plan: Any) -> tuple[Any, Any]:
    echoed: list[Any] = []

    def echo() -> None:
        try:
            echoed.append(bench(pair.context, pair.b, pair.to_a, role="echo", **plan))
        except Exception as error:
            echoed.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    driven = bench(pair.context, pair.a, pair.to_b, role="driver", **plan)
    thread.join()
    return driven, echoed[0]


@pytest.mark.parametrize("memory", ["shared", "ordinary"])
def test_the_loops_return_raw_samples(pair: Pair, memory: str) -> None:
    samples, echoed = both(pair, crossrail.bench_latency, size=8, iters=200, warmup=20, memory=memory)
    assert samples["size"] == 8 and samples["batch"] >= 1 and not echoed["samples_us"]
    assert len(samples["samples_us"]) == -(-200 // samples["batch"]) and min(samples["samples_us"]) > 0

    samples, _ = both(pair, crossrail.bench_bandwidth, size=65536, iters=5, warmup=1, window=16, memory=memory)
    assert len(samples["samples_us"]) == 5 and samples["bytes_per_sample"] == 16 * 65536

    rows, echoed = both(pair, crossrail.bench_p2p, size=(1 << 20) + 3, iters=3, memory=memory)
    assert rows == echoed and len(rows) == 3
    for row in rows:
        for end in (row["sender"], row["receiver"]):
            assert end["us"] > 0 and end["receipt"]["bytes"] == (1 << 20) + 3
            assert sum(lane["bytes"] for lane in end["receipt"]["lanes"]) == (1 << 20) + 3


def test_different_plans_are_refused_at_both_ends(shm: Pair) -> None:
    failures: list[BaseException] = []

    def echo() -> None:
        try:
            crossrail.bench_latency(shm.context, shm.b, shm.to_a, role="echo", size=8, iters=10)
        except crossrail.MismatchError as error:
            failures.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(crossrail.MismatchError, match="size=16"):
        crossrail.bench_latency(shm.context, shm.a, shm.to_b, role="driver", size=16, iters=10)
    thread.join()
    assert len(failures) == 1


@pytest.mark.parametrize("wrong", [{"role": "drummer"}, {"memory": "imaginary"}])
def test_unknown_words_are_refused(shm: Pair, wrong: dict[str, str]) -> None:
    with pytest.raises(crossrail.UsageError, match=next(iter(wrong.values()))):
        crossrail.bench_latency(
            shm.context,
            shm.a,
            shm.to_b,
            **{"role": "driver", "size": 8, "iters": 1} | wrong,  # type: ignore[arg-type]
        )


def test_progress_is_told_and_may_end_the_run(shm: Pair) -> None:
    class EnoughError(Exception):
        pass

    seen: list[tuple[int, int]] = []

    def on_progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 3:
            raise EnoughError

    ended: list[BaseException] = []

    def echo() -> None:
        try:
            crossrail.bench_latency(shm.context, shm.b, shm.to_a, role="echo", size=8, iters=2**31)
        except crossrail.CrossrailError as error:
            ended.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(EnoughError):
        crossrail.bench_latency(
            shm.context, shm.a, shm.to_b, role="driver", size=8, iters=2**31, on_progress=on_progress
        )
    shm.a.close()
    thread.join(20)
    assert ended and [total for _, total in seen] == [2**31 + 100] * 3
    assert seen == sorted(seen)


def test_the_example_alone() -> None:
    ended = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"hello from the other side \(eager over \w+", ended.stdout)


def test_the_example_as_two_processes() -> None:
    with subprocess.Popen([sys.executable, EXAMPLE, "listen"], stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        address = listener.stdout.readline().split()[-1]
        connector = subprocess.run([sys.executable, EXAMPLE, "connect", address], timeout=60)
        rest = listener.stdout.read()
        assert connector.returncode == 0 and "hello from the other side" in rest
    assert listener.returncode == 0


def test_the_examples_stay_short() -> None:
    root = EXAMPLE.parents[1]
    for example in (EXAMPLE, root / "rust" / "two_processes.rs"):
        lines = [line for line in example.read_text().splitlines() if line.strip()]
        assert len(lines) <= 20, example
