"""Agreement of the two ends of a bench on the place of their memory, without a GPU: each names its own."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from crossrail_tools.cli.cases import Bandwidth, Latency, P2p, RawTcp, Unpack, Write, ordered
from crossrail_tools.cli.failure import Failure
from crossrail_tools.cli.point_to_point.driver import _Driver, _hello
from crossrail_tools.cli.point_to_point.listener import _agree, _ordered
from crossrail_tools.cli.point_to_point.options import BenchOptions, plans


class Context:
    """A context of a machine with two GPUs."""

    timeout = 1.0

    def __init__(self, **settings: str) -> None:
        self._settings = settings

    def info(self) -> dict[str, Any]:
        return {"devices": [], "cuda": {"devices": [{"ordinal": 0}, {"ordinal": 1}], "reason": None, "fix": None}}

    def settings(self) -> dict[str, str]:
        known = {"CROSSRAIL_CHUNK": "2M", "CROSSRAIL_WINDOW": "16", "CROSSRAIL_CHANNELS": "auto"}
        return {**known, "CROSSRAIL_BOUNCE": "128M", "CROSSRAIL_UNPACK": "kernel", **self._settings}


def met(here: BenchOptions, there: BenchOptions, **settings: str) -> dict[str, Any]:
    """What the listening end (``here``) answers to the other end's first words."""
    import crossrail

    sent: list[dict[str, Any]] = []
    endpoint = SimpleNamespace(explain=lambda: SimpleNamespace(candidates=[]))
    session: Any = SimpleNamespace(context=Context(**settings), endpoint=endpoint, send=sent.append)
    _agree(session, here, {**_hello(there, plans(there)), "version": crossrail.__version__})
    (answer,) = sent
    return answer


def ends(here: list[str] | None, there: list[str] | None) -> str:
    """Where the listening end's memory is, when the ends were sent these devices."""
    return str(met(BenchOptions("p2p", listen="", device=here), BenchOptions("p2p", device=there))["device"])


@pytest.mark.parametrize(
    ("here", "there", "place"),
    [
        (None, None, "cpu"),
        (None, ["cuda:0"], "cuda:0"),
        (None, ["cuda:0", "cuda:1"], "cuda:1"),
        (None, ["cuda:0", "cpu"], "cpu"),
        (["cuda:1"], ["cuda:0"], "cuda:1"),
        (["cuda:1"], ["cuda:0", "cuda:1"], "cuda:1"),
        (["cuda:1"], None, "cuda:1"),
        (["cpu"], ["cuda:0"], "cpu"),
        (None, ["cpu"], "cpu"),
    ],
)
def test_each_end_says_its_own_or_takes_what_the_other_wishes(
    here: list[str] | None, there: list[str] | None, place: str
) -> None:
    assert ends(here, there) == place


def test_two_wishes_for_one_end_are_a_failure_that_names_both() -> None:
    with pytest.raises(Failure, match="cuda:1 at the listening end, but the connecting end requests cuda:0"):
        ends(["cuda:1"], ["cuda:1", "cuda:0"])


def test_a_gpu_that_the_listening_end_lacks_names_those_that_it_has() -> None:
    with pytest.raises(Failure, match=r"cuda:7 does not exist here; known: cuda:0, cuda:1"):
        ends(None, ["cuda:7"])


def test_the_way_to_unpack_is_the_receivers_and_must_be_given_there() -> None:
    driver = BenchOptions("p2p", device=["cuda:0"], unpack="host")
    with pytest.raises(Failure, match=r"--unpack host must be given at the receiving end too.*now unpacks by kernel"):
        met(BenchOptions("p2p", listen=""), driver)
    assert met(BenchOptions("p2p", listen=""), driver, CROSSRAIL_UNPACK="host")["unpack"] == "host"
    with pytest.raises(Failure, match="--unpack is d2d at the listening end and host"):
        met(BenchOptions("p2p", listen="", unpack="d2d"), driver, CROSSRAIL_UNPACK="d2d")


def test_the_other_ends_process_gets_the_same_way_to_unpack() -> None:
    assert "--unpack=d2d" in BenchOptions("p2p", device=["cuda:0"], unpack="d2d").for_child()


