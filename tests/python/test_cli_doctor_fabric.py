"""`crossrail doctor --fabric` and libfabric in `crossrail info`, over the hostile libfabric of tests/fabric."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run
from test_cli_doctor import doctor, found, machine

from crossrail.records import FabricDevice, FabricState
from crossrail_tools.cli.doctor import fabric
from crossrail_tools.cli.failure import Failure
from crossrail_tools.cli.info import usable_fabric

SOURCES = Path(__file__).parents[1] / "fabric" / "hostile"
STEADY = "nics=2,tx=64,msg=4194304,move=200,cuts=8,early=0,eagain=0,withhold=0,repeat=0,null=0,hmem=1,data=4"

DEVICE: FabricDevice = {
    "provider": "efa",
    "name": "rdmap0s6-rdm",
    "nic": "rdmap0s6",
    "pci": "0000:36:00.0",
    "speed": 400_000_000_000,
    "up": True,
    "gpu": True,
    "modes": "LOCAL VIRT_ADDR ALLOCATED PROV_KEY",
    "mr_key_size": 4,
    "cq_data_size": 4,
    "tx_size": 4096,
    "inject_size": 32,
    "iov_limit": 2,
    "rma_iov_limit": 1,
    "max_msg_size": 1 << 30,
    "rx_cq_data": False,
}


def device(**changes: Any) -> FabricDevice:
    return {**DEVICE, **changes}  # type: ignore[typeddict-item]


def state(*devices: FabricDevice, **changes: Any) -> FabricState:
    known = {"version": "2.6", "reason": None, "fix": None, "files": ["/lib/libfabric.so.1"], "refused": None}
    return {**known, "devices": list(devices), **changes}  # type: ignore[typeddict-item, return-value]


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("hostile") / "libfabric.so.1"
    sources = sorted(str(one) for one in SOURCES.glob("*.c") if one.name != "layout.c")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-lpthread"]
    script = f"-Wl,--version-script={SOURCES / 'hostile.map'}"
    subprocess.run(["cc", *flags, script, "-Wl,-soname,libfabric.so.1", "-o", path, *sources], check=True)
    return path


def settings(library: Path, options: str = STEADY) -> dict[str, str]:
    return {"CROSSRAIL_FABRIC_LIBRARY": str(library), "HOSTILE_OPTIONS": options, "HOSTILE_SEED": "3"}


def test_every_nic_is_tested_and_what_it_does_is_found(hostile: Path) -> None:
    findings = doctor("--fabric=efa", "--only=fabric", code=0, settings=settings(hostile))
    by_id: dict[str, list[dict[str, Any]]] = {}
    for one in findings:
        by_id.setdefault(one["id"], []).append(one)
    assert list(by_id) == [f"fabric-{name}" for name in (
        "library", "devices", "limits", "write", "key", "fence", "rows", "register", "gpu"
    )]  # fmt: skip
    assert str(hostile) in by_id["fabric-library"][0]["evidence"]
    assert {one["subject"] for one in by_id["fabric-write"]} == {"efa/rdmap0s6-rdm", "efa/rdmap1s6-rdm"}
    assert all("immediates keep their 32 bits" in one["evidence"] for one in by_id["fabric-write"])
    devices = by_id["fabric-devices"]
    assert all("400 Gbit/s, link up, GPU memory directly" in one["evidence"] for one in devices)
    assert "immediates of 4 bytes" in by_id["fabric-limits"][0]["evidence"]
    assert "PROV_KEY" in by_id["fabric-limits"][0]["evidence"]
    assert "refused after" in by_id["fabric-key"][0]["evidence"]
    assert "a closed registration stops a write" in by_id["fabric-fence"][0]["evidence"]
    assert "per GiB" in by_id["fabric-register"][0]["evidence"]
    assert "packed into one write" in by_id["fabric-rows"][0]["evidence"]


def test_an_operation_that_fails_is_named(hostile: Path) -> None:
    broken = settings(hostile, f"{STEADY},fail_at=2")
    (one,) = doctor("--fabric=tcp", "--only=fabric-write", code=1, settings=broken)
    assert (one["severity"], one["subject"]) == ("error", "tcp/tcp")
    assert "4111" in one["evidence"]
    assert "--only fabric-write" in one["fix"]


def test_a_library_that_ends_the_process_is_a_finding(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    names = ("fi_getinfo", "fi_freeinfo", "fi_fabric", "fi_strerror")
    code = "#include <stdlib.h>\nunsigned fi_version(void) { return 1 << 16 | 20; }\n"
    code += "void *fi_dupinfo(void *info) { (void)info; abort(); }\n"
    code += "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
    source, library = tmp_path / "aborts.c", tmp_path / "libfabric.so.1"
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    findings = doctor("--fabric", "--only=fabric-library,fabric-write", code=1, settings=settings(library))
    assert [one["severity"] for one in findings] == ["error", "error"]
    assert all("the second process" in one["evidence"] for one in findings)


def test_no_library_is_an_error_with_its_path() -> None:
    (one,) = doctor("--fabric", "--only=fabric-library", code=1, settings=settings(Path("/nowhere/libfabric.so.1")))
    assert "CROSSRAIL_FABRIC_LIBRARY=/nowhere/libfabric.so.1" in one["evidence"]
    assert "apt install libfabric1" in one["fix"]


def test_info_has_the_devices_when_something_asks_for_libfabric(hostile: Path) -> None:
    done = run("info", "--json=-", settings=settings(hostile))
    assert done.returncode == 0, done.stderr
    fabric_of = json.loads(done.stdout)["fabric"]
    assert fabric_of["version"] == "1.20"
    assert {one["provider"] for one in fabric_of["devices"]} >= {"efa", "cxi", "tcp", "shm", "verbs;ofi_rxm"}
    nics = [one for one in fabric_of["devices"] if one["provider"] == "efa"]
    assert all(one["up"] and one["gpu"] and one["speed"] == 400_000_000_000 for one in nics)
    table = run("info", settings=settings(hostile)).stdout
    assert "efa/rdmap0s6-rdm" in table
    assert "400 Gbit/s" in table


def test_info_loads_nothing_where_nothing_asks(tmp_path: Path) -> None:
    assert usable_fabric({}, tmp_path) is None
    (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    missing = {"CROSSRAIL_FABRIC_LIBRARY": "/nowhere/libfabric.so.1"}
    # In a process that has not loaded libfabric.
    code = (
        "import sys, json; from pathlib import Path; from crossrail_tools.cli.info import usable_fabric\n"
        "print(json.dumps([usable_fabric(json.loads(sys.argv[1]), Path(folder)) for folder in sys.argv[2:]]))"
    )
    command = [sys.executable, "-c", code, json.dumps(missing), "/nowhere", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    nowhere, here = json.loads(done.stdout)
    assert (nowhere or {}).get("version") is None
    assert here is not None


def asked(monkeypatch: pytest.MonkeyPatch, facts: dict[str, float] | Failure) -> None:
    """Every test of a device has this outcome."""

    def answer(_: Any) -> dict[str, float]:
        if isinstance(facts, Failure):
            raise facts
        return facts

    monkeypatch.setattr(fabric, "_ask", answer)


@pytest.mark.parametrize(
    ("check", "facts", "severity", "words"),
    [
        (fabric.keys, {"written": 64, "refused": 0, "error_ms": 0, "survives": 1}, "error", "a wrong key wrote"),
        (fabric.keys, {"written": 0, "refused": 0, "error_ms": 0, "survives": 1}, "ok", "dropped without an error"),
        (fabric.keys, {"written": 0, "refused": 1, "error_ms": 12, "survives": 0}, "ok", "is lost with it"),
        (fabric.fences, {"began": 1, "after_bytes": 8e6, "fenced": 0}, "note", "8.00 MB were written after"),
        (fabric.fences, {"began": 0, "after_bytes": 0, "fenced": 0}, "note", "over before"),
        (fabric.registration, {"first_ms_per_gib": 260, "later_ms_per_gib": 520}, "note", "260.0 ms per GiB, 520.0"),
        (fabric.registration, {"first_ms_per_gib": 6, "later_ms_per_gib": 6}, "ok", "6.0 ms per GiB"),
        (fabric.writes, Failure("the second process was ended by SIGABRT"), "error", "SIGABRT"),
    ],
)
def test_what_a_device_does_decides_the_severity(
    monkeypatch: pytest.MonkeyPatch, check: Any, facts: Any, severity: str, words: str
) -> None:
    asked(monkeypatch, facts)
    (one,) = found(check, machine(fabric="", fabric_state=state(device())))
    assert one.severity == severity
    assert words in one.evidence
    assert one.fix or severity in ("ok", "note")


def test_devices_and_libraries_that_are_wrong_are_named() -> None:
    down = found(fabric.devices, machine(fabric_state=state(device(up=False))))
    assert [one.severity for one in down] == ["warning"]
    assert "no link" in down[0].evidence
    none = found(fabric.devices, machine(fabric_state=state(device(provider="tcp", nic=None, pci=None, gpu=False))))
    assert "through host memory: the provider has no HMEM" in none[0].evidence
    assert "finds no NIC (efa, cxi, verbs: none)" in none[1].evidence
    twice = found(fabric.library, machine(fabric_state=state(files=["/a/libfabric.so.1", "/b/libfabric.so.1"])))
    assert [one.severity for one in twice] == ["warning", "ok"]
    old = found(fabric.library, machine(fabric_state=state(device(), version="1.17")))
    assert "emulates remote writes on EFA" in old[0].evidence


def test_gpu_memory_that_is_not_visible_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric.Machine, "gpus", property(lambda _: ["cuda:0", "cuda:1"]))
    asked(monkeypatch, {"wrong": 4096, "register_ms": 3})
    findings = found(fabric.gpu_memory, machine(fabric="", fabric_state=state(device())))
    assert [(one.severity, one.subject) for one in findings] == [
        ("error", f"efa/rdmap0s6-rdm, {gpu}") for gpu in ("cuda:0", "cuda:1")
    ]
    asked(monkeypatch, {"wrong": 0, "register_ms": 3})
    findings = found(fabric.gpu_memory, machine(fabric="", fabric_state=state(device())))
    assert all("visible with the immediate" in one.evidence for one in findings)
    (one,) = found(fabric.gpu_memory, machine(fabric="", fabric_state=state(device(gpu=False))))
    assert "no provider here has HMEM" in one.evidence
