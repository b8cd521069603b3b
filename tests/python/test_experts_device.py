"""Expert buffers on GPUs, as far as that can be seen without one: addresses and strides, by a GPU that is the host."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ep_cases import Case, Got, Inputs, Setup, inputs, judge, outputs
from fake_gpu import STREAM, FakeRegion, World
from host_torch import HostTensors, torch

import crossrail
from crossrail import _calls, _experts_device, _native
from crossrail._calls import CombineCall, DispatchCall, Sizes
from crossrail._device_arrays import PlainArrays, expert_shapes, rank_shapes

TWO = Setup(2, max_tokens=6, hidden=512, local_experts=3, topk=2)
SETUPS = {
    "bf16": TWO,
    "fp8": replace(TWO, dtype="fp8", prereduce=False),
    "ue8m0": replace(TWO, dtype="fp8", scale="ue8m0"),
    "odd": replace(TWO, dtype="fp8", scale="ue8m0", hidden=640),
}


def world_of(setup: Setup) -> World:
    numbers = {
        name: value for name, value in setup.arguments().items() if isinstance(value, int) and name != "prereduce"
    }
    parameters = _calls.parameters_of(numbers, setup.dtype, setup.scale, setup.layouts, 1.0)
    return World(Sizes.of(parameters), setup.prereduce)


def dispatch(way: Any, x: Any, topk_idx: Any, **options: Any) -> Any:
    names = dict.fromkeys(DispatchCall._fields) | {"layout": "expert", "expert_alignment": 1, "send_only": False}
    names |= DispatchCall._field_defaults
    return way.dispatch(DispatchCall(**(names | {"x": x, "topk_idx": topk_idx} | options)))


def combine(way: Any, y: Any, handle: Any, **options: Any) -> Any:
    names = dict.fromkeys(CombineCall._fields) | {"send_only": False} | CombineCall._field_defaults
    return way.combine(CombineCall(**(names | {"y": y, "handle": handle} | options)))


def tensor(array: Any) -> Any:
    """NumPy's array as a tensor of the same memory; bits of bf16 as such numbers."""
    return HostTensors(STREAM).shown(array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array)


def bits(given: Any) -> Any:
    """A copy of a tensor's values; of bf16 and fp8 their bits."""
    if given.dtype == torch.bfloat16:
        return given.view(torch.int16).numpy().view(np.uint16).copy()
    return (given.view(torch.uint8) if given.dtype == torch.float8_e4m3fn else given).numpy().copy()


def apart(array: Any) -> Any:
    """The same rows, each with something behind it."""
    wide = np.full((len(array), array.shape[1] + 16), 0xABAB, array.dtype)
    wide[:, :-16] = array
    return wide[:, :-16]


def run_all(case: Case, narrow: bool = False) -> dict[int, Got]:
    """A case on all ranks, one after the other; `narrow`: rows and scales lie apart, numbers have 4 bytes."""
    world = world_of(case.setup)
    fed = [inputs(case, rank) for rank in range(case.setup.ranks)]
    came = [begin(way, case, one, narrow) for way, one in zip(world.ways, fed, strict=True)]
    came = [one.finish() for one in came] if case.split else came
    if case.cached:
        again = [inputs(case, rank, again=True).x for rank in range(case.setup.ranks)]
        options = {"layout": "rank", "max_rows": world.sizes.most}
        came = [
            dispatch(way, tensor(x), None, handle=one.handle, **options)
            for way, x, one in zip(world.ways, again, came, strict=True)
        ]
    got = [shown(one) for one in came]
    sums = [
        end(way, case, rank, one, given, narrow)
        for rank, (way, one, given) in enumerate(zip(world.ways, fed, came, strict=True))
    ]
    sums = [one.finish() for one in sums] if case.split else sums
    for one, total in zip(got, sums, strict=True):
        one.sums = bits(total.x)
    return dict(enumerate(got))


