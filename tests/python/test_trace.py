"""CROSSRAIL_TRACE, `--trace` and `crossrail trace merge`: slices, arrows, counters, clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import one_error, run

import crossrail
from crossrail_tools.cli import unpack
from crossrail_tools.cli.trace import clock_offsets, merged

SIZE = 16 << 20


def moved(folder: Path) -> None:
    """Moves 16 MiB over two rails between two workers that record it."""
    context = crossrail.Context(tls="tcp", net_devices="127.0.0.1,127.0.0.2", trace=str(folder))
    with crossrail.Worker(context, name="one") as one, crossrail.Worker(context, name='the "other"') as two:
        endpoint = one.connect(two.address())
        accepted = two.accept()
        receive = two.recv(bytearray(SIZE), 1)
        endpoint.send(bytearray(SIZE), 1).wait()
        receive.wait()
        del accepted


def test_a_transfer_becomes_slices_arrows_and_counters(tmp_path: Path) -> None:
    moved(tmp_path / "traces")
    out = tmp_path / "merged.json"
    done = run("trace", "merge", "--output", str(out), str(tmp_path / "traces"))
    assert (done.returncode, done.stderr) == (0, "")
    whole = json.loads(out.read_text())
    assert whole["otherData"]["clocks_not_aligned"] == [] and whole["otherData"]["dropped"] == 0
    events = whole["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    workers = {e["pid"]: e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"}
    assert sorted(workers.values()) == ["one", 'the "other"']

    def slices(what: str) -> list[dict[str, Any]]:
        return [event for event in events if event["ph"] == "X" and event["name"] == what]

    sent, received = slices("chunk sent"), slices("chunk received")
    assert sum(e["args"]["bytes"] for e in sent) == sum(e["args"]["bytes"] for e in received) == SIZE
    assert {workers[e["pid"]] for e in sent} == {"one"} and {workers[e["pid"]] for e in received} == {'the "other"'}
    rails = {names[e["pid"], e["tid"]] for e in sent}
    assert rails <= {'tcp/127.0.0.1 with the "other"', 'tcp/127.0.0.2 with the "other"'} and rails
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == len(sent)
    assert all(starts[flow] <= ends[flow] for flow in starts)
    windows = [e["args"]["chunks"] for e in events if e["ph"] == "C"]
    assert max(windows) >= 1 and len(windows) >= 2 * len(rails)
    (send,) = slices("send")
    assert send["args"]["bytes"] == SIZE and send["dur"] > 0
    assert names[send["pid"], send["tid"]] == 'operations with the "other"'


def test_nothing_is_written_without_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with crossrail.Worker(crossrail.Context()):
        pass
    assert not list(tmp_path.iterdir())


TCP = ("--transport=tcp", "--iters=2", "--warmup=1")


@pytest.mark.parametrize(
    ("bench", "options", "chunks"),
    [
        ("p2p", (*TCP, "--rails=127.0.0.1", "--size=8M"), 8),
        ("latency", (*TCP, "--sizes=256K"), 4),
        ("bandwidth", (*TCP, "--sizes=256K"), 4),
        ("mesh", (*TCP, "--size=2M"), 4),
        ("ep", (*TCP, "--tokens=64", "--nvlink-backend=none", "--verify=none", "--mode=e2e"), 4),
        ("control", ("--rounds=1", "--num-processes=2", "--experts-per-rank=2", "--op=init"), 0),
    ],
)
def test_a_bench_writes_one_file(bench: str, options: tuple[str, ...], chunks: int, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run("bench", bench, *options, "--trace", str(out))
    assert done.returncode == 0, done
    events = json.loads(out.read_text())["traceEvents"]
    sent, received = (sum(event["name"] == f"chunk {way}" for event in events) for way in ("sent", "received"))
    assert sent == received >= chunks
    phases = [event for event in events if event["name"] in ("warm-up", "timed")]
    two_ended = bench in ("p2p", "latency", "bandwidth")
    assert sum(event["name"] == "process_name" for event in events) == 2 + two_ended
    assert bool(phases) == two_ended
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("warmup", "transfers"), [(2, 5), (0, 3)])
def test_warm_up_is_told_apart(warmup: int, transfers: int, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    p2p = ("--transport=tcp", "--rails=127.0.0.1", "--size=8M", "--iters=3", f"--warmup={warmup}")
    assert run("bench", "p2p", *p2p, "--trace", str(out)).returncode == 0
    events = json.loads(out.read_text())["traceEvents"]
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in ("warm-up", "timed")}
    assert spans.keys() == ({"warm-up", "timed"} if warmup else {"timed"})
    sends = [e for e in events if e["name"] == "send" and e["args"]["bytes"] == 8 << 20]
    assert len(sends) == transfers

    def within(phase: str) -> int:
        begin, end = spans.get(phase, (0.0, 0.0))
        return sum(begin <= send["ts"] and send["ts"] + send["dur"] <= end for send in sends)

    assert (within("warm-up"), within("timed")) == (warmup, 3)
    if warmup:
        assert spans["warm-up"][1] == pytest.approx(spans["timed"][0], abs=0.01)


def test_a_bench_without_workers_writes_a_file_without_tracks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench unpack`: it needs a GPU, so what it measures is made up."""
    times = {"samples_us": [3.0, 4.0], "gpu_us": []}
    monkeypatch.setattr(unpack, "known_gpus", lambda *_: None)
    found = {"pieces": 2, "contiguous": times, "modes": {"d2d": times}}
    monkeypatch.setattr(unpack.Unpack, "run", lambda *_, **__: found)
    out = tmp_path / "bench.json"
    options = unpack.UnpackOptions(
        device="cuda:0", fragments=[4096], sizes=[8192], sources=["pinned"], modes=["d2d"], trace=str(out)
    )
    options.run()
    shown = capsys.readouterr()
    assert "d2d" in shown.out and "bench.json: nothing is in it: no worker took part in the run" in shown.err
    assert json.loads(out.read_text())["traceEvents"] == []
    assert list(tmp_path.iterdir()) == [out]


