"""Refuses to be imported beside another `nixl`: which of the two a program gets would be a matter of luck."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent


def refuse_another() -> None:
    """Raises ImportError that names the other one, if there is one."""
    if (other := found()) is not None:
        remedy = "remove one of them: pip uninstall nixl, or pip uninstall crossrail-nixl"
        raise ImportError(f"nixl: crossrail-nixl is installed beside {other}; {remedy}")


def found() -> str | None:
    """Another NIXL: installed as a package, or another module of this name."""
    try:
        return f"nixl {importlib.metadata.version('nixl')}"
    except importlib.metadata.PackageNotFoundError:
        pass
    for folder in sys.path:
        spec = PathFinder.find_spec("nixl", [folder])
        where = None if spec is None else spec.origin
        if where is not None and Path(where).resolve().parent != HERE:
            return where
    return None