def begin(way: Any, case: Case, fed: Inputs, narrow: bool) -> Any:
    options: dict[str, Any] = {"layout": case.layout, "send_only": case.split}
    if case.weights == "dispatch":
        options["topk_weights"] = tensor(fed.topk_weights)
    if case.layout == "rank":
        options |= {"max_rows": way._sizes.most, "expert_alignment": case.alignment}
    elif narrow and case.setup.dtype == "fp8":
        dtype, (local, most, blocks) = expert_shapes(way._sizes)["scales"]
        if dtype == "float32":
            options["out"] = {"scales": torch.zeros(local, blocks, most).transpose(1, 2)}
        elif blocks % 4 == 0:
            options["out"] = {"scales": torch.zeros(local, blocks // 4, most, dtype=torch.int32).transpose(1, 2)}
    x, idx = (apart(fed.x), fed.topk_idx.astype(np.int32)) if narrow else (fed.x, fed.topk_idx)
    return dispatch(way, tensor(x), tensor(idx), **options)


def end(way: Any, case: Case, rank: int, fed: Inputs, came: Any, narrow: bool) -> Any:
    rows = int(came.offsets[-1]) if case.layout == "rank" else None
    shape = tuple(came.x.shape) if rows is None else (rows, case.setup.hidden)
    y = np.full(came.x.shape, 0x7FC0, np.uint16)
    y[:rows] = outputs(case, rank, shape, None if came.counts is None else bits(came.counts))
    options: dict[str, Any] = {"send_only": case.split}
    if case.weights == "combine":
        options["topk_weights"] = tensor(fed.topk_weights)
    if case.biases:
        options["bias"] = list(map(tensor, fed.biases))
    if narrow:
        options["out"] = tensor(apart(np.full((len(fed.x), case.setup.hidden), 0x7FC0, np.uint16)))
    return combine(way, tensor(y), came.handle, **options)


def shown(came: Any) -> Got:
    names = ("x", "scales", "counts", "source", "ranges", "topk_idx", "topk_weights", "offsets")
    found = {name: None if (one := getattr(came, name)) is None else bits(one) for name in names}
    if found["scales"] is not None and found["scales"].dtype == np.int32:
        found["scales"] = np.ascontiguousarray(found["scales"]).view(np.uint8)
    if came.layout == "rank":
        count = int(found["offsets"][-1])
        assert found["topk_idx"] is None or (found["topk_idx"][count:] == -1).all()
        cut = {"x", "scales", "topk_idx", "topk_weights"}
        found = {name: one[:count] if one is not None and name in cut else one for name, one in found.items()}
    return Got(**found, sums=None)


@pytest.mark.parametrize("narrow", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("name", SETUPS)
def test_arrays_are_where_the_gpu_is_told(name: str, narrow: bool) -> None:
    setup = SETUPS[name]
    for case in (
        Case(setup),
        Case(setup, weights="combine", tokens=(1, 5), dropped=0.3, biases=1, seed=1, split=True),
        Case(setup, weights="none", routing="one", seed=2),
        Case(setup, layout="rank", tokens=(4, 0), alignment=4, seed=3, biases=2),
        Case(setup, layout="rank", weights="none", split=True, seed=4),
        Case(setup, layout="rank", cached=True, seed=5),
        Case(setup, tokens=(0, 0), seed=6),
        Case(setup, layout="rank", tokens=(0, 0), seed=7),
        Case(setup, repeats=True, seed=8),
        Case(setup, layout="rank", repeats=True, seed=9),
    ):
        judge(case, run_all(case, narrow), on_gpu=True)


@pytest.mark.parametrize("seed", range(25))
def test_any_exchange(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = SETUPS[str(rng.choice(list(SETUPS)))]
    ranks, most = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    setup = replace(base, ranks=ranks, max_tokens=most, topk=int(rng.integers(1, 4)))
    case = Case(
        setup,
        layout=setup.layouts[seed % 2],
        tokens=tuple(int(rng.integers(0, most + 1)) for _ in range(ranks)),
        dropped=float(rng.choice([0.0, 0.4, 1.0])),
        biases=int(rng.integers(0, 3)),
        split=bool(rng.random() < 0.5),
        seed=seed,
    )
    judge(case, run_all(case, bool(rng.random() < 0.5)), on_gpu=True)


def alone(**options: Any) -> tuple[Any, Any]:
    """A buffer with one rank, and what it may be given."""
    setup = replace(TWO, ranks=1, **options)
    fed = inputs(Case(setup), 0)
    return world_of(setup).ways[0], Inputs(tensor(fed.x), tensor(fed.topk_idx), tensor(fed.topk_weights), ())


def test_the_host_learns_how_many_rows_came() -> None:
    way, fed = alone()
    came = dispatch(way, fed.x, fed.topk_idx, topk_weights=fed.topk_weights, layout="rank", expert_alignment=8)
    assert came.x.shape == (6, 512) and came.handle.rows == 6
    assert came.count_list == came.counts.tolist() and sum(came.count_list) % 8 == 0
    again = dispatch(way, fed.x, None, handle=came.handle, layout="rank")
    assert (again.counts, again.topk_idx, again.topk_weights, again.source, again.count_list) == (None,) * 5
    np.testing.assert_array_equal(bits(again.x), bits(came.x))
    np.testing.assert_array_equal(again.offsets, [0, 6])
    assert came.ranges is None and dispatch(way, fed.x, fed.topk_idx).offsets is None


def test_a_region_lives_as_long_as_what_shows_it() -> None:
    way, fed = alone()
    came = dispatch(way, fed.x, fed.topk_idx, layout="rank")
    (taken,) = way._native.regions
    region = weakref.ref(taken)
    assert taken.users == [STREAM]
    came.record_stream(9)
    assert taken.users == [STREAM, 9]
    way._native.regions.clear()
    del taken
    gc.collect()
    assert region() is not None
    del came
    gc.collect()
    assert region() is None


def test_a_graph_needs_to_know_how_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    way, fed = alone()
    monkeypatch.setattr(FakeRegion, "is_captured", True)
    with pytest.raises(crossrail.UsageError, match="not known while a graph is captured; max_rows"):
        dispatch(way, fed.x, fed.topk_idx, layout="rank")
    assert dispatch(way, fed.x, fed.topk_idx, layout="rank", max_rows=6).x.shape == (6, 512)


def test_what_was_begun_has_its_arrays() -> None:
    way, fed = alone()
    begun = dispatch(way, fed.x, fed.topk_idx, send_only=True)
    assert begun.result.x.shape == (3, 6, 512)
    assert begun.finish() is begun.result
    waiting = dispatch(way, fed.x, fed.topk_idx, layout="rank", send_only=True)
    assert waiting.result is None
    assert waiting.finish().x.shape == (6, 512)


def test_results_into_the_callers_arrays() -> None:
    way, fed = alone(dtype="fp8")
    kinds = expert_shapes(way._sizes)
    out = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in kinds.items()}
    stats = torch.ones(3, dtype=torch.int32)
    came = dispatch(way, fed.x, fed.topk_idx, out=out, stats=stats)
    assert all(getattr(came, name) is array for name, array in out.items())
    np.testing.assert_array_equal(stats, came.counts + 1)
    assert dispatch(way, fed.x, fed.topk_idx, out={"source": None}).source is None
    mine = {"counts": torch.zeros(3, dtype=torch.int32), "offsets": torch.zeros(2, dtype=torch.int64)}
    ranked = dispatch(way, fed.x, fed.topk_idx, layout="rank", out=mine, stats=stats)
    np.testing.assert_array_equal(stats, came.counts + 1 + ranked.counts)
    assert ranked.counts is mine["counts"] and ranked.offsets is mine["offsets"]


def bad_calls() -> dict[str, Any]:
    def made(**options: Any) -> Any:
        return lambda way, fed: dispatch(way, **({"x": fed.x, "topk_idx": fed.topk_idx} | options))

    def changed(**options: Any) -> Any:
        return lambda way, fed: dispatch(
            way, **({"x": fed.x, "topk_idx": fed.topk_idx} | {name: by(fed) for name, by in options.items()})
        )

    def sums(**options: Any) -> Any:
        def call(way: Any, fed: Inputs) -> Any:
            came = dispatch(way, fed.x, fed.topk_idx, topk_weights=fed.topk_weights)
            y = torch.zeros(came.x.shape, dtype=torch.bfloat16)
            return combine(way, **({"y": y, "handle": came.handle} | options))

        return call

    zeros, longs = torch.zeros(6, 512, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    wide, shorts = torch.zeros(6, 1024, dtype=torch.bfloat16), torch.zeros(6, 2, dtype=torch.int16)
    return {
        "topk_idx is None; it may be left out when a handle is given": made(topk_idx=None),
        "x: expected bf16 [T, 512], got float32 [6, 512]": changed(x=lambda fed: fed.x.float()),
        "x: expected bf16 [T, 512], got bfloat16 [6, 511]": changed(x=lambda fed: fed.x[:, :-1]),
        "x has strides [1024, 2]": made(x=wide[:, ::2]),
        "x has strides [516, 1] at address": made(x=torch.zeros(6, 516, dtype=torch.bfloat16)[:, :512]),
        "x is a tuple of 3": changed(x=lambda fed: (fed.x,) * 3),
        "topk_idx: expected int64 or int32 [6, 2], got int16 [6, 2]": made(topk_idx=shorts),
        "topk_weights: expected float32 [6, 2], got": changed(topk_weights=lambda fed: fed.topk_weights[:5]),
        "layout 'rows' is neither": made(layout="rows"),
        "handle is for the rank layout": made(handle="handle"),
        "max_rows is for the rank layout": made(max_rows=3),
        "handle is a str, not the handle of a dispatch on a GPU": made(handle="handle", layout="rank"),
        "max_rows 7 is more than can be received, ranks * max_tokens_per_rank = 6": made(layout="rank", max_rows=7),
        "max_rows is 0, where it must be enough for the received rows": made(layout="rank", max_rows=0),
        "max_rows is a float, not an integer": made(layout="rank", max_rows=1.5),
        "expert_alignment -1 is not from 0": made(layout="rank", expert_alignment=-1),
        "stats count new routings, and a handle repeats one": made(
            layout="rank", handle="handle", stats=torch.zeros(3, dtype=torch.int32)
        ),
        "stats: expected int32 [3], got int64 [3]": made(stats=longs),
        "waits: expected int64 [1], got int64 [2]": made(waits=longs[:2]),
        "out has unknown keys ['z']; known: ['x', 'counts', 'ranges', 'source']": made(out={"z": zeros}),
        "out has unknown keys ['x']; known: ['counts', 'offsets']": made(out={"x": zeros}, layout="rank"),
        "out['x']: expected bf16 [3, 6, 512], got bfloat16 [6, 512]": made(out={"x": zeros}),
        "out['counts'] is not contiguous in C order": made(out={"counts": torch.zeros(6, dtype=torch.int32)[::2]}),
        "handle is a str": sums(handle="handle"),
        "y: expected bf16 [3, 6, 512], got bfloat16 [6, 512]": sums(y=zeros),
        "topk_weights were given to dispatch already": sums(topk_weights=torch.zeros(6, 2)),
        "3 biases where there may be two": sums(bias=[zeros] * 3),
        "bias: expected bf16 [6, 512], got bfloat16 [5, 512]": sums(bias=zeros[:5]),
        "out: expected bf16 [6, 512], got int32 [6, 512]": sums(out=torch.zeros(6, 512, dtype=torch.int32)),
    }


@pytest.mark.parametrize("says", bad_calls())
def test_a_wrong_call_is_named(says: str) -> None:
    way, fed = alone()
    before = sum(map(len, way._native.world.waiting))
    with pytest.raises(crossrail.CrossrailError) as raised:
        bad_calls()[says](way, fed)
    assert says in str(raised.value)
    assert sum(map(len, way._native.world.waiting)) == before


def test_scales_that_do_not_fit() -> None:
    for scale, blocks, says in (("f32", 5, "float32"), ("ue8m0", 4, "uint8")):
        way, fed = alone(dtype="fp8", scale=scale)
        shape = (3, 6, blocks)
        wrong = torch.zeros(shape)
        with pytest.raises(crossrail.UsageError, match=rf"out\['scales'\]: expected {says} \[3, 6, 4\]"):
            dispatch(way, fed.x, fed.topk_idx, out={"scales": wrong})
    spread = torch.zeros(3, 6, 8, dtype=torch.uint8)[:, :, ::2]
    with pytest.raises(crossrail.UsageError, match="expected blocks 1 byte apart, got 2"):
        dispatch(way, fed.x, fed.topk_idx, out={"scales": spread})


def test_shapes_of_results() -> None:
    sizes = Sizes(ranks=4, max_tokens=128, hidden=7168, experts=288, topk=8, fp8=True, ue8m0=False)
    assert expert_shapes(sizes) == {
        "x": ("float8_e4m3fn", (72, 512, 7168)),
        "scales": ("float32", (72, 512, 56)),
        "counts": ("int32", (72,)),
        "ranges": ("int64", (72, 4)),
        "source": ("int32", (72, 512)),
    }
    assert expert_shapes(replace(sizes, ue8m0=True))["scales"] == ("uint8", (72, 512, 56))
    assert list(expert_shapes(replace(sizes, fp8=False))) == ["x", "counts", "ranges", "source"]
    assert rank_shapes(sizes) == {"counts": ("int32", (72,)), "offsets": ("int64", (5,))}


def test_an_array_needs_memory_of_a_gpu() -> None:
    memory = crossrail.Context().alloc(64)
    with pytest.raises(crossrail.UsageError, match="the memory is on the host"):
        crossrail.DeviceArray(memory, "float32", [4])


def test_what_a_buffer_takes_of_a_gpu() -> None:
    numbers = {"max_tokens_per_rank": 128, "hidden": 7168, "num_experts": 288, "topk": 8, "ranks": 4}
    plan = crossrail.ExpertBuffer.plan(**numbers, device="cuda:0")
    assert sum(plan.bytes.values()) == plan.total
    assert plan.largest_tokens is None or plan.largest_tokens >= 128, "None: there is no GPU"
    decode = crossrail.ExpertBuffer.plan(**numbers, layouts=["expert"], device=0)
    assert 0 < decode.total < plan.total
    more = crossrail.ExpertBuffer.plan(**numbers, device=0, regions=3)
    assert more.total > plan.total
    assert (plan.pinned, more.pinned, decode.pinned) == (0, 0, 0)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_gpu_has_no_inboxes_of_ranks_on_other_nodes(layout: Any) -> None:
    numbers = {"max_tokens_per_rank": 128, "hidden": 7168, "num_experts": 288, "topk": 8}

    def plan(ranks: int, far: int | None = None) -> Any:
        found = crossrail.ExpertBuffer.plan(**numbers, ranks=ranks, layouts=[layout], device=0, network_ranks=far)
        assert sum(found.bytes.values()) == found.total
        return found

    near = plan(16)
    rows = "dispatched rows"
    # As much as its node's ranks take, whose number of experts is what differs; and a line for each flag instead of 8
    # bytes, two for each of 7 pieces of a token.
    assert near.bytes[rows] == 2 * plan(8).bytes[rows]
    spread = 2 * 128 * 7 * (128 - 8)
    for kind in (rows, "returned rows"):
        assert plan(16, 8).bytes[kind] * 2 == near.bytes[kind] + 16 * spread
    inbox = (plan(16, 8).total - plan(16, 15).total) / 7
    assert near.total + 2 * 16 * spread == plan(16, 8).total + 8 * inbox
    # Both directions, each with an inbox for every far rank, and rings of commands.
    rings = plan(16, 1).pinned - 2 * inbox
    assert 0 < rings < 1 << 20
    assert plan(16, 15).pinned == 30 * inbox + rings
    assert f"{plan(16, 8).pinned} bytes" in str(plan(16, 8))
    assert "pinned" not in str(near)
    with pytest.raises(crossrail.UsageError, match="network_ranks 16 is more than the 15 other ranks"):
        plan(16, 16)


@pytest.mark.parametrize("layouts", [["expert"], ["rank"], ["expert", "rank"]], ids=str)
def test_rows_once_per_node_take_pinned_memory_for_a_rank_of_each_node(layouts: list[Any]) -> None:
    numbers = {"max_tokens_per_rank": 128, "hidden": 7168, "num_experts": 288, "topk": 8, "ranks": 32, "device": 0}
    once = crossrail.ExpertBuffer.plan(**numbers, layouts=layouts, send="node", node_ranks=8)
    each = crossrail.ExpertBuffer.plan(**numbers, layouts=layouts, network_ranks=24)
    assert sum(once.bytes.values()) == once.total
    assert 0 < once.pinned * 7 < each.pinned, "three ranks, not 24"
    assert once.bytes["sums for other nodes"] > 2 * 8 * 3 * 128 * 7168 * 2
    # Few tokens go directly.
    auto = crossrail.ExpertBuffer.plan(**numbers, layouts=layouts, send="auto", node_ranks=8)
    assert auto == once
    few = numbers | {"max_tokens_per_rank": 2}
    auto = crossrail.ExpertBuffer.plan(**few, layouts=layouts, send="auto", node_ranks=8)
    assert auto == crossrail.ExpertBuffer.plan(**few, layouts=layouts, network_ranks=24)
    # A node alone sends nothing to others.
    alone = crossrail.ExpertBuffer.plan(**numbers, layouts=layouts, send="node", node_ranks=32)
    assert alone == crossrail.ExpertBuffer.plan(**numbers, layouts=layouts)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"send": "once"}, "send is 'once', not 'rank', 'node' or 'auto'"),
        ({"send": "auto"}, "needs node_ranks"),
        ({"send": "node"}, "needs node_ranks"),
        ({"node_ranks": 8}, "node_ranks is for send='node'"),
        ({"send": "node", "node_ranks": 8, "device": "cpu"}, "send='node' is for a GPU"),
        ({"send": "node", "node_ranks": 5}, "32 ranks in nodes of 5"),
        ({"send": "node", "node_ranks": 40}, "32 ranks in nodes of 40"),
        ({"send": "node", "node_ranks": 8, "prereduce": False}, "prereduction in the expert layout"),
    ],
    ids=str,
)
def test_what_send_takes(changed: dict[str, Any], says: str) -> None:
    numbers = {"max_tokens_per_rank": 128, "hidden": 7168, "num_experts": 288, "topk": 8, "ranks": 32, "device": 0}
    with pytest.raises(crossrail.UsageError, match=says):
        crossrail.ExpertBuffer.plan(**(numbers | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ranks": 96}, "ranks 96 is more than the 64 of a node"),
        ({"ranks": 1152}, "ranks 1152 is not from 1 to 1024"),
        ({"hidden": 16512}, "hidden 16512 is not from 1 to 16384"),
        ({"hidden": 192}, "hidden 192"),
        ({"regions": 0}, "regions 0 is not from 1 to 64"),
        ({"topk": 33}, "topk 33"),
        ({"layouts": []}, "layouts"),
    ],
    ids=str,
)
def test_numbers_that_kernels_do_not_take(changed: dict[str, Any], says: str) -> None:
    numbers = {"max_tokens_per_rank": 128, "hidden": 7168, "num_experts": 288, "topk": 8, "ranks": 4, "device": 0}
    with pytest.raises(crossrail.UsageError, match=says):
        crossrail.ExpertBuffer.plan(**(numbers | changed))


