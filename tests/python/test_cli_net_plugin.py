"""`crossrail bench p2p --net-plugin`: a foreign plugin, our own, and files that are none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import listening, one_error, run

import crossrail.nccl

SOURCE = Path(__file__).parents[1] / "data" / "net_plugin" / "plugin.c"
WORK = ("--size=1000003", "--chunk=64K", "--iters=2", "--warmup=1")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference plugin of version 11."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("plugin") / "libref-none.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-DVERSION=11", "-o", path, SOURCE], check=True)
    return path


def with_fault(compiled: Path, fault: str) -> str:
    """The plugin under a name that makes it misbehave."""
    return str(shutil.copy(compiled, compiled.with_name(f"libref-{fault}.so")))


def row(*arguments: str, settings: dict[str, str] | None = None) -> dict[str, Any]:
    """The only row of a run that must succeed."""
    done = run("bench", "p2p", *WORK, *arguments, "--json=-", settings=settings)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["rows"]
    assert found["verified"]
    assert found["verdict"]
    return dict(found)


def test_a_foreign_plugin_has_a_row_per_device(compiled: Path) -> None:
    found = row(f"--net-plugin={with_fault(compiled, 'fragments')}", "--channels=2", "--window=8")
    assert found["transport"] == "Reference"
    assert {lane["name"] for lane in found["lanes"]} == {"Reference/ref0", "Reference/ref1"}
    assert sum(lane["bytes"] for lane in found["lanes"]) == 2 * 1_000_003
    assert (found["chunk"], found["window"], found["channels"]) == (65536, 8, 2)
    assert found["stages"]["unpack_us"] > 0
    assert any("Reference of version 11: ref0 (25000 Mbit/s, 2.5 us" in note for note in found["notes"])


@pytest.mark.parametrize("threads", ["auto", "3"])
def test_our_own_plugin_is_driven_like_any_other(threads: str) -> None:
    rails = {"CROSSRAIL_TLS": "tcp", "CROSSRAIL_NET_DEVICES": "127.0.0.1,127.0.0.2", "CROSSRAIL_IO_THREADS": threads}
    found = row(f"--net-plugin={crossrail.nccl.plugin_path()}", settings=rails)
    assert found["transport"] == "Crossrail"
    (lane,) = found["lanes"]
    assert lane["name"] == "Crossrail/crossrail:127.0.0.1+127.0.0.2"
    assert lane["chunks"] == 2 * 16
    assert "--channels" in found["verdict"]["text"]
    assert "--rails" not in found["verdict"]["text"], "a plugin's devices are its own"


def test_a_plugin_that_prints_does_not_reach_stdout(compiled: Path) -> None:
    found = row(f"--net-plugin={with_fault(compiled, 'stdout')}")
    (note,) = [note for note in found["notes"] if "prints to stdout" in note]
    assert "Reference" in note
    assert "hello from the plugin" in note


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("isend-error", ("isend of Reference (v11)", "the cable is gone (42)")),
        ("half-lost", ("verify", "arrived as 0x00")),
        ("init-refuses", ("init of Reference (v11)", "no network today")),
    ],
)
def test_a_plugin_that_fails_is_one_line_that_names_the_function(
    compiled: Path, fault: str, words: tuple[str, ...]
) -> None:
    one_error(run("bench", "p2p", *WORK, f"--net-plugin={with_fault(compiled, fault)}"), 1, *words)


def test_files_that_are_no_plugin_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    one_error(
        run("bench", "p2p", f"--net-plugin={tmp_path}/text.so"), 2, "text.so", "cannot be loaded", "file too short"
    )


@pytest.mark.parametrize("option", ["--device=cpu,cuda:0", "--memory=shared", "--transport=tcp", "--compare=iperf3"])
def test_options_of_our_own_transports_are_refused_with_a_plugin(option: str) -> None:
    one_error(run("bench", "p2p", "--net-plugin=some.so", option), 2, option.partition("=")[0])


def test_both_ends_must_have_a_plugin(compiled: Path) -> None:
    with listening("p2p") as (_, address):
        done = run("bench", "p2p", f"--connect={address}", f"--net-plugin={compiled}")
    assert done.returncode == 1
    assert "--net-plugin must be given at both ends" in done.stderr
