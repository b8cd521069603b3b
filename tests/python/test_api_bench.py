"""The measuring loops from Python, and the examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair

import crossrail

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "two_processes.py"


def case(what: str, **plan: Any) -> str:
    """The JSON of a case."""
    return json.dumps({"what": what, "warmup": 20, **plan})


def both(pair: Pair, text: str, **end: Any) -> tuple[Any, Any]:
    echoed: list[Any] = []

    def echo() -> None:
        try:
            echoed.append(json.loads(crossrail.bench(text, pair.context, pair.b, [pair.to_a], role="echo", **end)))
        except Exception as error:
            echoed.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    driven = json.loads(crossrail.bench(text, pair.context, pair.a, [pair.to_b], **end))
    thread.join()
    return driven, echoed[0]


@pytest.mark.parametrize("memory", ["shared", "ordinary"])
def test_the_loops_return_raw_samples(pair: Pair, memory: str) -> None:
    samples, echoed = both(pair, case("latency", size=8, iters=200), memory=memory)
    assert samples["size"] == 8 and samples["batch"] >= 1 and not echoed["samples_us"]
    assert len(samples["samples_us"]) == -(-200 // samples["batch"]) and min(samples["samples_us"]) > 0

    samples, _ = both(pair, case("bandwidth", size=65536, iters=5, window=16), memory=memory)
    assert len(samples["samples_us"]) == 5 and samples["bytes_per_sample"] == 16 * 65536

    rows, echoed = both(pair, case("p2p", size=(1 << 20) + 3, iters=3, warmup=2, verify="full"), memory=memory)
    assert rows == echoed and len(rows) == 3
    for row in rows:
        for end in (row["sender"], row["receiver"]):
            assert end["us"] > 0 and end["receipt"]["bytes"] == (1 << 20) + 3
            assert sum(lane["bytes"] for lane in end["receipt"]["lanes"]) == (1 << 20) + 3


def test_different_plans_are_refused_at_both_ends(shm: Pair) -> None:
    failures: list[BaseException] = []

    def echo() -> None:
        try:
            crossrail.bench(case("latency", size=8, iters=10), shm.context, shm.b, [shm.to_a], role="echo")
        except crossrail.MismatchError as error:
            failures.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(crossrail.MismatchError, match="size=16"):
        crossrail.bench(case("latency", size=16, iters=10), shm.context, shm.a, [shm.to_b])
    thread.join()
    assert len(failures) == 1


@pytest.mark.parametrize("wrong", [{"role": "drummer"}, {"memory": "imaginary"}])
def test_unknown_words_are_refused(shm: Pair, wrong: dict[str, Any]) -> None:
    with pytest.raises(crossrail.UsageError, match=next(iter(wrong.values()))):
        crossrail.bench(case("latency", size=8, iters=1), shm.context, shm.a, [shm.to_b], **wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("latency", "no case"),
        (case("dance", size=8, iters=1), "dance"),
        (case("latency", size=-8, iters=1), "-8"),
        (case("latency", size=8), "iters"),
        (case("latency", size=8, iters=1, window=4), "window"),
        (case("latency", size=8, iters=1), "needs a worker"),
        (case("experts", mode="e2e", layout="expert", cached=False, iters=1), "needs a buffer"),
    ],
)
def test_a_case_that_is_none_or_lacks_its_end_is_refused(shm: Pair, text: str, why: str) -> None:
    with pytest.raises(crossrail.UsageError, match=why):
        crossrail.bench(text, shm.context)


def test_progress_is_told_and_may_end_the_run(shm: Pair) -> None:
    class EnoughError(Exception):
        pass

    seen: list[tuple[int, int]] = []

    def on_progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 3:
            raise EnoughError

    ended: list[BaseException] = []
    endless = case("latency", size=8, iters=2**31)

    def echo() -> None:
        try:
            crossrail.bench(endless, shm.context, shm.b, [shm.to_a], role="echo")
        except crossrail.CrossrailError as error:
            ended.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(EnoughError):
        crossrail.bench(endless, shm.context, shm.a, [shm.to_b], on_progress=on_progress)
    shm.a.close()
    thread.join(20)
    assert ended and [total for _, total in seen] == [2**31 + 20] * 3
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
