"""Two processes: `two_processes.py listen` and `two_processes.py connect ADDR`, or both without arguments."""

import subprocess
import sys

import crossrail

mode, *rest = sys.argv[1:] or ["both"]
with crossrail.Worker(crossrail.Context()) as worker:
    if mode == "connect":
        endpoint = worker.connect(rest[0])
        endpoint.send(b"hello from the other side", tag=7).wait()
    else:
        address = worker.control_addresses()[0]
        print(f"listening: {sys.argv[0]} connect {address}", flush=True)
        other = subprocess.Popen([sys.executable, __file__, "connect", address]) if mode == "both" else None
        endpoint, inbox = worker.accept(), bytearray(64)
        receipt = worker.recv(inbox, tag=7).wait()
        print(inbox[: receipt.bytes].decode(), f"({receipt.protocol} over {endpoint.explain().small})")
        sys.exit(other.wait() if other else 0)
