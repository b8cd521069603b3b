"""The results of GPU scenarios, which are saved after each command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from machine import describe  # noqa: E402
from steps import gpu_count  # noqa: E402

from crossrail_tools.report.packing import compact  # noqa: E402
from crossrail_tools.report.schema import Row  # noqa: E402
from harness import Results  # noqa: E402

PEER_LIMIT_S = 60.0
DETAILS = ("iterations", "messages", "expert_tokens")
"""Fields of a row with some hundred bytes for each transfer or message."""


class ScenarioResults(Results):
    """Results of a scenario on GPUs, with the peers' output of each turn.

    Its file is rewritten after each command, so that an interrupted scenario keeps its partial results."""

    def __init__(self, pack: Path, out: Path, scratch: Path) -> None:
        super().__init__(scratch)
        self.out = out
        self.environment = describe(pack, gpu_count()[0])
        self.failures: list[str] = []
        self.peers: dict[str, list[dict[str, Any]]] = {}

    def ours(self, *options: str, **settings: str) -> list[Row]:
        """Runs `crossrail bench`; keeps the report, or why there is none: then there are no rows."""
        try:
            self.bench(*options, **settings)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            self.failures.append(str(error))
            return []
        finally:
            self.save()
        return self.reports[-1].rows

    def peer(self, name: str, script: str, *options: str, **environment: str) -> list[dict[str, Any]]:
        """Runs a peer's script and keeps its output, or the reason for a missing one. A peer that hung is not rerun."""
        earlier = [turn for turn in self.peers.get(name, []) if turn.get("hung")]
        said = earlier[-1] if earlier else peer(script, *options, **environment)
        self.peers.setdefault(name, []).append({**said, "command": [script, *options], "environment": environment})
        self.save()
        rows: list[dict[str, Any]] = said.get("rows", [])
        return rows

    def failure_reason(self, name: str) -> str:
        """Reason for a missing figure of ours, or of a peer."""
        return self.failures[-1] if self.failures else f"{name}: {self.missing_reason(name)}"

    def missing_reason(self, name: str) -> str:
        """Why there is no figure of a peer."""
        said = [turn["error"] for turn in self.peers.get(name, []) if "error" in turn]
        return str(said[-1]) if said else "it was not run"

    def save(self) -> None:
        """Writes the file."""
        versions = [report.environment.peers for report in self.reports]
        versions += [turn.get("versions", {}) for turns in self.peers.values() for turn in turns]
        peers = {name: version for each in versions for name, version in each.items()}
        own = {"environment": {**self.environment, "peers": peers}, "command": sys.argv}
        data: dict[str, Any] = {**self.data(), **own, "failures": self.failures, "peers": self.peers}
        drop_details(data["rows"])
        self.out.write_text(compact(data, pack=True))


def drop_details(rows: Iterable[dict[str, Any]]) -> None:
    """Drops per-transfer and per-message details from all rows but the first with them; samples stay in all rows."""
    for detail in DETAILS:
        for row in [row for row in rows if row.get(detail)][1:]:
            del row[detail]


def peer(script: str, *options: str, **environment: str) -> dict[str, Any]:
    """What a script of peers/ prints, as JSON; or `error`."""
    command = [sys.executable, str(HERE / "peers" / script), *options]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PEER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {PEER_LIMIT_S:g} s", "hung": True}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        print(done.stderr, file=sys.stderr)
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said
