"""A stand-in for Ray on one machine: every actor is a process, calls are made one after the other."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

_instance: Any = None


def _make(cls: type) -> None:
    global _instance
    _instance = cls()


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_instance, method)(*arguments)


class _Actor:
    def __init__(self, cls: type) -> None:
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _make, (cls,))

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self._process.submit(_call, method, arguments))


def remote(**options: Any) -> Any:
    """Decorates the class of an actor."""
    return lambda cls: SimpleNamespace(remote=lambda: _Actor(cls))


def get(futures: list[Future[Any]]) -> list[Any]:
    """The results of calls."""
    return [future.result(60) for future in futures]


def init(**options: Any) -> None:
    """Nothing to start."""


util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
