"""The verdict names what holds a transfer back, what to try, and the figures behind it."""

from dataclasses import replace

import pytest

from crossrail_tools.report.pipeline import Waits, stage_shares
from crossrail_tools.report.schema import Lane, Row, Stages
from crossrail_tools.report.verdict import Facts, judge

FULL = Stages(match_us=0.0, window_us=0.0, wire_us=950.0, copy_us=20.0)


def rails(count: int, rate: float = 0.25, line: float | None = None, retransmits: int = 0) -> list[Lane]:
    return [
        Lane(f"tcp/eth{n}", 10_000_000, 1 / count, gb_per_s=rate, retransmits=retransmits, line_gb_per_s=line)
        for n in range(1, count + 1)
    ]


def changed(made: Facts, **changes) -> Facts:
    own = {name: changes.pop(name) for name in ("dead", "channels_found") if name in changes}
    names = {"us": "p50_us", "raw_gb_per_s": "raw_tcp_gb_per_s"}
    row = replace(made.row, **{names.get(name, name): value for name, value in changes.items()})
    return replace(made, row=row, **own)


def facts(**changes) -> Facts:
    base = Row(
        "p2p",
        "tcp",
        size=64 << 20,
        p50_us=1000.0,
        gb_per_s=1.0,
        protocol="chunks",
        stages=FULL,
        lanes=rails(4),
        window=16,
        chunk=2 << 20,
        channels=1,
        memory="ordinary",
    )
    return changed(Facts(base), **changes)


def test_a_dead_rail_comes_before_everything() -> None:
    verdict = judge(facts(dead=["tcp/eth3"], stages=replace(FULL, window_us=900.0)))
    assert verdict.holds == "rail"
    assert "tcp/eth3 went down" in verdict.text
    assert "tcp/eth1, tcp/eth2, tcp/eth4 carried" in verdict.text


def test_a_late_receiver() -> None:
    verdict = judge(facts(stages=replace(FULL, match_us=400.0)))
    assert (verdict.holds, "40%" in verdict.text, "Post receives" in verdict.text) == ("match", True, True)


@pytest.mark.parametrize(("window_us", "holds"), [(240.0, "network"), (260.0, "window")])
def test_a_full_window(window_us: float, holds: str) -> None:
    verdict = judge(facts(stages=replace(FULL, window_us=window_us)))
    assert verdict.holds == holds
    if holds == "window":
        assert "window: raise to 32" in verdict.text
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
    assert verdict.holds == "host memory"
    assert "90%" in verdict.text
    assert "1.00 GB/s" in verdict.text
    assert said in verdict.text


def test_full_rails_want_more_rails() -> None:
    verdict = judge(facts(lanes=rails(4, 0.24, line=0.25)))
    assert verdict.holds == "network"
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
    assert "tcp/eth3 retransmitted 100 segments (1.4% of 10.00 MB)" in text


def test_nothing_measured_is_no_crash() -> None:
    assert judge(facts(us=0.0, lanes=[], gb_per_s=0.0)).holds == "network"


def gpu(**changes) -> Facts:
    """A transfer into GPU memory over TCP that nothing in particular holds back: half of what sockets carry."""
    base = facts(
        device="cuda:0,cuda:1",
        memory=None,
        unpack="kernel",
        unpack_gb_per_s={"kernel": 30.0, "d2d": 9.0, "host": 5.0},
        raw_gb_per_s=2.0,
        bounce=128 << 20,
        stages=replace(FULL, pack_us=100.0, unpack_us=60.0, slot_us=10.0),
    )
    return changed(base, **changes)


@pytest.mark.parametrize(("rate", "holds"), [(1.69, "host memory"), (1.71, "network")])
@pytest.mark.parametrize("made", [facts, gpu])
def test_near_the_raw_sockets_it_is_the_network(made, rate: float, holds: str) -> None:
    verdict = judge(made(gb_per_s=rate, raw_gb_per_s=2.0))
    assert verdict.holds == holds
    assert verdict.text.startswith(f"{holds}: ")
    assert "2.00 GB/s that plain TCP sockets" in verdict.text or "plain TCP sockets carried 2.00 GB/s" in verdict.text
    if holds == "network":
        assert "86% of the 2.00 GB/s" in verdict.text


