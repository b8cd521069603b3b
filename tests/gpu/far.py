"""The other process of the GPU tests of the API: started by `Far`, it does what it is told, one command at a time.

python tests/gpu/far.py DEVICE TLS LOG        commands as lines of JSON on stdin, answers on stdout
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 30.0


def pattern(nbytes: int, seed: int, device: str) -> Any:
    """Bytes in which neither a shift nor a missing or doubled chunk goes unseen."""
    import torch

    at = torch.arange(nbytes, dtype=torch.int64, device=device)
    return ((at * 167 + (at >> 8) * 31 + (at >> 16) * 7 + (at >> 24) * 3 + seed) % 251).to(torch.uint8)


def as_bytes(tensor: Any) -> Any:
    """A tensor's items as bytes."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Far:
    """A process with a worker, connected to `worker` here; `endpoint` leads to it."""

    def __init__(self, worker: Any, device: str, tls: str, log: str = "error", **environment: str) -> None:
        self.device = device
        self.stderr = tempfile.TemporaryFile("w+") if log != "error" else None  # noqa: SIM115 (`kill` closes it)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, device, tls, log],
            env={**clean, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            bufsize=1,
        )
        try:
            self.ask("connect", to=worker.address().hex())
            self.endpoint = worker.accept(TIMEOUT_S)
            self.answer()
        except BaseException:
            self.kill()
            raise

    def ask(self, what: str, **options: Any) -> None:
        """Starts `what` there."""
        assert self.process.stdin is not None
        print(json.dumps({"what": what, **options}), file=self.process.stdin, flush=True)

    def answer(self, timeout: float = TIMEOUT_S + 10) -> Any:
        """What it answers to the oldest question; an error there is one here."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout), f"no answer in {timeout} s"
        line = self.process.stdout.readline()
        assert line, f"the other process has ended with {self.process.wait(5)}"
        answer = json.loads(line)
        assert "error" not in answer, f"there: {answer['error']}"
        return answer["value"]

    def do(self, what: str, **options: Any) -> Any:
        """`ask` and `answer`."""
        self.ask(what, **options)
        return self.answer()

    def said(self) -> list[str]:
        """The lines that it wrote to stderr so far; kept where it has another log level than `error`."""
        assert self.stderr is not None
        self.stderr.seek(0)
        return self.stderr.read().splitlines()

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        if self.stderr is not None:
            self.stderr.close()

    def close(self) -> None:
        """Lets it end."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.kill()


