"""Sequences of calls that serving engines and benchmarks make of NIXL, on crossrail.nixl."""

from __future__ import annotations

from collections.abc import Callable

import nixl_engines
import pytest


@pytest.mark.parametrize("tls", ["shm", "tcp"])
@pytest.mark.parametrize("program", nixl_engines.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program(program: Callable[[str, str], None], tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", f"{tls},self")
    program(f"one of {program.__name__}", f"other of {program.__name__}")
