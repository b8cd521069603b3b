"""The environment of a measurement, read from the system at the time of the run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from .schema import Environment

_PREFIX = "CROSSRAIL_"
_SECRET = "CROSSRAIL_SECRET"


def capture_environment(
    peers: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
) -> Environment:
    """Records this machine, this process's settings and the versions of ``peers``.

    ``overrides`` are settings given in code or on the command line, which win over the environment. The secret's
    value is never recorded, only that there was one.
    """
    uname = os.uname()
    return Environment(
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=uname.nodename,
        kernel=f"{uname.sysname} {uname.release}",
        machine=uname.machine,
        cpu=_cpu_model(),
        cores=os.cpu_count() or 0,
        cores_allowed=sorted(os.sched_getaffinity(os.getpid())),
        governor=_first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        load_average=[round(load, 2) for load in os.getloadavg()],
        python=f"{platform.python_implementation()} {platform.python_version()}",
        crossrail=package_version(),
        commit=_commit(),
        settings={**settings_in(os.environ), **settings_in(overrides or {})},
        peers=dict(peers or {}),
    )


def package_version() -> str:
    """The version of Crossrail that this process has loaded, else the installed one; ``unknown`` without either."""
    if (loaded := getattr(sys.modules.get("crossrail"), "__version__", None)) is not None:
        return str(loaded)
    # Takes longer than everything else that a command needs before it measures.
    import importlib.metadata

    try:
        return importlib.metadata.version("crossrail")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def settings_in(variables: Mapping[str, str]) -> dict[str, str]:
    """The ``CROSSRAIL_`` variables among ``variables``, with the value of the secret hidden."""
    return {
        name: "(hidden)" if name == _SECRET else value
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIX)
    }


def _cpu_model() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or "unknown"


def _first_line(path: Path) -> str | None:
    lines = _lines(path)
    return lines[0].strip() if lines else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _commit() -> str | None:
    """The commit of the checkout that contains this package, with ``+`` if files differ from it."""
    here = Path(__file__).resolve()
    checkout = next((folder for folder in here.parents if (folder / ".git").exists()), None)
    if checkout is None or not (checkout / "python" / "crossrail").is_dir():
        return None
    command = ["git", "-C", str(checkout), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    head = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    changed = any(not line.startswith("#") for line in lines)
    return None if head == "(initial)" else head + ("+" if changed else "")
