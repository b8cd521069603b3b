"""Sends a tensor between GPUs: `two_gpus.py listen` and `two_gpus.py connect ADDR`, or both without arguments.

Needs PyTorch. On a machine with one GPU both ends share it.
"""

import subprocess
import sys

import torch

import crossrail

if not torch.cuda.is_available():
    sys.exit(f"{sys.argv[0]} needs a GPU at each end, and PyTorch {torch.__version__} can use none here")
mode, *rest = sys.argv[1:] or ["both"]
length = 16 << 20
with crossrail.Worker(crossrail.Context()) as worker:
    if mode == "connect":
        x = torch.arange(length, device="cuda:0") % 1000
        worker.connect(rest[0]).send(x, tag=7).wait()  # starts once the stream has computed x
    else:
        torch.cuda.set_device(min(1, torch.cuda.device_count() - 1))
        address = worker.control_addresses()[0]
        print(f"listening: {sys.argv[0]} connect {address}", flush=True)
        other = subprocess.Popen([sys.executable, __file__, "connect", address]) if mode == "both" else None
        endpoint = worker.accept()
        y = torch.zeros(length, dtype=torch.int64, device="cuda")
        total = y.sum()  # loads the kernels now: loading them later could block on the waiting stream
        torch.cuda.synchronize()
        request = worker.recv(y, tag=7)
        request.wait_on(torch.cuda.current_stream())  # the stream waits, not the host
        total = y.sum()
        receipt = request.wait()
        good = total.item() == (torch.arange(length) % 1000).sum().item()
        print(f"{receipt.bytes} bytes over {receipt.protocol}: {'verified' if good else 'WRONG'}")
        sys.exit((other.wait() if other else 0) or not good)
