"""`crossrail top`: what processes of this machine and ranks of a job do, and which rank keeps the others waiting."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import COMMAND, clean_environment, one_error, run
from rich.console import Console
from terminal import HIDE_CURSOR, SHOW_CURSOR, Terminal
from test_cli_store import store

import crossrail
from crossrail._native import read_pages
from crossrail_tools.cli import main
from crossrail_tools.cli.top import STORE_S, TopOptions
from crossrail_tools.cli.top.screen import Keyboard
from crossrail_tools.cli.top.snapshot import Process, Snapshot, as_json, rates_between, verdicts
from crossrail_tools.cli.top.tables import ERRORS, frequency, program_of, rendered
from crossrail_tools.report.tables import console

ROW_BYTES = 512


def shown(*options: str, pages: Path) -> tuple[dict[str, Any], str]:
    """The JSON and what went to stderr."""
    done = run("top", "--json", "-", *options, settings={"CROSSRAIL_PAGES": str(pages)})
    assert done.returncode == 0, done
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[tuple[crossrail.Worker, crossrail.Endpoint]]:
    """A worker that has sent 1 MiB over two rails and waits for a message from a peer that sends none."""
    context = crossrail.Context(tls="tcp", net_devices="127.0.0.1,127.0.0.2", pages=str(tmp_path))
    with crossrail.Worker(context, name="one") as one, crossrail.Worker(context, name="two") as two:
        endpoint = one.connect(two.address())
        accepted = two.accept()
        receive = two.recv(bytearray(1 << 20), 1)
        endpoint.send(bytearray(1 << 20), 1).wait()
        receive.wait()
        waits = one.recv(bytearray(8), 77, source=endpoint)
        yield one, endpoint
        waits.cancel()
        del accepted


@pytest.fixture
def with_nvml(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a management library of NVIDIA's, with two GPUs."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    source, folder = Path(__file__).parent / "driver" / "nvml.c", tmp_path / "nvml"
    folder.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(folder), "CROSSRAIL_PAGES": str(tmp_path)}


def test_gpus_are_shown_where_their_library_is(with_nvml: dict[str, str]) -> None:
    done = run("top", "--json=-", settings=with_nvml)
    assert done.returncode == 0, done
    one, two = json.loads(done.stdout)["gpus"]
    assert one == {
        "index": 0, "name": "Pretended GPU", "busy_percent": 37, "memory_used": 20 << 30, "memory_total": 80 << 30
    }  # fmt: skip
    assert (two["index"], two["name"], two["busy_percent"], two["memory_used"]) == (1, "Another GPU", None, 0)
    assert re.search(r"^0 +Pretended GPU +37% +21.47 GB +85.90 GB$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^1 +Another GPU +- +0 B +85.90 GB$", done.stderr, re.MULTILINE), done.stderr


def test_a_library_of_gpus_that_hangs_or_is_broken_is_left_out(with_nvml: dict[str, str]) -> None:
    library = Path(with_nvml["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1"
    for settings in ({"NVML_HANGS": "1"}, {}):
        done = run("top", "--json=-", settings={**with_nvml, **settings})
        assert done.returncode == 0, done
        assert json.loads(done.stdout)["gpus"] == []
        assert "GPUs of this machine" not in done.stderr
        library.write_text("no library")


def page_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """The row of that kind and name, once something is there to be seen."""
    deadline = time.monotonic() + 20
    while True:
        (found,) = read_pages(str(folder))
        rows = [row for row in found["page"]["rows"] if (row["kind"], row["name"]) == (kind, name)]
        if rows and max(sum(v for v in row["values"].values() if isinstance(v, int)) for row in rows) > 0:
            return rows[0]
        assert time.monotonic() < deadline, f"no {kind} {name!r} in {found}"
        time.sleep(0.02)


def sent_by_rails(folder: Path) -> int:
    """Bytes that the rails of both workers have sent, as the page has it now."""
    (found,) = read_pages(str(folder))
    return sum(row["values"]["sent_bytes"] for row in found["page"]["rows"] if row["kind"] == "rail")


def waits_of(folder: Path) -> list[tuple[str, str, str, str, int]]:
    """What rows show as their oldest wait now: kind and name of the row, operation, whom it waits for, its number."""
    (found,) = read_pages(str(folder))
    waits = [(row["kind"], row["name"], row["wait"]) for row in found["page"]["rows"] if row["wait"]]
    return sorted((kind, name, wait["operation"], wait["whom"], wait["number"]) for kind, name, wait in waits)


def test_a_page_has_rails_links_peers_and_the_oldest_wait(
    at_work: tuple[crossrail.Worker, crossrail.Endpoint], tmp_path: Path
) -> None:
    # Which rail the message went over is not said: one chunk has room for it.
    page_of(tmp_path, "tcp/127.0.0.1", "rail")
    # The rows are written now and then, one after the other: some may still show the send.
    deadline = time.monotonic() + 20
    seen_by_both = [("peer", "two", "recv", "two", 77), ("worker", "one", "recv", "two", 77)]
    while (waits := waits_of(tmp_path)) != seen_by_both:
        assert time.monotonic() < deadline, waits
        time.sleep(0.02)
    while sent_by_rails(tmp_path) < 1 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    seen, _ = shown(pages=tmp_path)
    (process,) = seen["processes"]
    assert process["process"].endswith(f":{os.getpid()}") and process["error"] is None
    rows = process["page"]["rows"]
    links = {(row["name"], row["peer"]) for row in rows if row["kind"] == "link"}
    assert {("tcp/127.0.0.1", "two"), ("tcp/127.0.0.2", "one")} <= links
    (peer,) = (row for row in rows if row["kind"] == "peer" and row["name"] == "two")
    assert peer["values"]["in_flight"] == 1 and peer["wait"]["operation"] == "recv"
    table = run("top", "--once", settings={"CROSSRAIL_PAGES": str(tmp_path)}).stdout
    assert "oldest waits" in table and "tcp/127.0.0.2" in table and "recv" in table


def test_a_page_is_its_owners_alone_and_goes_with_its_last_worker(tmp_path: Path) -> None:
    context = crossrail.Context(pages=str(tmp_path))
    with crossrail.Worker(context):
        (page,) = tmp_path.iterdir()
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.name.split("-")[2] == str(os.getpid())
    assert not list(tmp_path.iterdir())
    with crossrail.Worker(crossrail.Context(pages="off")):
        assert not list(tmp_path.iterdir())


def test_connections_that_end_between_two_looks_leave_no_rows(tmp_path: Path) -> None:
    context = crossrail.Context(tls="shm", pages=str(tmp_path))
    with crossrail.Worker(context, name="one") as one, crossrail.Worker(context, name="two") as two:
        # Few are looked at together, and those that come free the places of those that went.
        for _ in range(2):
            pairs = [(one.connect(two.address()), two.accept()) for _ in range(60)]
            wait_for_rows(tmp_path, {"peer": 2 * len(pairs), "link": 2 * len(pairs)})
            for pair in pairs:
                for endpoint in pair:
                    endpoint.close()
            del pairs, pair, endpoint
        wait_for_rows(tmp_path, {"peer": 0, "link": 0})


def test_rails_have_the_bytes_of_connections_that_no_look_has_seen(tmp_path: Path) -> None:
    context = crossrail.Context(tls="tcp", net_devices="127.0.0.1", pages=str(tmp_path))
    with crossrail.Worker(context, name="one") as one, crossrail.Worker(context, name="two") as two:
        for _ in range(20):
            endpoint, accepted = one.connect(two.address()), two.accept()
            receive = two.recv(bytearray(256 << 10), 1)
            endpoint.send(bytearray(256 << 10), 1).wait()
            receive.wait()
            endpoint.close()
            accepted.close()
        deadline = time.monotonic() + 20
        while True:
            (found,) = read_pages(str(tmp_path))
            rails = [row["values"] for row in found["page"]["rows"] if row["kind"] == "rail"]
            sums = [sum(int(rail[name]) for rail in rails) for name in ("sent_bytes", "received_bytes")]
            if min(sums) >= 20 * (256 << 10):
                break
            assert time.monotonic() < deadline, f"{sums} of {20 * (256 << 10)} bytes"
            time.sleep(0.02)


def wait_for_rows(folder: Path, counts: dict[str, int]) -> None:
    """Returns once the page of this process has at least so many rows of each kind; none, where that is 0."""
    deadline = time.monotonic() + 30
    while True:
        (found,) = read_pages(str(folder))
        seen = {kind: sum(row["kind"] == kind for row in found["page"]["rows"]) for kind in counts}
        if all(seen[kind] >= count if count else not seen[kind] for kind, count in counts.items()):
            return
        assert time.monotonic() < deadline, f"{seen} instead of {counts}"
        time.sleep(0.02)


def test_pages_of_dead_processes_are_named_and_then_removed(tmp_path: Path) -> None:
    code = (
        "import crossrail, os, signal; w = crossrail.Worker(crossrail.Context()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment({"CROSSRAIL_PAGES": str(tmp_path)}), timeout=60, check=False
    )
    assert died.returncode == -9
    (page,) = tmp_path.iterdir()
    _, stderr = shown(pages=tmp_path)
    (said,) = (line for line in stderr.splitlines() if str(page) in line)
    assert said.endswith("its process has ended; the next process that uses Crossrail removes the page")
    with crossrail.Worker(crossrail.Context(pages=str(tmp_path))):
        assert page not in list(tmp_path.iterdir())


def test_a_program_that_ends_with_its_group_open_leaves_no_page(tmp_path: Path) -> None:
    code = "import crossrail; g = crossrail.Group(size=1); w = crossrail.Worker(g.context)"
    subprocess.run(
        [sys.executable, "-c", code], env=clean_environment({"CROSSRAIL_PAGES": str(tmp_path)}), timeout=60, check=True
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "it is incomplete: its process is making it, or died meanwhile"),
        (lambda data: bytes(8) + data[8:], "it is incomplete"),
        (lambda data: b"NOTAPAGE" + data[8:], "it does not begin as a page does"),
        (
            lambda data: data[:8] + struct.pack("<I", 9) + data[12:],
            "its layout has version 9, this program reads version",
        ),
        (lambda data: data[:56] + struct.pack("<Q", 1 << 40) + data[64:], "it claims 1099511627776 rows"),
        (lambda data: data[:16] + struct.pack("<Q", 1) + data[24:], "its name and its contents disagree"),
    ],
)
def test_a_page_that_cannot_be_read_is_one_line(change: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    with crossrail.Worker(crossrail.Context(pages=str(tmp_path / "pages"))):
        (page,) = (tmp_path / "pages").iterdir()
        other = tmp_path / "others"
        other.mkdir()
        (other / page.name).write_bytes(change(page.read_bytes()))
        (found,) = read_pages(str(other))
        assert found["page"] is None and said in found["error"]


def test_rows_that_lie_are_harmless(tmp_path: Path) -> None:
    """Text of another process can't steer the terminal, and unknown kinds of rows are left out."""
    (tmp_path / "pages").mkdir()
    with crossrail.Worker(crossrail.Context(pages=str(tmp_path / "pages")), name="honest"):
        (page,) = (tmp_path / "pages").iterdir()
        data = bytearray(page.read_bytes())
        row = data.index(b"honest\0") - 16
        assert row % ROW_BYTES == 0
        data[row + 16 : row + 24] = b"\x1b[2Jabc\0"
        data[row + 144 : row + 176] = b"\xff" * 32
        (tmp_path / page.name).write_bytes(data)
        (found,) = read_pages(str(tmp_path))
        (worker,) = (row for row in found["page"]["rows"] if row["kind"] == "worker")
        assert worker["name"] == "?[2Jabc" and worker["wait"]["age_s"] == 0.0
        data[row + 8 : row + 12] = struct.pack("<I", 999)
        (tmp_path / page.name).write_bytes(data)
        (found,) = read_pages(str(tmp_path))
        assert [row["kind"] for row in found["page"]["rows"]] == ["process"]


