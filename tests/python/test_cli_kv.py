"""`crossrail bench kv` as a user meets it."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import one_error
from commands import rows_of as bench_rows
from commands import run as command
from test_fabric_lanes import fabric_or_skip

import crossrail
from crossrail_tools.cli import kv_ends
from crossrail_tools.cli.failure import Failure
from crossrail_tools.cli.kv import dsv4
from crossrail_tools.report.schema import Report

SMALL = ("--iters=2", "--warmup=1", "--rounds=2")

run = partial(command, "bench", "kv")
rows_of = partial(bench_rows, "kv", *SMALL)


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """An interpreter with a nixl that is not called ours."""
    texts = {name: f"from crossrail.nixl.{name} import *\n" for name in ("_api", "_bindings")}
    return interpreter(tmp_path, "nixl", "nixl", texts)


def mooncake(folder: Path, engine: str) -> Path:
    """An interpreter with a Mooncake of that module `engine`."""
    return interpreter(folder, "mooncake", "mooncake-transfer-engine", {"engine": engine})


def interpreter(folder: Path, module: str, distribution: str, texts: dict[str, str]) -> Path:
    """An interpreter with a package, version 1.5.1, of those modules."""
    package = folder / module
    package.mkdir()
    for name, text in {"__init__": "", **texts}.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    there = folder / f"{distribution.replace('-', '_')}-1.5.1.dist-info"
    there.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5.1\n"
    (there / "METADATA").write_text(metadata, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(Path(crossrail.__file__).parents[1])])
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("page", "tokens", "rows", "size"),
    [
        (16, 8192, 33_192, 49.1e6),
        (64, 8192, 9_786, 49.1e6),
        (16, 32_768, 131_304, 183e6),
        (64, 131_072, 154_746, 719e6),
    ],
)
def test_the_preset_counts_as_collectivex_does(page: int, tokens: int, rows: int, size: float) -> None:
    work = dsv4(tokens, page, 1)
    assert work.rows == rows
    assert work.size == pytest.approx(size, rel=0.005)


@pytest.mark.parametrize("transport", ["shm", "tcp", "fabric:tcp"])
def test_every_row_is_verified(transport: str) -> None:
    if transport.startswith("fabric:"):
        fabric_or_skip(transport.removeprefix("fabric:"))
    rows = rows_of("--row=576,2304", "--rows=50", "--bulk", "--notice", f"--transport={transport}")
    works = [row for row in rows if row.what == "kv"]
    assert len(works) == 8 and all(row.verified and row.transport == transport for row in works)
    assert [row.pieces for row in works] == [50] * 4 + [1] * 4
    assert {row.size for row in works} == {50 * 576, 50 * 2304}
    assert all(len(row.samples_us) == 4 and row.gb_per_s for row in works)
    (notice,) = [row for row in rows if row.what == "kv-notice"]
    assert notice.p50_us and notice.gb_per_s is None


def test_a_preset_with_several_requests() -> None:
    rows = rows_of("--preset=dsv4", "--isl=1K", "--page=64", "--batch=2", "--op=pull")
    assert [row.part for row in rows] == ["pull: dsv4 1K tokens, pages of 64"]
    assert rows[0].pieces == dsv4(1024, 64, 2).rows and rows[0].verified


def test_nixl_takes_turns(another: Path) -> None:
    done = run(*SMALL, "--json=-", "--row=576", "--rows=20", "--op=push", "--compare=nixl", f"--nixl-python={another}")
    assert done.returncode == 0, done.stderr
    report = Report.loads(done.stdout)
    assert report.environment.peers == {"nixl": "1.5.1"}
    rows = report.rows
    result = rows[0].peers["nixl"]
    assert result.error is None and len(result.rounds) == len(rows[0].rounds) == 2
    assert any("nixl made lists" in note for note in rows[0].notes)


def test_mooncake_takes_turns(tmp_path: Path) -> None:
    python = mooncake(tmp_path, "from crossrail.mooncake.engine import TransferEngine\n")
    work = ("--transport=tcp", "--row=576", "--rows=2500", "--op=push", "--notice", "--compare=mooncake")
    pushed, notice = rows_of(*work, f"--mooncake-python={python}")
    result = pushed.peers["mooncake"]
    assert result.error is None and len(result.rounds) == 2 and pushed.cpu_s_per_gib
    assert result.cpu_s_per_gib and notice.peers == {}


def test_a_mooncake_that_fails_is_named_and_ours_is_measured(tmp_path: Path) -> None:
    python = mooncake(
        tmp_path,
        "from crossrail.mooncake import engine\n"
        "class TransferEngine(engine.TransferEngine):\n"
        "    def batch_transfer_sync_write(self, *rows):\n"
        "        return -1\n",
    )
    work = ("--transport=tcp", "--rows=20", "--op=push", "--compare=mooncake")
    (row,) = rows_of(*work, f"--mooncake-python={python}")
    assert row.peers["mooncake"].error == ("mooncake, initiator: run: OSError: batch_transfer_sync returned -1")
    assert row.gb_per_s


@pytest.mark.parametrize(("peer", "whose"), [("nixl", "NVIDIA's nixl"), ("mooncake", "Mooncake's transfer engine")])
def test_no_peer_is_a_mistake_of_the_user(peer: str, whose: str) -> None:
    done = run("--transport=tcp", f"--compare={peer}", f"--{peer}-python=/no/such/python")
    one_error(done, 2, f"does not import {whose}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--isl=8K",),
        ("--compare=mooncake",),
        ("--compare=mooncake", "--transport=tcp", "--connect=127.0.0.1:1"),
        ("--preset=dsv4", "--rows=5"),
        ("--preset=dsv4", "--page=3"),
        ("--rows=0",),
        ("--transport=cuda_ipc",),
        ("--transport=carrier-pigeon",),
        ("--transport=fabric:tcp,tcp",),
        ("--device=cuda", "--transport=shm"),
        ("--device=cpu",),
        ("--device=cuda:0,cuda:1,cuda:2",),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...]) -> None:
    one_error(run(*arguments), 2)


def test_gpu_memory_takes_pytorch_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one_error(run(*SMALL, "--device=cuda", "--rows=5"), 1, "crossrail, initiator: start: ")


class Scripted:
    """A channel over which another machine asks for that."""

    def __init__(self, *asked: dict[str, Any]) -> None:
        hello = {"kv": 1, "version": crossrail.__version__, "transport": "tcp"}
        self.asked = [hello, *asked, {"do": "bye"}]
        self.answers: list[dict[str, Any]] = []

    def receive(self, _: float) -> dict[str, Any]:
        return self.asked.pop(0)

    def send(self, answer: dict[str, Any]) -> None:
        self.answers.append(answer)


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"library": "crossrail", "do": "run", "iterations": 1}, "'run' of 'crossrail' is not supported"),
        ({"library": "os", "do": "start", "module": "os"}, "'start' of 'os' is not supported"),
        ({"do": ["x"]}, "is not supported from another machine"),
        (
            {"library": "crossrail", "do": "start", "work": {"groups": [[1 << 40, 1, 1]], "batch": 1}},
            "at the listening end",
        ),
        ({"library": "crossrail", "do": "start", "work": {"groups": "x"}}, "work of another form"),
    ],
)
def test_the_listening_end_does_only_what_it_measures(asked: dict[str, Any], refused: str) -> None:
    channel = Scripted(asked)
    kv_ends._serve({}, {}, channel)
    assert channel.answers[0] == {}
    assert refused in channel.answers[1]["failed"]


def test_another_command_at_the_other_end_is_named() -> None:
    channel = Scripted()
    channel.asked[0] = {"bench": "p2p"}
    with pytest.raises(Failure, match="the other end must run `crossrail bench kv --connect`"):
        kv_ends._serve({}, {}, channel)


def test_more_than_the_memory_is_refused_at_once() -> None:
    one_error(run("--rows=1G", "--row=1G"), 1, "do not fit into")


class Noted:
    """An end that notes when it is stopped."""

    def __init__(self, notes: list[bool]) -> None:
        self.notes = notes

    def pause(self, paused: bool) -> None:
        self.notes.append(paused)


def test_a_peer_is_stopped_while_it_is_not_its_turn() -> None:
    notes: list[bool] = []
    with kv_ends.Ends(Noted(notes), Noted(notes), rests=True).turn():
        assert notes == [False, False]
    assert notes == [False, False, True, True]
    with kv_ends.Ends(Noted(notes), Noted(notes), rests=False).turn():
        pass
    assert len(notes) == 4
