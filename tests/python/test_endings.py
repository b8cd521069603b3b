"""The end of the interpreter: no object that calls native code prints anything from its `__del__`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from commands import clean_environment

from crossrail._endings import at_end

PACKAGES = Path(__file__).parents[2] / "python"

# What is alive at the end, in an order that ends modules before objects: objects in a cycle, in a module's names, in
# an attribute of a builtin, with work in flight.
KEPT = """
import builtins, sys
import numpy as np
import crossrail
from crossrail.kv import PagedCache, Receiver
from crossrail.mooncake import TransferEngine
from crossrail.nixl import _utils
from crossrail.nixl._api import nixl_agent, nixl_agent_config

a = nixl_agent("A", nixl_agent_config(enable_listen_thread=True, listen_port=0))
b = nixl_agent("B")
a.add_remote_agent(b.get_agent_metadata())
b.add_remote_agent(a.get_agent_metadata())
at = _utils.malloc_passthru(1 << 20)
held = [agent.register_memory([(at, 1 << 20, 0, "")], "DRAM") for agent in (a, b)]
a.remove_remote_agent("B")
a.add_remote_agent(b.get_agent_metadata())
rows = a.get_xfer_descs([(at, 1 << 19, 0)], "DRAM")
handle = a.initialize_xfer("WRITE", rows, rows, "B", b"done")
a.transfer(handle)
for _ in range(6):  # more than B keeps that nobody reads: they fail at the end
    a.send_notif("B", bytes(1 << 20))
engine = TransferEngine()
engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
engine.allocate_managed_buffer(4096)
worker = crossrail.Worker(crossrail.Context(), admit=True)
cache = PagedCache(worker, [np.zeros((4, 8), np.uint8)])
lease = cache.lend([1, 2])
everything = [a, b, held, handle, engine, cache, lease]
"""
WAYS = {
    "names": "",
    "cycle": "everything.append(everything)\ndel a, b, held, handle, engine, worker, cache, lease, everything\n",
    "builtins": "builtins.kept = everything\n",
    "modules": "sys.kept = everything\nsys.modules['crossrail.kept'] = type('kept', (), {'all': everything})\n",
    "thread": (
        "import threading\n"
        "threading.Thread(target=lambda kept: threading.Event().wait(), args=(everything,), daemon=True).start()\n"
    ),
    "error": "raise SystemExit(0)\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_printed_at_the_end(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", KEPT + WAYS[way]],
        env=clean_environment({"NIXL_LOG_LEVEL": "ERROR"}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_del_is_made_by_the_same_decorator() -> None:
    found = 0
    for file in PACKAGES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__" and file.name != "_endings.py":
                found += 1
                assert [ast.unparse(one) for one in node.decorator_list] == ["at_end"], f"{file}: {node.lineno}"
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__del__":
                found += 1
                assert ast.unparse(node.value).startswith("at_end("), f"{file}: {node.lineno}"
    assert found >= 7


def test_nothing_leaves_an_end(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []

    class One:
        def _end(self) -> None:
            ended.append("one")
            raise RuntimeError("at the end")

        __del__ = at_end(_end)

    One()
    assert ended == ["one"] and capfd.readouterr().err == ""
