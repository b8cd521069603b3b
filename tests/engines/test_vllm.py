"""vLLM's own NIXL connector, unchanged, over the module `nixl`: its workers that pull and push. `make engines`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from ends_of_engines import ended, go_on, site_of, start, until_said
from free_ports import free_port

PROGRAM = "vllm_kv.py"


@pytest.fixture(scope="session")
def site() -> Path:
    return site_of("vllm==0.33.0")


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_blocks_are_pulled(processes: ExitStack, site: Path, transports: str) -> None:
    port = str(free_port())
    settings = {} if transports == "all" else {"CROSSRAIL_TLS": transports}
    prefill = start(processes, PROGRAM, site, "prefill", port, "0,1,2", **settings)
    until_said(prefill, "ready")
    ended(start(processes, PROGRAM, site, "decode", port, "0,1,2", **settings), "received")
    ended(prefill, "sent")


def test_a_killed_prefill_fails_the_request_by_its_blocks(processes: ExitStack, site: Path) -> None:
    port = str(free_port())
    prefill = start(processes, PROGRAM, site, "prefill", port, "0,1")
    until_said(prefill, "ready")
    decode = start(processes, PROGRAM, site, "decode", port, "0,1!")
    until_said(decode, "ready")
    prefill.kill()
    prefill.wait()
    go_on(decode)
    ended(decode, "received")


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_blocks_are_pushed(processes: ExitStack, site: Path, transports: str) -> None:
    port, own = str(free_port()), str(free_port())
    settings = {} if transports == "all" else {"CROSSRAIL_TLS": transports}
    prefill = start(processes, PROGRAM, site, "push", port, "0,1,2", **settings)
    ended(start(processes, PROGRAM, site, "pushed", port, "0,1,2", own, **settings), "received")
    ended(prefill, "sent")


def test_a_killed_decode_fails_its_push_and_the_next_one_is_served(processes: ExitStack, site: Path) -> None:
    port, own, other = str(free_port()), str(free_port()), str(free_port())
    prefill = start(processes, PROGRAM, site, "push", port, "0,1!,2,3")
    killed = start(processes, PROGRAM, site, "pushed", port, "0,1!", own)
    until_said(prefill, "ready")
    killed.kill()
    killed.wait()
    go_on(prefill)
    ended(start(processes, PROGRAM, site, "pushed", port, "2,3", other), "received")
    ended(prefill, "sent")
