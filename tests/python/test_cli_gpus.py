"""What the command says about GPUs: `info`, and benches that are asked for one. With and without GPUs here."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import one_error, run

from crossrail_tools.cli.info import print_cuda
from crossrail_tools.report.tables import console


def cuda_here() -> dict[str, Any]:
    """What `info` says of CUDA on this machine."""
    state: dict[str, Any] = json.loads(run("info", "--json=-").stdout)["info"]["cuda"]
    return state


def gpu(ordinal: int, **changes: Any) -> dict[str, Any]:
    made = {
        "ordinal": ordinal,
        "name": "NVIDIA H200",
        "arch": "sm_90a",
        "memory": 141 << 30,
        "free": None,
        "pci": f"0000:{ordinal + 1:02x}:00.0",
        "numa_node": ordinal,
        "bounce_bytes": 0,
        "copied": {"by_engine": 0},
        "nics": [
            {"name": "eth1", "distance": "same switch" if ordinal == 0 else "across"},
            {"name": "lo", "distance": "unknown"},
        ],
    }
    return {**made, **changes}


def state(gpus: list[dict[str, Any]], **changes: Any) -> Any:
    made = {
        "present": True,
        "reason": None,
        "fix": None,
        "driver": "13.0",
        "devices": gpus,
        "peer_access": [[True] * len(gpus) for _ in gpus],
        "kernel_cache": {"folder": "/home/one/.cache/crossrail", "bytes": 123_000},
        "compiler": "NVRTC 13.0, /site/nvidia/lib/libnvrtc.so.13",
        "why_no_compiler": None,
    }
    return {**made, **changes}


def printed(cuda: Any) -> str:
    out = io.StringIO()
    print_cuda(cuda, console(out))
    return out.getvalue()


def test_no_cuda_is_said_with_its_reason_and_the_fix() -> None:
    absent = state([], present=False, reason="no CUDA driver: libcuda.so.1: not found", fix="install NVIDIA's driver")
    text = printed(absent)
    assert text == "CUDA: not usable: no CUDA driver: libcuda.so.1: not found; install NVIDIA's driver\n\n"


def test_gpus_their_nics_and_the_memory_taken() -> None:
    text = printed(state([gpu(0, free=100 << 30, bounce_bytes=128 << 20), gpu(1, numa_node=None)]))
    assert "CUDA: driver for CUDA 13.0" in text
    (first,) = [line for line in text.splitlines() if "0000:01:00.0" in line]
    assert " ".join(first.split()) == "cuda:0 NVIDIA H200 sm_90a 0000:01:00.0 0 141.00 GiB 100.00 GiB 128 MiB"
    (second,) = [line for line in text.splitlines() if "0000:02:00.0" in line]
    assert second.split()[5:] == ["-", "141.00", "GiB", "-", "0", "MiB"]
    assert [line.split() for line in text.splitlines() if "switch" in line] == [["cuda:0", "same", "switch"]]
    assert [line.split() for line in text.splitlines() if "across" in line] == [["cuda:1", "across"]]
    assert "lo" not in text.split("GPU to NIC")[1].split("\n")[1]
    assert "peer access: between all GPUs" in text
    assert "kernel cache: 123.00 kB in /home/one/.cache/crossrail" in text
    assert "kernel compiler: NVRTC 13.0, /site/nvidia/lib/libnvrtc.so.13" in text
    assert "memory taken for GPUs: 134.22 MB of pinned host memory" in text
    assert "\x1b" not in text and "…" not in text


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    text = printed(state([gpu(0), gpu(1)], peer_access=[[True, False], [True, True]]))
    assert "peer access: not from cuda:0 to cuda:1: those transfers are staged" in text


def test_a_machine_that_hides_its_topology_says_so() -> None:
    text = printed(state([gpu(0, nics=[{"name": "eth0", "distance": "unknown"}])], kernel_cache=None))
    assert "the machine does not expose the distances" in text
    assert "kernel cache: no usable folder" in text
    assert "peer access" not in text


def test_info_says_what_cuda_is_here(tmp_path: Path) -> None:
    done = run("info", f"--json={tmp_path}/info.json")
    assert done.returncode == 0, done.stderr
    cuda = json.loads((tmp_path / "info.json").read_text())["info"]["cuda"]
    if cuda["present"]:
        assert f"CUDA: driver for CUDA {cuda['driver']}" in done.stdout
    else:
        assert f"CUDA: not usable: {cuda['reason']}" in done.stdout
        assert cuda["fix"] in done.stdout


def test_a_compiler_that_is_missing_is_said_with_the_reason_and_the_way_around() -> None:
    text = printed(state([gpu(0)], compiler=None, why_no_compiler="NVRTC was not found (nowhere); pip install it"))
    said = "kernel compiler: none: NVRTC was not found (nowhere); pip install it; CROSSRAIL_UNPACK=d2d needs none"
    assert said in text


@pytest.fixture
def old_driver(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose driver supports CUDA 11.4 only."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 11040; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": str(tmp_path)}


def test_a_driver_that_is_too_old_is_named_and_host_memory_goes_on(old_driver: dict[str, str]) -> None:
    which = ("it supports CUDA 11.4, at least 12.0 is needed", "update NVIDIA's driver")
    text = run("info", settings=old_driver).stdout
    assert all(part in text for part in ("CUDA: not usable: the CUDA driver is too old", *which))
    one_error(run("bench", "p2p", "--device=cuda:0", settings=old_driver), 1, "no GPU can be used", *which)
    one_error(run("bench", "unpack", settings=old_driver), 1, "no GPU can be used", *which)
    done = run("bench", "latency", "--size=8", "--iters=10", settings=old_driver)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "unpack"),
        ("bench", "mesh", "--devices=all"),
        ("bench", "mesh", "--devices=cuda:0,cuda:1"),
        ("bench", "p2p", "--device=cuda:0"),
        ("bench", "latency", "--device=cpu,cuda:0", "--size=8", "--iters=10"),
        ("bench", "bandwidth", "--device=cuda", "--unpack=host"),
    ],
)
def test_without_a_gpu_a_bench_that_wants_one_says_why(arguments: tuple[str, ...]) -> None:
    cuda = cuda_here()
    if cuda["present"]:
        pytest.skip("there are GPUs here")
    one_error(run(*arguments), 1, "no GPU can be used", cuda["reason"], cuda["fix"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device=cpu",), ("cpu", "cuda, cuda:N")),
        (("--device=gpu0",), ("gpu0", "cuda:N")),
        (("--fragments=0",), ("--fragments",)),
        (("--fragments=4KB",), ("4KB",)),
        (("--size=0",), ("--size",)),
        (("--from=tape",), ("tape", "device", "pinned")),
        (("--mode=kernel,magic",), ("magic", "kernel, d2d, host")),
        (("--iters=0",), ("--iters",)),
        (("--listen",), ("--listen",)),
        (("--json=/nonexistent/folder/file",), ("/nonexistent/folder",)),
    ],
)
def test_unpack_bad_usage_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error(run("bench", "unpack", *arguments), 2, *words)
