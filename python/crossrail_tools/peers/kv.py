"""One end of `bench kv`: pages moved through NIXL's interface (of crossrail.nixl or NVIDIA's package) or Mooncake's.

All libraries run this same program, each in processes and with an interpreter of its own: by its path, since Crossrail
need not be installed there. Orders arrive as lines of JSON on stdin, and each is answered by one on stdout.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

LIMIT_S = 120.0
IDLE_S = 0.005
TURN = b"turn"
"""The notification that `NixlEnd.turns` waits for."""
CALL_ROWS = 1000
"""Rows of one call of Mooncake, whose TCP refuses some thousands."""


class Paged:
    """Pools of pages of this end, and the rows that the requests of a work take from them.

    A group of the work has pages of ``row`` bytes in ``layers`` layers, of which each request takes ``pages``, the same
    in every layer. Both ends and the verification derive all else from the seed.
    """

    def __init__(self, work: dict[str, Any], seed: int) -> None:
        self.seed, self.batch = seed, work["batch"]
        self.groups = [dict(zip(("row", "layers", "pages"), group, strict=True)) for group in work["groups"]]
        self.slots = [max(1, (5 * self.batch * group["pages"] + 3) // 4) for group in self.groups]
        sizes = [group["row"] * group["layers"] * slots for group, slots in zip(self.groups, self.slots, strict=True)]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
        self.size = int(self.starts[-1])

    def pattern(self) -> Any:
        words = -(-self.size // 8)
        return np.random.default_rng(self.seed).integers(0, 2**64, words, np.uint64).view(np.uint8)[: self.size]

    def rows(self, base: int, device: int) -> Any:
        """Every page of the pool as (address, length, device)."""
        parts = []
        for group, slots, start in zip(self.groups, self.slots, self.starts[:-1], strict=True):
            part = np.zeros((group["layers"] * slots, 3), np.uint64)
            part[:, 0] = np.arange(len(part), dtype=np.uint64) * np.uint64(group["row"]) + np.uint64(base) + start
            part[:, 1] = group["row"]
            part[:, 2] = device
            parts.append(part)
        return np.concatenate(parts)

    def indices(self, request: int) -> Any:
        """The rows of one request: the same block table in every layer of a group."""
        parts, first = [], 0
        for at, (group, slots) in enumerate(zip(self.groups, self.slots, strict=True)):
            table = np.random.default_rng([self.seed, at]).permutation(slots)
            chosen = table[request * group["pages"] : (request + 1) * group["pages"]]
            layers = first + slots * np.arange(group["layers"])
            parts.append((layers[:, None] + chosen[None, :]).ravel())
            first += group["layers"] * slots
        return np.concatenate(parts).astype(np.int32)

    def places(self) -> Iterator[tuple[Any, int]]:
        """Offset and length of every row of every request, request by request."""
        rows = self.rows(0, 0)
        for request in range(self.batch):
            chosen = rows[self.indices(request)]
            yield from zip(chosen[:, 0].astype(np.int64), chosen[:, 1].astype(int), strict=True)


class Pool:
    """Memory of this process: the host's, or that of a GPU, which takes PyTorch."""

    def __init__(self, size: int, gpu: int | None) -> None:
        self.gpu = gpu
        self.kind, self.device = ("DRAM", 0) if gpu is None else ("VRAM", gpu)
        self._bytes: Any = np.empty(size, np.uint8)
        if gpu is not None:
            self._torch = importlib.import_module("torch")
            self._bytes = self._torch.empty(size, dtype=self._torch.uint8, device=f"cuda:{gpu}")
        self.base: int = self._bytes.ctypes.data if gpu is None else self._bytes.data_ptr()

    def write(self, data: Any) -> None:
        if self.gpu is None:
            self._bytes[:] = data
        else:
            self._bytes.copy_(self._torch.from_numpy(data.copy()))
            self._torch.cuda.synchronize(self.gpu)

    def read(self) -> Any:
        return self._bytes if self.gpu is None else self._bytes.cpu().numpy()


