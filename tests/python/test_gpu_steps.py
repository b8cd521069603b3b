"""The runner of GPU tests and benchmarks: what it makes of outputs, of steps that hang, of machines without GPUs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))

import steps  # noqa: E402
from steps import Counts, Runner, Step, group_sizes, read_libtest, read_program, read_pytest, visible  # noqa: E402

LIBTEST = """
running 4 tests
skipped: a_pair: there is one GPU
test a_pair ... ok
test whole ... ok
test broken ... FAILED
skipped: another: there is one GPU
test another ... ok

test result: FAILED. 3 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s
"""

PYTEST = """
=========================== short test summary info ============================
SKIPPED [2] tests/gpu/test_a.py:21: needs 2 GPUs: there is 1
FAILED tests/gpu/test_a.py::test_b - assert 1 == 2
=================== 1 failed, 10 passed, 2 skipped in 0.62s ====================
"""


def test_libtest_counts_skips_of_its_tests_own_words() -> None:
    expected = Counts(1, 1, 3, ("FAILED broken", "SKIPPED [2] there is one GPU"))
    assert read_libtest(LIBTEST, 101) == expected


def test_a_test_program_that_died_is_a_failure() -> None:
    assert read_libtest("running 2 tests\ntest a ... ok\n", -11) == Counts(0, 1, 0, ("ended early, exit code -11",))
    hung = read_libtest("running 2 tests\ntest a_pair has been running for over 60 seconds\n", -1)
    assert hung.notes == ("did not end: a_pair",)


def test_no_test_at_all_is_a_failure() -> None:
    empty = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n"
    assert read_libtest(empty, 0).failed == 1
    assert read_pytest("=== no tests ran in 0.00s ===\n", 5).failed == 1


def test_pytest_counts() -> None:
    notes = (
        "SKIPPED [2] tests/gpu/test_a.py:21: needs 2 GPUs: there is 1",
        "FAILED tests/gpu/test_a.py::test_b - assert 1 == 2",
    )
    assert read_pytest(PYTEST, 1) == Counts(10, 1, 2, notes)
    assert read_pytest("collected 3 items\nFatal Python error: Aborted\n", -6).failed == 1
    died = (
        "test_a.py::test_b[one two] PASSED [ 10%]\ntest_a.py::test_c FAILED [ 20%]\ntest_a.py:7: in test_c\n    f()\n"
        "test_a.py::test_d Fatal Python error: Segmentation fault\n  File test_a.py line 3\n"
    )
    notes = ("FAILED test_a.py::test_c", "ended early, exit code -11", "in test_a.py::test_d")
    assert read_pytest(died, -11) == Counts(1, 2, 0, notes)
    assert read_pytest("== 2 passed, 1 error in 3.00s (0:00:03) ==\n", 1) == Counts(2, 1, 0)


@pytest.mark.parametrize(
    ("output", "code", "failed"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0, 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0),
        ("========= ERROR SUMMARY: 3 errors\n", 86, 1),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", 0, 1),
        ("Device not supported\n", 0, 1),
    ],
)
def test_a_sanitizer_must_have_looked(output: str, code: int, failed: int) -> None:
    assert steps.read_sanitizer(output, code).failed == failed


def test_all_steps_run_and_one_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = Runner("try", tmp_path, 60)
    stubborn = "trap '' TERM; echo begun; sleep 60 & wait"
    runner.run(Step("hangs", ["sh", "-c", stubborn], 0.3, read_program))
    runner.run(Step("fails", ["sh", "-c", "echo why it failed; exit 3"], 10, read_program))
    runner.run(Step("is not there", ["/nonexistent/program"], 10, read_program))
    runner.run(Step("has no tool", ["true"], 10, read_program, missing="no tool"))
    runner.run(Step("works", ["sh", "-c", "echo $NAME"], 10, read_program, {"NAME": "a value"}))
    assert runner.finish() == 1
    states = [result.state for result in runner.results]
    assert states == ["out of time", "failed", "failed", "skipped", "passed"]
    assert runner.results[0].seconds < 10
    log = (tmp_path / "try.log").read_text()
    assert "begun" in log
    assert "a value" in log
    said = capsys.readouterr().out
    assert "why it failed" in said
    assert "FAILED: hangs, fails, is not there" in said
    table = json.loads((tmp_path / "try.json").read_text())
    assert [step["state"] for step in table["steps"]] == states


def test_a_budget_that_is_spent_leaves_steps_out_and_says_so(tmp_path: Path) -> None:
    runner = Runner("try", tmp_path, 0.2)
    runner.run(Step("long", ["sleep", "60"], 60, read_program))
    runner.run(Step("late", ["true"], 60, read_program))
    assert [result.state for result in runner.results] == ["out of time", "not run"]
    assert runner.finish() == 1


def test_what_a_step_leaves_running_is_ended(tmp_path: Path) -> None:
    runner = Runner("try", tmp_path, 60)
    runner.run(Step("leaves one", ["sh", "-c", "sleep 61 & echo $!"], 10, read_program))
    pid = (tmp_path / "try.log").read_text().split()[-1]
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_much_output_is_shortened_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LOG_BYTES", 1000)
    runner = Runner("try", tmp_path, 60)
    runner.run(Step("talks", ["sh", "-c", "echo first; seq 10000; echo last"], 10, read_program))
    runner.run(Step("next", ["echo", "after"], 10, read_program))
    log = (tmp_path / "try.log").read_text()
    assert len(log) < 2000
    assert "first" in log
    assert "last\n\n== next" in log


def test_how_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert group_sizes(None, 8) == [4, 2, 1]
    assert group_sizes(None, 3) == [2, 1]
    assert group_sizes("2", 4) == [2]
    with pytest.raises(ValueError, match="has 2"):
        group_sizes("4", 2)
    with pytest.raises(ValueError, match="list of numbers"):
        group_sizes("many", 2)
    assert visible(range(2), 4) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible(range(4), 4) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-41c8,1")
    assert visible([0, 1], 3) == {"CUDA_VISIBLE_DEVICES": "3,GPU-41c8"}
    assert visible([2], 3) == {"CUDA_VISIBLE_DEVICES": "1"}


class Meeting:
    """Steps as files: each says what GPUs it sees, and waits until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, name: str, gpus: int, kind: str = "alone") -> Step:
        script = (
            f'echo "$CUDA_VISIBLE_DEVICES" >{name}.on.new; mv {name}.on.new {name}.on; '
            f"while [ ! -e {name}.go ]; do sleep 0.01; done"
        )
        return Step(name, ["sh", "-c", f"cd '{self.folder}' && {script}"], 20, read_program, gpus=gpus, kind=kind)

    def seen(self, name: str) -> str:
        """What a step sees, once it runs."""
        deadline = time.monotonic() + 10
        while not (self.folder / f"{name}.on").exists():
            assert time.monotonic() < deadline, f"{name} was not begun"
            time.sleep(0.01)
        return (self.folder / f"{name}.on").read_text().strip()

    def runs(self, name: str) -> bool:
        return (self.folder / f"{name}.on").exists()

    def let(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()


def test_steps_run_side_by_side_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meeting, runner = Meeting(tmp_path), Runner("try", tmp_path, 60)
    asked = {"all": (4, "alone"), "pair": (2, "alone"), "one": (1, "alone"), "last": (1, "alone"), "four": (4, "waits")}
    asked |= {"few": (4, "waits"), "slow": (1, "endless"), "next": (1, "waits")}
    asked |= {"a": (4, "any"), "b": (2, "any"), "c": (2, "any"), "late": (1, "any")}
    steps = [meeting.step(name, gpus, kind) for name, (gpus, kind) in asked.items()]
    thread = threading.Thread(target=runner.run_all, args=(steps, 4))
    thread.start()
    try:
        assert meeting.seen("all") == "" and not meeting.runs("pair")
        meeting.let("all")
        assert [meeting.seen(name) for name in ("pair", "one", "last")] == ["0,1", "2", "3"]
        assert not meeting.runs("four") and not meeting.runs("a"), "somebody is beside what must be alone"
        for name in ("one", "pair", "last"):
            meeting.let(name)
        assert [meeting.seen(name) for name in ("four", "few", "a")] == ["", "", ""]
        assert sorted(meeting.seen(name) for name in ("b", "c")) == ["0,1", "2,3"]
        assert not meeting.runs("slow"), "three steps whose kernels wait have one GPU"
        assert not meeting.runs("late"), "three others have one GPU"
        meeting.let("b")
        assert meeting.seen("late") in meeting.seen("b")
        meeting.let("four")
        assert not meeting.runs("slow"), "endless waits are beside others"
        assert not meeting.runs("next"), "it has overtaken one that waits for the same room"
        meeting.let("few")
        assert meeting.seen("slow") != meeting.seen("next")
    finally:
        for step in steps:
            meeting.let(step.name)
        thread.join(20)
    assert runner.finish() == 0
    assert sorted(result.name for result in runner.results) == sorted(step.name for step in steps)
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["try.log"]
    assert all(f"== {step.name}:" in (tmp_path / "try.log").read_text() for step in steps)


def test_what_runs_is_ended_when_something_goes_wrong(tmp_path: Path) -> None:
    def cannot(output: str, code: int) -> Counts:
        raise RuntimeError("this output cannot be read")

    runner = Runner("try", tmp_path, 60)
    steps = [Step("long", ["sleep", "60"], 60, read_program), Step("odd", ["true"], 10, cannot)]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="cannot be read"):
        runner.run_all(steps, 2)
    assert time.monotonic() - began < 20


