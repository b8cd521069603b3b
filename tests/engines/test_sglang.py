"""SGLang's own connections of prefill and decode, unchanged, over the modules `nixl` and `mooncake`: `make engines`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from ends_of_engines import ended, go_on, site_of, start, until_said
from free_ports import free_port

PROGRAM = "sglang_kv.py"


@pytest.fixture(scope="session")
def site() -> Path:
    return site_of("sglang==0.5.23")


@pytest.mark.parametrize("transports", ["all", "tcp"])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_pages_go_from_prefill_to_decode(processes: ExitStack, site: Path, backend: str, transports: str) -> None:
    port = str(free_port())
    settings = {} if transports == "all" else {"CROSSRAIL_TLS": transports}
    prefill = start(processes, PROGRAM, site, backend, "prefill", port, "0,1,2", **settings)
    decode = start(processes, PROGRAM, site, backend, "decode", port, "0,1,2", **settings)
    ended(decode, "received")
    ended(prefill, "sent")


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_killed_decode_fails_its_request_and_the_next_one_is_served(
    processes: ExitStack, site: Path, backend: str
) -> None:
    port = str(free_port())
    prefill = start(processes, PROGRAM, site, backend, "prefill", port, "0,1!,2,3")
    killed = start(processes, PROGRAM, site, backend, "decode", port, "0,1!")
    until_said(killed, "asked")
    until_said(prefill, "ready")
    killed.kill()
    killed.wait()
    go_on(prefill)
    ended(start(processes, PROGRAM, site, backend, "decode", port, "2,3"), "received")
    ended(prefill, "sent")
