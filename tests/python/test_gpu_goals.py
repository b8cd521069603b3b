"""The GPU benchmark without a GPU: what is judged and how, what a failing peer does, and the peers' own scripts."""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import crossrail.nccl
from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.schema import PeerResult, Report, Row

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benches" / "gpu"
sys.path[:0] = [str(GPU), str(GPU / "peers")]

import device_api  # noqa: E402
import findings  # noqa: E402
import goals  # noqa: E402
import hosts  # noqa: E402
import judging  # noqa: E402
import kv  # noqa: E402
import ranks  # noqa: E402
import sharing  # noqa: E402
from steps import Result, gpu_count  # noqa: E402

import harness  # noqa: E402


def test_a_rate_is_held_against_the_median_of_the_peers_turns() -> None:
    outcome = judging.rate_against("work", [97.0, 98.0, 10.0], [100.0, 1.0, 200.0], 0.97, "copies", "never")
    assert (outcome.met, outcome.ratio, outcome.failed) == (True, "0.970", False)
    assert judging.rate_against("work", [96.9], [100.0], 0.97, "copies", "never").met is False
    shown = judging.rate_against("work", [1.0], [100.0], None, "copies", "never")
    assert (shown.met, shown.to_reach) == (None, "beside copies")


@pytest.mark.parametrize(("ours", "theirs"), [([], [1.0]), ([1.0], [])])
def test_a_missing_figure_is_a_failure_that_says_why(ours: list[float], theirs: list[float]) -> None:
    outcome = judging.rate_against("work", ours, theirs, 1.0, "copies", "copies: no such program")
    assert outcome.failed
    assert outcome.notes == ["copies: no such program"]


def test_a_latency_is_held_against_nccls_taken_in_the_same_way() -> None:
    peers = {"graph": [25.0, 20.0, 30.0], "wall": [40.0], "nixl": [12.5]}
    outcome = judging.as_latency("work", [15.0], peers, "graph", 0.6, "never", {})
    assert (outcome.peer, outcome.ratio, outcome.met) == ("25.00 us", "0.60", True)
    assert outcome.notes == ["nccl with a host that waits: 40.00 us", "nixl: 12.50 us"]
    assert judging.as_latency("work", [15.2], peers, "graph", 0.6, "never", {}).met is False
    hosts = judging.as_latency("work", [24.1], {**peers, "nixl": []}, "wall", 0.6, "never", {"nixl": "no UCX"})
    notes = ["nccl in a graph: 25.00 us", "nixl: no figure: no UCX"]
    assert (hosts.peer, hosts.met, hosts.notes) == ("40.00 us", False, notes)
    assert judging.as_latency("work", [15.0], {"nixl": [1.0]}, "wall", 0.6, "nccl: gone", {}).failed


def test_staged_rates_are_judged_in_the_usual_mode_and_shown_in_the_others() -> None:
    gpu = {(1, "kernel"): [9.5], (1, "host"): [4.0]}
    goals = {1: 1.1}
    outcomes = judging.staged("64M", gpu, {1: [10.0]}, ([5.0], [8.0]), goals, "4 threads x 4", "never")
    assert [outcome.met for outcome in outcomes] == [True, None, True, None]
    assert outcomes[0].notes == ["NCCL is fastest with: 4 threads x 4"]
    slower = judging.staged("64M", gpu, {1: [10.1]}, ([6.0], [9.0]), goals, "", "never")
    assert [outcome.met for outcome in slower] == [False, None, False, None]
    one_gpu = judging.staged("64M", gpu, {1: [10.0]}, None, goals, "", "never")
    assert len(one_gpu) == 2
    assert not any(outcome.failed for outcome in one_gpu)
    assert judging.staged("64M", gpu, {1: [10.0]}, ([], []), goals, "", "nccl: gone")[0].failed