def test_nobody_there_and_no_folder(tmp_path: Path) -> None:
    assert (
        "no process of this user on this machine uses Crossrail"
        in run("top", "--once", settings={"CROSSRAIL_PAGES": str(tmp_path)}).stdout
    )
    one_error(run("top", "--once", settings={"CROSSRAIL_PAGES": "off"}), 2, "there is no folder to look in")
    one_error(run("top", "--once", settings={"CROSSRAIL_PAGES": str(tmp_path / "none")}), 1, "No such file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_processes_of_other_users_are_one_line_together() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o777)
        look_from_outside(folder)


def look_from_outside(folder: str) -> None:
    here = "import crossrail, sys\nworker = crossrail.Worker(crossrail.Context())\nprint(flush=True)\nsys.stdin.read()"
    settings = clean_environment({"CROSSRAIL_PAGES": folder})
    others = [
        subprocess.Popen([sys.executable, "-c", here], env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline() == b"\n"
        look = (
            "import os, signal, sys\nfrom crossrail_tools.cli import main\nfrom crossrail_tools.cli import top\n"
            "os.setresuid(65534, 65534, 65534)\nsys.exit(main(['top', '--once']))"
        )
        done = subprocess.run([sys.executable, "-c", look], env=settings, capture_output=True, text=True, timeout=60)
        line = "crossrail: 3 processes are other users': run `crossrail top` as that user, or as root\n"
        assert (done.returncode, done.stderr) == (0, line), done.stdout
    finally:
        for other in others:
            other.communicate(timeout=30)


def test_ctrl_c_while_it_looks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("CROSSRAIL_PAGES", str(tmp_path))
    monkeypatch.setattr("crossrail_tools.cli.top.time", SimpleNamespace(monotonic=time.monotonic, sleep=pressed))
    handled = (signal.SIGINT, signal.SIGTERM)
    former = [signal.getsignal(number) for number in handled]
    try:
        assert main(["top", "--once"]) == 130
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C ended in a traceback")
    assert [signal.getsignal(number) for number in handled] == former, "no signal was received"
    assert capsys.readouterr() == ("", "crossrail: error: interrupted\n")


def test_kinds_of_errors_are_those_of_the_pages() -> None:
    layout = (Path(__file__).parents[2] / "crates" / "sight" / "src" / "layout.rs").read_text(encoding="utf-8")
    kinds = re.search(r"pub const ERRORS: \[&str; \d+\] = \[([^]]*)\]", layout)
    assert kinds is not None and tuple(re.findall(r'"(\w+)"', kinds[1])) == ERRORS


def rank_process(rank: int, ranks: list[int] | None, *, answered: bool = True) -> Process:
    wait = None if ranks is None else {"operation": "sync", "number": 3, "age_s": 1.0, "whom": "", "ranks": ranks}
    row = {"kind": "buffer", "owner": 1, "name": "x", "peer": "", "age_s": 9.0, "wait": wait, "values": {"rank": rank}}
    return Process(f"host:{rank}", {"rows": [row]} if answered else None, None, "g", rank, answered)


@pytest.mark.parametrize(
    ("processes", "named"),
    [
        ([rank_process(0, [2]), rank_process(1, [2]), rank_process(2, None)], [(2, "has not entered sync 3", [0, 1])]),
        (
            [rank_process(0, [1]), rank_process(1, [2]), rank_process(2, None, answered=False)],
            [(2, "does not answer: it is stopped, or cut off", [1])],
        ),
        ([rank_process(0, [3])], [(3, "has not joined, or has ended", [0])]),
        ([rank_process(0, [1]), rank_process(1, [0])], [(0, "waits itself", [1]), (1, "waits itself", [0])]),
        ([rank_process(0, None), rank_process(1, None)], []),
    ],
)
def test_the_rank_that_all_wait_for_is_named(processes: list[Process], named: list[tuple[Any, ...]]) -> None:
    found = verdicts(Snapshot(0.0, processes))
    assert [(each["rank"], each["state"], each["keeps_waiting"]) for each in found] == named


def test_rates_are_those_between_two_looks() -> None:
    def snapshot(at: float, sent: int) -> Snapshot:
        values = {"sent_bytes": sent, "received_bytes": 0}
        row = {"kind": "rail", "owner": 1, "name": "shm", "peer": "", "values": values}
        return Snapshot(at, [Process("host:1", {"rows": [row]})])

    rates = rates_between(snapshot(3.0, 500), snapshot(1.0, 100))
    assert list(rates.values()) == [(200.0, 0.0)]
    assert rates_between(snapshot(1.0, 500), snapshot(1.0, 100)) == {}


def busy(pid: int, age_s: float, in_flight: int, sent: int) -> Process:
    """A process that has waited so long for "two", and whose rail has sent so much."""
    wait = {"operation": "recv", "number": 7, "age_s": age_s, "whom": "two", "ranks": []} if age_s else None
    rail: dict[str, Any] = dict.fromkeys(
        ("received_bytes", "stalls", "retransmits", "resent_chunks", "lost_lanes", "corrupt_lanes"), 0
    )
    rail |= {"sent_bytes": sent, "in_flight_bytes": in_flight}
    made = [("worker", "w", wait, {}), ("rail", f"tcp/eth{pid}", None, rail)]
    rows = [
        {"kind": kind, "owner": 1, "name": name, "peer": "", "age_s": 9.0, "wait": waits, "values": values}
        for kind, name, waits, values in made
    ]
    return Process(f"host:{pid}", {"rows": rows, "dropped": 0})


def test_each_process_has_a_row_and_the_slowest_is_first() -> None:
    before = Snapshot(0.0, [busy(1, 0, 0, 0), busy(2, 1.0, 1, 0), busy(3, 5.0, 1, 0)])
    now = Snapshot(1.0, [busy(1, 0, 0, 0), busy(2, 1.0, 1, 2_000_000), busy(3, 5.0, 1, 8_000_000)])
    out = io.StringIO()
    console(out).print(rendered(now, before))
    lines = out.getvalue().splitlines()
    assert lines[0] == "3 processes, 3 workers, 0 expert buffers"
    processes = [line.split()[0] for line in lines[lines.index("processes") + 3 :][:3]]
    assert processes == ["host:3", "host:2", "host:1"]
    rails = [line.split()[1] for line in lines[lines.index("rails") + 3 :][:3]]
    assert rails == ["tcp/eth2", "tcp/eth3", "tcp/eth1"]
    out = io.StringIO()
    console(out).print(rendered(Snapshot(0.0, now.processes[:1]), before))
    assert out.getvalue().startswith("1 process, 1 worker, 0 expert buffers\n")


def test_proxies_of_expert_buffers_have_rows_by_rank_and_thread() -> None:
    def seen(commands: int, sent: int, bursts: int) -> Process:
        names = ("pending", "in_flight", "lost_rails")
        far = dict.fromkeys(names, 0) | {"rank": 3, "commands": commands, "sent_bytes": sent, "rails": 4}
        far["burst_seconds"] = [0, bursts, *[0] * 11, bursts * 25_000]
        idle = far | {"rank": 2, "burst_seconds": [0] * 14}
        far |= {"pending": 7, "in_flight": 64, "lost_rails": 1}
        thread = {"state": 1, "polling_seconds": 4.5, "wake_ups": 12}
        made = [("proxy", "moe", "rank 2", idle), ("proxy", "moe", "rank 3", far)]
        made += [("proxy_thread", "crossrail-ep-0", "moe, rank 1", thread)]
        rows = [
            {"kind": kind, "owner": 1, "name": name, "peer": peer, "age_s": 9.0, "wait": None, "values": values}
            for kind, name, peer, values in made
        ]
        return Process("host:1", {"rows": rows, "dropped": 0})

    before, now = Snapshot(0.0, [seen(100, 1 << 20, 10)]), Snapshot(2.0, [seen(500, 2_000_000_000 + (1 << 20), 30)])
    out = io.StringIO()
    Console(file=out, width=200).print(rendered(now, before))
    lines = out.getvalue().splitlines()
    ranks = [line.split() for line in lines[lines.index("ranks on other nodes") + 3 :][:2]]
    assert [row[2:4] for row in ranks] == [["rank", "3"], ["rank", "2"]], "those with pending commands first"
    assert ranks[0][4:] == ["1.00", "GB/s", "200", "/s", "500", "7", "64", "30", "25", "us", "4", "1"], ranks[0]
    assert ranks[1][-3:] == ["-", "4", "0"]
    thread = lines[lines.index("threads for ranks on other nodes") + 3]
    assert re.search(r"crossrail-ep-0 +moe, rank 1 +napping +50% of 9.0 s +12", thread), thread
    rates = as_json(now, before)["processes"][0]["page"]["rows"][1]["values"]["rates"]
    assert rates == [1e9, 200.0]


def test_bytes_by_link_are_those_of_the_last_operation_that_was_counted() -> None:
    def row(operation: str, counted: int, *links: int) -> dict[str, object]:
        names = ("counted", "nvlink_out_bytes", "nvlink_in_bytes", "network_out_bytes", "network_in_bytes")
        values = dict(zip(names, (counted, *links), strict=True))
        about = {"kind": "exchange", "owner": 1, "name": "moe", "peer": operation, "age_s": 9.0}
        return {**about, "wait": None, "values": values}

    made = [row("dispatch", 4, 3_000_000, 2_000_000, 1_000_000, 500_000), row("combine", 4, 40, 30, 20, 10)]
    now = Snapshot(1.0, [Process("host:1", {"rows": made, "dropped": 0})])
    out = io.StringIO()
    Console(file=out, width=200).print(rendered(now, now))
    lines = out.getvalue().splitlines()
    found = [line.split() for line in lines[lines.index("bytes by link") + 3 :][:2]]
    assert [line[1:3] for line in found] == [["moe", "combine"], ["moe", "dispatch"]]
    assert found[1][-1] == "4" and found[0][3:] == ["40", "B", "30", "B", "20", "B", "10", "B", "4"], found


def test_a_busy_expert_job_is_not_idle_and_programs_have_names() -> None:
    def rank(number: int, dispatches: int, command: str) -> Process:
        counts = dict.fromkeys(("masked", "lost"), 0) | {"connected": 2, "rank": number, "ranks": 2}
        values = counts | {"dispatches": dispatches, "combines": dispatches, "memory_bytes": 1 << 20}
        row = {"kind": "buffer", "owner": 1, "name": "moe", "peer": "", "age_s": 9.0, "wait": None, "values": values}
        return Process(f"host:{number}", {"rows": [row], "dropped": 0, "command": command})

    before = Snapshot(0.0, [rank(0, 100, "python -X dev train.py"), rank(1, 100, "python -m serve --x")])
    now = Snapshot(
        2.0, [rank(0, 500, "/usr/bin/python3.11 -X dev /opt/train.py --lr 1"), rank(1, 100, "python -m serve --x")]
    )
    out = io.StringIO()
    console(out).print(rendered(now, before))
    lines = out.getvalue().splitlines()
    processes = lines[lines.index("processes") + 1 :]
    assert "exchanges now" in processes[0]
    assert "host:0 train.py" in processes[2] and "400 /s" in processes[2]
    assert "host:1 serve" in processes[3] and " 0 /s" in processes[3]
    buffers = lines[lines.index("expert buffers") + 3]
    assert buffers.count("200 /s") == 2
    assert (
        program_of("") == "" and program_of("python -c import?x") == "python" and program_of("/bin/server") == "server"
    )
    assert frequency(0) == "0 /s" and frequency(12.345) == "12.3 /s" and frequency(123456) == "123 k/s"


def test_what_does_not_fit_is_counted_and_scrolled_and_q_ends(tmp_path: Path) -> None:
    context = crossrail.Context(pages=str(tmp_path), tls="shm")
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(crossrail.Worker(context, name=f"worker {number}")) for number in range(20)]
        endpoints = [workers[0].connect(other.address()) for other in workers[1:]]
        wait_for_rows(tmp_path, {"peer": 19})
        with Terminal([*COMMAND, "top"], 100, rows=12, environment={"CROSSRAIL_PAGES": str(tmp_path)}) as terminal:
            terminal.read_until(r"lines 1 to 11 of [1-9][0-9]+")
            terminal.press("\x1b[B")
            terminal.read_until(r"lines 2 to 12 of [1-9][0-9]+")
            terminal.press("\x1b[F")
            terminal.read_until(r"lines ([0-9]+) to ([0-9]+) of \2:")
            terminal.press("q")
            assert terminal.end(20) == 0
        assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR)
        del endpoints


def test_keys_are_told_apart_however_reads_split_them() -> None:
    """One read may bring several keys, or a part of one: of an escape sequence, or of a character."""
    out, into = os.pipe()
    keyboard = Keyboard(out)

    def names(*pieces: bytes) -> list[str]:
        found: list[str] = []
        for piece in pieces:
            os.write(into, piece)
            while (name := keyboard.pressed(0.0)) is not None:
                found += [name] if name else []
        return found

    try:
        assert names(b"jjk") == ["down", "down", "up"]
        assert names(b"\x1b", b"[", b"B", b"\x1b[6", b"~\x1bO", b"A") == ["down", "page down", "up"]
        assert names("\N{BOX DRAWINGS LIGHT HORIZONTAL}".encode()[:2]) == []
        assert names("\N{BOX DRAWINGS LIGHT HORIZONTAL}".encode()[2:] + b"G") == ["end"]
        assert names(b"\x1b", b"j") == ["down"], "after the key Esc alone"
        os.close(into)
        assert keyboard.pressed(0.0) == "q", "the terminal is gone"
    finally:
        os.close(out)


def test_a_dead_store_is_said_and_the_pages_here_are_shown(tmp_path: Path) -> None:
    with socket.socket() as unused, crossrail.Worker(crossrail.Context(pages=str(tmp_path))):
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        done = run("top", "--job", "--once", "--store", address, settings={"CROSSRAIL_PAGES": str(tmp_path)})
    assert done.returncode == 1
    assert "1 process, 1 worker" in done.stdout and f":{os.getpid()}" in done.stdout
    assert f"the store {address} does not answer: Connection refused" in done.stderr


def test_a_store_that_hangs_is_said_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_PAGES", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = TopOptions(job="", store=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        snapshot = options._snapshot(crossrail.Context(timeout=STORE_S))
        took = time.monotonic() - began
    assert snapshot.trouble is not None and f"the store {options.store} does not answer: " in snapshot.trouble
    assert took < STORE_S - 0.5


STUCK = 5


def test_a_stuck_rank_of_eight_is_named(tmp_path: Path) -> None:
    """Eight ranks of one process meet in a buffer's barrier, all but one."""
    context = crossrail.Context(pages=str(tmp_path), log="error")
    come = threading.Event()
    inside: list[float] = []
    failed: list[BaseException] = []

    def rank(number: int, address: str) -> None:
        try:
            group = crossrail.Group(name="job", rank=number, size=8, local_rank=number, store=address, context=context)
            with group, crossrail.ExpertBuffer(group, 4, 128, 8, 1) as buffer:
                if number == STUCK:
                    come.wait(60)
                inside.append(time.monotonic())
                buffer.sync()
                group.barrier()
        except BaseException as error:
            failed.append(error)
            come.set()

    with store("--listen=127.0.0.1:0") as (_, address):
        threads = [threading.Thread(target=rank, args=(number, address)) for number in range(8)]
        for thread in threads:
            thread.start()
        try:
            deadline = time.monotonic() + 60
            while len(inside) < 7 and not failed and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not failed and len(inside) == 7, failed
            stuck_since = max(inside)
            # A shorter wait is nothing to name.
            time.sleep(max(0.0, stuck_since + 1.0 - time.monotonic()))
            with subprocess.Popen(
                [*COMMAND, "top", "--job", "job", "--store", address, "--json", "-"],
                env=clean_environment({}),
                stdout=subprocess.PIPE,
                text=True,
            ) as top:
                assert top.stdout is not None
                seen = json.loads(top.stdout.read())
            waited = time.monotonic() - stuck_since
        finally:
            come.set()
            for thread in threads:
                thread.join(60)
    assert not failed, failed
    rows = [row for process in seen["processes"] for row in process["page"]["rows"] if row["kind"] == "buffer"]
    assert {row["values"]["connected"] for row in rows} == {8}, "also of the rank that has entered no operation"
    (named,) = seen["stuck"]
    assert (named["rank"], named["group"]) == (STUCK, "job")
    assert named["keeps_waiting"] == [rank for rank in range(8) if rank != STUCK]
    assert named["state"].startswith("has not entered sync")
    # It is at once: the command took the rest of that time to start and to end.
    assert 0.5 <= named["age_s"] < waited + 1.0


def test_a_job_needs_a_store_that_has_it() -> None:
    one_error(run("top", "--job"), 2, "--job needs the job's store")
    one_error(run("top", "--store", "tcp://127.0.0.1:1"), 2, "--store needs --job")
    with store("--listen=127.0.0.1:0") as (_, address):
        said = "has no group 'nobody': is it the store of that job, and has a rank joined?"
        one_error(run("top", "--job", "nobody", "--store", address), 1, said)