def test_slices_of_one_thread_never_overlap(tmp_path: Path) -> None:
    """Perfetto drops a slice that begins within another of its thread and ends after it."""
    moved(tmp_path)
    for part in tmp_path.iterdir():
        ends: dict[int, float] = {}
        events = json.loads(part.read_text())["traceEvents"]
        for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: float(event["ts"])):
            assert event["ts"] >= ends.get(event["tid"], 0.0) - 0.0015, event
            ends[event["tid"]] = event["ts"] + event["dur"]
        assert ends and max(ends) < 1000


def trace(host: str, *events: tuple[str, str, float]) -> dict[str, Any]:
    made = [{"ph": kind, "id": flow, "ts": at, "name": "chunk"} for kind, flow, at in events]
    about = {"schema": "crossrail-trace/1", "host": host, "pid": 1, "worker": host, "dropped": 2}
    return {"otherData": about, "traceEvents": made}


def test_clocks_are_aligned_by_the_quickest_chunks() -> None:
    """The clock of b is 1000 us ahead and a chunk takes 5 us; one each way was held up. c is known through b only."""
    a = trace("a", ("s", "1", 10.0), ("s", "2", 20.0), ("f", "3", 45.0), ("f", "4", 95.0))
    b = trace("b", ("f", "1", 1015.0), ("f", "2", 1225.0), ("s", "3", 1040.0), ("s", "4", 1050.0))
    b["traceEvents"] += trace("b", ("s", "5", 1060.0), ("f", "6", 1075.0))["traceEvents"]
    c = trace("c", ("f", "5", 65.0), ("s", "6", 70.0))
    lost = trace("d", ("f", "9", 1.0))
    assert clock_offsets([a, b, c, lost]) == {"a": 0.0, "b": 1000.0, "c": 0.0}
    whole = merged([a, b, c, lost])
    assert whole["otherData"]["clocks_not_aligned"] == ["d"] and whole["otherData"]["dropped"] == 8
    assert [e["ts"] for e in whole["traceEvents"] if e["pid"] == 2][:2] == [15.0, 225.0]


def test_arrows_with_one_end_are_left_out() -> None:
    a = trace("a", ("s", "1", 10.0), ("s", "2", 20.0), ("f", "3", 45.0))
    b = trace("b", ("f", "1", 15.0), ("s", "3", 40.0), ("f", "4", 50.0))
    kept = [(event["ph"], event["id"]) for event in merged([a, b])["traceEvents"]]
    assert kept == [("s", "1"), ("f", "3"), ("f", "1"), ("s", "3")]


def test_a_merged_file_is_not_merged_again(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(merged([trace("a")])))
    one_error(run("trace", "merge", str(tmp_path / "x.json")), 1, "x.json: is merged already")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no trace of Crossrail, or cut off"),
        ("[]", "is no trace of Crossrail, or cut off"),
        ('{"otherData": {"schema": "other/1"}, "traceEvents": []}', "has the schema 'other/1'"),
        ('{"otherData": {"schema": "crossrail-trace/1"}, "traceEvents": [3]}', "is no trace of Crossrail, or cut off"),
        ('{"otherData": {"schema": "crossrail-trace/1"}, "traceEvents": []}', "is no trace of Crossrail, or cut off"),
        ("[" * 100_000, "is no trace of Crossrail, or cut off"),
        (json.dumps(trace("a", ("s", ["1"], 1.0))), "is no trace of Crossrail, or cut off"),  # type: ignore[arg-type]
    ],
)
def test_a_file_that_is_no_trace_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    one_error(run("trace", "merge", str(tmp_path / "x.json")), 1, "x.json: ", said)


def test_a_device_is_no_trace() -> None:
    one_error(run("trace", "merge", "/dev/zero"), 1, "/dev/zero: neither a file nor a pipe")


def test_a_folder_without_traces_is_one_line(tmp_path: Path) -> None:
    one_error(run("trace", "merge", str(tmp_path)), 1, "no trace there; a worker writes its own when it is closed")


def test_what_cannot_be_written_is_said_with_the_option_that_named_it(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(trace("a")))
    absent = str(tmp_path / "none" / "out.json")
    one_error(run("trace", "merge", str(tmp_path / "x.json"), "--output", absent), 1, "none", "--output")
    one_error(run("bench", "p2p", "--size=4K", "--trace", absent), 2, "none does not exist", "--trace")
