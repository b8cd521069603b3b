"""Files of results and plans with anything in them: each is read, or refused with one line. Never a traceback.

As the targets of fuzz/: the same mutations every time, and others with FUZZ_SEED for FUZZ_SECONDS (`make fuzz`).
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sweep import sweep

from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.ep.plan import load_plan, parse_plan
from crossrail_tools.cli.failure import Failure
from crossrail_tools.report.writing import WriteError

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MOST_LINE = 600
"""Longest error; longer ones are no lines that somebody reads."""

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), 1 << 31, 1 << 63),
    *(
        -(1 << 63),
        10**400,
        -(10**400),
        "",
        " ",
        "\0",
        "\x1b[2J\n",
        "ns:",
        "ns:0000",
        "1",
        "nan",
        "<script>",
        "x" * 3000,
    ),
    *([], {}, [[]], [None], {"": {}}, [1, "a"], ["a"], [{}], {"a": []}, [0] * 50, [1e308] * 20),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every item of every list and object: its container and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def changed(value: Any, generator: random.Random) -> str:
    """The value as JSON, with some of it replaced, left out, doubled or moved, and some of its text damaged."""
    value = copy.deepcopy(value)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        everywhere = list(places(value))
        if not everywhere:
            break
        container, key = generator.choice(everywhere)
        other, place = generator.choice(everywhere)
        how = generator.random()
        if how < 0.5:
            container[key] = copy.deepcopy(generator.choice(ODD))
        elif how < 0.65:
            del container[key]
        elif how < 0.8:
            container[key] = copy.deepcopy(other[place])
        elif isinstance(container, dict):
            container[generator.choice(["", "a", "rows", "samples_us", str(key)[:-1], str(key) + "s"])] = container[key]
        else:
            container.insert(key, copy.deepcopy(container[key]))
    text = json.dumps(value)
    if generator.random() < 0.15:
        at = generator.randrange(len(text))
        put = generator.choice(["", "-", "9", "1e999", "null", "[" * 3000, '"', "\\ud800", "nan", "9" * 5000])
        text = text[:at] + put + text[at + generator.choice([0, 1, 8]) :]
    return text


def fuzz(values: list[Any], reads: Callable[[str], None], turns: int) -> None:
    """Reads each value and then mutations of them; ``reads`` raises what the command shows as an error."""
    for value in values:
        reads(json.dumps(value))
    end, turn = time.monotonic() + SECONDS, 0
    while turn < turns or time.monotonic() < end:
        text = changed(values[turn % len(values)], random.Random(f"{SEED} {turn}"))
        try:
            reads(text)
        except (Failure, WriteError) as error:
            shown = str(error)
            assert shown and "\n" not in shown and len(shown) <= MOST_LINE, (SEED, turn, shown, text)
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={SEED}, turn {turn}: {error!r} for {text[:2000]}") from error
        turn += 1
    print(f"{turn} mutations from seed {SEED}")


def results() -> list[Any]:
    """What benches wrote, with a few rows each."""
    found = []
    for path in sorted((ROOT / "benches" / "results").glob("*.json")):
        data = json.loads(path.read_text())
        for part in ("rows", "outcomes"):
            if isinstance(data.get(part), list):
                data[part] = data[part][:2]
        for row in data.get("rows", []):
            if isinstance(row.get("samples_us"), list):
                row["samples_us"] = row["samples_us"][:4]
        if len(json.dumps(data)) < 20_000:
            found.append(data)
    assert len(found) > 8
    return [*found, json.loads(sweep({0: [1.0, 2.0]}).dumps())]


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_report_reads_or_refuses(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reads(text: str) -> None:
        Path("results.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        outputs = ["--html=page.html", "--markdown=page.md", "--csv=rows.csv"]
        parse_arguments(["report", "results.json", *outputs]).run()
        capsys.readouterr()

    fuzz(results(), reads, 50)


@pytest.mark.parametrize("option", ["--check", "--calibrate"])
def test_plan_takes_results_or_refuses(option: str, nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reads(text: str) -> None:
        Path("results.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        parse_arguments(["plan", "--ep=8", option, "results.json"]).run()
        capsys.readouterr()

    paths = [ROOT / "benches" / "results" / "gpu" / f"ep_{name}-2.json" for name in ("decode", "sweep")]
    measured = [json.loads(path.read_text()) for path in paths]
    fuzz([{**data, "rows": data["rows"][:20]} for data in measured], reads, 40)


CLUSTER = {
    "name": "two nodes",
    "nodes": 2,
    "gpus_per_node": 8,
    "gpu": {"memory_gb": 141, "copy_gb_per_s": 2820},
    "nvlink": {"gb_per_s": 399},
    "network": {"nics_per_node": 8, "gb_per_s": 50, "latency_us": 5, "oversubscription": 2, "leaf_nodes": 1},
    "operations": {"dispatch_us": 15.8, "combine_us": 12.5, "pair_us": 3.3},
}
MODEL = {
    "name": "a model",
    "experts": 256,
    "topk": 8,
    "hidden": 7168,
    "layers": 58,
    "groups": 8,
    "topk_groups": 4,
    "redundant_experts": "auto",
    "intermediate": 2048,
    "imbalance": 1.2,
    "types": {"dispatch": "fp8", "combine": "bf16", "weights": "fp8"},
    "decode": {"tokens": 128},
    "prefill": {"tokens": 4096},
}


@pytest.mark.parametrize(("option", "shape"), [("--cluster", CLUSTER), ("--model", MODEL)])
def test_plan_reads_shapes_or_refuses(
    option: str, shape: Any, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reads(text: str) -> None:
        Path("shape.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        parse_arguments(["plan", "--ep=8,16", option, "shape.json", "--json=plan.json"]).run()
        capsys.readouterr()

    fuzz([shape], reads, 150)


def test_elastic_plans_are_read_or_refused(nowhere: Path) -> None:
    def reads(text: str) -> None:
        Path("plan.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        plan = load_plan("plan.json")
        assert parse_plan(plan.dumps()) == plan
        for index in range(len(plan.phases)):
            assert set(plan.leaving(index)) <= set(plan.before(index))
            plan.takes_lowest_ranks(index)

    plans = [json.loads(path.read_text()) for path in sorted((ROOT / "tests" / "data" / "plans").glob("*.json"))]
    fuzz(plans, reads, 600)
