"""Every fenced example of the README, the guides and the other pages is run, or checked as far as this machine can."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from free_ports import free_port

import crossrail
from crossrail_tools.cli.command_line import parse_arguments

ROOT = Path(__file__).parents[2]
HERE = "test_fences.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMIX_", "CROSSRAIL_")

RUN_BY: dict[str, list[str]] = {
    "README.md": ["test_first_page.py", HERE],
    "docs/design/adding-a-transport.md": [HERE] * 7,
    "docs/guides/c.md": ["test_capi_experts.py"] * 3,
    # Shown from examples/python/experts.py, which a test runs; the others are run here.
    "docs/guides/experts.md": ["test_ep_example.py"] * 3 + [HERE, "test_ep_example.py", HERE],
    # Shown from examples/python/experts_gpu.py, which tests/gpu runs: it needs a GPU and PyTorch.
    "docs/guides/experts-gpu.md": ["test_experts_gpu_guide.py"] * 9,
    # Needs two processes with a GPU: its calls are checked against the signatures.
    "docs/guides/gpu.md": [HERE],
    "docs/guides/kv.md": ["test_kv_guide.py"],
    "docs/guides/nccl.md": [HERE],
    "docs/guides/slow.md": ["test_slow_guide.py"],
    "docs/guides/watching.md": ["test_watching_guide.py"] * 2,
    "docs/plan.md": ["test_cli_plan.py"] * 2,
}
"""The test module that runs each fence of a page, in their order."""


def pages() -> Iterator[Path]:
    """The pages of the repository, without those that only the site has."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md"))
    for folder in ("docs", "packages", "examples", "fuzz"):
        found = sorted((ROOT / folder).rglob("*.md"))
        yield from (page for page in found if (ROOT / "docs" / "site") not in page.parents)


def fences(page: str) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_every_fence_has_a_test() -> None:
    found = {page.relative_to(ROOT).as_posix(): len(fences(page.relative_to(ROOT).as_posix())) for page in pages()}
    assert {page: count for page, count in found.items() if count} == {page: len(by) for page, by in RUN_BY.items()}
    for page, by in RUN_BY.items():
        for name in set(by) - {HERE}:
            text = (ROOT / "tests" / "python" / name).read_text(encoding="utf-8")
            assert Path(page).name in text or Path(page).stem in text, f"{name} does not read {page}"


_COMMAND = re.compile(r"^    (?:\w+\$ )?((?:[A-Z_]+=\S+ )*crossrail [a-z][^|\n]*?)(?: +#.*| \|.*)?$", re.MULTILINE)
COMMANDS = sorted(
    {(page.name, line) for page in pages() for line in _COMMAND.findall(page.read_text(encoding="utf-8"))}
)


def test_every_command_of_every_page_can_be_parsed() -> None:
    wrong = []
    for page, line in COMMANDS:
        words = shlex.split(line.partition(" > ")[0])
        try:
            parse_arguments(words[words.index("crossrail") + 1 :])
        except SystemExit as error:
            wrong += [(page, line)] if error.code else []
    assert not wrong
    assert len(COMMANDS) > 80


EXPERTS = """
import ml_dtypes, numpy as np
rng = np.random.default_rng(0)
x = rng.standard_normal((5, 7168), np.float32).astype(ml_dtypes.bfloat16)
topk_idx = np.argsort(rng.random((5, 288)), axis=1)[:, :8].copy()
topk_weights = np.full((5, 8), 1 / 8, np.float32)


def run_experts(x, scales, counts):
    y = np.zeros(x.shape, ml_dtypes.bfloat16)
    for expert, count in enumerate(counts):
        y[expert, :count] = (x[expert, :count].astype(np.float32) * np.repeat(scales[expert, :count], 128, axis=-1))
    return y


"""


def test_the_readme_moves_tokens_to_experts_and_back() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # The store listens on the port after MASTER_PORT.
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(free_port() - 1)
    check = "\nprint(out.shape, out.dtype, np.abs(out.astype(np.float32) - x.astype(np.float32)).max() < 0.3)\n"
    program = EXPERTS + fences("README.md")[1][1] + check
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | job, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(5, 7168) bfloat16 True\n"


def test_the_plan_of_the_guide_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    exec(fences("docs/guides/experts.md")[3][1], {})  # the page's own code
    assert "largest tokens per rank that fit" in capsys.readouterr().out


def test_the_values_of_the_guide_of_experts() -> None:
    names: dict[str, Any] = {}
    exec(fences("docs/guides/experts.md")[5][1], names)  # the page's own code
    rows = np.ones((2, 3, 256), ml_dtypes.float8_e4m3fn)
    scales = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    values = names["values"](SimpleNamespace(x=rows, scales=scales))
    assert values.dtype == np.float32
    assert (values[1, 2] == np.repeat([10.0, 11.0], 128)).all()


def test_the_guide_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", changed)
    exec(fences("docs/guides/nccl.md")[0][1], {})  # the page's own code
    assert changed["NCCL_NET"] == "Crossrail"
    assert Path(changed["NCCL_NET_PLUGIN"]).is_file()


def test_the_calls_of_the_guide_of_gpus() -> None:
    objects = {
        "context": crossrail.Context,
        "endpoint": crossrail.Endpoint,
        "mapped": crossrail.Mapped,
        "memory": crossrail.Memory,
    }
    calls = [node for node in ast.walk(ast.parse(fences("docs/guides/gpu.md")[0][1])) if isinstance(node, ast.Call)]
    assert len(calls) == 4
    for call in calls:
        assert isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        method = getattr(objects[call.func.value.id], call.func.attr)
        named = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        inspect.signature(method).bind(None, *call.args, **named)


TESTED = ("engine/src/session/example.rs", "transport/src/loopback.rs")


def test_the_code_of_the_guide_of_transports_is_in_tested_files() -> None:
    blocks = fences("docs/design/adding-a-transport.md")
    sources = "".join((ROOT / "crates" / path).read_text(encoding="utf-8") for path in TESTED)
    # A crate calls itself `crate`, and what is in the same module by its name alone.
    outside = sources.replace("crate::conformance", "crossrail_transport::conformance").replace(
        "= pair(", "= loopback::pair("
    )
    known = {line.strip() for line in outside.splitlines()}
    shortened = {
        # What the example keeps in a map until the peer has made it, and what stands in a list elsewhere.
        'let record = LaneRecord::of(&lane, "loopback", EAGER_LIMIT);',
        "sessions.add_polled_lane(endpoint, Box::new(lane), record, true)?;",
        "sessions.add_polled_lane(endpoint, Box::new(ours), record, true)?;",
        "Arc::new(Loopback::default()),",
    }
    for language, text in blocks:
        if language == "rust":
            code = {line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("//")}
            assert not code - known - shortened
    (command,) = [text for language, text in blocks if language == "console"]
    assert command == "$ cargo test -p crossrail --lib example\n"
    assert "mod example" in (ROOT / "crates/engine/src/session/mod.rs").read_text(encoding="utf-8")
