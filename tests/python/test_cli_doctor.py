"""`crossrail doctor` on this machine: what it tests, what it reports, and that nothing it meets ends in a traceback."""

from __future__ import annotations

import json
import re
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import one_error, run
from test_cli_store import store

import crossrail
from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.doctor import gpus, job, limits, nics, second, table, transports
from crossrail_tools.cli.doctor.examine import examine
from crossrail_tools.cli.doctor.finding import SEVERITIES, Check, Found, Machine
from crossrail_tools.cli.doctor.links import Rail, pair_rails
from crossrail_tools.cli.doctor.netlink import interfaces, route
from crossrail_tools.cli.doctor.show import page, summary
from crossrail_tools.cli.failure import Failure, exit_code_of

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
RAIL = Rail("eth1", "eth1", True, True, 9000, "10.0.1.1", 24, virtual=False, speed_mbps=100_000, numa_node=1)


def machine(**changes: Any) -> Machine:
    """This machine, with some things replaced."""
    return Machine(**{"info": crossrail.Context(environment=False).info(), **changes})


def found(check: Any, on: Machine) -> list[Found]:
    return list(check(on))


def doctor(*options: str, code: int, settings: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The findings of a run of the command."""
    done = run("doctor", *options, "--json=-", settings=settings)
    assert done.returncode == code, done.stderr
    whole = json.loads(done.stdout)
    assert whole["schema"] == "crossrail-doctor/1"
    return list(whole["findings"])


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m crossrail_tools.cli.doctor.page > docs/doctor.md"


def test_every_check_has_an_id_of_its_own_and_says_everything() -> None:
    ids = [check.id for check in table.CHECKS]
    assert len(set(ids)) == len(ids)
    assert {check.group for check in table.CHECKS} == set(table.GROUPS)
    assert set(ids) >= table.NEED_GPUS
    for check in table.CHECKS:
        assert check.tests.endswith(".") and check.rule and check.usual_fix and 0 < check.limit_s <= 300, check.id


def test_transports_are_used_between_two_processes() -> None:
    ids = ("shm", "mapped", "fd-passing", "tcp-loopback")
    findings = doctor(f"--only={','.join(ids)}", code=0)
    assert [one["id"] for one in findings if one["severity"] == "ok"] == list(ids), findings
    assert "compared" in findings[0]["evidence"]


def test_the_table_says_what_mends_what_and_how_long_it_may_take() -> None:
    done = run("doctor", "--only=settings,descriptors", settings={"CROSSRAIL_TLS": "pigeon", "CROSSRAIL_WINDOW": "0"})
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (row,) = [number for number, line in enumerate(lines) if re.match("error +settings +CROSSRAIL_TLS .*pigeon", line)]
    assert lines[row + 1].strip().startswith("fix: accepted: `all`, a list")
    assert "2 errors" in done.stdout
    assert "2 checks, each with a time limit: 15 s at most" in done.stderr
    assert "2 problems found (settings)" in done.stderr


def test_the_environment_does_not_decide_whether_the_machine_works() -> None:
    findings = doctor("--only=settings,shm", code=0, settings={"CROSSRAIL_TLS": "tcp", "CROSSRAIL_TIMEOUT": "1ms"})
    assert [one["severity"] for one in findings] == ["ok", "ok"]
    assert "CROSSRAIL_TLS" in findings[0]["evidence"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--onyl=shm",), ("--onyl", "--only")),
        (("--torchrun", "--slurm"), ("--slurm", "--torchrun")),
        (("--json=/nonexistent/doctor.json",), ("/nonexistent",)),
        (("now",), ("now",)),
        (("--store=nonsense",), ("nonsense", "tcp://host:port")),
    ],
)
def test_nonsense_is_an_error_and_exit_2(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    text = refusal(capsys, 2, *options)
    assert all(word in text for word in words), text


def refusal(capsys: pytest.CaptureFixture[str], code: int, *options: str) -> str:
    """The error of a command line that ends with this exit code; run in this process, which spares another one."""
    with pytest.raises((Failure, crossrail.CrossrailError, SystemExit)) as caught:
        parse_arguments(["doctor", *options]).run()
    error = caught.value
    if isinstance(error, SystemExit):
        assert error.code == code
        return capsys.readouterr().err
    assert isinstance(error, Exception) and exit_code_of(error) == code
    return str(error)


def test_an_error_is_one_line() -> None:
    one_error(run("doctor", "--only=shmm"), 2, "shmm", "known: settings")


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("rail-mtu", "--peer"),
        ("store", "--store"),
        ("nccl", "--nccl"),
        ("fabric-key", "--fabric"),
        ("launcher", "--torchrun"),
    ],
)
def test_a_check_with_an_option_is_refused_without_it(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["doctor", f"--only={name}"])
    assert ended.value.code == 2
    assert f"--only {name} needs {option}" in capsys.readouterr().err


def check_of(body: Any, limit_s: float = 5.0) -> Check:
    return Check("id", "Tests.", "rule", "mends", body, "group", limit_s)


def test_a_check_that_fails_or_hangs_is_a_finding() -> None:
    hold = threading.Event()

    def broken(_: Machine) -> Iterable[Found]:
        yield Found("ok", "half of it works")
        raise ZeroDivisionError("in the middle")

    def refused(_: Machine) -> Iterable[Found]:
        raise crossrail.RefusedError("connect: refused", detail="refused", hint="ask them")

    def hanging(_: Machine) -> Iterable[Found]:
        hold.wait(20)
        return []

    seen: list[str] = []
    began = time.monotonic()
    try:
        checks = [check_of(broken), check_of(refused), check_of(hanging, 0.05), check_of(lambda _: [])]
        findings = examine(checks, machine(), lambda check: seen.append(check.id))
    finally:
        hold.set()
    assert time.monotonic() - began < 30
    assert seen == ["id"] * 4
    assert [one.severity for one in findings] == ["ok", "error", "error", "error", "note"]
    assert "ZeroDivisionError: in the middle" in findings[1].evidence
    assert (findings[2].evidence, findings[2].fix) == ("refused", "ask them")
    assert "did not end within 0.05 s" in findings[3].evidence
    assert summary(findings) == "5 findings: 3 errors, 0 warnings, 1 note, 1 ok"
    assert set(SEVERITIES) == {"error", "warning", "note", "ok"}


def test_findings_with_one_cause_are_one() -> None:
    def named(name: str, *results: Found) -> Check:
        return replace(check_of(lambda _: results), id=name)

    root = named("root", Found("warning", "is down", "up", "eth1"), Found("ok", "is up", "", "eth2"))
    effect = named("effect", Found("error", "no data", "", "one", ("root", "eth1")), Found("ok", "data", "", "two"))
    further = named("further", Found("warning", "slow", "", "one", ("effect", "one")))
    one, two, three = examine([root, effect, further], machine())
    assert (one.id, one.severity, one.subject, one.evidence, one.fix) == ("root", "error", "eth1", "is down", "up")
    assert [(each.id, each.severity) for each in one.also] == [("effect", "error"), ("further", "warning")]
    assert (two.id, two.subject, three.id, three.subject) == ("root", "eth2", "effect", "two")
    # A cause that is no problem itself, or that was not tested, explains nothing; nor do findings explain each other.
    assert [each.id for each in examine([effect], machine())] == ["effect", "effect"]
    blameless = named("effect", Found("error", "no data", "", "one", ("root", "eth2")))
    assert len(examine([root, blameless], machine())) == 3
    circle = named("circle", *(Found("error", "", "", here, ("circle", there)) for here, there in ("ab", "ba", "cc")))
    assert [each.subject for each in examine([circle], machine())] == ["a", "b", "c"]


def test_a_system_call_that_is_refused_explains_the_transports_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(tls: str, **_: Any) -> Any:
        raise crossrail.ConfigError("worker: memfd_create", detail="memfd_create: Operation not permitted")

    monkeypatch.setattr(transports, "connected", refused)
    monkeypatch.setattr(limits, "refusals", lambda: {"memfd_create": "Operation not permitted"})
    checks = [check for check in table.CHECKS if check.id in ("shm", "mapped", "system-calls")]
    (one,) = examine(checks, machine())
    assert (one.id, one.subject, [each.id for each in one.also]) == ("system-calls", "memfd_create", ["shm", "mapped"])


def test_netlink_agrees_with_the_machine() -> None:
    by_name = {one.name: one for one in interfaces()}
    lo = by_name["lo"]
    assert lo.loopback and lo.up and lo.mtu > 0
    assert [one.subnet for one in lo.addresses if one.address == "127.0.0.1"] == ["127.0.0.0/8"]
    assert route("127.0.0.9", "127.0.0.1").interface == "lo"
    for device in crossrail.Context(environment=False).info()["devices"]:
        if device["chosen"]:
            assert device["address"] in {one.address for one in by_name[device["interface"]].addresses}


def test_rails_are_paired_as_transfers_pair_them() -> None:
    mine = [replace(RAIL, name=f"eth{n}", address=f"10.0.{n}.1") for n in (1, 2, 3)]
    theirs = [replace(RAIL, name=f"a{n}", address=f"10.0.{n}.2") for n in (2, 1)]
    assert [(a.name, b.name) for a, b in pair_rails(mine, theirs)] == [("eth1", "a1"), ("eth2", "a2")]
    assert pair_rails(mine, [replace(RAIL, address="fd00::1")]) == []


def test_devices_that_are_down_slow_or_short_are_named() -> None:
    rails = [
        RAIL,
        replace(RAIL, name="eth2", interface="eth2", up=False, carrier=False),
        replace(RAIL, name="eth3", interface="eth3", carrier=False),
        replace(RAIL, name="eth4", interface="eth4", mtu=1500, speed_mbps=10_000),
        replace(RAIL, name="eth5", interface="eth5", mtu=1000),
    ]
    here = machine(rails=rails)
    states = {one.subject: one for one in found(nics.link_state, here)}
    assert [states[name].severity for name in ("eth1", "eth2", "eth3")] == ["ok", "warning", "warning"]
    assert states["eth2"].fix == "ip link set eth2 up" and "no link" in states["eth3"].evidence
    (slow,) = found(nics.speeds, here)
    assert slow.subject == "eth4" and "10 Gbit/s, where another device has 100" in slow.evidence
    short = {one.subject: one for one in found(nics.mtus, here)}
    assert short["eth5"].severity == "warning" and short["eth5"].fix.startswith("ip link set eth5 mtu 9000")
    assert short["eth4"].severity == "ok", "a slower device may have an MTU of its own"
    (none,) = found(nics.link_state, machine())
    assert none.severity == "note"


def interrupts(root: Path, rail: Rail, on: list[str]) -> Machine:
    """A machine whose device has one receive queue and one interrupt for each entry of ``on``."""
    hardware = root / "devices" / "pci0"
    folder = root / "class/net" / rail.interface
    for number, cpus in enumerate(on):
        (folder / "queues" / f"rx-{number}").mkdir(parents=True)
        (root / "irq" / str(40 + number)).mkdir(parents=True)
        (root / "irq" / str(40 + number) / "effective_affinity_list").write_text(cpus)
        (hardware / "msi_irqs").mkdir(parents=True, exist_ok=True)
        (hardware / "msi_irqs" / str(40 + number)).write_text("msix")
    (folder / "device").symlink_to(hardware)
    made = machine(rails=[rail], sys=root, proc=root)
    made.info["machine"]["numa_nodes"] = [{"node": 0, "cpus": [0, 1]}, {"node": 1, "cpus": [2, 3]}]
    return made


@pytest.mark.parametrize(
    ("on", "severity", "said"),
    [
        (["2", "3"], "ok", "2 receive queues, 2 interrupts"),
        (["0", "0"], "warning", "all 2 interrupts run on processor 0"),
        (["0", "1", "2-3"], "warning", "2 of 3 interrupts run on processors of another NUMA node than 1"),
    ],
)
def test_where_interrupts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: list[str], severity: str, said: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    (one,) = found(nics.queues, interrupts(tmp_path, RAIL, on))
    assert (one.severity, one.evidence, one.subject) == (severity, said, "eth1")


def test_lists_of_processors() -> None:
    assert nics.parse_cpus("0-2,8") == {0, 1, 2, 8}
    assert nics.parse_cpus("") == nics.parse_cpus("x-1") == frozenset()


@pytest.mark.parametrize(("control", "severity"), [(0x1D, "warning"), (0x11, "ok"), (None, "note")])
def test_bridges_that_redirect(tmp_path: Path, control: int | None, severity: str) -> None:
    bridge = tmp_path / "bus/pci/devices/0000:00:01.0"
    bridge.mkdir(parents=True)
    (bridge / "class").write_text("0x060400\n")
    config = bytearray(4096 if control is not None else 64)
    if control is not None:
        struct.pack_into("<I", config, 0x100, 0x0001 | 0x140 << 20)
        struct.pack_into("<IHH", config, 0x140, limits._ACS, 0, control)
    (bridge / "config").write_bytes(config)
    here = machine(sys=tmp_path)
    here.info["gpus"] = [{"pci": "0000:01:00.0", "model": None, "driver": None, "numa_node": None}]
    (one,) = found(limits.direct_access, here)
    assert one.severity == severity
    assert ("setpci -s 0000:00:01.0" in one.fix) == (severity == "warning")


def test_what_this_process_may_use_is_tried() -> None:
    here = machine()
    names = ("descriptors", "locked_memory", "processors", "memory", "shared_memory_folder", "system_calls", "clock")
    for name in (*names, "huge_pages", "socket_buffers", "congestion_control"):
        for one in found(getattr(limits, name), here):
            assert one.evidence and (one.fix or one.severity in ("ok", "note")), (name, one)


def test_too_few_descriptors_are_noticed() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        (one,) = found(limits.descriptors, machine())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert one.severity == "warning" and "could be opened" in one.evidence and one.fix


def with_gpus(count: int, *, access: bool = True) -> Machine:
    """A machine on which CUDA offers so many GPUs."""
    here = machine()
    cuda = here.info["cuda"]
    nics_ = [{"name": "eth1", "distance": "same switch"}]
    cuda["present"], cuda["driver"] = True, "12.8"
    cuda["devices"] = [  # type: ignore[typeddict-item]
        {"ordinal": number, "name": "H", "nics": nics_} for number in range(count)
    ]
    cuda["peer_access"] = [[access] * count for _ in range(count)]
    return here


@pytest.mark.parametrize(("scope", "mends"), [("1\n", "ptrace_scope=0"), (None, "--cap-add=SYS_PTRACE")])
def test_single_copies_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str | None, mends: str
) -> None:
    way = {"lane": "shm(cma)", "missed": True, "reason": "process_vm_readv: EPERM"}
    endpoint = SimpleNamespace(explain=lambda: SimpleNamespace(candidates=[way]))
    monkeypatch.setattr(transports, "connected", lambda *_, **__: nullcontext((None, None, endpoint, None)))
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(scope)
    (one,) = found(transports.single_copy, machine(proc=tmp_path))
    assert one.severity == "warning" and "EPERM" in one.evidence and mends in one.fix


def test_transports_without_a_check_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    known = [one for one in here.info["transports"] if one["name"] in transports.TESTED]
    here.info["transports"] = known
    assert found(transports.further_transports, here)[0].severity == "ok"
    missing = {"name": "ucx", "usable": False, "detail": "", "reason": "no libucp.so.0", "fix": "install libucx0"}
    here.info["transports"] = [missing]  # type: ignore[list-item]
    (note,) = found(transports.further_transports, here)
    assert (note.severity, note.subject, note.fix) == ("note", "ucx", "install libucx0")
    monkeypatch.setattr(transports, "TESTED", frozenset({"self", "tcp", "cuda_ipc"}))
    here.info["transports"] = known
    (used,) = found(transports.further_transports, here)
    assert (used.severity, used.subject) == ("ok", "shm") and "compared" in used.evidence


def test_losses_under_load_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [
        {"segments": 0, "segments sent again": 0, "backlog": 0, "eth1": 3},
        {"segments": 1000, "segments sent again": 50, "backlog": 4, "eth1": 3},
    ]
    monkeypatch.setattr(transports, "_counters", lambda _: counted.pop(0))
    monkeypatch.setattr(transports, "LOAD_S", 0.01)
    resent, backlog = found(transports.under_load, machine())
    assert "50 of 1000 TCP segments were sent again" in resent.evidence
    assert (backlog.subject, backlog.severity) == ("backlog", "warning") and "netdev_max_backlog" in backlog.fix


def test_gpus_that_the_driver_does_not_offer() -> None:
    here = machine()
    here.info["gpus"] = [{"pci": "0000:01:00.0", "model": None, "driver": None, "numa_node": None}]
    here.info["cuda"] |= {"present": False, "devices": [], "reason": "no CUDA driver", "fix": "install it"}
    (one,) = found(gpus.driver, here)
    assert (one.severity, one.fix) == ("error", "install it")
    more = with_gpus(1)
    more.info["gpus"] = here.info["gpus"] * 2
    assert [one.severity for one in found(gpus.driver, more)] == ["ok", "note"]
    assert found(nics.distances, more)[0].evidence == "near eth1"


def test_a_kernel_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: Any) -> Any:
        raise crossrail.UnsupportedError("unpack: no compiler", detail="no compiler")

    monkeypatch.setattr(gpus.Unpack, "run", refuse)
    (one,) = found(gpus.kernels, with_gpus(1))
    assert (one.severity, one.subject, one.fix) == ("error", "cuda:0", "CROSSRAIL_UNPACK=d2d needs no compiler")
    monkeypatch.setattr(gpus.Unpack, "run", lambda *_: {"modes": {"d2d": {"samples_us": [16777.216]}}})
    (good,) = found(gpus.pinned_memory, with_gpus(1))
    assert good.severity == "ok" and "1.00 GB/s" in good.evidence


def test_a_slow_pair_of_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(mine: str, theirs: str, allocate: Any) -> tuple[Found, float]:
        slow = (mine, theirs) == ("cuda:2", "cuda:0")
        return Found("ok", "copied", subject=f"{mine} to {theirs}"), 20.0 if slow else 100.0

    monkeypatch.setattr(gpus, "_over_ipc", copied)
    results = found(gpus.pairs, with_gpus(3))
    assert len(results) == 6
    (slow,) = [one for one in results if one.severity == "warning"]
    assert slow.subject == "cuda:2 to cuda:0" and "20.00 GB/s" in slow.evidence
    assert {one.severity for one in found(gpus.pairs, with_gpus(2, access=False))} == {"warning"}
    assert found(gpus.pairs, with_gpus(1))[0].severity == "note"


def test_a_second_process_that_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, or on a busy machine, it takes longer to start than the connection may."""
    real = second.rank_process

    def slow(*given: Any) -> Any:
        end = real(*given)
        end.pause(True)
        threading.Timer(5, end.pause, [False]).start()
        return end

    monkeypatch.setattr(second, "rank_process", slow)
    monkeypatch.setattr(second, "WAIT_S", 4.0)
    (one,) = found(transports.shared_memory, machine())
    assert one.severity == "ok", one.evidence


@pytest.mark.parametrize(("flaw", "severity", "said"), [(0, "warning", "staged in host memory"), (1, "error", "wrong")])
def test_memory_of_gpus_is_sent_and_compared(
    monkeypatch: pytest.MonkeyPatch, flaw: int, severity: str, said: str
) -> None:
    """With host memory in the place of a GPU's, which goes there and back but not by CUDA IPC."""
    real = transports.connected
    monkeypatch.setattr(gpus, "SIZE", 1 << 20)
    monkeypatch.setattr(gpus, "connected", lambda tls, **how: real("shm", **how))
    monkeypatch.setattr(gpus, "pattern", lambda size, right=gpus.pattern: right(size) + flaw * next(calls))
    calls = iter((0, 1, 1))
    one, _ = gpus._over_ipc("cpu", "cpu", lambda context, gpu: context.alloc(gpus.SIZE))
    assert (one.severity, one.subject) == (severity, "cpu") and said in one.evidence


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("launcher", "environ", "said"),
    [
        ("torchrun", {**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR=127.0.0.1 is loopback"),
        ("torchrun", {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "4"}, ""),
        ("torchrun", {**TORCHRUN, "MASTER_ADDR": "192.0.2.1", "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ("torchrun", {**TORCHRUN, "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "65535"}, "MASTER_PORT=65535"),
        ("torchrun", TORCHRUN, "not set: MASTER_ADDR"),
        ("Slurm", {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, "not set: SLURM_STEP_NODELIST"),
    ],
)
def test_variables_of_launchers(launcher: str, environ: dict[str, str], said: str) -> None:
    results = list(job.variables(machine(launcher=launcher), environ))
    bad = [one for one in results if one.severity == "error"]
    assert len(bad) == bool(said)
    assert not bad or (said in bad[0].evidence and bad[0].fix)


def test_two_launchers_contradict() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]"}
    results = list(job.variables(machine(launcher="Slurm"), {**slurm, "RANK": "0"}))
    assert [one.severity for one in results] == ["warning", "ok"]


def test_a_store_is_used_and_a_missing_one_is_a_finding() -> None:
    with store("--listen=127.0.0.1:0") as (_, address):
        (one,) = doctor("--only=descriptors", f"--store={address}", code=0)[1:]
        assert one["id"] == "store" and "published, read, withdrawn" in one["evidence"]
        assert [one["id"] for one in doctor("--only=store", f"--store={address}", code=0)] == ["store"]
    (missing,) = doctor("--only=descriptors", "--store", code=1)[1:]
    assert missing["severity"] == "error" and "CROSSRAIL_STORE" in missing["fix"]


def test_processes_with_nccl_are_found(tmp_path: Path) -> None:
    for pid, names in ((11, ["libnccl.so.2"]), (12, ["libnccl.so.2.27.3", "libnccl-net-crossrail.so"]), (13, ["libc"])):
        (tmp_path / str(pid)).mkdir()
        lines = [f"7f00-7f01 r-xp 00000000 08:01 99       /opt/my libs/{name}" for name in names]
        (tmp_path / str(pid) / "maps").write_text("\n".join(lines))
    by_process = {one.subject: one for one in job.libraries(machine(proc=tmp_path)) if one.subject}
    assert by_process["process 11"].severity == "note" and by_process["process 12"].severity == "ok"
    assert "/opt/my libs/libnccl.so.2 without" in by_process["process 11"].evidence
    assert "process 13" not in by_process


def test_a_plugin_that_is_not_installed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Path:
        raise crossrail.UnsupportedError("this installation has no plugin")

    monkeypatch.setattr(job, "plugin_path", absent)
    (one,) = job.plugin(machine())
    assert one.severity == "error" and "no plugin" in one.evidence and "pip install" in one.fix
