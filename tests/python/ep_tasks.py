"""What ranks do in tests of options, of failures and of changing groups."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ep_cases import Case, Got, Setup, as_bf16, inputs, outputs, sums_of_rows
from ep_rank import Me, as_bits, main, run, send, show, task

import crossrail
from crossrail import ref

__all__ = ["Lived", "main"]


@dataclass
class Lived:
    """What a survivor has to tell."""

    got: list[Got] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    longest_s: float = 0.0
    """The longest time from one finished exchange to the next."""


def _lived(buffer: Any, got: list[Got], longest_s: float) -> Lived:
    return Lived(got, _faults(buffer), list(buffer.masked()), longest_s)


def _faults(buffer: Any) -> list[dict[str, Any]]:
    names = ("rank", "stage", "operation", "why")
    return [{name: getattr(fault, name) for name in names} for fault in buffer.faults()]


@task
def connect(me: Me, setup: Setup, ranks: list[int], activate: bool = True) -> list[int]:
    """Connects these ranks, with a buffer that begins without connections."""
    buffer = me.buffer_for(setup, connect=False)
    buffer.connect(ranks, activate=activate)
    return list(buffer.connected())


@task
def change(me: Me, call: str, ranks: list[int], options: dict[str, Any] | None = None) -> list[int]:
    """`connect`, `disconnect`, `mask` or `unmask`; returns who is connected."""
    getattr(me.buffer, call)(ranks, **(options or {}))
    return list(me.buffer.connected())


@task
def masked(me: Me) -> list[int]:
    return list(me.buffer.masked())


@task
def faults(me: Me) -> list[dict[str, Any]]:
    """Whom this rank has lost, and why."""
    return _faults(me.buffer)


@task
def again(me: Me, case: Case) -> Got:
    """A case with the buffer that is there."""
    return run(me.buffer, case, me.group.rank)


@task
def links(me: Me, setup: Setup) -> list[tuple[int, str]]:
    return [(link.rank, link.kind) for link in me.buffer_for(setup).links()]


@task
def die(me: Me, case: Case, stage: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Is killed, or stopped, in the middle of an exchange: before it, with its dispatch or its combine begun."""
    buffer, rank, begun = me.buffer, me.group.rank, []
    fed = inputs(case, rank)
    if stage == "dispatch":
        begun.append(buffer.dispatch(as_bf16(fed.x), fed.topk_idx, fed.topk_weights, case.layout, send_only=True))
    elif stage == "combine":
        came = send(buffer, case, fed, rank)
        y = as_bf16(outputs(case, rank, came.x.shape, came.counts))
        begun.append(buffer.combine(y, came.handle, send_only=True))
    os.kill(os.getpid(), how)


@task
def survive(me: Me, cases: list[Case]) -> Lived:
    """Exchanges, whoever dies meanwhile."""
    got, longest, last = [], 0.0, time.monotonic()
    for case in cases:
        got.append(run(me.buffer, case, me.group.rank))
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return _lived(me.buffer, got, longest)


@task
def doomed(me: Me, case: Case, seconds: float) -> None:
    """Exchanges until it is killed, which is in so many seconds."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        run(me.buffer, case, me.group.rank)


@task
def part(me: Me, case: Case) -> Lived:
    """An exchange, and away at once."""
    me.drop()
    buffer = me.buffer_for(case.setup)
    got = run(buffer, case, me.group.rank)
    lived = _lived(buffer, [got], 0.0)
    me.drop()
    return lived


@task
def cached(me: Me, case: Case, times: int) -> list[Got]:
    """One routing, dispatched along again and again with other rows, each combined."""
    buffer, rank = me.buffer_for(case.setup), me.group.rank
    fed = inputs(case, rank)
    handle = send(buffer, case, fed, rank).handle
    got = []
    for turn in range(times):
        x = inputs(turned(case, turn), rank, again=True).x
        came = buffer.dispatch(as_bf16(x), None, layout=case.layout, handle=handle)
        one = show(came)
        one.sums = as_bits(buffer.combine(as_bf16(outputs(case, rank, came.x.shape, came.counts)), came.handle).x)
        got.append(one)
    return got


def turned(case: Case, turn: int) -> Case:
    """The same case with the rows of its `turn`-th cached dispatch."""
    return replace(case, rows_seed=turn + 1)


@task
def into(me: Me, case: Case) -> tuple[Got, dict[str, Any]]:
    """A dispatch into the caller's own arrays, which were full of other things before."""
    buffer, rank = me.buffer_for(case.setup), me.group.rank
    fed = inputs(case, rank)
    shown = send(buffer, case, fed, rank)
    there = {name: getattr(shown, name) for name in ("x", "scales") if getattr(shown, name) is not None}
    out = {name: np.full(one.nbytes, 0xEE, np.uint8).view(one.dtype).reshape(one.shape) for name, one in there.items()}
    came = buffer.dispatch(as_bf16(fed.x), fed.topk_idx, fed.topk_weights, case.layout, out=out)
    own = all(getattr(came, name) is out[name] for name in out)
    return show(came), {"own": own, **{name: as_bits(array) for name, array in out.items()}}