class End:
    """One end: its pool, and the parameters of the other end."""

    def __init__(self, work: dict[str, Any], seed: int, gpu: int | None) -> None:
        self.pages = Paged(work, seed)
        self.pool = Pool(self.pages.size, gpu)
        self.paint()

    def hello(self) -> dict[str, Any]:
        """Parameters for the other end."""
        return {"base": self.pool.base, "device": self.pool.device}

    def peer(self, target: str, base: int, device: int, seed: int, work: dict[str, Any]) -> dict[str, Any]:
        """Stores the other end's parameters: its address in the library, its pool, its work."""
        self.name = self.reach(target)
        self.there, self.device_there, self.other = base, device, Paged(work, seed)
        return {}

    def reach(self, target: str) -> str:
        """Adds the other end, by what its `hello` says; its name."""
        raise NotImplementedError

    def lists(self, bulk: bool) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """All rows of both pools, and for each request the indices of those that it moves."""
        if bulk:
            size = sum(int(size) for _, size in self.pages.places())
            mine = np.array([[self.pool.base, size, self.pool.device]], np.uint64)
            other = np.array([[self.there, size, self.device_there]], np.uint64)
            return mine, other, [(np.zeros(1, np.int32), np.zeros(1, np.int32))]
        mine = self.pages.rows(self.pool.base, self.pool.device)
        other = self.other.rows(self.there, self.device_there)
        return mine, other, [(self.pages.indices(at), self.other.indices(at)) for at in range(self.pages.batch)]

    def transfer(self) -> None:
        """Posts all requests, and returns when the last is done."""
        raise NotImplementedError

    def run(self, iterations: int) -> dict[str, Any]:
        """Times from the first post until the last request is done."""
        samples = []
        for _ in range(iterations):
            began = time.perf_counter()
            self.transfer()
            samples.append(1e6 * (time.perf_counter() - began))
        return {"samples_us": samples}

    def cpu(self) -> dict[str, Any]:
        """Processor time of this process so far, with all its threads."""
        return {"seconds": time.process_time()}

    def idle(self) -> dict[str, Any]:
        """Work of the target while the initiator transfers; the library's own threads run anyway."""
        return {}

    def paint(self) -> dict[str, Any]:
        self.pool.write(self.pages.pattern())
        return {}

    def check(self, bulk: bool) -> dict[str, Any]:
        """Whether this end's pool has exactly the peer's rows in its own, and nothing else changed."""
        expected, theirs = self.pages.pattern().copy(), self.other.pattern()
        if bulk:
            size = sum(int(size) for _, size in self.pages.places())
            expected[:size] = theirs[:size]
        else:
            for (here, size), (there, _) in zip(self.pages.places(), self.other.places(), strict=True):
                expected[here : here + size] = theirs[there : there + size]
        return {"same": bool(np.array_equal(self.pool.read(), expected))}


class NixlEnd(End):
    """An agent of NIXL's interface."""

    def __init__(self, module: str, name: str, work: dict[str, Any], seed: int, gpu: int | None) -> None:
        super().__init__(work, seed, gpu)
        self.api = importlib.import_module(f"{module}._api")
        config = self.api.nixl_agent_config(num_threads=0, backends=["UCX"])
        self.agent = self.api.nixl_agent(name, config)
        self.agent.register_memory([(self.pool.base, self.pages.size, self.pool.device, "")], self.pool.kind)
        self.handles: list[Any] = []
        self.early = 0
        self.keep: list[Any] = []

    def hello(self) -> dict[str, Any]:
        return {**super().hello(), "target": self.agent.get_agent_metadata().hex()}

    def reach(self, target: str) -> str:
        return str(self.agent.add_remote_agent(bytes.fromhex(target)).decode())

    def prepare(self, op: str, bulk: bool, notice: str) -> dict[str, Any]:
        """Lists of the whole pools, and a transfer for each request; how long both took."""
        self.early = 0
        self.handles.clear()
        self.keep.clear()
        mine, other, tables = self.lists(bulk)
        began = time.perf_counter()
        local = self.agent.prep_xfer_dlist("", mine, self.pool.kind)
        middle = time.perf_counter()
        remote = self.agent.prep_xfer_dlist(self.name, other, self.pool.kind)
        listed = time.perf_counter()
        for ours, theirs in tables:
            message = notice.encode()
            self.handles.append(self.agent.make_prepped_xfer(op, local, ours, remote, theirs, message))
        ended = time.perf_counter()
        self.keep += [local, remote]
        return {
            "us": {
                "local": 1e6 * (middle - began),
                "remote": 1e6 * (listed - middle),
                "prepare": 1e6 * (ended - listed),
            }
        }

    def transfer(self) -> None:
        post, state = self.agent.transfer, self.agent.check_xfer_state
        limit = time.perf_counter() + LIMIT_S
        for handle in self.handles:
            post(handle)
        for handle in self.handles:
            while state(handle) != "DONE":
                if time.perf_counter() > limit:
                    raise TimeoutError(f"a transfer was not done within {LIMIT_S} s")

    def turns(self, count: int, first: bool) -> dict[str, Any]:
        """The two ends write one row with a notification in turns; half of the round trip."""
        (handle,), samples = self.handles, []
        transfer, state = self.agent.transfer, self.agent.check_xfer_state
        done, limit = True, time.perf_counter() + LIMIT_S
        for turn in range(count):
            began = time.perf_counter()
            if first or turn:
                while not done:
                    done = state(handle) == "DONE"
                transfer(handle)
                done = False
            while not self._taken():
                if not done:
                    done = state(handle) == "DONE"
                if time.perf_counter() > limit:
                    raise TimeoutError(f"a notification did not arrive within {LIMIT_S} s")
            samples.append(1e6 * (time.perf_counter() - began) / 2)
        while not first and not done:
            done = state(handle) == "DONE"
        if not first:
            transfer(handle)
        while state(handle) != "DONE":
            pass
        return {"samples_us": samples}

    def idle(self) -> dict[str, Any]:
        """Takes notifications."""
        self.early += self._count()
        return {}

    def _count(self) -> int:
        return sum(messages.count(TURN) for messages in self.agent.get_new_notifs().values())

    def _taken(self) -> bool:
        """Takes a notification of the other end, if there is one."""
        self.early += self._count()
        self.early -= (there := self.early > 0)
        return there


