"""Where GPU figures were measured: what `crossrail bench` records, and the GPUs, the driver and the pack's commit."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sharing import shared

from crossrail_tools.report.environment import capture_environment

FIELDS = ("name", "pci.bus_id", "memory.total", "memory.used", "driver_version", "clocks.sm", "clocks.mem")
LIMIT_S = 20.0


def describe(pack: Path, used: int) -> dict[str, Any]:
    """The environment of a file of results, measured with so many GPUs. A wheel knows no commit; the pack does."""
    environment = capture_environment()
    manifest = pack / "manifest.json"
    if manifest.exists():
        environment = replace(environment, commit=json.loads(manifest.read_text())["commit"])
    return {
        **asdict(environment),
        "gpus": gpus(),
        "gpus_used": used,
        "shared_by_mps": shared(),
        "links": ask("topo", "-m").splitlines(),
    }


def gpus() -> list[dict[str, str]]:
    """A record for each GPU, as nvidia-smi has it; empty without one."""
    listed = ask(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader")
    return [dict(zip(FIELDS, line.split(", "), strict=False)) for line in listed.splitlines()]


def ask(*arguments: str) -> str:
    """What nvidia-smi answers; nothing where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