def test_bytes_by_link_are_those_of_gpus() -> None:
    with crossrail.Group(size=1) as group, crossrail.ExpertBuffer(group, 8, 256, 4, 2) as buffer:
        assert [link.gateway for link in buffer.links()] == [None]
        assert buffer.explain().startswith("rows go once to each rank")
        received = buffer.dispatch(np.zeros((1, 256), ml_dtypes.bfloat16), np.zeros((1, 2), np.int64))
        with pytest.raises(crossrail.UsageError, match="the buffer is on the host"):
            buffer.traffic(received.handle)


def test_no_gpu_is_said() -> None:
    if crossrail.Context().info()["cuda"]["present"]:
        pytest.skip("there is a GPU")
    with crossrail.Group(size=1) as group, pytest.raises(crossrail.UnsupportedError, match="no CUDA driver"):
        crossrail.ExpertBuffer(group, 8, 256, 4, 2, device="cuda")


class Lender:
    """An array of Numba's kind: `__cuda_array_interface__` and nothing else."""

    def __init__(self, **interface: Any) -> None:
        whole = {"version": 3, "shape": (6, 512), "typestr": "<u2", "data": (4096, False), "strides": None}
        self.__cuda_array_interface__ = whole | interface


def taken(value: Any, topk_idx: Any = None, *, out: Any = None) -> Any:
    """The kernels' arguments for a dispatch of these rows, whose results are put into `out`."""
    arguments = _native.Arguments(Sizes(1, 6, 512, 3, 2, False, False), 0, None, False)
    none = dict.fromkeys(DispatchCall._fields) | DispatchCall._field_defaults
    call = DispatchCall(**(none | {"x": value, "topk_idx": topk_idx}))
    args, used = arguments.dispatch(call, out or {}, False)
    assert used == [one for one in (value, topk_idx, *(out or {}).values()) if one is not None]
    return args


