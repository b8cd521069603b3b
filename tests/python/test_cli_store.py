"""`crossrail store`: the built-in store as a process of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import COMMAND, clean_environment, one_error, run

import crossrail


@contextmanager
def store(*options: str, settings: Mapping[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store, and the address it printed."""
    with subprocess.Popen(
        [*COMMAND, "store", *options],
        env=clean_environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_prints_its_address_serves_and_ends_by_a_signal(number: int) -> None:
    with store("--listen=127.0.0.1:0") as (process, address):
        assert address.startswith("tcp://127.0.0.1:")
        with crossrail.Group(store=address, size=2) as one, crossrail.Group(store=address, size=2) as other:
            assert sorted((one.rank, other.rank)) == [0, 1]
            assert not one.serves_store
            other.publish("key", b"value")
            assert one.collect("key", [other.rank]) == [b"value"]
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
        assert (process.returncode, stdout) == (0, "")
        assert f"CROSSRAIL_STORE={address}" in stderr
        assert signal.Signals(number).name in stderr


def test_a_port_in_use_is_one_line() -> None:
    with store("--listen=127.0.0.1:0") as (_, address):
        where = address.removeprefix("tcp://")
        one_error(run("store", f"--listen={where}"), 2, where)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen=0.0.0.0:0",), ("secret", "CROSSRAIL_SECRET")),
        (("--listen=127.0.0.1:port",), ("port", "HOST:PORT")),
        (("--listen=192.0.2.1:0",), ("192.0.2.1",)),
        (("--secret-file=/nonexistent/secret",), ("/nonexistent/secret",)),
        (("--lissen=x",), ("--lissen",)),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_2(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error(run("store", *options), 2, *words)


def test_beyond_loopback_with_a_secret_the_wrong_one_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more\n")
    with store("--listen=0.0.0.0:0", f"--secret-file={secret}") as (_, address):
        port = address.rpartition(":")[2]
        right, wrong = (crossrail.Context(secret=text) for text in ("sixteen bytes or more", "another one entirely"))
        with pytest.raises(crossrail.RefusedError, match="secret"):
            crossrail.Group(store=f"tcp://127.0.0.1:{port}", size=1, rank=0, context=wrong)
        with crossrail.Group(store=f"tcp://127.0.0.1:{port}", size=1, rank=0, context=right) as group:
            assert group.rank == 0