class Commands:
    """What the other process can do. Tensors and regions are kept by name."""

    def __init__(self, device: str, tls: str, log: str) -> None:
        import torch

        import crossrail

        self.torch = torch
        self.device = device
        torch.cuda.set_device(device)
        self.context = crossrail.Context(tls=tls, timeout=TIMEOUT_S, log=log)
        self.worker = crossrail.Worker(self.context, name="far")
        self.endpoint: Any = None
        self.kept: dict[str, Any] = {}
        self.threads: list[threading.Thread] = []
        self.begun: Any = None

    def connect(self, to: str) -> None:
        self.endpoint = self.worker.connect(bytes.fromhex(to))

    def make(self, name: str, nbytes: int, offset: int = 0, seed: int | None = None, own: bool = False) -> None:
        """A tensor of `nbytes` at `offset` of a larger one, of zeros or of a pattern. `own`: from Context.alloc."""
        if own:
            memory = self.context.alloc(offset + nbytes + 256, self.device)
            self.kept[name + " memory"] = memory
            whole = self.torch.from_dlpack(memory)
        else:
            whole = self.torch.zeros(offset + nbytes + 256, dtype=self.torch.uint8, device=self.device)
        self.kept[name + " whole"] = whole
        self.kept[name] = whole[offset : offset + nbytes]
        if seed is not None:
            self.kept[name].copy_(pattern(nbytes, seed, self.device))
        self.torch.cuda.synchronize()

    def send(self, name: str, tag: int = 0, delay: float = 0.0) -> dict[str, Any]:
        time.sleep(delay)
        return dict(self.endpoint.send(self.kept[name], tag).wait().as_dict())

    def begin(self, name: str, tag: int) -> None:
        """Sends, and one byte with the next tag; `end` waits for it."""
        self.begun = self.endpoint.send(self.kept[name], tag)
        self.endpoint.send(b".", tag + 1).wait()

    def end(self) -> str:
        """The class of what it failed with."""
        try:
            self.begun.wait()
        except Exception as error:
            return type(error).__name__
        finally:
            self.begun = None
        return "nothing"

    def recv(self, name: str, tag: int = 0) -> dict[str, Any]:
        return dict(self.worker.recv(self.kept[name], tag).wait().as_dict())

    def recv_refused(self, name: str, tag: int = 0) -> str:
        """The class of what a receive fails with."""
        try:
            self.recv(name, tag)
        except Exception as error:
            return type(error).__name__
        return "nothing"

    def write(self, name: str, key: str, offset: int = 0, imm: int | None = None) -> None:
        from crossrail import RegionKey

        self.endpoint.write(self.kept[name], RegionKey.from_bytes(bytes.fromhex(key)), offset, imm).wait()

    def exchange(self, count: int) -> None:
        """Receives into `in0` and so on by tag, and sends `out0` and so on."""
        requests = [self.worker.recv(self.kept[f"in{tag}"], tag) for tag in range(count)]
        requests += [self.endpoint.send(self.kept[f"out{tag}"], tag) for tag in range(count)]
        for request in requests:
            request.wait()

    def wrong(self, name: str, seed: int) -> int:
        """How many bytes are not as `pattern` has them; those around the tensor must be 0."""
        tensor, whole = self.kept[name], self.kept[name + " whole"]
        self.torch.cuda.synchronize()
        wrong = int((tensor != pattern(tensor.numel(), seed, self.device)).sum())
        around = int((whole != 0).sum()) - int((tensor != 0).sum())
        return wrong + around

    def value(self, name: str) -> list[int]:
        """The least and the greatest byte."""
        self.torch.cuda.synchronize()
        return [int(self.kept[name].min()), int(self.kept[name].max())]

    def register(self, name: str) -> str:
        self.kept[name + " region"] = region = self.worker.register(self.kept[name])
        return bytes(region.key()).hex()

    def deregister(self, name: str) -> None:
        self.kept.pop(name + " region").deregister()

    def share(self, name: str) -> str:
        return bytes(self.endpoint.share(self.kept[name + " memory"])).hex()

    def fill_shared(self, shared: str, value: int) -> None:
        """Fills memory of the peer's."""
        self.context.alloc(1, self.device)
        mapped = self.endpoint.map(bytes.fromhex(shared))
        self.torch.from_dlpack(mapped).fill_(value)
        self.torch.cuda.synchronize()

    def flood(self, nbytes: int) -> None:
        """Sends without end, until it is killed."""
        source = self.torch.zeros(nbytes, dtype=self.torch.uint8, device=self.device)

        def run() -> None:
            while True:
                self.endpoint.send(source, tag=9).wait()

        threading.Thread(target=run, daemon=True).start()

    def echo_graph(self, shared: str, replays: int) -> int:
        """Awaits numbers, adds 1, puts them back: one replay of this graph for each of the other end's."""
        import graphs

        memory = self.kept["numbers memory"]
        mapped = self.endpoint.map(bytes.fromhex(shared))
        return graphs.echo(self.torch, memory, mapped, replays, self.device)

    def drop(self, *names: str) -> None:
        for name in [name for name in self.kept if name.split(" ")[0] in names or not names]:
            del self.kept[name]

    def free(self) -> None:
        """Gives what PyTorch keeps for later back to the driver."""
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def close(self) -> None:
        self.kept.clear()
        self.worker.close()


def main() -> None:
    """Does what stdin says until it ends."""
    sys.path.insert(0, str(Path(__file__).parent))
    commands = Commands(*sys.argv[1:4])
    for line in sys.stdin:
        options: Mapping[str, Any] = json.loads(line)
        what = getattr(commands, options["what"])
        try:
            answer = {"value": what(**{name: value for name, value in options.items() if name != "what"})}
        except Exception as error:  # told to the tests, which fail with it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    commands.close()


if __name__ == "__main__":
    main()