class MooncakeEnd(End):
    """A TransferEngine of Mooncake's interface, on this machine, over TCP."""

    def __init__(self, module: str, name: str, work: dict[str, Any], seed: int, gpu: int | None) -> None:
        super().__init__(work, seed, gpu)
        self.engine = importlib.import_module(module).TransferEngine()
        _succeeds("initialize", self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        _succeeds("register_memory", self.engine.register_memory(self.pool.base, self.pages.size))

    def hello(self) -> dict[str, Any]:
        return {**super().hello(), "target": f"127.0.0.1:{self.engine.get_rpc_port()}"}

    def reach(self, target: str) -> str:
        return target

    def prepare(self, op: str, bulk: bool, notice: str) -> dict[str, Any]:
        """Addresses and lengths of each call: this interface has nothing to prepare with the library."""
        mine, other, tables = self.lists(bulk)
        began = time.perf_counter()
        self.post = getattr(self.engine, {"READ": "batch_transfer_sync_read", "WRITE": "batch_transfer_sync_write"}[op])
        self.calls = []
        for ours, theirs in tables:
            for at in range(0, len(ours), CALL_ROWS):
                here, there = mine[ours[at : at + CALL_ROWS]], other[theirs[at : at + CALL_ROWS]]
                self.calls.append((here[:, 0].tolist(), there[:, 0].tolist(), here[:, 1].tolist()))
        return {"us": {"prepare": 1e6 * (time.perf_counter() - began)}}

    def transfer(self) -> None:
        for here, there, lengths in self.calls:
            _succeeds("batch_transfer_sync", self.post(self.name, here, there, lengths))


def _succeeds(call: str, code: int) -> None:
    if code != 0:
        raise OSError(f"{call} returned {code}")


def _orders(ends: Sequence[End]) -> Iterator[dict[str, Any]]:
    """Lines of stdin; between them, notifications are taken so that none is held back."""
    pending = b""
    while True:
        while b"\n" not in pending:
            if select.select([0], [], [], IDLE_S)[0]:
                piece = os.read(0, 1 << 16)
                if not piece:
                    return
                pending += piece
            elif ends:
                ends[0].idle()
        line, _, pending = pending.partition(b"\n")
        yield json.loads(line)


def main() -> None:
    """Executes requests until stdin ends. Logs go to stderr; stdout is for answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: never outlives the parent
    ends: list[End] = []
    for order in _orders(ends):
        what = order.pop("do")
        try:
            if what == "start":
                kind = MooncakeEnd if order["module"].endswith("mooncake.engine") else NixlEnd
                ends.append(kind(**order))
                answer = ends[0].hello()
            else:
                answer = getattr(ends[0], what)(**order)
        except Exception as error:
            answer = {"error": f"{what}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
