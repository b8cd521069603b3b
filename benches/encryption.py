"""What TLS 1.3 in user space costs on a TCP connection of this machine: the figures behind docs/design/trust.md.

    python benches/encryption.py            into docs/design/encryption.json
    python benches/encryption.py --bytes 256M --rounds 1 --results DIR

One process sends to another over loopback, in the clear and through OpenSSL by turns. A row has the
rate and the processor time of both ends for a GiB. Kernel TLS is tried by setting it up on a socket. Needs the command
openssl, for a certificate.
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import crossrail
from crossrail_tools.report import capture_environment, compact, write_text
from harness import refusal

RESULTS = Path(__file__).parents[1] / "docs" / "design"
CHUNK = 1 << 20
LIMIT = 120.0
TCP_ULP = 31


def main() -> int:
    """Measures, prints and writes; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--bytes", type=size_of, default=1 << 30, help="bytes of one turn (1G)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (5)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if why := refusal(arguments.results, RESULTS):
        print(why, file=sys.stderr)
        return 2
    samples: dict[str, list[dict[str, float]]] = {"clear": [], "tls": []}
    with tempfile.TemporaryDirectory(prefix="crossrail-tls-") as scratch:
        files = certificate(Path(scratch))
        for _ in range(arguments.rounds):
            for kind, used in (("clear", None), ("tls", files)):
                samples[kind].append(one_turn(arguments.bytes, used))
    median = {
        kind: {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        for kind, turns in samples.items()
    }
    result: dict[str, Any] = {
        "schema": "crossrail-encryption/1",
        "environment": asdict(capture_environment()),
        "bytes": arguments.bytes,
        "openssl": ssl.OPENSSL_VERSION,
        "kernel_tls": kernel_tls(),
        "median": median,
        "time_ratio": median["clear"]["gb_per_s"] / median["tls"]["gb_per_s"],
        "samples": samples,
    }
    for kind, row in median.items():
        print(f"{kind:6} {row['gb_per_s']:.2f} GB/s, {row['cpu_s_per_gib']:.2f} s of processor time for a GiB")
    print(f"kernel TLS: {result['kernel_tls']}")
    write_text(compact(result), str(arguments.results / "encryption.json"))
    return 0


def size_of(text: str) -> int:
    """One size such as 256M, in bytes."""
    (size,) = crossrail.parse_sizes(text)
    return size


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate and its key, which live as long as `folder`."""
    key, own = folder / "key.pem", folder / "own.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=crossrail", "-keyout", str(key), "-out", str(own)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return own, key


def kernel_tls() -> str:
    """Whether a socket of this kernel takes TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b"tls")
        except OSError as error:
            return f"no: setsockopt(TCP_ULP): {errno.errorcode.get(error.errno or 0, str(error))}"
    return "yes"


def one_turn(size: int, files: tuple[Path, Path] | None) -> dict[str, float]:
    """Sends `size` bytes from a child to this process; its rate, and what both took of the processors."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                send(server.getsockname()[:2], size, files)
                code = 0
            finally:
                os._exit(code)
        connection, _ = server.accept()
        connection.settimeout(LIMIT)
        if files is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(*files)
            connection = context.wrap_socket(connection, server_side=True)
        with connection:
            connection.sendall(b"!")
            before, begin = processor_time(resource.RUSAGE_SELF), time.perf_counter()
            buffer, left = memoryview(bytearray(CHUNK)), size
            while left:
                read = connection.recv_into(buffer)
                if read == 0:
                    raise ConnectionError(f"the sender ended with {left} bytes to go")
                left -= read
            seconds = time.perf_counter() - begin
            own = processor_time(resource.RUSAGE_SELF) - before
            connection.sendall(b"!")
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise ConnectionError(f"the sender ended with status {status}")
    both = own + usage.ru_utime + usage.ru_stime
    return {"gb_per_s": size / seconds / 1e9, "cpu_s_per_gib": both * (1 << 30) / size}


def send(address: tuple[str, int], size: int, files: tuple[Path, Path] | None) -> None:
    """The sender's end."""
    connection = socket.create_connection(address, timeout=LIMIT)
    if files is not None:
        context = ssl.create_default_context(cafile=str(files[0]))
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        connection = context.wrap_socket(connection)
    chunk = memoryview(bytes(CHUNK))
    connection.recv(1)
    for at in range(0, size, CHUNK):
        connection.sendall(chunk[: min(CHUNK, size - at)])
    connection.recv(1)


def processor_time(who: int) -> float:
    """Seconds of processor time so far."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
