"""Several rails at once: how they share, what happens when one fails, and that each really uses its NIC.

Speeds are asserted loosely here, and of rails that a busy machine can fill too: other work may share it. benches/run.py
has the tight figures.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from bed import Bed, Side
from ends import SECRET, End, Pair, wait_for_traffic

from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import print_report

MAKE = Callable[..., Bed]
MIB = 1 << 20
COMMAND = (sys.executable, "-m", "crossrail", "bench")
EQUAL_MBIT = (500, 500, 500, 500)
UNEVEN_MBIT = (500, 500, 250, 125)
EIGHT_MBIT = (400, 300, 200, 150, 100, 80, 50, 25)


def shares(row: Row) -> dict[str, float]:
    """Each device's share of all bytes."""
    return {lane.device or lane.name: lane.share for lane in row.lanes}


def proportional(bed: Bed, within: float) -> Callable[[Row], None]:
    """That the rails' shares are as their rates are, and that together they reach half of these."""

    def check(row: Row) -> None:
        for device, mbit in zip(bed.rails, bed.mbit, strict=True):
            assert shares(row).get(device, 0.0) == pytest.approx(mbit / sum(bed.mbit), abs=within), device
        assert row.gb_per_s is not None
        assert row.gb_per_s > 0.5 * bed.gb_per_s

    return check


def test_four_equal_rails_share_equally_and_add_up(make_bed: MAKE) -> None:
    bed = make_bed(EQUAL_MBIT)

    def check(row: Row) -> None:
        proportional(bed, 0.06)(row)
        assert row.raw_tcp_gb_per_s is not None, row.notes
        assert row.raw_tcp_gb_per_s > 0.5 * bed.gb_per_s
        assert row.verdict is not None
        assert row.verdict.holds == "network"

    row = Pair(bed).undisturbed(check, "--size=32M", "--iters=8")
    assert row.transport == "tcp"
    assert sorted(shares(row)) == bed.rails
    assert sum(lane.bytes for lane in row.lanes) >= 8 * 32 * MIB
    for rate in (row.gb_per_s, row.raw_tcp_gb_per_s):
        assert rate is not None
        assert rate <= 1.05 * bed.gb_per_s
    for device in bed.rails:
        assert bed.sent_bytes("right", device) > 8 * 32 * MIB * 0.15


def test_uneven_rails_fill_in_proportion(make_bed: MAKE) -> None:
    bed = make_bed(UNEVEN_MBIT)
    Pair(bed).undisturbed(proportional(bed, 0.07), "--size=32M", "--iters=8")


def test_eight_rails_of_any_rates_fill_in_proportion(make_bed: MAKE) -> None:
    bed = make_bed(EIGHT_MBIT)
    Pair(bed).undisturbed(proportional(bed, 0.07), "--size=32M", "--iters=4")


def test_messages_that_go_with_their_first_frame_use_all_rails(make_bed: MAKE) -> None:
    """Not the first that was named alone, which is the slowest here."""
    bed = make_bed((50, 100, 200, 400))

    def check(row: Row) -> None:
        assert sorted(shares(row)) == bed.rails
        assert shares(row)["eth4"] > 3 * shares(row)["eth1"], shares(row)
        assert row.gb_per_s is not None
        assert row.gb_per_s > 0.4 * bed.gb_per_s, "eth1 alone carries 0.067 of the sum"

    for size in ("16K", "64K"):
        Pair(bed, what="bandwidth").undisturbed(check, f"--sizes={size}", "--iters=60")


def test_messages_move_to_the_fastest_rail_once_rates_are_known(make_bed: MAKE) -> None:
    """Their connection begins on the first, the slowest here. All that is sent meanwhile arrives, and verifies."""
    bed = make_bed((20, 200, 40, 30))
    pair = Pair(bed, what="bandwidth", settings={"CROSSRAIL_LOG": "debug"})
    done = pair.run("--sizes=256K,8", "--iters=20")
    assert "messages go over rail eth2, which is faster" in done.driving.said + done.listening.said
    assert done.report is not None
    by_size = {row.size: shares(row) for row in done.report.rows}
    assert by_size[8].get("eth2", 0.0) > 0.9, by_size
    for said in (done.driving.said, done.listening.said):
        assert not re.search(r"warn: .*(:messages|is lost)", said), said