def gpu_tests() -> Any:
    """tests/gpu/run.py, which no other module imports."""
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_of_gpus_is_run_with_as_many_as_it_needs(tmp_path: Path) -> None:
    run, folder = gpu_tests(), tmp_path / "tests"
    folder.mkdir()
    for path in ROOT.glob("crates/*/tests/gpu*"):
        package = re.search(r'name = "(.+)"', (path.parents[1] / "Cargo.toml").read_text())
        assert package
        text = "\n".join(file.read_text() for file in ([path] if path.is_file() else path.glob("*.rs")))
        names = "\n".join(f"{name}: test" for name in re.findall(r"\bfn (\w+given_back)", text))
        program = folder / f"{package[1]}.{path.stem}"
        program.write_text(f"#!/bin/sh\necho '{names}'\n")
        program.chmod(0o755)
    listed = run.steps_for(tmp_path, None, [4, 2, 1], 4)
    steps = {step.name: step for step in listed}
    assert len(steps) == len(listed)
    files = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    programs = [path.name for path in folder.iterdir()]
    assert {*run.PAIRS, *run.EXPERTS, *run.ENDLESS} <= {*files, *programs}
    for name in (*programs, *(f"Python {name}" for name in files)):
        found = [size for size in (4, 2, 1) if f"{size} GPU: {name}" in steps]
        assert found == ([2, 1] if name.removeprefix("Python ") in run.PAIRS else [4, 2, 1])
        assert all(steps[f"{size} GPU: {name}"].gpus == size for size in found)
        if name.startswith("Python "):
            text = (ROOT / "tests" / "gpu" / name.removeprefix("Python ")).read_text()
            needed = [int(count) for count in re.findall(r"mark\.gpus\((\d+)\)", text)]
            assert max(needed, default=1) <= found[0], f"{name} has tests that would always be skipped"
    alone = [name for name, step in steps.items() if step.kind == "alone"]
    assert set(alone) == {
        *(f"{size} GPU: crossrail-cuda-ipc.gpu given_back" for size in (2, 1)),
        *(f"{size} GPU: crossrail-gpu.gpu_staging given_back" for size in (2, 1)),
        *(f"{size} GPU: Python test_api_ends.py alone" for size in (2, 1)),
        *(f"{size} GPU: Python test_deep_ep_low_latency.py alone" for size in (4, 2, 1)),
        *(f"2 GPU: {tool}" for tool in run.SANITIZERS),
    }
    assert "--skip" in steps["2 GPU: crossrail-cuda-ipc.gpu"].command
    assert "not alone" in steps["2 GPU: Python test_api_ends.py"].command
    assert [step.name for step in listed[: len(alone)]] == alone, "those that must be alone come first"
    for some in (listed[: len(alone)], listed[len(alone) :]):
        gpus = [step.gpus for step in some]
        assert gpus == sorted(gpus, reverse=True), "those with the most GPUs come first"


def test_without_a_gpu_the_tests_fail_and_say_why(tmp_path: Path) -> None:
    if steps.gpu_count()[0]:
        pytest.skip("this machine has a GPU")
    command = [sys.executable, ROOT / "tests" / "gpu" / "run.py", f"--pack={tmp_path}", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "need a GPU" in done.stderr


def test_what_a_sanitizer_leaves_out_is_a_kernel_that_there_is() -> None:
    run = gpu_tests()
    sources = [path.read_text() for path in ROOT.glob("crates/kernels/csrc/kernels/*.cu")]
    for tool in run.SANITIZERS:
        command = [str(part) for part in run.sanitizer(Path("pack"), tool, 1, {}).command]
        left_out = run.NOT_FOR.get(tool)
        assert (f"kernel_substring={left_out}" in command) == (tool in run.NOT_FOR)
        if left_out is not None:  # mangled: each part of the name behind its length
            space, kernel = re.findall(r"[a-z_]+", left_out)
            assert left_out == f"{len(space)}{space}{len(kernel)}{kernel}"
            there = [
                text for text in sources if f"::{space} {{" in text and re.search(rf"__global__.* {kernel}\(", text)
            ]
            assert there