def test_a_window_that_a_socket_takes_at_once_is_the_limit_if_it_led() -> None:
    """--window 1 --chunk 64K: 87 % of the time went into waiting, and plain sockets were hardly faster in this run."""
    stages = replace(FULL, window_us=870.0, slowest={"window": 0.87, "network": 0.13})
    small = facts(raw_gb_per_s=1.1, stages=stages, window=1, chunk=64 << 10)
    assert judge(small).holds == "window" and "raise to" in judge(small).text
    assert judge(changed(small, chunk=2 << 20)).holds == "network"
    assert judge(changed(small, stages=replace(stages, slowest={"window": 0.4, "network": 0.6}))).holds == "network"


def test_a_network_that_is_full_hides_windows_slots_and_unpacking() -> None:
    stages = replace(FULL, window_us=900.0, slot_us=900.0, unpack_us=900.0, copy_us=900.0)
    assert judge(gpu(gb_per_s=1.9, stages=stages)).holds == "network"
    assert judge(gpu(gb_per_s=1.9, stages=replace(stages, match_us=300.0))).holds == "match"


@pytest.mark.parametrize(("rate", "holds"), [(4.2, "host memory"), (4.3, "unpack")])
def test_near_what_the_way_to_unpack_does_alone_another_is_advised(rate: float, holds: str) -> None:
    verdict = judge(gpu(unpack="host", gb_per_s=rate, raw_gb_per_s=20.0))
    assert verdict.holds == holds
    if holds == "unpack":
        assert verdict.text.startswith("unpack: use kernel. ")
        assert "kernel 30.00 GB/s, d2d 9.00 GB/s, host 5.00 GB/s" in verdict.text
        assert "by host, at 4.30 GB/s" in verdict.text


@pytest.mark.parametrize(("busy_us", "holds"), [(790.0, "host memory"), (810.0, "unpack")])
def test_a_transfer_that_unpacks_all_the_time(busy_us: float, holds: str) -> None:
    stages = replace(FULL, unpack_us=busy_us)
    verdict = judge(gpu(unpack="d2d", stages=stages))
    assert verdict.holds == holds
    if holds == "unpack":
        assert verdict.text.startswith("unpack: use kernel. 81% of the time was unpacking, by d2d")


@pytest.mark.parametrize(("kernel", "advised"), [(9.8, False), (10.0, True)])
def test_another_way_must_be_a_tenth_faster_to_be_advised(kernel: float, advised: bool) -> None:
    rates = {"kernel": kernel, "d2d": 9.0, "host": 5.0}
    text = judge(gpu(unpack="d2d", unpack_gb_per_s=rates, stages=replace(FULL, unpack_us=900.0))).text
    assert ("use kernel" in text) is advised
    assert ("d2d is the fastest mode here" in text) is not advised


def test_the_fastest_way_to_unpack_wants_larger_chunks() -> None:
    verdict = judge(gpu(stages=replace(FULL, unpack_us=900.0)))
    assert verdict.holds == "unpack"
    assert "kernel is the fastest mode here: larger chunks (--chunk)" in verdict.text


def test_without_the_rates_of_unpacking_its_share_still_counts() -> None:
    verdict = judge(gpu(unpack_gb_per_s={}, stages=replace(FULL, unpack_us=900.0)))
    assert verdict.holds == "unpack"
    assert "alone" not in verdict.text


@pytest.mark.parametrize(("slot_us", "holds"), [(240.0, "host memory"), (260.0, "bounce")])
def test_chunks_that_wait_for_slots_want_more_bounce_memory(slot_us: float, holds: str) -> None:
    verdict = judge(gpu(stages=replace(FULL, slot_us=slot_us, unpack_us=300.0)))
    assert verdict.holds == holds
    if holds == "bounce":
        assert "26% of the time chunks waited" in verdict.text
        assert "of 128M" in verdict.text
        assert "CROSSRAIL_BOUNCE=256M" in verdict.text


@pytest.mark.parametrize(("busy_us", "holds"), [(390.0, "bounce"), (410.0, "unpack")])
def test_slots_that_unpacking_holds_are_not_for_want_of_memory(busy_us: float, holds: str) -> None:
    assert judge(gpu(stages=replace(FULL, slot_us=300.0, unpack_us=busy_us))).holds == holds