@task
def counted(me: Me, cases: list[Case]) -> Any:
    """The statistics that these dispatches add up to."""
    buffer = me.buffer_for(cases[0].setup)
    stats = np.full(cases[0].setup.local_experts, 7, np.int32)
    for case in cases:
        fed = inputs(case, me.group.rank)
        buffer.dispatch(as_bf16(fed.x), fed.topk_idx, layout=case.layout, stats=stats)
    return stats


@task
def kept(me: Me, first: Case, second: Case) -> tuple[Got, Got]:
    """A result right after its dispatch, and the same result after the next one."""
    buffer, rank = me.buffer_for(first.setup), me.group.rank
    one = send(buffer, first, inputs(first, rank), rank)
    before = show(one)
    send(buffer, second, inputs(second, rank), rank)
    return before, show(one)


@task
def destroyed(me: Me, setup: Setup) -> str:
    """What a destroyed buffer answers."""
    buffer = me.buffer_for(setup)
    case = Case(setup, layout=setup.layouts[0])
    me.drop()
    buffer.destroy()
    fed = inputs(case, me.group.rank)
    try:
        buffer.dispatch(as_bf16(fed.x), fed.topk_idx)
    except crossrail.CrossrailError as error:
        return error.kind
    return "nothing"


@task
def with_block(me: Me, setup: Setup) -> bool:
    me.drop()
    with crossrail.ExpertBuffer(me.group, **setup.arguments()) as buffer:
        return len(buffer.connected()) == setup.ranks


@task
def make(me: Me, setup: Setup, options: dict[str, Any]) -> str:
    """A buffer with these arguments; its construction may fail."""
    me.drop()
    buffer = crossrail.ExpertBuffer(me.group, **(setup.arguments() | options))
    buffer.destroy()
    return "made"


Change = Callable[[dict[str, Any], Setup], None]


def _set(name: str, value: Callable[[Any], Any]) -> Change:
    def change(arguments: dict[str, Any], setup: Setup) -> None:
        arguments[name] = value(arguments[name])

    return change


def _id(value: int) -> Change:
    def change(arguments: dict[str, Any], setup: Setup) -> None:
        arguments["topk_idx"] = arguments["topk_idx"].copy()
        arguments["topk_idx"][1, 0] = value

    return change


def _too_often(arguments: dict[str, Any], setup: Setup) -> None:
    arguments["topk_idx"] = np.zeros_like(arguments["topk_idx"])


def _too_many(arguments: dict[str, Any], setup: Setup) -> None:
    for name in ("x", "topk_idx", "topk_weights"):
        arguments[name] = np.concatenate([arguments[name], arguments[name]])


MISTAKES: dict[str, Change] = {
    "an id too large": _id(1_000_000),
    "an id below -1": _id(-2),
    "an expert too often": _too_often,
    "more tokens than M": _too_many,
    "x too narrow": _set("x", lambda x: x[:, :-8].copy()),
    "x of one dimension": _set("x", lambda x: x.reshape(-1)),
    "x of float32": _set("x", lambda x: x.astype(np.float32)),
    "topk_idx of int32": _set("topk_idx", lambda idx: idx.astype(np.int32)),
    "topk_idx too wide": _set("topk_idx", lambda idx: np.concatenate([idx, idx], axis=1)),
    "fewer topk_idx than x": _set("topk_idx", lambda idx: idx[:-1].copy()),
    "topk_weights of float64": _set("topk_weights", lambda weights: weights.astype(np.float64)),
    "fewer topk_weights": _set("topk_weights", lambda weights: weights[:, :-1].copy()),
    "an unknown layout": _set("layout", lambda layout: "column"),
}
"""What one rank may do wrong in a dispatch."""


@task
def mistake(me: Me, setup: Setup, name: str | None, layout: str = "expert") -> Got:
    """A dispatch in which something is wrong here, or (None) only elsewhere."""
    case = Case(setup, layout=layout)  # type: ignore[arg-type]
    buffer, fed = me.buffer_for(setup), inputs(case, me.group.rank)
    arguments = {"x": as_bf16(fed.x), "topk_idx": fed.topk_idx, "topk_weights": fed.topk_weights, "layout": layout}
    if name is not None:
        MISTAKES[name](arguments, setup)
    return show(buffer.dispatch(**arguments))


@task
def mistaken_answer(me: Me, setup: Setup, name: str | None, layout: str = "expert") -> None:
    """A combine in which something is wrong here, or (None) only elsewhere."""
    case, rank = Case(setup, layout=layout), me.group.rank  # type: ignore[arg-type]
    buffer, fed = me.buffer_for(setup), inputs(case, rank)
    came = send(buffer, case, fed, rank)
    y = as_bf16(outputs(case, rank, came.x.shape, came.counts))
    options: dict[str, Any] = {}
    if name == "y too short":
        y = y[..., :-8].copy()
    elif name == "y of float32":
        y = y.astype(np.float32)
    elif name == "weights twice":
        options["topk_weights"] = fed.topk_weights
    elif name == "three biases":
        options["bias"] = tuple(as_bf16(fed.x) for _ in range(3))
    elif name == "a bias too long":
        options["bias"] = np.concatenate([as_bf16(fed.x), as_bf16(fed.x)])
    elif name == "out too short":
        options["out"] = as_bf16(fed.x)[:-1].copy()
    buffer.combine(y, came.handle, **options)


