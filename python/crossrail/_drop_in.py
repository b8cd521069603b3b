"""What the packages that own another project's module name share (crossrail-deep-ep, -nixl, -mooncake)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def refuse_another(module: str, here: str, distributions: Iterable[str], extensions: Iterable[str] = ()) -> None:
    """Raises ImportError if another ``module`` is installed: which one a program imports would depend on the path.

    ``here``: the file that calls. ``distributions``, ``extensions``: the other project's packages and top-level modules
    that come with it. Raises ImportError that names the other one.
    """
    folder = Path(here).resolve().parent
    if (other := _another(module, folder, distributions, extensions)) is not None:
        ours = f"crossrail-{module.replace('_', '-')}"
        name = other.split()[0] if " " in other else module
        remedy = f"remove one of them: pip uninstall {name}, or pip uninstall {ours}"
        raise ImportError(f"{module}: {ours} is installed beside {other}; {remedy}")


def alias(package: str, modules: Mapping[str, ModuleType]) -> None:
    """Makes ``modules`` importable as submodules of ``package``."""
    for name, module in modules.items():
        sys.modules[f"{package}.{name}"] = module
        setattr(sys.modules[package], name, module)


def beyond_loopback(context: Any) -> str | None:
    """The wildcard to listen at for peers on other machines: all addresses, of both families where there are both.

    None without a secret, which peers beyond loopback must prove to know; processes are then on one machine."""
    return wildcard() if has_secret(context) else None


def has_secret(context: Any) -> bool:
    """True if CROSSRAIL_SECRET or CROSSRAIL_SECRET_FILE is set, without which no worker listens beyond loopback."""
    settings = context.settings()
    return bool(settings["CROSSRAIL_SECRET"] or settings["CROSSRAIL_SECRET_FILE"])


def wildcard() -> str:
    """All addresses of this machine and a free port; those of IPv4 alone where the kernel has no IPv6."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return "0.0.0.0:0"
    return "[::]:0"


def _another(module: str, folder: Path, distributions: Iterable[str], extensions: Iterable[str]) -> str | None:
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    for entry in sys.path:
        spec = PathFinder.find_spec(module, [entry])
        where = None if spec is None else spec.origin
        if where is not None and Path(where).resolve().parent != folder:
            return where
    for name in extensions:
        if (found := importlib.util.find_spec(name)) is not None:
            return str(found.origin)
    return next(map(str, sorted(folder.glob("*.so"))), None)
