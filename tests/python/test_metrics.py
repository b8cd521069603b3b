"""CROSSRAIL_METRICS, read by Prometheus's own parser; its page and its dashboard name what there is."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import clean_environment
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
TRANSFER = """
import sys, crossrail
context = crossrail.Context(tls="tcp", net_devices="127.0.0.1,127.0.0.2")
with crossrail.Worker(context, name='say "a"') as one, crossrail.Worker(context, name="b\\\\c") as two:
    out = one.connect(two.address())
    two.accept()
    for _ in range(4):
        receive = two.recv(bytearray(4 << 20), 1)
        out.send(bytearray(4 << 20), 1).wait()
        receive.wait()
    waits = one.recv(bytearray(8), 77, source=out)
    print("ready", flush=True)
    sys.stdin.readline()
    waits.cancel()
"""


@contextmanager
def program(pages: Path, metrics: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has moved 16 MiB and waits for a message."""
    settings = {"CROSSRAIL_PAGES": str(pages), "CROSSRAIL_METRICS": metrics}
    with subprocess.Popen(
        [sys.executable, "-c", TRANSFER],
        env=clean_environment(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
            yield process
        finally:
            if process.poll() is None:
                process.stdin.close()
                process.wait(30)


def families(text: str) -> Mapping[str, Metric]:
    """By the names that the page gives: the parser takes `_total` off."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
    }


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every metric in the page."""
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(crossrail_\w+)` \| (\w+) \| (.*?) \| .+ \|$", page, re.M)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


@contextmanager
def free_port() -> Iterator[int]:
    """A port that the kernel gives to nobody else: it is bound, and nothing listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def scrape(port: int, path: str = "/metrics") -> str:
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_prometheus_reads_what_the_page_documents(tmp_path: Path) -> None:
    with free_port() as port, program(tmp_path, f":{port}"):
        deadline = time.monotonic() + 20
        while True:
            found = families(scrape(port))
            sent = sum(sample.value for sample in found["crossrail_rail_sent_bytes_total"].samples)
            transfers = [sample.value for sample in found["crossrail_worker_transfers_total"].samples]
            waits = [sample.labels["operation"] for sample in found["crossrail_oldest_wait_seconds"].samples]
            if sent >= 16 << 20 and transfers == [4, 4] and waits == ["recv"]:
                break
            assert time.monotonic() < deadline, (sent, transfers, waits)
            time.sleep(0.05)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(port, "/elsewhere")
    (info,) = found["crossrail_process_info"].samples
    assert info.labels["program"] == Path(sys.executable).name, "nothing of what was given to it"
    pages = documented()
    assert pages.keys() == found.keys()
    for name, family in found.items():
        kind, labels = pages[name]
        assert family.type == kind, name
        for sample in family.samples:
            assert sample.labels.keys() - {"host", "pid", "le"} == labels, sample
    links = {(s.labels["link"], s.labels["peer"]) for s in found["crossrail_link_sent_bytes_total"].samples}
    assert ("tcp/127.0.0.1", "b\\c") in links and ("tcp/127.0.0.2", 'say "a"') in links
    (wait,) = found["crossrail_oldest_wait_seconds"].samples
    assert (wait.labels["operation"], wait.labels["name"]) == ("recv", 'say "a"')
    took = {sample.name: sample for sample in found["crossrail_worker_transfer_seconds"].samples if sample.value}
    assert took["crossrail_worker_transfer_seconds_count"].value == 4
    assert took["crossrail_worker_transfer_seconds_sum"].value > 0


def test_a_taken_port_is_one_line_and_the_program_works(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with program(tmp_path, f":{held.getsockname()[1]}") as process:
            _, stderr = process.communicate("\n", timeout=30)
    assert process.returncode == 0
    (line,) = stderr.splitlines()
    assert "CROSSRAIL_METRICS: 127.0.0.1:" in line and "Address already in use" in line


def test_files_for_node_exporter(tmp_path: Path) -> None:
    pages, target = tmp_path / "pages", tmp_path / "textfile"
    pages.mkdir()
    target.mkdir()
    (target / "crossrail-999999999-1.prom").write_text("left by a dead process")
    with program(pages, f"file:{target}") as process:
        deadline = time.monotonic() + 20
        while not (made := list(target.glob(f"crossrail-{process.pid}-*.prom"))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = families(made[0].read_text())
        assert {s.labels["pid"] for s in found["crossrail_process_info"].samples} == {str(process.pid)}
    assert not list(target.iterdir())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [("9400", "is neither an address"), ("file:", "names no folder"), (":port", "is neither an address")],
)
def test_a_wrong_setting_is_refused(wrong: str, why: str) -> None:
    code = "import crossrail; crossrail.Context()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment({"CROSSRAIL_METRICS": wrong}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f'ConfigError: CROSSRAIL_METRICS: "{wrong}" {why}' in done.stderr


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    known = documented()
    dashboard = json.loads((ROOT / "examples/cluster/grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in asked:
        (name,) = re.findall(r"crossrail_\w+", expression)
        family = name.removesuffix("_bucket") if name not in known else name
        assert family in known, expression
        labels = set(re.findall(r"\w+", re.search(r"by \((.*?)\)", expression)[1]))  # type: ignore[index]
        assert labels <= known[family][1] | {"host", "pid", "le"}, expression
