"""One rank as a process: does what the test tells it over stdin and answers over stdout.

A request is a pickled (task, arguments); the answer is what the task returned, or a Failed.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from ep_cases import Case, Got, Setup, as_bf16, inputs, outputs

import crossrail

TASKS: dict[str, Callable[..., Any]] = {}
"""What a test may ask for, by name."""


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `function` one of the tasks."""
    TASKS[function.__name__] = function
    return function


@dataclass
class Failed:
    """A task that raised."""

    kind: str
    text: str
    trace: str
    took: float = 0.0


@dataclass
class Me:
    """What a rank keeps between tasks."""

    group: Any = None
    made_for: Any = None
    buffer: Any = None
    keep: dict[str, Any] = field(default_factory=dict)

    def buffer_for(self, setup: Setup, **options: Any) -> Any:
        """A buffer for `setup`: the one that is there, or a new one in its place."""
        if self.made_for != (setup, options):
            self.drop()
            self.buffer = crossrail.ExpertBuffer(self.group, **(setup.arguments() | options))
            self.made_for = (setup, options)
        return self.buffer

    def drop(self) -> None:
        """Destroys the buffer, if there is one."""
        if self.buffer is not None:
            self.buffer.destroy()
        self.buffer = self.made_for = None


def as_bits(array: Any) -> Any:
    """A copy as plain numbers: bf16 and fp8 as their bits."""
    if array is None:
        return None
    array = np.asarray(array)
    floats = {ml_dtypes.bfloat16: np.uint16, ml_dtypes.float8_e4m3fn: np.uint8, ml_dtypes.float8_e8m0fnu: np.uint8}
    kind = floats.get(array.dtype.type)
    return np.array(array if kind is None else array.view(kind))


@task
def join(me: Me, **options: Any) -> tuple[int, int]:
    me.group = crossrail.Group(**options)
    return me.group.rank, me.group.size


@task
def leave(me: Me) -> None:
    me.drop()
    if me.group is not None:
        me.group.leave()
    me.group = None


@task
def prepare(me: Me, setup: Setup, options: dict[str, Any] | None = None) -> None:
    """Makes the buffer now. A timeout among its options is that of operations only."""
    patient = options is None or "timeout" not in options
    buffer = me.buffer_for(setup, **(options or {}), **({} if patient else {"connect": False}))
    if not patient:
        buffer.connect(range(setup.ranks), timeout=me.group.context.timeout)


@task
def drop(me: Me) -> None:
    me.drop()


@task
def exchange(me: Me, case: Case) -> Got:
    """One case from beginning to end."""
    buffer = me.buffer_for(case.setup)
    return run(buffer, case, me.group.rank)


def run(buffer: Any, case: Case, rank: int) -> Got:
    fed = inputs(case, rank)
    came = send(buffer, case, fed, rank)
    handle = came.handle
    if case.cached:
        again = inputs(case, rank, again=True)
        came = buffer.dispatch(
            as_bf16(again.x), None, layout=case.layout, handle=handle, expert_alignment=case.alignment
        )
    return answer(buffer, case, fed, came, rank)


def send(buffer: Any, case: Case, fed: Any, rank: int) -> Any:
    options: dict[str, Any] = {"layout": case.layout, "expert_alignment": case.alignment}
    if case.weights == "dispatch":
        options["topk_weights"] = fed.topk_weights
    if case.split:
        return buffer.dispatch(as_bf16(fed.x), fed.topk_idx, **options, send_only=True).finish()
    return buffer.dispatch(as_bf16(fed.x), fed.topk_idx, **options)


def answer(buffer: Any, case: Case, fed: Any, came: Any, rank: int) -> Got:
    """Combines and collects what there is to show."""
    y = as_bf16(outputs(case, rank, came.x.shape, came.counts))
    options: dict[str, Any] = {}
    if case.weights == "combine":
        options["topk_weights"] = fed.topk_weights
    if case.biases:
        bias = [as_bf16(one) for one in fed.biases]
        options["bias"] = bias[0] if case.biases == 1 else tuple(bias)
    got = show(came)
    poison(came)
    if case.out:
        options["out"] = as_bf16(np.full((len(fed.x), case.setup.hidden), 0x7FC0, np.uint16))
    sums = buffer.combine(y, came.handle, **options, send_only=case.split)
    if case.split:
        sums = sums.finish()
    got.bytes.append(dict(sums.bytes))
    got.timing.append(dict(sums.timing))
    got.sums = as_bits(options["out"] if case.out else sums.x)
    got.dtypes["sums"] = sums.x.dtype.name
    poison(sums)
    return got