def test_a_rail_behind_a_long_queue_keeps_its_share(make_bed: MAKE) -> None:
    """What waits in its queue is late by 20 ms; the others neither wait for it nor take its part."""
    bed = make_bed((250, 250, 250, 250), queues=("2ms", "2ms", "2ms", "20ms"), congestion="reno")
    Pair(bed).undisturbed(proportional(bed, 0.1), "--size=32M", "--iters=4")


def test_one_rail_is_compared_with_iperf3_over_the_same_link(make_bed: MAKE) -> None:
    """The control link carries many times as much."""
    if shutil.which("iperf3") is None and os.environ.get("CI") != "true":
        pytest.skip("iperf3 is not installed")
    bed = make_bed((200,))
    row = Pair(bed).run("--size=4M", "--iters=2", "--rounds=1", "--compare=iperf3").row
    peer = row.peers["iperf3"]
    assert peer.error is None
    assert peer.gb_per_s is not None
    assert peer.gb_per_s <= 1.25 * bed.gb_per_s


def test_only_the_chosen_rails_carry_data(make_bed: MAKE) -> None:
    bed = make_bed()
    row = Pair(bed, rails=["eth1", "eth3"]).run("--size=32M", "--iters=4").row
    assert sorted(shares(row)) == ["eth1", "eth3"]
    for device in ("eth1", "eth3"):
        assert bed.sent_bytes("right", device) > 4 * 32 * MIB * 0.3
    for device in ("eth0", "eth2", "eth4"):
        assert bed.sent_bytes("right", device) < MIB, device


@pytest.mark.parametrize("fewer", ["listening", "driving"])
def test_fewer_rails_than_the_other_end_has_are_told_at_both(make_bed: MAKE, fewer: str) -> None:
    """A rail that was asked for and is not used: a warning at both ends, a line of the verdict, a row of the table."""
    bed = make_bed((1000, 1000, 1000, 1000))
    rails = ["eth1", "eth2"]
    listener = rails if fewer == "listening" else bed.rails
    driver = rails if fewer == "driving" else bed.rails
    pair = Pair(bed, settings={"CROSSRAIL_LOG": "warn"})
    with pair.listening(f"--rails={','.join(listener)}") as listening:
        options = (f"--rails={','.join(driver)}", "--size=8M", "--iters=4")
        command = bed.inside("right", *COMMAND, "p2p", f"--connect={pair.address()}", *options, "--json=-")
        done = subprocess.run(command, env=pair.clean(), capture_output=True, text=True, timeout=60, check=True)
        said_there = listening.end().said
    (row,) = Report.loads(done.stdout).rows
    assert sorted(shares(row)) == rails
    offers = "the peer" if fewer == "listening" else "this end"
    reason = f"{offers} offers eth1 eth2 only"
    where = "" if fewer == "listening" else " at the listening end"
    assert row.unused.keys() == {f"tcp/eth3{where}", f"tcp/eth4{where}"}
    assert all(reason in why for why in row.unused.values())
    assert row.verdict is not None
    assert f"Not used: tcp/eth3{where}, tcp/eth4{where}: {reason}" in row.verdict.text
    assert "--channels" not in row.verdict.text
    asked, other = (done.stderr, said_there) if fewer == "listening" else (said_there, done.stderr)
    assert "eth3, eth4 are not used: the peer offers eth1 eth2 only" in asked, "each end's own words"
    assert "its eth3, eth4 are not used: no device of CROSSRAIL_NET_DEVICES=eth1,eth2" in other
    shown = io.StringIO()
    print_report(Report.loads(done.stdout), console(shown))
    assert re.search(rf"^tcp/eth3{where} +not used", shown.getvalue(), re.MULTILINE), shown.getvalue()


