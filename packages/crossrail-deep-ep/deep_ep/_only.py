"""Refuses to be imported beside another `deep_ep`: which of the two a program gets would be a matter of luck."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent


def refuse_another() -> None:
    """Raises ImportError that names the other one, if there is one."""
    if (other := found()) is not None:
        remedy = "remove one of them: pip uninstall deep_ep, or pip uninstall crossrail-deep-ep"
        raise ImportError(f"deep_ep: crossrail-deep-ep is installed beside {other}; {remedy}")


def found() -> str | None:
    """Another DeepEP: installed as a package, another module of this name, or an extension of one."""
    try:
        return f"deep_ep {importlib.metadata.version('deep_ep')}"
    except importlib.metadata.PackageNotFoundError:
        pass
    for folder in sys.path:
        spec = PathFinder.find_spec("deep_ep", [folder])
        where = None if spec is None else spec.origin
        if where is not None and Path(where).resolve().parent != HERE:
            return where
    extension = importlib.util.find_spec("deep_ep_cpp") or next(HERE.glob("_C.*.so"), None)
    return None if extension is None else str(getattr(extension, "origin", extension))