def test_ways_to_unpack_stand_beside_one_copy() -> None:
    ceiling = Row("unpack", "", 64 << 20, unpack="contiguous", fragment=4096, gb_per_s=1700.0, gpu_gb_per_s=1750.0)
    ways = {"kernel": 0.93, "d2d": 0.02}
    rows = [ceiling] + [
        Row("unpack", "", 64 << 20, unpack=way, fragment=4096, gb_per_s=1.0, ratio={"contiguous": ratio})
        for way, ratio in ways.items()
    ]
    kernel, copies = judging.unpacked(rows, "device", 0.8, "never")
    assert (kernel.met, kernel.peer, kernel.ratio) == (True, "1750 GB/s", "0.930")
    assert (copies.met, copies.to_reach) == (None, "beside a contiguous copy")
    assert judging.unpacked([], "device", 0.8, "no GPU")[0].notes == ["no GPU"]


class Machine:
    """Two GPUs that answer at once: stands in for `crossrail bench` and for the peers' scripts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int = 2) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.silent: set[str] = set()
        self.folder = tmp_path
        monkeypatch.setattr(harness, "bench", self.bench)
        for module in (findings, goals):
            monkeypatch.setattr(module, "peer", self.peer)
            monkeypatch.setattr(module, "gpu_count", lambda: (gpus, ""))
        monkeypatch.setattr(sharing, "gpu_count", lambda: (gpus, ""))

    def bench(self, _: Path, what: str, *options: str, settings: dict[str, str]) -> Report:
        self.asked.append((what, *options, *settings.values()))
        if what in self.silent:
            raise RuntimeError(f"crossrail {what}: it broke")
        return Report(capture_environment(), ["crossrail"], list(self.rows(what, dict(self.split(options)))))

    @staticmethod
    def split(options: tuple[str, ...]) -> list[tuple[str, str]]:
        return [(name, value) for name, _, value in (option.partition("=") for option in options)]

    def rows(self, what: str, options: dict[str, str]) -> list[Row]:
        sizes = ranks.sizes(options.get("--sizes", options.get("--size", "64M")))
        if what == "mesh":
            rates = (340.0, 335.0)
            return [Row("mesh", "cuda_ipc", sizes[0], part="all", source=n, gb_per_s=rates[n]) for n in range(2)]
        if what == "latency":
            kinds = ("latency", "write")
            return [Row(kind, "cuda_ipc", size, p50_us=8.0, gb_per_s=None) for kind in kinds for size in sizes]
        if what == "kv":
            return [self.moved(options, 1 if "--compare" in options else 131_304)]
        gpu = "--device" in options
        return [Row(what, options["--transport"], size, gb_per_s=380.0 if gpu else 400.0) for size in sizes]

    @staticmethod
    def moved(options: dict[str, str], pieces: int) -> Row:
        way = options["--transport"]
        nixl = PeerResult("kv", gb_per_s=0.5, rounds=[0.5]) if way == "cuda_ipc" else PeerResult("kv", error="no")
        peers = {"nixl": nixl} if "--compare" in options else {}
        return Row("kv", way, 1 << 20, part="pull", pieces=pieces, p50_us=900.0, rounds=[200.0], peers=peers)

    def peer(self, script: str, *options: str, **environment: str) -> dict[str, Any]:
        if script in self.silent:
            return {"error": f"{script} is silent"}
        given = dict(self.split(options))
        if script == "../memory.py":
            return {
                "used": [4 << 20, 0],
                "grown": [0, 0],
                "left": [2 << 20, 0],
                "driver": {"all": [0], "error": "it broke"} if "driver" in self.silent else {"all": [2 << 20, 0]},
                "info": {},
            }
        tuned = environment.get("NCCL_SOCKET_NTHREADS") == "4"
        if given.get("--what") == "collectives":
            rate = len(environment.get("CROSSRAIL_NET_DEVICES", "").split(",")) + tuned / 10
            row = {"samples_us": [20.0 / rate], "gb_per_s": rate}
            return {
                "rows": [
                    {**row, "what": what, "size": size}
                    for what in ("all_reduce", "all_to_all")
                    for size in ranks.sizes(given["--sizes"])
                ]
            }
        window = int(given.get("--window", "16"))
        row = {"what": given.get("--what"), "window": window, "samples_us": [20.0], "wall_us": [180.0]}
        rate = {"copies.py": 385.0, "nccl_rates.py": 250.0 if tuned else 100.0}.get(script, 1.0)
        return {"rows": [{**row, "size": size, "gb_per_s": rate} for size in ranks.sizes(given.get("--sizes", "64M"))]}

    def run(self, name: str, rounds: int = 2) -> dict[str, Any]:
        found = findings.ScenarioResults(self.folder, self.folder / "out.json", self.folder)
        goals.SCENARIOS[name][0](harness.Effort(rounds), found)
        found.save()
        data: dict[str, Any] = json.loads((self.folder / "out.json").read_text())
        return data


def test_a_pair_by_itself_and_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = Machine(monkeypatch, tmp_path).run("pair")
    works = {outcome["work"]: outcome for outcome in data["outcomes"]}
    assert works["NVLink, one pair, 64M, 16 under way"]["ratio"] == f"{380 / 385:.3f}"
    alone = works["NVLink, one pair, 64M, one at a time"]
    assert alone["peer"].startswith("373"), "one copy at a time is counted by the host's clock, as ours is"
    assert works["NVLink, both ways at once, 64M, the slower GPU"]["met"] is False
    assert len(data["peers"]["copies"]) == 4
    assert data["rows"]


def test_puts_and_nccl_ep_beside_our_experts() -> None:
    puts = [{"bytes": 8, "us": 25.04}, {"bytes": 1 << 20, "window": 48, "gb_per_s": 4.2}]
    shown = [(outcome.work, outcome.ours) for outcome in device_api.put_outcomes(puts, "")]
    assert shown == [
        ("NCCL's device API, put + signal, 8", "25.0 us"),
        ("NCCL's device API, windows of 48 puts of 1M", "4.20 GB/s"),
    ]
    assert device_api.put_outcomes([], "no nvcc")[0].notes == ["no nvcc"]
    times = {"dispatch_us": [200.0, 220.0, 210.0], "combine_us": [300.0] * 3, "pair_us": [510.0, 500.0, 520.0]}
    theirs = [{"tokens": 8, **times}, {"tokens": 128, **times}]
    own = Row("e2e", "ep", None, tokens=8, dtype="fp8", p50_us=255.0, gb_per_s=None)
    other = Row("e2e", "ep", None, tokens=8, dtype="bf16", p50_us=1.0, gb_per_s=None)
    first, second = device_api.expert_outcomes("NCCL EP", "low-latency-fp8", theirs, [other, own], "")
    assert first.work == "NCCL EP, over Crossrail, 8 tokens, dispatch + combine"
    assert (first.ours, first.peer, first.ratio) == ("510.0 us", "255.0 us", "2.00")
    assert first.notes == ["dispatch 210.0 us", "combine 300.0 us"]
    assert (second.peer, second.ratio) == ("-", "-"), "ours was not measured with 128 tokens"
    assert device_api.expert_outcomes("NCCL EP", "high-throughput", [], [own], "it hung")[0].failed


def test_latencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = Machine(monkeypatch, tmp_path).run("latency")
    met = {outcome["work"]: outcome["met"] for outcome in data["outcomes"]}
    assert met["NVLink, 4K, write, seen by the host, one way"] is True
    assert met["NVLink, 1M, put, seen by the GPU, one way"] is False, "as slow as the peer, in this test"
    assert met["NVLink, 64K, send, one way"] is None
    threads = [turn["command"] for turn in data["peers"]["nixl"]]
    assert ["--progress-thread" in command for command in threads] == [False, True]


def test_mesh_is_judged_on_four_gpus_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Machine(monkeypatch, tmp_path).run("mesh")["outcomes"][0]["met"] is None
    machine = Machine(monkeypatch, tmp_path, gpus=4)
    (outcome,) = machine.run("mesh")["outcomes"]
    assert outcome["met"] is True
    assert outcome["ours"].startswith("335")


def test_tcp_against_nccl_as_it_comes_and_at_its_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path)
    data = machine.run("tcp")
    assert len(data["outcomes"]) == 3 * (3 + 1 + 1) + 3 * 3 + 2, "64M with all unpack modes, 1G, two short messages"
    first, second = data["outcomes"][:2]
    assert {first["work"], second["work"]} == {"TCP, GPU to GPU, 64M, 1 rail, unpack kernel"}
    assert (first["ratio"], float(second["ratio"])) == ("1.520", 3.8)
    assert first["notes"] == ["NCCL is fastest with: 4 threads x 4"]
    rows = {outcome["work"]: outcome["to_reach"] for outcome in reversed(data["outcomes"])}
    assert rows["TCP, GPU to GPU, 1G, 4 rails, unpack kernel"] == ">= 1.4 x NCCL over sockets, tuned"
    short = data["outcomes"][-1]
    assert (short["work"], short["ratio"], short["met"]) == ("TCP, GPU to GPU, 64K, one way", f"{8 / 180:.3f}", True)
    assert "--rails=127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4" in {word for line in machine.asked for word in line}


def test_two_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = Machine(monkeypatch, tmp_path, gpus=1)
    assert not any("NCCL" in outcome["to_reach"] for outcome in alone.run("tcp", rounds=1)["outcomes"])
    said = tmp_path / "said"
    control = tmp_path / sharing.CONTROL
    control.write_text(f'#!/bin/sh\necho "$@ $(timeout 1 cat)" >> {said}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with sharing.mps():
        folder = Path(os.environ[sharing.VARIABLE])
        assert folder.is_dir()
        data = alone.run("tcp", rounds=1)
    assert said.read_text().split() == ["-d", "quit"]
    assert not (folder.exists() or sharing.shared())
    assert data["environment"]["shared_by_mps"] is True
    assert data["outcomes"][0]["to_reach"] == ">= 1.1 x NCCL over sockets, tuned"
    devices = {word for line in alone.asked for word in line if word.startswith("--device")}
    assert devices == {"--device=cuda:0"}


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_calls_of_the_host_need_no_second_gpu(gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "gpu_count", lambda: (gpus, ""))
    assert hosts.ranks() == f"--ranks={ranks}"
    assert goals.SCENARIOS["ep_hosts"][2] == 1


def test_without_mps_nothing_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sharing, "FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="nvidia-cuda-mps-control was not found"), sharing.mps():
        pass
    control = tmp_path / sharing.CONTROL
    control.write_text("#!/bin/sh\necho 'no such device' >&2\nexit 3\n")
    control.chmod(0o755)
    with pytest.raises(RuntimeError, match="no such device"), sharing.mps():
        pass
    assert not sharing.shared()


def test_collectives_over_our_plugin_against_nccls_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugin = {"NCCL_NET_PLUGIN": "/there/plugin.so", "NCCL_NET": "Crossrail"}
    monkeypatch.setattr(crossrail.nccl, "environment", lambda: plugin)
    data = Machine(monkeypatch, tmp_path).run("nccl")
    lines = {(outcome["work"], outcome["to_reach"]): outcome for outcome in data["outcomes"]}
    assert len(lines) == len(data["outcomes"]) == 2 * 4 * 7 * 2
    tuned = "sockets, 4 threads x 4, 8 channels"
    assert lines["NCCL all_reduce, Crossrail, 1 rail, 8", f"<= 1 x {tuned}"]["met"] is False
    assert lines["NCCL all_to_all, Crossrail, 4 rails, 64M", f">= 1.3 x {tuned}"]["met"] is True
    assert lines["NCCL all_to_all, Crossrail, 1 rail, 64M", "beside sockets, as it comes"]["ratio"] == "1.000"
    ours = [turn["environment"] for turn in data["peers"]["Crossrail, 4 rails"]]
    assert all(plugin.items() <= environment.items() for environment in ours)
    assert all(environment["CROSSRAIL_TLS"] == "tcp" for environment in ours)
    theirs = [turn["environment"] for turn in data["peers"]["4 threads x 4, 8 channels"]]
    assert {each["NCCL_NCHANNELS_PER_NET_PEER"] for each in (*ours, *theirs)} == {"8"}, "the same of NCCL's own"


def test_a_peer_that_fails_costs_its_rows_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path)
    machine.silent = {"nccl_rates.py"}
    data = machine.run("tcp")
    failed = [outcome["failed"] for outcome in data["outcomes"]]
    assert failed == [*[True, True, False, False, False] * 3, *[True, True, False] * 3, True, True]
    assert data["outcomes"][0]["notes"] == ["nccl: nccl_rates.py is silent"]
    machine.silent = {"nixl.py"}
    data = machine.run("latency")
    assert not any(outcome["failed"] for outcome in data["outcomes"])
    assert "nixl: no figure: nixl.py is silent" in data["outcomes"][0]["notes"]


def test_a_peer_that_hung_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = findings.ScenarioResults(tmp_path, tmp_path / "out.json", tmp_path)
    runs: list[str] = []
    monkeypatch.setattr(findings, "peer", lambda script, *_: runs.append(script) or {"error": "hung", "hung": True})
    assert found.peer("nixl", "nixl.py", "--sizes=4K") == found.peer("nixl", "nixl.py", "--sizes=8K") == []
    assert runs == ["nixl.py"]
    assert [turn["command"][1] for turn in found.peers["nixl"]] == ["--sizes=4K", "--sizes=8K"]


def test_details_of_transfers_are_kept_once() -> None:
    rows: list[dict[str, Any]] = [{"iterations": []}, {"iterations": [1], "samples_us": [1.0]}, {"iterations": [2]}]
    findings.drop_details(rows)
    assert rows == [{"iterations": []}, {"iterations": [1], "samples_us": [1.0]}, {}]


def test_why_a_rank_ended_is_what_it_said_without_the_traceback() -> None:
    said = """E1121 ucx_utils.cpp:592] VRAM memory is detected as host by UCX.