def driver(*places: str, transport: str | None = None) -> _Driver:
    """The driving end after it has met the other."""
    options = BenchOptions("p2p", device=list(places), transport=transport)
    candidates = [{"lane": "cuda_ipc", "reason": "no peer access", "missed": False}]
    endpoint = SimpleNamespace(explain=lambda: SimpleNamespace(candidates=candidates))
    session: Any = SimpleNamespace(context=Context(), endpoint=endpoint)
    answer = {"addresses": {}, "device": places[-1], "unpack": "d2d", "unused": {}}
    return _Driver(session, options, "127.0.0.1", answer, progress=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "transport", "found"),
    [
        (("cpu", "cpu"), "tcp", (None, "ordinary", None, None)),
        (("cuda:0", "cuda:0"), "tcp", ("cuda:0", None, "d2d", 128 << 20)),
        (("cuda:0", "cuda:1"), "tcp", ("cuda:0,cuda:1", None, "d2d", 128 << 20)),
        (("cuda:0", "cuda:1"), "cuda_ipc", ("cuda:0,cuda:1", None, None, None)),
        (("cuda:0", "cpu"), "tcp", ("cuda:0,cpu", "ordinary", None, None)),
        (("cpu", "cuda:1"), "shm", ("cpu,cuda:1", "ordinary", "d2d", 128 << 20)),
    ],
)
def test_rows_say_where_data_was_and_how_it_got_in(places: tuple[str, ...], transport: str, found: tuple) -> None:
    plan = plans(BenchOptions("p2p", device=list(places)))[0]
    row = driver(*places)._row_template(plan, transport, None)
    assert (row.device, row.memory, row.unpack, row.bounce) == found
    assert row.verified


def test_who_asks_for_cuda_ipc_gets_it_or_the_reason() -> None:
    asked = driver("cuda:0", "cuda:1", transport="cuda_ipc")
    asked._check_carried_by("cuda_ipc", "direct(cuda_ipc)")
    with pytest.raises(Failure, match=r"went over shm \(chunks\), not over cuda_ipc: no peer access"):
        asked._check_carried_by("shm", "chunks")
    driver("cuda:0", "cuda:1", transport="shm")._check_carried_by("shm", "chunks")


def test_cuda_ipc_brings_the_socket_that_it_needs() -> None:
    assert BenchOptions("p2p", transport="cuda_ipc").settings()["tls"] == "shm,cuda_ipc"
    assert BenchOptions("p2p", transport="tcp,cuda_ipc").settings()["tls"] == "shm,tcp,cuda_ipc"
    assert BenchOptions("p2p", transport="shm,cuda_ipc").settings()["tls"] == "shm,cuda_ipc"
    assert BenchOptions("p2p", transport="tcp").settings()["tls"] == "tcp"
    assert "tls" not in BenchOptions("p2p").settings()


def test_ends_with_gpus_or_rails_keep_their_processors() -> None:
    many = {0, 1, 2, 3}

    def cpu(what: str, **options: Any) -> int | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.sched_getaffinity", lambda pid: many)
            return BenchOptions(what, **options).cpu(driver=False)

    assert cpu("latency") == 1
    assert cpu("latency", device=["cuda:0"]) is None
    assert cpu("p2p") is None
    assert cpu("p2p", pin=[2, 3]) == 3


ORDER = Latency(8, 10, 1).order()


@pytest.mark.parametrize("memory", [None, 3, "", "cuda", "cuda:x", "cuda:0,cuda:1", "tape"])
def test_memory_that_makes_no_sense_is_refused(memory: Any) -> None:
    with pytest.raises(Failure, match="unknown here"):
        _ordered({"memory": memory, "case": ORDER})


def test_memory_that_is_known() -> None:
    for memory in ("shared", "ordinary", "cuda:0", "cuda:12"):
        assert _ordered({"memory": memory, "case": ORDER}) == (Latency(8, 10, 1), memory)


def test_every_case_that_may_be_ordered_survives_the_way() -> None:
    unpack = Unpack("cuda:0", 64, 8, "pinned", ["kernel"], 1, 1)
    for case in (Write(8, 1, 1), Bandwidth(8, 1, 1, 4), P2p(8, 1, 1, "quick"), RawTcp(8, 1, 2), unpack):
        assert ordered(json.loads(json.dumps(case.order()))).order() == json.loads(json.dumps(case.order()))


@pytest.mark.parametrize(
    "order",
    [
        None,
        [],
        {},
        {**ORDER, "what": "net-plugin"},
        {**ORDER, "what": ["latency"]},
        {**ORDER, "path": "/tmp/plugin.so"},
        {"what": "latency", "size": 8},
        {**ORDER, "size": -1},
        {**ORDER, "size": True},
        {**ORDER, "size": 1 << 63},
        {**ORDER, "size": "8"},
    ],
)
def test_orders_that_make_no_sense_are_refused(order: Any) -> None:
    with pytest.raises(Failure, match="the driving end requested"):
        ordered(order)