@task
def another_operation(me: Me, setup: Setup, which: str) -> None:
    """Dispatches, then dispatches or combines, as told: ranks that disagree."""
    case, rank = Case(setup), me.group.rank
    buffer, fed = me.buffer_for(setup), inputs(case, rank)
    came = send(buffer, case, fed, rank)
    if which == "dispatch":
        send(buffer, case, fed, rank)
    else:
        buffer.combine(as_bf16(outputs(case, rank, came.x.shape, came.counts)), came.handle)


@task
def missing(me: Me, case: Case) -> tuple[list[int], list[int]]:
    """Whom a dispatch and its combine list as missing."""
    buffer, rank = me.buffer, me.group.rank
    came = send(buffer, case, inputs(case, rank), rank)
    sums = buffer.combine(as_bf16(outputs(case, rank, came.x.shape, came.counts)), came.handle)
    return came.missing, sums.missing


@task
def synchronize(me: Me) -> None:
    me.buffer.sync()


@task
def await_end(me: Me, rank: int) -> str:
    """Waits until the group no longer counts `rank` as alive; its state then."""
    while me.group.state(rank).state == "alive":
        assert me.group.wait_change(20), f"rank {rank} stays alive"
    return str(me.group.state(rank).state)


@dataclass
class Endured:
    """Results of exchanges while ranks and the store are lost."""

    whole: int = 0
    """Number of complete and correct results."""
    marked: int = 0
    """Results that list who is missing."""
    wrong: int = 0
    """Number of results that list no missing rank and still differ from those of all ranks."""
    error: str = ""
    masked: list[int] = field(default_factory=list)


@task
def feed(me: Me, case: Case) -> None:
    """Makes what this rank dispatches in a case, and what its sums are to be, for `endure` and `outlast`."""
    me.keep["fed"] = (case, inputs(case, me.group.rank), sums_of_rows(case, me.group.rank))


def _fed(me: Me, case: Case) -> tuple[Any, Any]:
    if me.keep.get("fed", (None,))[0] != case:
        feed(me, case)
    _, fed, right = me.keep["fed"]
    return fed, right


@task
def endure(me: Me, case: Case, times: int) -> Endured:
    """The same exchange again and again, up to the first error, with sums compared to what all ranks give."""
    buffer, rank, endured = me.buffer, me.group.rank, Endured()
    fed, right = _fed(me, case)
    try:
        for _ in range(times):
            came = send(buffer, case, fed, rank)
            # The rows themselves, so that sums do not depend on whose other rows a rank has received.
            sums = buffer.combine(came.x, came.handle)
            if sums.missing:
                endured.marked += 1
            elif np.array_equal(ref.bf16_values(as_bits(sums.x)), right, equal_nan=True):
                endured.whole += 1
            else:
                endured.wrong += 1
    except crossrail.CrossrailError as error:
        endured.error = str(error)
    endured.masked = list(buffer.masked())
    return endured


@dataclass
class Outlasted:
    """Results of exchanges until all ranks have had one without a rank."""

    whole: int = 0
    wrong: int = 0
    missing: list[int] = field(default_factory=list)
    marked_at: float = 0.0
    """When the first one without it was complete, by the monotonic clock of the machine."""
    masked: list[int] = field(default_factory=list)


AGREED = 4
"""Exchanges within which every rank has noticed a loss that one has noticed."""


@task
def outlast(me: Me, case: Case, dead: int) -> Outlasted:
    """The same exchange again and again, until a result lacks somebody, which should be `dead`, at every other rank."""
    buffer, rank, outlasted = me.buffer, me.group.rank, Outlasted()
    fed, right = _fed(me, case)
    done = noticed = 0
    others = [other for other in range(case.setup.ranks) if other != dead]
    last: int | None = None
    while last is None or done < last:
        came = send(buffer, case, fed, rank)
        sums = buffer.combine(came.x, came.handle)
        done += 1
        if sums.missing:
            if not outlasted.missing:
                outlasted.missing, outlasted.marked_at, noticed = list(sums.missing), time.monotonic(), done
                me.group.publish(f"outlasted {case.seed}", struct.pack("<Q", done))
            elif list(sums.missing) != outlasted.missing:
                outlasted.wrong += 1
        elif np.array_equal(ref.bf16_values(as_bits(sums.x)), right, equal_nan=True):
            outlasted.whole += 1
        else:
            outlasted.wrong += 1
        # Others may have had a whole result of that exchange, and cannot end the next ones alone: all end with one.
        if outlasted.missing and last is None and done == noticed + AGREED:
            at = me.group.collect(f"outlasted {case.seed}", others)
            last = AGREED + max(struct.unpack("<Q", value)[0] for value in at)
    outlasted.masked = list(buffer.masked())
    return outlasted