Traceback (most recent call last):
  File "nixl.py", line 155, in <module>
    sys.exit(main())
             ^^^^^^
nixl_cu13._bindings.nixlBackendError: NIXL_ERR_BACKEND
"""
    assert ranks.reason(said.splitlines()) == (
        "E1121 ucx_utils.cpp:592] VRAM memory is detected as host by UCX.; "
        "nixl_cu13._bindings.nixlBackendError: NIXL_ERR_BACKEND"
    )
    assert ranks.reason([]) == "it printed nothing"


def test_our_own_failure_is_said_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path)
    machine.silent = {"mesh"}
    data = machine.run("pair")
    assert data["failures"] == ["crossrail mesh: it broke"] * 2
    assert [outcome["work"] for outcome in data["outcomes"] if outcome["failed"]] == [
        "NVLink, both ways at once, 64M, the slower GPU"
    ]


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path)
    assert [outcome["met"] for outcome in machine.run("memory")["outcomes"]] == [True, True]
    machine.silent = {"driver"}
    unknown = machine.run("memory")["outcomes"][0]
    assert (unknown["met"], unknown["failed"], unknown["notes"][-1]) == (None, True, "the driver alone: it broke")


@pytest.mark.parametrize(("gpus", "device", "met"), [(1, "cuda:0", False), (2, "cuda:0,cuda:1", True)])
def test_pages_beside_nixl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, device: str, met: bool) -> None:
    machine = Machine(monkeypatch, tmp_path, gpus)
    monkeypatch.setattr(kv, "gpu_count", lambda: (gpus, ""))
    outcomes = machine.run("kv")["outcomes"]
    assert [outcome["ratio"] for outcome in outcomes] == ["-", "-", "400.000", "-"]
    assert (outcomes[1]["ours"], outcomes[1]["met"]) == ("900 us", met)
    assert (outcomes[3]["notes"], outcomes[3]["failed"]) == (["no"], False), "NIXL has no figure, and ours has"
    assert all(f"--device={device}" in words for words in machine.asked)
    machine.silent = {"kv"}
    assert [outcome["failed"] for outcome in machine.run("kv")["outcomes"]] == [True, True, True]


def test_the_table_has_a_line_for_each_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load(GPU / "run.py")
    (tmp_path / "pair.json").write_text(json.dumps({"outcomes": [{"work": "w", "ours": "1 GB/s", "to_reach": ">= 2"}]}))
    outcomes = run.outcomes_of(tmp_path / "pair.json", Result("pair", "passed"))
    outcomes += run.outcomes_of(tmp_path / "mesh.json", Result("mesh", "out of time"))
    outcomes += run.outcomes_of(tmp_path / "tcp.json", Result("tcp", "skipped", notes=["needs 2 GPUs"]))
    assert [outcome.failed for outcome in outcomes] == [False, True, False]
    harness.show_goals("GPU memory, every goal", outcomes, run.console())
    said = capsys.readouterr().out
    assert "mesh: out of time" in said
    assert "tcp: needs 2 GPUs" in said
    assert "1 GB/s" in said


def test_the_table_for_the_page() -> None:
    table = load(GPU / "table.py")
    base = {
        "ours": "1 GB/s",
        "peer": "-",
        "ratio": "0.5",
        "to_reach": ">= 1",
        "met": None,
        "failed": False,
        "notes": [],
    }
    lines = [{**base, "work": "a", "met": False}, {**base, "work": "b"}, {**base, "work": "c", "failed": True}]
    assert table.goals({"outcomes": lines}).splitlines()[2:] == [
        "| a | 1 GB/s | - | 0.5 | >= 1 | **no** |",
        "| b | 1 GB/s | - | 0.5 | >= 1 | - |",
        "| c | 1 GB/s | - | 0.5 | >= 1 | **failed** |",
    ]
    assert len(table.goals({"outcomes": lines}, "a | c").splitlines()) == 2 + 2


def test_what_was_counted_in_three_ways() -> None:
    table = load(GPU / "table.py")
    own = {"kernel_us": 20.0, "p50_us": 26.0, "host_p50_us": 90.0}
    peers = {"deepep": {**own, "kernel_us": 44.2, "heap_bytes": 2 << 30}, "drop-in": own, "nccl": {"error": "no NCCL"}}
    row = {
        "what": "combine",
        "layout": "expert",
        "dtype": "fp8",
        "tokens": 1,
        "p50_us": 25.0,
        "host_p50_us": 30.0,
        "peers": peers,
    }
    moved = {"bytes_logical": 10_000_000, "bytes_wire": 5_000_000, "heap_bytes": 11 << 20}
    again = {**row, **moved, "layout": "rank", "peers": {}, "cached": True}
    few = {**again, "tokens": 8, "cached": False}
    line = "| combine, fp8, 8 tokens | ours | - | 25.0 | 30.0 | 400 | 200 | 11 MiB |"
    assert table.ways({"rows": [row | moved, few]}).splitlines()[-1] == line
    assert table.ways({"rows": [{**row, **moved}, again]}).splitlines()[2:] == [
        "| combine, fp8 | ours | 20.0 | 25.0 | 30.0 | 400 | 200 | 11 MiB |",
        "| combine, fp8 | deepep | 44.2 | 26.0 | 90.0 | 385 | - | 2048 MiB |",
        "| combine, fp8 | drop-in | 20.0 | 26.0 | 90.0 | 385 | - | - |",
        "| combine, fp8 | nccl | no NCCL | - | - | - | - | - |",
        "| combine, fp8, cached handle | ours | - | 25.0 | 30.0 | 400 | 200 | 11 MiB |",
    ]


def test_a_sweep_has_a_table_for_each_number_that_changed() -> None:
    table = load(GPU / "table.py")
    usual = {"hidden": 7168, "topk": 8, "experts": 288, "routing": "uniform", "dtype": "fp8", "num_sms": 132}
    rows = [
        {**usual, "layout": "expert", "what": what, "tokens": tokens, "bytes_wire": 1_000_000, "p50_us": 1.0 * tokens}
        for tokens in (64, 128)
        for what in ("dispatch", "e2e")
    ]
    rows += [{**rows[2], "topk": 4}, {**rows[2], "routing": "one", "p50_us": 9.0}]
    tokens, topk, routing = table.sweep({"rows": rows}).split("\n\nexpert layout")[0:3]
    assert tokens.startswith("expert layout, hidden 7168, top-k 8, experts 288, routing uniform, dtype fp8, SMs 132:")
    assert tokens.splitlines()[2:] == [
        "| tokens | 64 | 128 |",
        "|---|---|---|",
        "| dispatch, us | 64.0 | 128.0 |",
        "| both, us | 64.0 | 128.0 |",
        "| dispatch, wire GB/s | 16 | 8 |",
    ]
    assert "| top-k | 4 | 8 |" in topk
    assert "| dispatch, us | 9.0 | 128.0 |" in routing


def test_small_transfers_stand_side_by_side() -> None:
    table = load(GPU / "table.py")
    turn = {"rows": [{"size": 4096, "samples_us": [10.0, 12.0, 11.0], "wall_us": [30.0]}]}
    rows = [{"what": "write", "size": 4096, "p50_us": took} for took in (8.0, 9.0)]
    peers = {"nccl": [turn], "nixl": [{"error": "it could not be loaded"}], "puts": [turn, turn]}
    head, _, line = table.latency({"rows": rows, "peers": peers}).splitlines()
    assert head == "| us, one way | write | message | NCCL, a host waits | NIXL, a host waits | put | NCCL in a graph |"
    assert line == "| 4 KiB | 8.50 | - | 30.00 | - | 11.00 | 11.00 |"


def test_what_was_not_measured_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = load(GPU / "table.py")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    page = "a\n<!-- machine of one-2.json -->\nold\n<!-- end -->\nb\n"
    assert table.written(page) == page.replace("old", "Not measured yet.")
    gpu = {"name": "H200", "driver_version": "580"}
    there = {"gpus": [gpu] * 4, "gpus_used": 2, "cores": 64, "commit": "f000f1138e05", "time": "now"}
    data = {"environment": {**there, "peers": {"nccl": "2.28"}}, "command": ["goals.py", "--rounds=3", "--quick"]}
    (tmp_path / "one-2.json").write_text(json.dumps(data))
    said = "2 of 4 H200; driver 580; 64 cores; nccl 2.28; commit f000f11; turns: 3; fewer iterations; now"
    assert table.written(page) == page.replace("old", said)
    with pytest.raises(ValueError, match="there are table, ways"):
        table.written(page.replace("machine", "plot"))


def test_the_pages_have_the_tables_of_the_committed_results() -> None:
    table = load(GPU / "table.py")
    for page in ("performance.md", "performance-experts.md"):
        text = (ROOT / "docs" / page).read_text()
        assert text.count("<!-- end -->") == len(table.BLOCK.findall(text)) > 0
        assert table.written(text) == text, f"docs/{page} is older than its files: make pages"


def load(path: Path) -> types.ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--only=flying"], 2),
        (["--rounds=0"], 2),
        (["--gpus=0"], 2),
        (["--name=pair"], 2),
        ([], 1),
        (["--only=experts"], 1),
    ],
)
def test_bad_usage_and_no_gpu(tmp_path: Path, options: list[str], code: int) -> None:
    if gpu_count()[0]:
        pytest.skip("this machine has a GPU")
    command = [sys.executable, GPU / "run.py", f"--pack={tmp_path}", f"--out={tmp_path}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr


@pytest.mark.parametrize(
    ("script", "options", "module"),
    [
        ("peers/nccl_rates.py", ["--what=latency"], "torch"),
        ("peers/host_calls.py", [], "torch"),
        ("peers/nixl.py", [], "nixl_cu13"),
        ("peers/copies.py", ["--what=pair"], "cuda"),
        ("puts.py", [], "torch"),
        ("memory.py", ["--way=tcp"], "cuda"),
    ],
)
def test_a_peer_that_is_not_installed_is_named(script: str, options: list[str], module: str) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    command = [sys.executable, GPU / script, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{Path(script).name}: needs" in done.stderr
    assert "Traceback" not in done.stderr


RANK = """
import argparse, sys, time
sys.path.insert(0, {peers!r})
import ranks
parser = argparse.ArgumentParser()
ranks.add_common(parser)
arguments = parser.parse_args()
def work(arguments, rank, folder):
    other = ranks.exchange(folder, rank, "name", str(rank).encode())
    {body}
    if rank == 0:
        ranks.keep([{{"other": other.decode(), "sizes": arguments.sizes}}], {{}})
    {after}
