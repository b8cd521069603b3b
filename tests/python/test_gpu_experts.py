"""The goals of expert parallelism on GPUs without a GPU: what is held against what."""

from __future__ import annotations

import importlib
import struct
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.ep.options import EpOptions
from crossrail_tools.report.schema import PeerResult, RankTimes, Row

GPU = Path(__file__).parents[2] / "benches" / "gpu"
sys.path[:0] = [str(GPU)]

import experts  # noqa: E402
import goals  # noqa: E402
import hosts  # noqa: E402
import nodes  # noqa: E402
import normal  # noqa: E402
import pack  # noqa: E402

from harness import Effort, Outcome  # noqa: E402

V1 = PeerResult("deep_ep", p50_us=100.0, rounds=[100.0], kernel_us=50.0, host_p50_us=200.0, heap_bytes=1000)


def row(what: str, p50_us: float = 50.0, dtype: str = "fp8", **more: PeerResult) -> Row:
    peers = {"deepep": V1, **more}
    made = Row(what, "heap", 7168, rounds=[p50_us], p50_us=p50_us, host_p50_us=90.0, dtype=dtype, peers=peers)
    return replace(made, heap_bytes=200, num_sms=132, ranks=4)


def test_decode_is_held_against_what_is_counted_alike() -> None:
    own = PeerResult("crossrail.deep_ep", p50_us=60.0, rounds=[60.0], kernel_us=30.0)
    rows = [row("e2e", 58.0), row("dispatch", **{"drop-in": own}), row("combine")]
    found = {one.work: one for one in experts.decode_outcomes(rows, "never")}
    both = found["decode, dispatch + combine, by events"]
    assert (both.ours, both.peer, both.ratio, both.met) == ("58.0 us", "100.0 us", "0.58", True)
    dispatch = found["decode, dispatch, kernels"]
    assert (dispatch.ours, dispatch.peer, dispatch.met) == ("30.0 us", "50.0 us", True)
    assert "by events 50.0 us" in dispatch.notes[-1]
    combine = found["decode, combine, kernels"]
    assert (combine.ours, combine.met) == ("50.0 us", False)
    assert "count more" in combine.notes[-1]
    memory = found["decode, GPU memory of a buffer"]
    assert (memory.ratio, memory.met) == ("0.200", True)
    host = found["decode, dispatch + combine, by the host's clock"]
    assert (host.ours, host.peer, host.met) == ("90.0 us", "200.0 us", None)
    assert not any(one.failed for one in found.values())


def test_prefill_is_held_against_deepeps_best_way_to_count() -> None:
    slow = PeerResult("deep_ep", p50_us=900.0, rounds=[900.0], host_p50_us=1000.0)
    rows = [
        row(what, 64.0, dtype, **{"deepep-uncached": slow}) for dtype in ("fp8", "bf16") for what in experts_modes()
    ]
    found = {(one.work, one.to_reach): one for one in experts.prefill_outcomes(rows, "never")}
    judged = [one for one in found.values() if one.met is not None]
    assert [(one.peer, one.met) for one in judged] == [("100.0 us", True), ("100.0 us", False), ("100.0 us", True)]
    uncached = found["prefill, dispatch bf16 + combine, by events", "beside deepep-uncached"]
    assert (uncached.peer, uncached.met) == ("900.0 us", None)


def experts_modes() -> tuple[str, ...]:
    return ("dispatch", "combine", "e2e")


def test_what_has_no_figure_says_why() -> None:
    gone = PeerResult("deep_ep", error="ModuleNotFoundError: No module named 'deep_ep'")
    for one in experts.decode_outcomes([row(what, deepep=gone) for what in experts_modes()], "never")[:4]:
        assert one.failed
        assert "No module" in one.notes[0]
    for one in experts.decode_outcomes([], "rank 2: did not verify") + experts.prefill_outcomes(
        [], "rank 2: did not verify"
    ):
        assert one.failed
        assert one.notes[0] == "rank 2: did not verify"
    assert experts.sms_outcomes([], "prefill", ["rank 1: gone"])[0].notes == ["rank 1: gone"]
    assert experts.control_outcome([], "kernels cached", 100.0, ["no GPU"]).failed