def test_arrays_by_the_cuda_array_interface() -> None:
    given = taken(Lender())
    assert (given.x, given.tokens, given.x_stride) == (4096, 6, 1024)
    assert taken(Lender(strides=(2048, 2))).x_stride == 2048
    ids = taken(Lender(), Lender(typestr="<i4", shape=(6, 2)))
    assert (ids.topk_idx, ids.idx_bytes) == (4096, 4)
    empty = taken(Lender(shape=(0, 512), data=(None, False)))
    assert (empty.x, empty.tokens) == (0, 0)
    assert taken(Lender(data=(64, True))).x == 64
    with pytest.raises(crossrail.UsageError, match=r"dispatch: out\['x'\] is read-only"):
        taken(Lender(), out={"x": Lender(data=(64, True))})
    with pytest.raises(crossrail.UsageError, match=r"x: expected bf16 \[T, 512\], got <f2 \[6, 512\]"):
        taken(Lender(typestr="<f2"))
    for broken in ({"shape": "wide"}, {"data": 7}, {"strides": ("a", "b")}, {"strides": (2,)}, {"shape": (-6, 512)}):
        with pytest.raises(crossrail.UsageError, match="invalid __cuda_array_interface__"):
            taken(Lender(**broken))


def test_streams_of_arrays_that_are_not_pytorchs() -> None:
    class CupyStream:
        ptr, device_id = 4660, 1

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.ptr

    arrays = PlainArrays(crossrail.Context(), 1)
    streams = arrays.streams(CupyStream(), "dispatch")
    assert streams.handle == 4660 and streams.users() == [(4660, streams.stream)]
    assert arrays.streams(None, "dispatch").handle == 0
    with pytest.raises(crossrail.UsageError, match="the stream is of cuda:1, but the buffer is on cuda:0"):
        PlainArrays(crossrail.Context(), 0).streams(CupyStream(), "dispatch")
    with pytest.raises(crossrail.UsageError, match="is not a CUDA stream"):
        arrays.streams("fast", "dispatch")


def test_what_rows_of_a_combine_travel_as() -> None:
    way = world_of(TWO).ways[0]
    assert [way._wire(wire, True) for wire in ("bf16", "logfmt10", "fp8")] == [0, 1, 2]
    assert way._wire("bf16", False) == 0
    with pytest.raises(crossrail.UsageError, match="wire 'fp4' is none of bf16, logfmt10, fp8"):
        way._wire("fp4", True)
    with pytest.raises(crossrail.UsageError, match="wire 'fp8' is for the expert layout"):
        way._wire("fp8", False)
    odd = world_of(replace(TWO, hidden=520)).ways[0]
    assert odd._wire("bf16", True) == 0
    with pytest.raises(crossrail.UsageError, match="scales for 128 values, and hidden is 520"):
        odd._wire("logfmt10", True)


def test_who_is_missing_is_asked_when_the_operation_is_done() -> None:
    class Asked:
        done = False

        def synchronize(self, timeout: float | None) -> None:
            self.done = True

        def missing(self) -> list[int]:
            assert self.done, "kernels may lose a rank up to the end of the operation"
            return [2]

    native: Any = Asked()
    event = _experts_device.Event(native, native, native)
    assert _experts_device.DeviceCombined(None, None, event).missing == [2]
