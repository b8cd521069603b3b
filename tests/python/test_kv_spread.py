"""Weights from one process to several, of which some are killed or stopped in the middle."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from kv_receiver import PIECE, SIZES, digest, processes, weights

import crossrail
from crossrail.kv import Receiver, spread

KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)


def context(tls: str) -> crossrail.Context:
    return crossrail.Context(tls=tls, log="error", timeout=60)


@pytest.mark.parametrize("fanout", [1, 2, 4])
@pytest.mark.parametrize("tls", ["shm", "tcp"])
def test_all_have_every_byte(tls: str, fanout: int) -> None:
    tensors = weights(1)
    with processes(tls, {}) as receivers:
        done = spread(context(tls), tensors, [one.described for one in receivers], fanout=fanout, piece=PIECE)
        assert (done.reached, done.lost, done.nbytes) == (["r0", "r1", "r2", "r3"], {}, sum(SIZES))
        for one in receivers:
            assert one.outcome() == {"lost": {}, "digest": digest(tensors)}


@pytest.mark.parametrize(
    ("tls", "doomed"),
    [
        ("shm", {0: (20, KILL)}),
        ("tcp", {1: (1, KILL)}),
        ("shm", {1: (40, KILL), 2: (20, KILL)}),
        ("tcp", {1: (40, KILL), 2: (20, KILL)}),
        ("shm", {3: (60, KILL)}),
        ("shm", {0: (0, STOP), 1: (0, KILL), 2: (50, KILL)}),
        ("tcp", {1: (30, STOP)}),
    ],
)
def test_lost_relays_are_passed_over_and_named(tls: str, doomed: dict[int, tuple[int, int]]) -> None:
    tensors = weights(1)
    with processes(tls, doomed) as receivers:
        stopped = any(how == STOP for _, how in doomed.values())
        stall = 8.0 if stopped else 60.0  # a killed one is not waited for
        done = spread(context(tls), tensors, [one.described for one in receivers], piece=PIECE, stall=stall)
        assert done.seconds < 40
        assert set(done.lost) == {f"r{at}" for at in doomed}
        assert done.reached == [f"r{at}" for at in range(4) if at not in doomed]
        for at, (_, how) in doomed.items():
            assert ("no progress report for 8 s" if how == STOP else "has ended") in done.lost[f"r{at}"]
        for at, one in enumerate(receivers):
            if at not in doomed:
                assert one.outcome() == {"lost": done.lost, "digest": digest(tensors)}


def test_a_tree_loses_an_inner_relay() -> None:
    tensors = weights(1)
    with processes("shm", {0: (25, KILL)}) as receivers:
        done = spread(context("shm"), tensors, [one.described for one in receivers], piece=PIECE, fanout=2)
        assert set(done.lost) == {"r0"}
        assert all(one.outcome()["digest"] == digest(tensors) for one in receivers[1:])


SOURCE = """
import os, signal, sys, crossrail
from kv_receiver import PIECE, weights
from crossrail.kv import _spread, spread
turn = _spread._Source.turn
def doomed(source):
    turn(source)
    if any(have >= 10 for have in source.have.values()):
        os.kill(os.getpid(), signal.SIGKILL)
_spread._Source.turn = doomed
spread(crossrail.Context(tls="shm", log="error"), weights(1), map(bytes.fromhex, sys.argv[1:]), piece=64, name="origin")
"""


def test_a_killed_source_is_named_at_the_receivers() -> None:
    with processes("shm", {}, count=3) as receivers:
        command = [sys.executable, "-c", SOURCE, *(one.described.hex() for one in receivers)]
        environment = {"PYTHONPATH": ":".join(sys.path)}
        assert subprocess.run(command, env=environment, timeout=60).returncode == -KILL
        began = time.monotonic()
        for one in receivers:
            outcome = one.outcome()
            assert (outcome["error"], outcome["peer"]) == ("peer_dead", "origin")
            assert "pieces have arrived" in outcome["text"]
        assert time.monotonic() - began < 20


def test_one_that_does_not_receive_is_lost_and_one_that_is_not_told_gives_up() -> None:
    tensors = weights(1)
    with (
        processes("shm", {}, count=1) as receivers,
        processes("shm", {}, count=1, timeout=0.5) as untold,
        Receiver(context("shm"), weights(0), name="idle") as idle,
    ):
        described = [receivers[0].described, idle.describe()]
        done = spread(context("shm"), tensors, described, piece=PIECE, stall=6.0)
        assert done.reached == ["r0"] and done.lost == {"idle": "no progress report for 6 s"}
        assert receivers[0].outcome()["digest"] == digest(tensors)
        outcome = untold[0].outcome()
        assert outcome["error"] == "timeout" and "0 of 0 pieces" in outcome["text"]
        with pytest.raises(crossrail.TimeoutError, match="given this end up, at 0 of"):
            idle.receive()


def test_receivers_that_are_not_complete_in_time_are_lost() -> None:
    with processes("shm", {0: (5, STOP)}, count=1) as receivers:
        done = spread(context("shm"), weights(1), [receivers[0].described], piece=PIECE, stall=30, timeout=6)
        assert done.reached == [] and "not complete after" in done.lost["r0"]


def test_what_does_not_fit_is_refused() -> None:
    here = context("shm")
    with (
        Receiver(here, [np.zeros(8), np.zeros(4)], name="one") as one,
        Receiver(here, [np.zeros(8)], name="one") as two,
    ):
        for tensors, words in (
            ([np.zeros(8), np.zeros(5)], r"40 bytes of tensors\[1\] here, 32 bytes at one"),
            ([np.zeros(8)], "1 tensors here, 2 tensors at one"),
        ):
            with pytest.raises(crossrail.MismatchError, match=words):
                spread(here, tensors, [one.describe()])
        with pytest.raises(crossrail.UsageError, match="two receivers have the same name"):
            spread(here, [np.zeros(8)], [two.describe(), two.describe()])
        for data in (b"", b"x" * 50, one.describe()[:-3]):
            with pytest.raises(crossrail.UsageError, match=r"not a description of weights|no weights"):
                spread(here, [np.zeros(8)], [data])
        for options in ({"fanout": 0}, {"piece": 0}, {"stall": 0}):
            with pytest.raises(crossrail.UsageError):
                spread(here, [np.zeros(8)], [], **options)
    with pytest.raises(crossrail.UsageError, match="no tensors"):
        Receiver(here, [])
    with pytest.raises(crossrail.UsageError, match="contiguous"):
        Receiver(here, [np.zeros((4, 4))[:, :2]])
