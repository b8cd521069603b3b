"""What every GPU test here gets: a visible skip where GPUs are too few, and a check that nothing is left behind.

A failure is told at once, as a later test may end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "python"), str(Path(__file__).parents[2] / "benches" / "gpu")]

from far import Far  # noqa: E402
from leftovers import held, more  # noqa: E402
from sharing import shared  # noqa: E402
from steps import gpu_count  # noqa: E402

COMMAND_LIMIT_S = 50.0
PATIENCE_S = 10.0
LASTING = {"link", "pair", "other"}
"""Fixtures of more than one test."""
GPUS, WHY_NONE = gpu_count()
PLACES = 2 * GPUS if shared() else GPUS
"""How many ranks can run at once: one on each GPU, or two (`tests/gpu/run.py --share`)."""
RANKS = 1 << (min(PLACES, 8) or 1).bit_length() - 1
"""Ranks of crossrail.deep_ep."""
FAILED = pytest.StashKey[bool]()
"""Of a test that has run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test here needs one GPU, or as many as its mark says."""
    for item in items:
        mark = item.get_closest_marker("gpus")
        needed = int(mark.args[0]) if mark else 1
        if needed > PLACES:
            why = WHY_NONE or f"there {'is' if GPUS == 1 else 'are'} {GPUS}"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}: {why}"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Ranks of crossrail.deep_ep, for the tests of one module."""
    from deep_ep_ranks import Ranks

    ranks = Ranks(RANKS)
    yield ranks
    ranks.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


class Told:
    """Prints each failure when it happens, and not once more at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            parts = [report.longreprtext, *(f"-- {name}\n{text}" for name, text in report.sections)]
            for line in "\n".join(parts).splitlines():
                terminal.write_line(line)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.config.option.tbstyle = "no"
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and terminal is not None and terminal.stats.get("skipped"):
            session.exitstatus = pytest.ExitCode.OK  # a file that is skipped as a whole, as where there is no PyTorch


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Told(config))


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which there are more child processes or shared segments than before.

    Descriptors are left out: the driver opens its own whenever a GPU is first used for something. So are segments where
    a context outlives the test: its bounce memory does too.
    """
    gc.collect()
    before = held()
    left_out: dict[str, Any] = {"descriptors": before.descriptors}
    if LASTING & set(request.fixturenames):
        left_out["segments"] = before.segments
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps all that it had
    request.node.funcargs.clear()
    deadline = time.monotonic() + 10
    gc.collect()
    while (left := more(before, held()._replace(**left_out))) and time.monotonic() < deadline:
        time.sleep(0.02)  # threads of closed workers and killed peers end on their own time
        gc.collect()
    assert not left, f"left behind: {left}{told(before.children)}"


def told(known: frozenset[str]) -> str:
    """The other child processes, and the mapped segments, as the machine names them."""
    lines = []
    for child in sorted(held().children - known):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"process {child}, state {state}: {command}")
    lines += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    return "".join(f"\n  {line}" for line in lines)


class Link(NamedTuple):
    """This process with one GPU, another with the next one (or the same, where there is one), and a way between."""

    name: str
    context: Any
    worker: Any
    endpoint: Any
    far: Far
    device: str


WAYS = {"cuda_ipc": "shm,cuda_ipc", "shm": "shm", "tcp": "tcp"}


@pytest.fixture(scope="session", params=WAYS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """Two processes connected in each way in turn; one pair for all tests."""
    import crossrail

    tls = WAYS[request.param]
    context = crossrail.Context(tls=tls, timeout=30, log="error")
    with crossrail.Worker(context, name="near") as worker:
        far = Far(worker, f"cuda:{min(1, GPUS - 1)}", tls)
        try:
            warm(worker, far)
            yield Link(request.param, context, worker, far.endpoint, far, "cuda:0")
        finally:
            far.close()


def warm(worker: Any, far: Far) -> None:
    """Messages both ways: what the first makes (kernels, pinned memory) can wait for a GPU that is busy."""
    import torch

    for nbytes in (1000, 8 << 20):
        tensor = torch.full((nbytes,), 1, dtype=torch.uint8, device="cuda:0")
        far.do("make", name="warm", nbytes=nbytes)
        far.ask("recv", name="warm")
        far.endpoint.send(tensor).wait()
        far.answer()
        far.ask("send", name="warm")
        worker.recv(tensor, source=far.endpoint).wait()
        far.answer()
    far.do("drop")


def goes_on(stream: Any, request: Any) -> None:
    """Waits until a stream that waits for a request is done. Where it never is, the request is cancelled."""
    deadline = time.monotonic() + PATIENCE_S
    while not stream.query():
        if time.monotonic() > deadline:
            finished = request.is_done()
            request.cancel()
            pytest.fail(f"{stream} still waits after {PATIENCE_S} s; the request was finished: {finished}; {request}")
        time.sleep(0.001)


Crossrail = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def crossrail_command() -> Crossrail:
    """Runs `crossrail ARGUMENTS`, with settings of its own only, to its end."""

    def run(*arguments: str, code: int | None = 0, **settings: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        done = subprocess.run(
            [sys.executable, "-m", "crossrail", *arguments],
            env={**clean, **settings},
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stderr}\n{done.stdout}"
        return done

    return run


@pytest.fixture
def rows(crossrail_command: Crossrail) -> Callable[..., list[dict[str, object]]]:
    """Runs a bench that must succeed; gives the rows of its JSON."""

    def run(*arguments: str, **settings: str) -> list[dict[str, object]]:
        done = crossrail_command("bench", *arguments, "--json=-", **settings)
        found: list[dict[str, object]] = json.loads(done.stdout)["rows"]
        return found

    return run


def compiled(target: Path, source: str, *options: str) -> None:
    """A shared library of this source, by the C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    command = [compiler, "-xc", "-", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", target, *options]
    subprocess.run(command, input=source, check=True, text=True)


@pytest.fixture
def apart(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose GPUs do not reach each other: its driver, with another answer to that."""
    ctypes.CDLL("libcuda.so.1")
    files = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line)
    # The real one is found under another name than its own, which is this one's.
    (tmp_path / "libcuda-real.so").symlink_to(next(files))
    (tmp_path / "named").mkdir()
    compiled(tmp_path / "named" / "libcuda-real.so", "")
    behind = (f"-L{tmp_path}/named", "-Wl,--no-as-needed", "-lcuda-real")
    answer = "int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }"
    compiled(tmp_path / "libcuda.so.1", answer, *behind)
    return {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