def show(came: Any) -> Got:
    """Copies of everything that a dispatch brought."""
    names = ("x", "scales", "counts", "source", "ranges", "topk_idx", "topk_weights", "offsets")
    arrays = {name: getattr(came, name, None) for name in names}
    dtypes = {name: array.dtype.name for name, array in arrays.items() if array is not None}
    got = Got(**{name: as_bits(array) for name, array in arrays.items()}, sums=None, dtypes=dtypes)
    got.bytes.append(dict(came.bytes))
    got.timing.append(dict(came.timing))
    return got


def poison(result: Any) -> None:
    """Overwrites what the caller may overwrite, so that nothing that is left there can pass for a later result."""
    for name in ("x", "scales"):
        array = getattr(result, name, None)
        if array is not None and array.flags.writeable:
            array.view(np.uint8)[...] = 0xFF


@task
def exchange_all(me: Me, cases: list[Case]) -> list[Got]:
    """Several cases of one setup, one after the other."""
    buffer = me.buffer_for(cases[0].setup)
    return [run(buffer, case, me.group.rank) for case in cases]


@task
def back_to_back(me: Me, case: Case, times: int) -> list[Got]:
    """The case again and again, with other tokens, layouts and routings each time."""
    buffer = me.buffer_for(case.setup)
    return [run(buffer, varied(case, turn), me.group.rank) for turn in range(times)]


def varied(case: Case, turn: int) -> Case:
    """The `turn`-th variation of a case: the same on every rank."""
    rng = np.random.default_rng([case.seed, turn])
    setup = case.setup
    layout = setup.layouts[int(rng.integers(len(setup.layouts)))]
    return replace(
        case,
        seed=case.seed + 1000 + turn,
        layout=layout,
        routing=("uniform", "skewed:1.3", "one")[int(rng.integers(3))],
        tokens=tuple(int(rng.integers(0, setup.max_tokens + 1)) for _ in range(setup.ranks)),
        dropped=float(rng.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1])),
        weights="dispatch" if rng.random() < 0.5 else "combine" if layout == "expert" else "none",
        split=bool(rng.random() < 0.3),
    )


@task
def two_in_flight(me: Me, first: Case, second: Case) -> list[Got]:
    """Two dispatches begun before either is finished, and their combines alike."""
    buffer, rank = me.buffer_for(first.setup), me.group.rank
    cases = (first, second)
    fed = [inputs(case, rank) for case in cases]
    pending = [
        buffer.dispatch(as_bf16(one.x), one.topk_idx, one.topk_weights, case.layout, send_only=True)
        for case, one in zip(cases, fed, strict=True)
    ]
    came = [one.finish() for one in pending]
    got = [show(one) for one in came]
    ys = [as_bf16(outputs(case, rank, one.x.shape, one.counts)) for case, one in zip(cases, came, strict=True)]
    sums = [buffer.combine(y, one.handle, send_only=True) for y, one in zip(ys, came, strict=True)]
    for one, pair in zip(got, sums, strict=True):
        result = pair.finish()
        one.sums = as_bits(result.x)
        one.bytes.append(dict(result.bytes))
    return got


@task
def held(me: Me) -> dict[str, int]:
    """Descriptors and mapped memfds of this process."""
    maps = Path("/proc/self/maps").read_text()
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "memfds": maps.count("memfd:")}


def read(stream: BinaryIO) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def write(stream: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test ends us
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    me = Me()
    while True:
        try:
            name, arguments, options = read(requests)
        except EOFError:
            return
        began = time.monotonic()
        try:
            result = TASKS[name](me, *arguments, **options)
        except Exception as error:
            result = Failed(type(error).__name__, str(error), traceback.format_exc(), time.monotonic() - began)
        write(answers, result)
