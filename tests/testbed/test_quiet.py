"""A clean run says nothing that sounds like a failure: at the default log level, goodbyes are told from losses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

from bed import SIDES, Bed
from ends import SECRET, Pair

EXPECTED = re.compile(r"crossrail: (\d+ ranks, store tcp://.*|done; node 0 of 2 has the report)")


def test_connecting_and_disconnecting_ranks_of_two_nodes(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000, 2000))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    command = [sys.executable, "-m", "crossrail", "bench", "control", "--num-processes=4", "--world-size=2"]
    command += [f"--master-addr={bed.address('left', 'eth0')}", "--rounds=3", "--experts-per-rank=8"]
    nodes = [
        subprocess.Popen(
            bed.inside(side, *command, f"--rank={number}"),
            env={**clean, "CROSSRAIL_SECRET": SECRET},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, side in enumerate(SIDES)
    ]
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert not [line for text in said for line in text.splitlines() if not EXPECTED.fullmatch(line)]


def test_two_ends_that_part(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000, 2000))
    for what, options in {"p2p": ("--size=4M", "--iters=2"), "latency": ("--sizes=8:64", "--iters=50")}.items():
        for _ in range(3):
            pair = Pair(bed, what, settings={"CROSSRAIL_LOG": "warn"})
            done = pair.run(*options)
            assert (done.listening.code, done.driving.code) == (0, 0)
            for said in (done.listening.said, done.driving.said):
                lines = [line for line in said.splitlines() if "listening on" not in line and "done; " not in line]
                assert not lines
