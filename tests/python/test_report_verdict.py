"""The verdict names what holds a transfer back, what to try, and the figures behind it."""

from dataclasses import replace

import pytest

from crossrail.report import Facts, Lane, Stages, judge

FULL = Stages(match_us=0.0, window_us=0.0, wire_us=950.0, copy_us=20.0)


def rails(count: int, rate: float = 0.25, line: float | None = None, retransmits: int = 0) -> list[Lane]:
    return [
        Lane(f"tcp/eth{n}", 10_000_000, 1 / count, gb_per_s=rate, retransmits=retransmits, line_gb_per_s=line)
        for n in range(1, count + 1)
    ]


def facts(**changes) -> Facts:
    base = Facts(
        size=64 << 20,
        us=1000.0,
        gb_per_s=1.0,
        protocol="chunks",
        stages=FULL,
        lanes=rails(4),
        window=16,
        chunk=2 << 20,
        channels=1,
        memory="ordinary",
    )
    return replace(base, **changes)


def test_a_dead_rail_comes_before_everything() -> None:
    verdict = judge(facts(dead=["tcp/eth3"], stages=replace(FULL, window_us=900.0)))
    assert verdict.holds == "rail"
    assert "tcp/eth3 went down" in verdict.text
    assert "tcp/eth1, tcp/eth2, tcp/eth4 carried" in verdict.text


def test_a_late_receiver() -> None:
    verdict = judge(facts(stages=replace(FULL, match_us=400.0)))
    assert (verdict.holds, "40%" in verdict.text, "Post receives" in verdict.text) == ("match", True, True)


@pytest.mark.parametrize(("window_us", "holds"), [(240.0, "wire"), (260.0, "window")])
def test_a_full_window(window_us: float, holds: str) -> None:
    verdict = judge(facts(stages=replace(FULL, window_us=window_us)))
    assert verdict.holds == holds
    if holds == "window":
        assert "26%" in verdict.text
        assert "--window 32 or --chunk 4M" in verdict.text


@pytest.mark.parametrize(
    ("protocol", "memory", "said"),
    [
        ("direct(cma)", "ordinary", "--memory shared"),
        ("direct(mapped)", "shared", "one plain copy"),
        ("chunks", "shared", "already use shared memory"),
    ],
)
def test_copying(protocol: str, memory: str, said: str) -> None:
    verdict = judge(facts(protocol=protocol, memory=memory, stages=replace(FULL, copy_us=900.0), lanes=[]))
    assert verdict.holds == "copy"
    assert "90%" in verdict.text
    assert "1.00 GB/s" in verdict.text
    assert said in verdict.text


def test_full_rails_want_more_rails() -> None:
    verdict = judge(facts(lanes=rails(4, 0.24, line=0.25)))
    assert verdict.holds == "wire"
    assert "100% of their 1.00 GB/s: full" in verdict.text


def test_rails_far_below_their_line_want_channels() -> None:
    verdict = judge(facts(lanes=rails(4, 0.25, line=1.25)))
    assert "20% of their 5.00 GB/s" in verdict.text
    assert "--channels 2" in verdict.text


def test_one_rail_alone() -> None:
    assert "--rails" in judge(facts(lanes=rails(1, 1.0))).text


def test_loss_is_named_with_its_rail() -> None:
    lanes = rails(4)
    lanes[2] = replace(lanes[2], retransmits=100)
    text = judge(facts(lanes=lanes)).text
    assert "tcp/eth3 sent 100 segments again (1.4% of 10.00 MB)" in text


def test_nothing_measured_is_no_crash() -> None:
    assert judge(facts(us=0.0, lanes=[], gb_per_s=0.0)).holds == "wire"
