"""Where loopback has only IPv6, workers listen at ::1 and reach each other there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import crossrail

context = crossrail.Context(tls="tcp", timeout=20)
a, b = crossrail.Worker(context), crossrail.Worker(context)
assert all(address.startswith("[::1]:") for address in a.control_addresses()), a
to_b = a.connect(b.address())
b.accept()
target = bytearray(8)
inbound = b.recv(target)
to_b.send(b"12345678").wait()
assert inbound.wait().bytes == 8 and target == b"12345678"
"""


def test_workers_meet_where_loopback_has_only_ipv6() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and iproute2")
    prepare = 'ip link set lo up && ip -4 address flush dev lo && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", prepare, "sh", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
