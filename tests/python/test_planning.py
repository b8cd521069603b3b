"""Plans of expert parallelism: closed forms against random routings, fits against what was measured on GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossrail_tools.planning import calibration, cost
from crossrail_tools.planning.cost import plan
from crossrail_tools.planning.presets import CLUSTERS, MODELS, PUBLISHED
from crossrail_tools.planning.routing import Routing
from crossrail_tools.planning.shapes import Cluster, Model, PlanError
from crossrail_tools.report.schema import Report, Row

GPU = Path(__file__).parents[2] / "benches" / "results" / "gpu"
H200 = CLUSTERS["h200"]
MODEL = Model("test", experts=256, topk=8, hidden=7168, decode_tokens=128, prefill_tokens=4096, source="test")


def drawn(routing: Routing, tokens: int, seed: int = 7) -> np.ndarray:
    """Selected experts [tokens, topk], drawn as :class:`Routing` says."""
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, routing.experts))
    size = routing.experts // routing.groups
    used = np.argsort(rng.random((tokens, routing.groups)), axis=1)[:, : routing.topk_groups]
    usable = np.zeros((tokens, routing.groups), bool)
    np.put_along_axis(usable, used, True, axis=1)
    scores[~np.repeat(usable, size, axis=1)] = -1
    return np.argsort(-scores, axis=1)[:, : routing.topk]


def homes_of(routing: Routing, units: int) -> np.ndarray:
    """The unit of every copy of every expert [copies, experts]: equally many each, two copies of an expert apart."""
    rng = np.random.default_rng(5)
    most = -(-routing.physical // routing.experts)
    homes = np.empty((most, routing.experts), int)
    homes[0] = np.arange(routing.experts) * units // routing.experts
    load = np.bincount(homes[0], minlength=units).astype(float)
    for number in range(routing.physical - routing.experts):
        copy, expert = 1 + number // routing.experts, 37 * number % routing.experts  # of all units in turn
        here = load + rng.random(units) / 2
        here[homes[:copy, expert]] = np.inf
        homes[copy, expert] = np.argmin(here)
        load[homes[copy, expert]] += 1
    return homes


def units_reached(routing: Routing, units: int, tokens: int = 20_000) -> float:
    """The mean number of units that random tokens reach, which select any copy of each of their experts."""
    chosen = drawn(routing, tokens)
    numbers = np.empty(routing.experts, int)
    numbers[37 * np.arange(routing.experts) % routing.experts] = np.arange(routing.experts)
    copies = (routing.physical - numbers[chosen] + routing.experts - 1) // routing.experts
    copy = (np.random.default_rng(11).random(chosen.shape) * copies).astype(int)
    homes = np.sort(homes_of(routing, units)[copy, chosen], axis=1)
    return float(1 + (np.diff(homes, axis=1) > 0).sum(axis=1).mean())


@pytest.mark.parametrize("units", [2, 4, 8, 32, 256])
def test_ranks_reached(units: int) -> None:
    routing = Routing(experts=256, topk=8, physical=256)
    assert routing.reached(units) == pytest.approx(units_reached(routing, units), rel=0.01)


@pytest.mark.parametrize("units", [2, 4, 8, 16, 64])
def test_nodes_reached_with_groups(units: int) -> None:
    routing = Routing(experts=256, topk=8, physical=256, groups=8, topk_groups=4)
    assert routing.reached(units) == pytest.approx(units_reached(routing, units), rel=0.01)
    assert routing.reached(8) <= 4


@pytest.mark.parametrize(("physical", "units"), [(288, 32), (320, 4), (512, 64), (512, 512), (2048, 2048)])
def test_ranks_reached_with_redundant_experts(physical: int, units: int) -> None:
    routing = Routing(experts=256, topk=8, physical=physical)
    assert routing.reached(units) == pytest.approx(units_reached(routing, units), rel=0.01)


def test_every_routing_of_a_small_case() -> None:
    routing = Routing(experts=8, topk=3, physical=8)
    every = [len({expert // 2 for expert in chosen}) for chosen in itertools.combinations(range(8), 3)]
    assert routing.reached(4) == pytest.approx(sum(every) / len(every))
    assert routing.reached(1) == 1


def test_rows_are_where_tokens_go() -> None:
    one = plan(H200, MODEL, "prefill", 64)
    rows = (one.dispatch.nvlink_bytes + one.dispatch.network_bytes) / MODEL.dispatch_row
    assert rows == pytest.approx(4096 * one.ranks_per_token * 63 / 64)
    selected = plan(H200, MODEL, "prefill", 64, "expert")
    rows = (selected.dispatch.nvlink_bytes + selected.dispatch.network_bytes) / MODEL.dispatch_row
    assert rows == pytest.approx(4096 * 8 * 63 / 64)


def test_rows_forwarded_by_nodes() -> None:
    """Each rank's own sends and forwards, counted for random tokens of one rank, as all ranks are alike."""
    routing = Routing(256, 8, 256)
    ranks, nodes = 32, 4
    homes = drawn(routing, 20_000) * ranks // 256
    network = np.mean([len({int(home) // 8 for home in token} - {0}) for token in homes])
    # Rank 0 of each node forwards what rank 0 of another sends there; what arrives for itself stays.
    nvlink = np.mean([len({int(home) for home in token if home % 8}) for token in homes])
    one = plan(H200, MODEL, "prefill", ranks, "node")
    assert one.nodes == nodes
    assert one.dispatch.network_bytes / MODEL.dispatch_row / 4096 == pytest.approx(network, rel=0.01)
    assert one.dispatch.nvlink_bytes / MODEL.dispatch_row / 4096 == pytest.approx(nvlink, rel=0.01)


def test_groups_of_experts_limit_what_nodes_receive() -> None:
    grouped = replace(MODEL, groups=8, topk_groups=4)
    free, limited = (plan(H200, model, "prefill", 64, "node") for model in (MODEL, grouped))
    assert limited.dispatch.network_bytes < 0.8 * free.dispatch.network_bytes
    assert limited.nodes_per_token < 4 < free.nodes_per_token


def test_oversubscribed_leaves_and_imbalance() -> None:
    assert H200.network is not None
    flat = plan(H200, MODEL, "prefill", 64)
    leaves = replace(H200, network=replace(H200.network, oversubscription=4, leaf_nodes=2))
    narrow = plan(leaves, MODEL, "prefill", 64)
    assert narrow.dispatch.fabric_bytes == pytest.approx(flat.dispatch.network_bytes * 6 / 7)
    assert narrow.dispatch.fabric_us == pytest.approx(4 * 6 / 7 * flat.dispatch.network_us)
    assert narrow.dispatch.bound == narrow.link == "fabric"
    busy = plan(H200, replace(MODEL, imbalance=1.5), "prefill", 64)
    assert busy.dispatch.network_us == pytest.approx(1.5 * flat.dispatch.network_us)


def test_where_the_network_takes_over() -> None:
    plans = [plan(H200, MODEL, "prefill", ranks) for ranks in (4, 8, 16, 32)]
    assert cost.turn(plans) == (8, 16)
    assert cost.turn(plans[:2]) == (8, None)
    assert cost.turn(plans[2:]) == (None, 16)
    assert plan(CLUSTERS["gb200"], MODEL, "prefill", 64).link == "nvlink"


@pytest.mark.parametrize("ranks", [4, 16, 512, 2048])
def test_copies_of_experts_fill_all_ranks(ranks: int) -> None:
    one = plan(H200, replace(MODEL, redundant_experts=None), "decode", ranks)
    assert one.physical_experts % ranks == 0
    assert 0 <= one.physical_experts - 256 < ranks


def measured(name: str) -> calibration.Files:
    return calibration.read([name], [(GPU / name).read_text()])


@pytest.mark.parametrize("scenario", ["ep_decode", "ep_prefill", "ep_sms"])
@pytest.mark.parametrize("gpus", [2, 4])
def test_a_fit_to_other_sizes_on_two_gpus_foretells_measurements(scenario: str, gpus: int) -> None:
    fitted, _ = calibration.calibrated(H200, measured("ep_sweep-2.json"))
    rows = calibration.compared(fitted, measured(f"{scenario}-{gpus}.json").exchanges, ["ep_sweep-2.json"])
    assert len(rows) >= 3
    for one in rows:
        assert abs(one.error) <= 0.15, (one.measured.row.what, one.measured.row.tokens, one.error)
        assert not one.fitted


def test_the_h200_is_what_was_measured() -> None:
    fitted, told = calibration.calibrated(H200, measured("ep_sweep-2.json"))
    for name in ("dispatch_us", "combine_us", "nvlink_gb_per_s", "copy_gb_per_s"):
        assert getattr(H200, name) == pytest.approx(getattr(fitted, name), rel=0.1)
    assert "NVLink" in told[0]


def test_bytes_and_heaps_are_those_that_were_measured() -> None:
    for name in ("ep_decode-4.json", "ep_prefill-4.json", "ep_prefill-2.json"):
        for one in measured(name).exchanges:
            planned, row = one.planned(H200), one.row
            both = {"dispatch": [planned.dispatch], "combine": [planned.combine]}
            wire = sum(part.nvlink_bytes for part in both.get(row.what, [planned.dispatch, planned.combine]))
            assert wire == pytest.approx(row.bytes_wire, rel=0.02)
            assert planned.memory.heap == pytest.approx(row.heap_bytes, rel=0.03)


def made_up(cluster: Cluster, tokens: Sequence[int]) -> calibration.Files:
    """Rows whose times are exactly those of ``cluster``."""
    rows = []
    for count, what in itertools.product(tokens, ("dispatch", "combine", "e2e")):
        shape = Row(what, "heap", 0, ranks=4, tokens=count, hidden=7168, topk=8, experts=256, layout="rank")
        logical = count * (1 if what == "dispatch" else 2)
        row = replace(shape, dtype="fp8", device="cuda", routing="uniform", bytes_logical=logical, p50_us=1.0)
        one = calibration.Measured(row, "made up")
        us = calibration.compared(cluster, [one])[0].us
        rows.append(calibration.Measured(replace(row, p50_us=us), "made up"))
    return calibration.Files(rows, {}, [])


def test_a_fit_finds_the_numbers_that_made_the_times() -> None:
    true = replace(
        H200, dispatch_us=9.0, combine_us=7.0, pair_us=2.0, nvlink_gb_per_s=300.0, copy_gb_per_s=1000.0, network=None
    )
    files = made_up(true, [1, 16, 128, 1024, 4096])
    # In the rank layout of one number of ranks, rows sent and rows read are in a fixed ratio: another number tells them
    # apart.
    pairs = [calibration.Measured(replace(one.row, ranks=2), one.file) for one in files.exchanges]
    timed = [
        calibration.Measured(replace(one.row, p50_us=calibration.compared(true, [one])[0].us), one.file)
        for one in pairs
    ]
    fitted, _ = calibration.calibrated(replace(H200, network=None), calibration.Files(files.exchanges + timed, {}, []))
    assert fitted == replace(
        true,
        dispatch_us=pytest.approx(9),
        combine_us=pytest.approx(7),
        pair_us=pytest.approx(2),
        nvlink_gb_per_s=pytest.approx(300),
        copy_gb_per_s=pytest.approx(1000),
    )


def test_a_fit_needs_several_sizes() -> None:
    with pytest.raises(PlanError, match="dispatch was measured with 2 different numbers of bytes, and a fit needs 3"):
        calibration.calibrated(H200, made_up(H200, [1, 128]))


def test_rates_of_networks_and_meshes() -> None:
    results = GPU.parent
    paths = [results / "tcp-latency.json", results / "rails-equal.json", GPU / "mesh-4.json"]
    files = calibration.read([str(path) for path in paths], [path.read_text() for path in paths])
    fitted, told = calibration.calibrated(H200, files)
    assert fitted.network is not None
    assert 0.2 < fitted.network.gb_per_s < 0.3  # four rails of 2 Gbit/s
    assert 1 < fitted.network.latency_us < 50
    assert 200 < fitted.nvlink_gb_per_s < 450
    assert len(told) == 2


def test_files_that_tell_nothing() -> None:
    name = "unpack-2.json"
    with pytest.raises(PlanError, match="--calibrate: the files have no rows of dispatch and combine"):
        calibration.calibrated(H200, measured(name))
    with pytest.raises(PlanError, match=r"x\.json: not JSON.*give the JSON of `crossrail bench`"):
        calibration.read(["x.json"], ["{"])
    with pytest.raises(PlanError, match="schema is 'crossrail-goals/1'"):
        measured("all-to-all-4.json")


def test_what_a_plan_does_not_cover_is_counted() -> None:
    assert measured("ep_sweep-2.json").left_out == {"routed otherwise than uniformly (one)": 6}
    assert measured("ep_prefill-2.json").left_out == {"with a cached handle": 2}


@pytest.mark.parametrize(
    "change",
    [{"p50_us": 0.0}, {"topk": 999}, {"experts": 255}, {"experts": 1 << 40, "ranks": 2}, {"tokens": 0}],
)
def test_rows_that_cannot_be(change: dict[str, float]) -> None:
    report = Report.loads((GPU / "ep_decode-4.json").read_text())
    text = replace(report, rows=[replace(report.rows[0], **change)]).dumps()
    assert calibration.read(["x"], [text]).left_out == {"without the numbers that a plan needs": 1}


def test_published_times() -> None:
    """Nothing is fitted to them. Those between nodes, and what sends as Crossrail does, are near."""
    errors = {}
    for one in PUBLISHED:
        planned = one.planned()
        errors[one.what, one.ranks, one.phase, one.tokens] = (
            planned.dispatch.us / one.dispatch_us - 1,
            planned.combine.us / one.combine_us - 1,
        )
    near = [pair for (what, ranks, *_), pair in errors.items() if what.endswith("H800") and ranks >= 32]
    assert len(near) == 6
    assert all(abs(error) < 0.2 for pair in near for error in pair)
    assert all(abs(error) < 0.1 for error in errors["DeepEP V2, H20-3e", 8, "decode", 128])
    assert all(error < 0.3 for pair in errors.values() for error in pair), "no plan is far above what was reached"


def test_presets_can_be_planned_at_all_their_sizes() -> None:
    for cluster, model in itertools.product(CLUSTERS.values(), MODELS.values()):
        for ranks in (4, 8, 64, 2048):
            one = plan(cluster, model, "decode", ranks)
            assert 0 < one.dispatch.us < one.layer_us <= one.step_us