sys.exit(ranks.run(arguments, work))
"""


@pytest.mark.parametrize(
    ("body", "after", "code", "says"),
    [
        ("pass", "pass", 0, ""),
        ("sys.exit(3 if rank else 0)", "pass", 1, "ended with"),
        ("time.sleep(60)", "pass", 1, "did not end within 2 s"),
        ("pass", "sys.exit(5)", 0, "ended with"),
    ],
)
def test_ranks_of_a_peer(tmp_path: Path, body: str, after: str, code: int, says: str) -> None:
    script = tmp_path / "peer.py"
    script.write_text(RANK.format(peers=str(GPU / "peers"), body=body, after=after))
    command = [sys.executable, script, "--sizes=4K,1M", "--limit=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    if code == 0:
        assert json.loads(done.stdout)["rows"] == [{"other": "1", "sizes": [4096, 1 << 20]}]


class Code(enum.IntEnum):
    cudaErrorPeerAccessAlreadyEnabled = 704


class Runtime:
    """CUDA's runtime over host memory: as much of it as copies.py calls."""

    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDeviceToHost=2)

    def __init__(self, gpus: int, lose: bool = False) -> None:
        self.gpus, self.lose = gpus, lose
        self.areas: dict[int, Any] = {}
        self.objects = self.events = 0
        self.begun: set[int] = set()

    def cudaEventCreate(self) -> tuple[int, int]:
        self.objects, self.events = self.objects + 1, self.events + 1
        return 0, self.events

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, self.gpus

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        area = ctypes.create_string_buffer(size)
        self.areas[ctypes.addressof(area)] = area
        return 0, ctypes.addressof(area)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.areas[address]
        return (0,)

    def cudaMemset(self, address: int, value: int, size: int) -> tuple[int]:
        ctypes.memset(address, value, size)
        return (0,)

    def cudaMemcpyPeerAsync(self, to: int, _a: int, source: int, _b: int, size: int, _stream: int) -> tuple[int]:
        ctypes.memmove(to, source, size - self.lose)
        return (0,)

    def cudaMemcpy(self, to: int, source: int, size: int, _kind: int) -> tuple[int]:
        ctypes.memmove(to, source, size)
        return (0,)

    def cudaEventElapsedTime(self, first: int, _last: int) -> tuple[int, float]:
        self.begun.add(first)
        return 0, 0.5

    def cudaDeviceCanAccessPeer(self, _source: int, _target: int) -> tuple[int, int]:
        return 0, 1

    def cudaDeviceEnablePeerAccess(self, _target: int, _flags: int) -> tuple[Code]:
        return (Code.cudaErrorPeerAccessAlreadyEnabled,)

    def __getattr__(self, name: str) -> Any:
        """What makes things counts them; what else there is does nothing."""

        def call(*_: Any) -> tuple[int, ...]:
            self.objects += ("Create" in name) - ("Destroy" in name)
            return (0, 1) if "Create" in name else (0,)

        return call


def test_copies_count_what_each_gpu_sends() -> None:
    copies = load(GPU / "peers" / "copies.py")
    assert copies.pairs("pair", 4, 2) == [(0, 1)]
    assert copies.pairs("all", 3, 4) == [(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]
    with pytest.raises(copies.CudaError, match="needs 4 GPUs, but this machine has 2"):
        copies.pairs("all", 4, 2)
    runtime = Runtime(3)
    arguments = types.SimpleNamespace(what="all", window=4, iters=3, warmup=1)
    row = copies.measure(copies.Cuda(runtime), copies.pairs("all", 3, 3), 1 << 20, arguments)
    assert row["samples_us"] == [500.0] * 3
    assert len(runtime.begun) == 3, "each GPU's time begins with its first copy, to whomever it goes"
    assert row["gb_per_s"] == pytest.approx(2 * 4 * (1 << 20) / 500.0 / 1e3)
    assert (runtime.areas, runtime.objects) == ({}, 0), "all of it is given back"
    with pytest.raises(copies.CudaError, match="data received differs from the data sent"):
        copies.measure(copies.Cuda(Runtime(2, lose=True)), [(0, 1)], 4096, arguments)
