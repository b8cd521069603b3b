"""Many short one-sided operations over rails of unequal rates: all rails carry them, in proportion."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bed import Bed
from ends import End, Pair

MAKE = Callable[..., Bed]
UNEVEN_MBIT = (50, 100, 200, 400)
PROGRAM = str(Path(__file__).with_name("short_end.py"))


def run(bed: Bed, op: str, size: int) -> tuple[float, dict[str, float]]:
    """The rate as a part of the rails' sum, and each device's share by the receipts."""
    pair = Pair(bed)
    serving = End(bed.inside("left", sys.executable, PROGRAM, "serve", pair.address()), pair.environment())
    try:
        serving.wait_to_say("listening on")
        command = bed.inside("right", sys.executable, PROGRAM, "drive", pair.address(), op, str(size))
        done = subprocess.run(command, env=pair.clean(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr + serving.said
        assert serving.end(20.0).code == 0, serving.said
    finally:
        serving.kill()
    found = json.loads(done.stdout)
    shares = dict.fromkeys(bed.rails, 0.0)
    for name, share in found["shares"].items():
        shares[name.removeprefix("tcp/").partition(":")[0]] += share
    return found["bytes_per_s"] / (bed.gb_per_s * 1e9), shares


@pytest.mark.parametrize("size", [64 << 10, 16 << 10], ids=["64K", "16K"])
@pytest.mark.parametrize("op", ["write", "read", "rows", "notice"])
def test_short_one_sided_operations_use_all_rails(make_bed: MAKE, op: str, size: int) -> None:
    """On the connection for messages alone they reach its rail's part, 0.07 here, and the others carry nothing."""
    bed = make_bed(UNEVEN_MBIT)
    # Short ones take a busy machine long: then the processors set the rails' shares, not their rates.
    reach, within = (0.5, 0.12) if size > 16 << 10 else (0.2, 0.4)
    seen = []
    for _ in range(4):  # other work on the machine takes from a run's rate, and shifts its shares
        reached, shares = run(bed, op, size)
        seen.append(f"{reached:.3f} of the sum, shares {shares}")
        parts = zip((shares[rail] for rail in bed.rails), UNEVEN_MBIT, strict=True)
        in_proportion = all(abs(part - mbit / sum(UNEVEN_MBIT)) < within for part, mbit in parts)
        if reached > reach and in_proportion and min(shares.values()) > 0.02 and shares["eth4"] > shares["eth1"]:
            return
    raise AssertionError("\n".join(seen))
