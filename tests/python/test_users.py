"""Without a secret, a worker and a store on loopback serve the processes of their own user and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from commands import clean_environment
from test_cli_store import store

import crossrail

WORKER = """
import os, signal, sys
import crossrail
context = crossrail.Context()
if len(sys.argv) > 2:
    os.setresuid(*[int(sys.argv[2])] * 3)
try:
    with crossrail.Worker(context) as worker:
        print("admitted", worker.connect(sys.argv[1], timeout=30).peer)
except crossrail.CrossrailError as error:
    print(type(error).__name__, error.reason, str(error).replace("\\n", " "))
"""
STORE = """
import os, signal, sys
import crossrail
if len(sys.argv) > 2:
    os.setresuid(*[int(sys.argv[2])] * 3)
try:
    with crossrail.Group(store=sys.argv[1], size=1, timeout=10) as group:
        print("admitted", group.rank)
except crossrail.CrossrailError as error:
    print(type(error).__name__, error.reason, str(error).replace("\\n", " "))
"""
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(autouse=True)
def no_token_of_nobody() -> Iterator[None]:
    """Removes the token that the other user's processes make."""
    yield
    shutil.rmtree(f"/tmp/crossrail-{NOBODY}", ignore_errors=True)


def visit(script: str, address: str, *user: int) -> str:
    """What a process of that user, or of this one, meets at the address."""
    done = subprocess.run(
        [sys.executable, "-c", script, address, *map(str, user)],
        env=clean_environment({"CROSSRAIL_TLS": "tcp"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def check_refusal(said: str, what: str) -> None:
    """One line that says who is served, by what, and what to do."""
    assert said.startswith("RefusedError user_denied"), said
    assert f"this {what} accepts processes of user 0 only" in said, said
    assert "/tmp/crossrail-0/token" in said, said
    assert "CROSSRAIL_SECRET_FILE" in said, said


def test_a_worker_on_loopback_refuses_another_user() -> None:
    with crossrail.Worker(crossrail.Context(tls="tcp")) as worker:
        address = worker.control_addresses()[0]
        assert visit(WORKER, address).startswith("admitted")
        check_refusal(visit(WORKER, address, NOBODY), "worker")


def test_a_store_on_loopback_refuses_another_user() -> None:
    with store("--listen=127.0.0.1:0") as (_, address):
        assert visit(STORE, address).startswith("admitted")
        check_refusal(visit(STORE, address, NOBODY), "store")