def test_equal_rails_give_no_such_warning(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    outcome = Pair(bed, settings={"CROSSRAIL_LOG": "warn"}).run("--size=8M", "--iters=2")
    assert not outcome.row.unused
    assert "not used" not in outcome.driving.said + outcome.listening.said


def test_copies_that_are_not_permitted_are_told_at_both_ends() -> None:
    """Two PID namespaces: neither process can name the other, so that single copies (CMA) fall back to the ring."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    listening = End([*COMMAND, "p2p", "--listen=127.0.0.1:0", "--timeout=20s"], {})
    try:
        address = listening.wait_to_say("listening on").split("listening on ")[1].partition(";")[0]
        command = ["unshare", "--pid", "--fork", "--mount-proc", *COMMAND, "p2p", f"--connect={address}"]
        done = subprocess.run(
            [*command, "--size=4M", "--iters=3", "--json=-"], env=clean, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        said_there = listening.end().said
    finally:
        listening.kill()
    (row,) = Report.loads(done.stdout).rows
    assert "PID namespace" in row.unused["shm(cma)"]
    assert row.verdict is not None
    assert row.verdict.holds in ("host memory", "match")
    assert "Not used: shm(cma):" in row.verdict.text
    assert "rails" not in row.verdict.text
    for said in (done.stderr, said_there):
        assert "no single copies by CMA, large messages go through the shared ring" in said


def test_rails_over_ipv6(make_bed: MAKE) -> None:
    bed = make_bed((2000, 2000), ipv4=False)
    row = Pair(bed, version=6).run("--size=32M", "--iters=4").row
    assert row.verified
    assert sorted(shares(row)) == ["eth1", "eth2"]
    for device in ("eth1", "eth2"):
        assert bed.sent_bytes("right", device) > 4 * 32 * MIB * 0.3
    assert row.raw_tcp_gb_per_s is not None, row.notes


def _names(row: Row, said: str, device: str) -> None:
    """The loss of ``device`` stands in a receipt of ``row``, in the log ``said``, and in the verdict."""
    assert any(device in note for one in row.iterations for note in one.notes), "no receipt names the lost rail"
    assert any(device in line for line in said.splitlines() if "is down" in line), said
    assert row.verdict is not None
    assert row.verdict.holds == "rail"
    assert device in row.verdict.text


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_rail_set_down_in_mid_transfer_leaves_the_rest_to_finish(make_bed: MAKE, side: str) -> None:
    bed = make_bed()

    def down(driving: End) -> None:
        wait_for_traffic(bed, "eth3", 80 * MIB, driving)
        bed.set_down("left" if side == "left" else "right", "eth3")

    outcome = Pair(bed).run("--size=1G", "--iters=2", "--warmup=0", during=down)
    row = outcome.row
    assert row.verified
    _names(row, outcome.driving.said + outcome.listening.said, "eth3")
    for one in row.iterations:
        assert sum(lane.bytes for lane in one.lanes) >= 512 * MIB
        assert one.us_sender < 6e6
    assert shares(row)["eth3"] < 0.15


def test_a_black_hole_is_found_by_a_deadline(make_bed: MAKE) -> None:
    bed = make_bed()

    def swallow(driving: End) -> None:
        wait_for_traffic(bed, "eth2", 80 * MIB, driving)
        bed.swallow("eth2")

    # Transfers go on without it before it is found: only a run that lasts on finds it.
    outcome = Pair(bed).run("--size=256M", "--iters=10", "--warmup=0", during=swallow)
    row = outcome.row
    assert row.verified
    _names(row, outcome.driving.said + outcome.listening.said, "eth2")
    assert all(one.us_sender < 6e6 for one in row.iterations)


def test_a_rail_that_comes_back_is_used_again(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))

    def down_and_up(driving: End) -> None:
        wait_for_traffic(bed, "eth2", 8 * MIB, driving)
        bed.set_down("left", "eth2")
        driving.wait_to_say("eth2", "is down")
        wait_for_traffic(bed, "eth1", 3 * 8 * MIB, driving)  # at least one whole transfer goes without it
        bed.set_up("left", "eth2")
        wait_for_traffic(bed, "eth2", 8 * MIB, driving)

    row = Pair(bed).run("--size=8M", "--iters=200", during=down_and_up).row
    carried = [sum(lane.bytes for lane in one.lanes if "eth2" in lane.name) for one in row.iterations]
    assert carried[-1] > MIB, "used again at the end"
    assert min(carried) == 0, "out in between"


def test_a_rail_of_a_hundredth_of_the_rate_holds_nothing_up(make_bed: MAKE) -> None:
    """What it would bring last goes over the others: a chunk of 2 MiB takes it 5.6 s, the whole transfer 0.9 s."""

    def check(row: Row) -> None:
        assert all(one.us_sender < 3e6 for one in row.iterations), [one.us_sender for one in row.iterations]
        assert shares(row)["eth2"] < 0.05

    Pair(make_bed((300, 3, 300))).undisturbed(check, "--size=64M", "--iters=2", "--warmup=0")


def test_data_does_not_need_the_control_link(make_bed: MAKE) -> None:
    bed = make_bed((2000, 2000))

    def down(driving: End) -> None:
        wait_for_traffic(bed, "eth1", 32 * MIB, driving)
        bed.set_down("left", "eth0")

    row = Pair(bed).run("--size=64M", "--iters=20", during=down).row
    assert row.verified
    assert sorted(shares(row)) == ["eth1", "eth2"]
    assert bed.sent_bytes("right", "eth0") < MIB


@pytest.mark.parametrize("sides", [("left",), ("right",), ("left", "right")], ids="-".join)
def test_rails_go_on_at_new_addresses(make_bed: MAKE, sides: tuple[Side, ...]) -> None:
    """All rails get other addresses for good, while the control link lives."""
    bed = make_bed((1000, 1000))

    def renumber(driving: End) -> None:
        wait_for_traffic(bed, "eth1", 32 * MIB, driving)
        for side in sides:
            for number in (1, 2):
                nic, address = f"eth{number}", f"10.88.{number}.{1 + (side == 'right')}/24"
                for command in (f"addr flush dev {nic}", f"addr add {address} dev {nic}"):
                    subprocess.run(["ip", "-n", bed.namespace[side], *command.split()], check=True, timeout=60)
        if len(sides) == 1:  # the other end keeps its addresses, and reaches the new ones
            other = "right" if sides[0] == "left" else "left"
            for number in (1, 2):
                for side, net in ((sides[0], 77), (other, 88)):
                    route = f"route replace 10.{net}.{number}.0/24 dev eth{number}"
                    subprocess.run(["ip", "-n", bed.namespace[side], *route.split()], check=True, timeout=60)
        wait_for_traffic(bed, "eth1", 64 * MIB, driving)
        wait_for_traffic(bed, "eth2", 64 * MIB, driving)

    row = Pair(bed).run("--size=64M", "--iters=24", during=renumber).row
    assert row.verified
    assert sorted(shares(row)) == ["eth1", "eth2"]


def test_a_wrong_secret_is_refused_with_one_line(make_bed: MAKE) -> None:
    bed = make_bed((1000,))
    pair = Pair(bed)
    with pair.listening("--timeout=10s") as listening:
        wrong = pair.start("right", f"--connect={pair.address()}", settings={"CROSSRAIL_SECRET": "another"})
        ended = wrong.end()
        assert ended.code == 1
        errors = [line for line in ended.said.splitlines() if "error" in line]
        assert len(errors) == 1
        assert "secret" in errors[0]
        assert "Traceback" not in ended.said
        assert SECRET not in ended.said
        assert listening.process.poll() is None, "a stranger does not end the listener"


def test_beyond_loopback_both_ends_need_the_secret(make_bed: MAKE) -> None:
    bed = make_bed((1000,))
    pair = Pair(bed)
    listening = pair.start("left", f"--listen={pair.address()}", without="CROSSRAIL_SECRET").end()
    assert listening.code in (1, 2)
    assert "CROSSRAIL_SECRET" in listening.said
    assert "Traceback" not in listening.said
    with pair.listening("--timeout=10s"):
        driving = pair.start("right", f"--connect={pair.address()}", without="CROSSRAIL_SECRET").end()
    assert driving.code in (1, 2)
    assert "secret" in driving.said.lower()
    assert "Traceback" not in driving.said


def test_the_same_bytes_without_rails_named_use_every_data_link(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    row = Pair(bed, rails=["^eth0"]).run("--size=16M", "--iters=4").row
    assert sorted(shares(row)) == ["eth1", "eth2"]