@pytest.mark.parametrize(
    ("window", "idle_us", "raw", "said"),
    [
        (16, 260.0, None, "raise to 32."),
        (12, 260.0, None, "raise to 32."),  # 12 / 0.74 = 16.2
        (16, 800.0, None, "raise to 128."),
        (16, 260.0, 4.5, "raise to 128."),  # 16 x 4.5 = 72
        (16, 260.0, 3.9, "raise to 64."),
        (512, 900.0, None, "raise to 1024."),
        (1024, 900.0, None, "raise it."),
        (None, 900.0, None, "raise it."),
        (16, 1000.0, None, "raise to 32."),
    ],
)
def test_how_far_to_raise_the_window(window: int | None, idle_us: float, raw: float | None, said: str) -> None:
    stages = replace(FULL, window_us=idle_us)
    verdict = judge(facts(window=window, stages=stages, raw_gb_per_s=raw))
    assert verdict.holds == "window"
    assert f"window: {said}" in verdict.text
    assert ("plain TCP sockets carried" in verdict.text) is (raw is not None)
    assert "--chunk 4M" in verdict.text
    if window == 1024:
        assert "--window" not in verdict.text


def test_host_memory_is_what_is_left() -> None:
    verdict = judge(gpu())
    assert verdict.holds == "host memory"
    for part in ("1.00 GB/s", "carried 2.00 GB/s", "kernel unpacks 30.00 GB/s alone", "10% packing", "6% unpacking"):
        assert part in verdict.text, verdict.text
    host = judge(facts(raw_gb_per_s=2.0))
    assert host.holds == "host memory"
    assert "unpack" not in host.text


@pytest.mark.parametrize(("copy_us", "said"), [(490.0, "where plain TCP"), (510.0, "went into copying memory")])
def test_half_of_the_time_copying_is_memory(copy_us: float, said: str) -> None:
    verdict = judge(gpu(stages=replace(FULL, copy_us=copy_us)))
    assert verdict.holds == "host memory"
    assert said in verdict.text


def test_a_copy_from_gpu_to_gpu_is_no_host_memory() -> None:
    verdict = judge(gpu(protocol="direct(cuda_ipc)", gb_per_s=370.0, stages=replace(FULL, copy_us=970.0), lanes=[]))
    assert verdict.holds == "copy"
    assert "97% of the time the GPUs copied (370 GB/s for 64M)" in verdict.text


def test_staging_is_no_matter_of_host_transfers() -> None:
    stages = replace(FULL, unpack_us=990.0, slot_us=990.0)
    assert judge(facts(stages=stages, unpack="host", unpack_gb_per_s={"host": 1.0})).holds == "network"


def test_sockets_slower_than_the_transfer_are_no_ceiling() -> None:
    verdict = judge(facts(gb_per_s=3.73, raw_gb_per_s=1.54))
    assert "%" not in verdict.text.partition("Plain TCP sockets")[2]
    assert "242%" not in verdict.text
    assert "Plain TCP sockets carried only 1.54 GB/s" in verdict.text
    assert "void" in verdict.text
    slightly = judge(facts(gb_per_s=1.02, raw_gb_per_s=1.0))
    assert "void" not in slightly.text
    assert "102%" in slightly.text


def test_sockets_slower_than_the_transfer_do_not_advise_on_the_window() -> None:
    verdict = judge(facts(gb_per_s=3.0, raw_gb_per_s=1.0, stages=replace(FULL, window_us=600.0)))
    assert verdict.holds == "window"
    assert "where plain TCP sockets" not in verdict.text
    assert "void" in verdict.text


def test_unpacking_alone_that_was_slower_is_no_ceiling() -> None:
    staged = replace(FULL, unpack_us=900.0)
    both = {"kernel": 1.0, "d2d": 0.4}
    verdict = judge(
        facts(device="cuda:0", unpack="kernel", unpack_gb_per_s=both, gb_per_s=2.0, stages=staged, protocol="staged")
    )
    assert verdict.holds == "unpack"
    assert "void" in verdict.text


def test_a_stated_line_rate_that_was_surpassed_compares_with_nothing() -> None:
    verdict = judge(facts(lanes=rails(4, line=0.125), gb_per_s=1.0))
    assert "200%" not in verdict.text
    assert "not their rates" in verdict.text