@pytest.mark.parametrize(("few", "met"), [(109.0, True), (111.0, False)])
def test_few_multiprocessors_are_held_against_the_best_number(few: float, met: bool) -> None:
    rows = [replace(row("combine", time), num_sms=number) for number, time in ((16, few), (32, 100.0), (132, 105.0))]
    combine = experts.sms_outcomes(rows, "prefill", [])[1]
    assert (combine.met, combine.peer) == (met, "100.0 us (32 SMs)")
    assert experts.sms_outcomes(rows, "decode", [])[1].met is None


def test_the_steps_of_a_buffers_life_are_added_up() -> None:
    steps = {"init": 30e3, "connect": 40e3, "destroy": 20e3}
    rows = [replace(row(step), rank_times=[RankTimes(0, time, time, time)]) for step, time in steps.items()]
    found = experts.control_outcome(rows, "kernels cached", 100.0, [])
    assert (found.ours, found.met) == ("90.0 ms", True)
    assert found.notes == ["ms: init 30.0, connect 40.0, destroy 20.0"]
    assert found.work == "control cycle, 4 GPUs, kernels cached"
    parts = [replace(row, stages_us={"map": 500.0} if row.what == "connect" else {}) for row in rows]
    shared = experts.control_outcome(parts, "kernels cached, on 2 GPUs", 80.0, [], "ranks")
    assert (shared.work, shared.met) == ("control cycle, 4 ranks, kernels cached, on 2 GPUs", False)
    assert shared.notes[1:] == ["connect: map 0.5"]


def test_every_scenario_is_known_and_bounded() -> None:
    ours = {name: limits for name, limits in goals.SCENARIOS.items() if name.startswith("ep_")}
    alone = {"ep_decode", "ep_prefill", "ep_hosts", "ep_normal", "ep_sms", "ep_sweep", "ep_control"}
    assert set(ours) == alone | {"ep_nodes", "ep_once"}
    assert all(0 < limit <= 180 for _, limit, _ in ours.values())
    # What calls take of the host can be seen with one rank; the others are about links.
    assert {name for name, (_, _, gpus) in ours.items() if gpus < 2} == {"ep_hosts"}
    assert set(goals.SETS["experts"]) == set(ours)
    assert set().union(*goals.SETS.values()) <= set(goals.SCENARIOS)