def test_the_ring_in_shared_memory_is_not_given_more_rails() -> None:
    ring = facts(lanes=[Lane("shm", 10_000_000, 1.0)], unused={"shm(cma)": "process_vm_readv: not permitted"})
    verdict = judge(ring)
    assert verdict.holds == "host memory"
    assert "--rails" not in verdict.text
    assert "--channels" not in verdict.text
    assert "--memory shared" in verdict.text
    assert verdict.text.endswith("Not used: shm(cma): process_vm_readv: not permitted.")


def test_rails_that_carry_nothing_are_listed_by_reason() -> None:
    unused = {"tcp/eth5": "the peer offers eth1 only", "tcp/eth6": "the peer offers eth1 only", "tcp/eth7": "refused"}
    verdict = judge(facts(unused=unused))
    assert "Not used: tcp/eth5, tcp/eth6: the peer offers eth1 only. Not used: tcp/eth7: refused." in verdict.text
    assert "--channels" not in verdict.text
    slower = judge(facts(unused=unused, gb_per_s=1.0, raw_gb_per_s=2.0))
    assert slower.holds == "host memory"
    assert "--channels" not in slower.text


def held(sender: Waits, receiver: Waits = Waits(), window_us: float = 0.0, match_us: float = 0.0) -> Stages:  # noqa: B008
    """The stages of a transfer of 1000 us that is busy with copies all the time, and waits for what is said."""
    shares = stage_shares(1000.0, match_us, window_us, sender, receiver)
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
    return replace(
        FULL, pack_us=950.0, unpack_us=950.0, slot_us=950.0, window_us=window_us, match_us=match_us, slowest=shares
    )


@pytest.mark.parametrize(
    ("stages", "holds", "said"),
    [
        (held(Waits(pack=600.0), Waits(unpack=500.0)), "pack", "Slowest stage, of the time: pack 60%, unpack 40%."),
        (held(Waits(pack=50.0), Waits(unpack=700.0)), "unpack", "70% of the time everything waited for unpacking"),
        # The sender has neither slots nor window because the receiver unpacks.
        (held(Waits(slot=300.0), Waits(unpack=600.0), window_us=250.0), "unpack", "unpack 60%, network 40%."),
        (held(Waits(slot=800.0), Waits(unpack=100.0)), "bounce", "70% of the time chunks waited for a slot"),
        (held(Waits(), Waits(slot=300.0)), "bounce", "30% of the time chunks waited for a slot"),
        (held(Waits(pack=100.0), Waits(unpack=100.0), window_us=700.0), "window", "60% of the time"),
        (held(Waits(pack=200.0), Waits(unpack=300.0)), "host memory", "network 50%, unpack 30%, pack 20%."),
        (held(Waits(pack=900.0), match_us=400.0), "pack", "pack 60%, match 40%."),
        (held(Waits(pack=300.0), match_us=600.0), "match", "60% of the time the data waited for the receiver"),
        # Receives that are posted late cost nothing while the network is what everything waits for.
        (held(Waits(), match_us=300.0), "host memory", "network 70%, match 30%."),
    ],
)
def test_the_stage_that_the_others_wait_for_is_named(stages: Stages, holds: str, said: str) -> None:
    verdict = judge(gpu(stages=stages))
    assert verdict.holds == holds
    assert said in verdict.text, verdict.text


def test_unpacking_that_nobody_waits_for_is_not_the_limit() -> None:
    stages = held(Waits())
    assert judge(gpu(stages=stages, gb_per_s=26.0, raw_gb_per_s=40.0)).holds == "host memory"
    assert judge(gpu(stages=replace(stages, slowest={}), gb_per_s=26.0, raw_gb_per_s=40.0)).holds == "unpack"


@pytest.mark.parametrize("made", [facts(), facts(lanes=rails(1)), gpu(), facts(raw_gb_per_s=2.0)])
def test_more_connections_than_were_found_are_no_advice(made: Facts) -> None:
    assert "--channels 2" in judge(made).text
    found = judge(changed(made, channels=4, channels_found=True)).text
    assert "--channels" not in found
    assert "--pin none" in found or "CROSSRAIL_CHANNELS=auto has 4 connections per rail" in found