class Asked:
    """Stands in for `findings.ScenarioResults`: records a scenario's commands, none of which returns rows."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.failures = ["no GPU"]
        self.commands: list[Any] = []

    def ours(self, *options: str, **__: str) -> list[Row]:
        self.commands.append(parse_arguments(["bench", *options]))
        return []

    def failure_reason(self, _: str) -> str:
        return self.failures[-1]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", sorted({*goals.SETS["experts"]} - {"ep_hosts", "ep_normal", "ep_nodes", "ep_once"}))
def test_a_scenario_runs_commands_that_there_are(tmp_path: Path, name: str, quick: bool) -> None:
    asked = Asked()
    goals.SCENARIOS[name][0](Effort(3, quick), asked)  # type: ignore[arg-type]
    assert asked.commands
    assert asked.outcomes
    assert any(outcome.failed and outcome.notes == ["no GPU"] for outcome in asked.outcomes)
    for command in asked.commands:
        if isinstance(command, EpOptions):
            assert command.device == "cuda"
            assert all(one.work(ranks).tokens > 0 for one in command.swept() for ranks in (2, 4, 8))


def test_a_sweep_changes_one_number_of_a_preset_at_a_time(tmp_path: Path) -> None:
    asked = Asked()
    experts.sweep(Effort(), asked)  # type: ignore[arg-type]
    names = {"tokens", "hidden", "topk", "experts", "routing", "dtype"}
    for layout in ("expert", "rank"):
        commands = [command for command in asked.commands if command.layout == layout]
        assert {name for command in commands for name, _ in command.sweep} == names
        works = [one.work(4) for command in commands for one in command.swept()]
        assert len(set(works)) == len(works), "nothing is measured twice"
    assert max(one.tokens for command in asked.commands for one in command.swept()) == 8192


def called(tokens: int, pattern: str, dispatch: float, combine: float, loop: float, **more: float) -> dict[str, Any]:
    figures = {"dispatch_us": dispatch, "combine_us": combine, "loop_us": loop, "graph_us": 30.0}
    return {"tokens": tokens, "pattern": pattern} | figures | more


def test_hosts_are_held_against_the_goal_of_a_call_and_deepeps_loop() -> None:
    ours = [called(128, "plain", 11.0, 9.0, 40.0), called(128, "hook", 12.0, 8.0, 41.0, send_combine_us=33.0)]
    theirs = [called(128, "plain", 26.0, 16.0, 73.0)]
    found = hosts.host_outcomes(ours, theirs, "", "")
    assert [one.met for one in found] == [True, False, True, None, True, True, None, None, None]
    assert (found[0].peer, found[2].to_reach, found[2].ratio) == ("26.0 us", "<= 0.55 x deepep", "0.55")
    assert found[-1].work == "low latency, 128 tokens, hook: combine, the half that sends"
    assert found[-1].peer == "-", "DeepEP has no row of that pattern"
    (first, *_) = hosts.host_outcomes([called(1, "plain", 11.0, 9.0, 40.0)], theirs, "", "")
    assert first.work == "low latency, 1 token, plain: host, dispatch"
    (none,) = hosts.host_outcomes([], theirs, "no GPU", "")
    assert none.failed and none.notes == ["no GPU"]
    alone = hosts.host_outcomes(ours, [], "", "it hung")
    assert alone[0].notes == ["deepep: it hung"] and alone[2].met is None


def test_hosts_are_measured_by_one_program(tmp_path: Path) -> None:
    commands = []

    class Peers(Asked):
        def peer(self, name: str, script: str, *options: str, **_: str) -> list[Any]:
            commands.append((name, script, options[0]))
            return []

        def missing_reason(self, name: str) -> str:
            return "no GPU"

    goals.SCENARIOS["ep_hosts"][0](Effort(3, True), Peers())  # type: ignore[arg-type]
    assert commands == [
        ("drop-in", "host_calls.py", "--module=crossrail.deep_ep"),
        ("deepep", "host_calls.py", "--module=deep_ep"),
    ]


def test_normal_mode_is_measured_by_both_versions_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepep-v2" / "deep_ep").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    commands = []

    class Peers(Asked):
        def peer(self, name: str, script: str, *options: str, **environment: str) -> list[Any]:
            commands.append((name, *options[:3]))
            own = str(tmp_path / "deepep-v2" / "nccl")
            assert environment.get("EP_NCCL_ROOT_DIR") == (own if name == "deepep-v2" else None)
            return []

        def missing_reason(self, name: str) -> str:
            return "no GPU"

    peers = Peers()
    goals.SCENARIOS["ep_normal"][0](Effort(3, True), peers)  # type: ignore[arg-type]
    assert commands == [
        ("drop-in", "--module=crossrail.deep_ep", "--version=1", "--tokens=8,128,4096"),
        ("deepep", "--module=deep_ep", "--version=1", "--tokens=8,128,4096"),
        ("drop-in-v2", "--module=crossrail.deep_ep", "--version=2", "--tokens=8,128,4096"),
        *(("deepep-v2", "--module=deep_ep", "--version=2", f"--tokens={tokens}") for tokens in (8, 128, 4096)),
    ]
    assert [one.failed for one in peers.outcomes] == [True]


def test_two_nodes_are_measured_beside_the_same_rows_by_nccl(tmp_path: Path) -> None:
    programs = []

    class Peers(Asked):
        def peer(self, name: str, script: str, *options: str, **environment: str) -> list[Any]:
            programs.append((name, script, environment["CROSSRAIL_TLS"]))
            return []

        def missing_reason(self, name: str) -> str:
            return "no GPU"

    asked = Peers()
    goals.SCENARIOS["ep_nodes"][0](Effort(3, True), asked)  # type: ignore[arg-type]
    assert programs == [("drop-in", "host_calls.py", "tcp")]
    *apart, alone = asked.commands
    assert len(apart) == 2 * len(nodes.VARIANTS)
    assert all((one.nodes, one.compare) == (2, ["nccl"]) for one in apart)
    assert (alone.nodes, alone.transport, alone.tokens) == (1, "shm", 128)
    assert len([one for one in asked.outcomes if one.failed]) == len(asked.outcomes) == 11


def between(mode: str, tokens: int, time: float, theirs: float | None, p99: float = 0.0) -> Row:
    peers = {} if theirs is None else {"nccl-tokens": PeerResult(what="", p50_us=theirs)}
    return replace(row(mode, time), tokens=tokens, p99_us=p99, bytes_network=946_000, peers=peers)


def test_two_nodes_have_goals_and_nccls_fastest_settings_beside() -> None:
    turns = {
        "slow": [between("e2e", 128, 330.0, 700.0, 600.0), between("dispatch", 8, 40.0, None)],
        "fast": [between("e2e", 128, 350.0, 600.0, 900.0)],
        "ours is slow": [between("e2e", 128, 350.0, 650.0, 900.0)],
    }
    found = {one.work: one for one in nodes.node_outcomes(turns, "no GPU")}
    pair = found["two nodes, 128 tokens, dispatch + combine"]
    assert (pair.ours, pair.to_reach, pair.peer, pair.ratio, pair.met) == (
        "350 us",
        "<= 340 us",
        "600 us",
        "0.58",
        False,
    )
    assert pair.notes == ["946.00 kB over the network for each rank", "NCCL is fastest fast"]
    tail = found["two nodes, 128 tokens, dispatch + combine, p99"]
    assert (tail.ours, tail.peer, tail.met) == ("900 us", "350 us", False)
    few = found["two nodes, 8 tokens, dispatch"]
    assert (few.ours, few.peer, few.met) == ("40 us", "-", None)
    assert found["two nodes, 4096 tokens, combine"].failed
    calls = nodes.call_outcomes([called(8, "plain", 11.0, 10.0, 80.0)], "")
    assert [one.met for one in calls] == [True, False, None, None]
    assert nodes.unreached_outcome([between("e2e", 128, 109.0, None)], []).met


def test_rows_once_per_node_stand_beside_rows_once_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    goals.SCENARIOS["ep_once"][0](Effort(3, True), asked)  # type: ignore[arg-type]
    assert asked.outcomes[0].failed
    monkeypatch.setattr(nodes, "mps", nullcontext)
    asked = Asked()
    goals.SCENARIOS["ep_once"][0](Effort(3, True), asked)  # type: ignore[arg-type]
    ways = [(one.send, one.nodes, len(one.swept())) for one in asked.commands]
    assert ways == [(send, 2, shapes) for send in ("rank", "node", "auto") for shapes in (2, 1)]
    each, node = (
        replace(between("e2e", 4096, time, None), send=send) for send, time in (("rank", 300.0), ("node", 150.0))
    )
    each = replace(each, peers={"network": PeerResult("", p50_us=400.0)})
    apart = replace(each, backend="none")
    beside, found, chosen = nodes.once_outcomes({"rank": [each, apart], "node": [node], "auto": [each]}, [])
    assert (beside.ours, beside.peer, beside.ratio) == ("300 us", "400 us", "0.75")
    assert (found.ours, found.peer, found.ratio) == ("150 us", "300 us", "0.50")
    assert found.work == "two nodes of two ranks, 4096 tokens, dispatch + combine, send=node"
    assert chosen.work.endswith("send=auto, which chooses rank")


def chained(tokens: int, dtype: str, loop: float, each: float = 20.0, host: str = "waits") -> dict[str, Any]:
    figures = {f"{name}_us": each for name in ("dispatch", "combine", "dispatch_kernels", "combine_kernels")}
    return {"tokens": tokens, "dtype": dtype, "host": host, "loop_us": loop, **figures}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("void deep_ep::elastic::dispatch_impl<true, 8>(void*, ncclDevComm, ncclWindow_vidmem*)", True),
        ("crossrail_ep_rank_dispatch", True),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", False),
        ("void at::cuda::(anonymous namespace)::spin_kernel(long)", False),
        ("Memcpy DtoD (Device -> Device)", False),
    ],
)
def test_kernels_of_an_operation_are_told_by_what_their_names_begin_with(
    name: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(GPU / "peers")
    calls = importlib.import_module("normal_calls")
    torch = SimpleNamespace(autograd=SimpleNamespace(DeviceType=SimpleNamespace(CUDA="cuda")))
    assert calls.is_kernel(torch, SimpleNamespace(device_type="cuda", name=name)) is counts


def test_normal_mode_is_held_against_the_faster_version() -> None:
    said = dict.fromkeys(("drop-in", "deepep", "drop-in-v2", "deepep-v2"), "no GPU")
    rows = {
        "drop-in": [chained(128, "bf16", 55.0), chained(4096, "fp8", 370.0)],
        "deepep": [chained(128, "bf16", 108.0), chained(4096, "fp8", 803.0)],
        "deepep-v2": [chained(128, "bf16", 94.0), chained(4096, "fp8", 454.0)],
    }
    short, long = normal.normal_outcomes(rows, said)
    assert (short.to_reach, short.peer, short.met) == ("<= 0.6 x deepep-v2", "94.0 us", True)
    assert (long.to_reach, long.peer, long.met) == ("<= 0.8 x deepep-v2", "454.0 us", False)
    assert "deepep: 803.0 us" in long.notes
    rows["deepep-v2"] = []
    short, long = normal.normal_outcomes(rows, said)
    assert (short.peer, short.met) == ("108.0 us", True) and "deepep-v2: no GPU" in short.notes
    assert long.met is None, "DeepEP V2 has no figure"


def test_the_rank_layout_is_held_against_the_kernels_of_v2() -> None:
    rows = {
        "drop-in-v2": [chained(128, "fp8", 50.0, 18.0, "does not wait")],
        "deepep-v2": [chained(128, "fp8", 60.0, 20.0, "does not wait")],
    }
    found = {one.work.rpartition(": ")[2]: one for one in normal.normal_outcomes(rows, {})}
    both = found["dispatch + combine, by events"]
    assert (both.ours, both.peer, both.met) == ("36.0 us", "40.0 us", True)
    assert found["combine, kernels"].met is None, "that goal is for 4096 tokens"
    (long,) = [chained(4096, "fp8", 400.0, 17.0, "does not wait")]
    rows = {"drop-in-v2": [long], "deepep-v2": [chained(4096, "fp8", 500.0, 20.0, "does not wait")]}
    found = {one.work.rpartition(": ")[2]: one for one in normal.normal_outcomes(rows, {})}
    assert [found[f"{name}, kernels"].met for name in ("dispatch", "combine")] == [False, True]


def test_a_packed_library_keeps_the_kernels_of_one_architecture() -> None:
    def container(*entries: tuple[int, bytes]) -> bytes:
        made = b"".join(
            struct.pack("<IIQ", 2, 32, len(code)) + bytes(12) + struct.pack("<I", of) + code for of, code in entries
        )
        return struct.pack("<IHHQ", pack.CONTAINER, 1, 16, len(made)) + made

    code = container((80, b"a" * 16), (90, b"b" * 16)) + bytes(8) + container((90, b"c" * 8))
    names = b"\0.nv_fatbin\0__nv_relfatbin\0.shstrtab\0"
    parts = [(b".nv_fatbin", code), (b"__nv_relfatbin", b"d" * 16), (b".shstrtab", names)]
    at, headers = 64, []
    for name, data in parts:
        headers.append(struct.pack("<IIQQQQ", names.index(name), 1, 0, 0, at, len(data)) + bytes(24))
        at += len(data)
    elf = bytearray(64)
    struct.pack_into("<Q", elf, 0x28, at)
    struct.pack_into("<HHH", elf, 0x3A, 64, len(parts), 2)
    library = elf + b"".join(data for _, data in parts) + b"".join(headers)
    slim = bytearray(library)
    pack.keep_one(slim, 90)
    assert slim == library.replace(b"a" * 16, bytes(16)).replace(b"d" * 16, bytes(16))
