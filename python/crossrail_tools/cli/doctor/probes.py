"""Probes of the path between two rails: reachability, path MTU, bandwidth.

The listening end answers on sockets of its own, on the ports of each rail on which a program could listen there (see
CROSSRAIL_PORTS), and sends these and a token over the authenticated control conversation. It never dials, answers only
clients that send the token, and bounds what each of them may request.

    TCP   token (16)  mode (1)  milliseconds (4)         then bytes to the end that receives
          mode `p`: answers HELLO; `s`: counts what it receives, and answers bytes (8) and microseconds (8);
          `o`: sends
    UDP   token (16)  number (4)  length of the answer (2), padding
          answers token (16)  number (4), padded to that length, with fragmentation forbidden
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import random
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..parsing import ports_at
from .links import Rail

TOKEN_LEN = 16
HEAD = struct.Struct("!16ssI")
DATAGRAM = struct.Struct("!16sIH")
ANSWER = struct.Struct("!16sI")
COUNTED = struct.Struct("!QQ")
HELLO = b"crossrail-doctor"

MOST_CONNECTIONS = 64
MOST_UNPROVEN = 256
"""Maximum of connections without a token. Beyond it, one from the source with most of them is evicted."""

MOST_PORTS = 32
"""Ports per rail that are tried. Of more, the first and last ones: tools listen on those, all else on these."""

MOST_MS = 10_000
HEAD_S, SURE_S = 2.0, 0.05
"""Timeout for a connection to send its head, and the time before it may be evicted."""

REACH_S = 1.0
STREAMS = 2
"""Connections per rail of a load: one alone is often limited by a single receive queue or processor."""

SLACK_S = 3.0
"""How long the end of a load may take to be confirmed, and its connections to be made."""
LARGEST = 65_535
"""Bytes of the largest IP packet."""

SURE_TRIES, TRIES = 4, 2
"""Datagrams of a size whose loss is reported, and of those that only narrow it down."""

SMALLEST_MTU = 576
_PIECE = 1 << 20
_SMALLEST_STEP = 8

# Not in the socket module: linux/in.h, linux/in6.h.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_TOTAL_RETRANS = 100
_SEGS_OUT = 136


def family_of(address: str) -> socket.AddressFamily:
    """The family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def headers_of(address: str) -> int:
    """Bytes of the IP and UDP headers in front of a datagram's payload."""
    return 48 if ":" in address else 28


@dataclass(frozen=True)
class Ports:
    """Where the listening end answers for one of its rails: over TCP on ``others`` too."""

    tcp: int
    udp: int
    others: tuple[int, ...] = ()


@dataclass
class _Unproven:
    """A connection that has not sent its head. ``source``: all of loopback is one, and an IPv6 network of 64 bits."""

    connection: socket.socket
    source: str
    until: float
    head: bytes = b""


def _source(address: str) -> str:
    host = ipaddress.ip_address(address.partition("%")[0])
    host = getattr(host, "ipv4_mapped", None) or host
    if host.is_loopback:
        return "loopback"
    return str(host) if host.version == 4 else str(ipaddress.ip_network((int(host) >> 64 << 64, 64)))


class Responder:
    """The sockets of the listening end. As a context manager, it closes them and ends its threads."""

    def __init__(self, rails: Sequence[Rail]) -> None:
        """Binds sockets for each rail that is up: on those of CROSSRAIL_PORTS that are free, or on any port without it.

        ``why_not`` has the reason for rails where that fails.
        """
        self.token = secrets.token_bytes(TOKEN_LEN)
        self.ports: dict[str, Ports] = {}
        self.why_not: dict[str, str] = {}
        self._stop, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._busy = threading.Semaphore(MOST_CONNECTIONS)
        self._unproven: dict[socket.socket, _Unproven] = {}  # of the thread that serves
        self._guard = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        for rail in rails:
            if rail.works:
                self._open(rail)
        self._thread = threading.Thread(target=self._serve, name="crossrail-doctor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *unused: object) -> None:
        self._wake.send(b"\0")
        self._thread.join()
        with self._guard:
            left = list(self._threads)
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in left:
            thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._wake.close()
        self._selector.close()

    def _open(self, rail: Rail) -> None:
        """Listens on the last free port first, as programs do; the datagrams of a rail have one port."""
        named = ports_at(rail.address)
        wanted = [*reversed(named)] or [0]
        if len(wanted) > MOST_PORTS:
            wanted = [*wanted[: MOST_PORTS - 8], *wanted[-8:]]
        opened: list[socket.socket] = []
        udp, reason = None, ""
        for port in wanted:
            try:
                tcp = _listening(rail.address, port)
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            opened.append(tcp)
            with contextlib.suppress(OSError):
                udp = udp or _datagrams(rail.address, tcp.getsockname()[1])
        if not opened:
            where = f"{rail.address}: no port of {named[0]} to {named[-1]}" if named else rail.address
            self.why_not[rail.name] = f"{where}: {reason}"
            return
        try:
            udp = udp or _datagrams(rail.address, 0)
        except OSError as error:
            self.why_not[rail.name] = error.strerror or str(error)
            for tcp in opened:
                tcp.close()
            return
        numbers = [one.getsockname()[1] for one in opened]
        self.ports[rail.name] = Ports(numbers[0], udp.getsockname()[1], tuple(numbers[1:]))
        for one in (*opened, udp):
            self._selector.register(one, selectors.EVENT_READ)

    def _serve(self) -> None:
        while True:
            ready = self._selector.select(HEAD_S if self._unproven else None)
            for key, _ in ready:
                if key.fileobj is self._stop:
                    return
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):  # of one datagram, or of one connection that is gone already
                    if key.data is not None:
                        self._read_head(key.data)
                    elif key.fileobj.type == socket.SOCK_DGRAM:
                        self._answer(key.fileobj)
                    else:
                        self._accept(key.fileobj)
            now = time.monotonic()
            for one in [one for one in self._unproven.values() if one.until <= now]:
                self._drop(one).close()

    def _answer(self, udp: socket.socket) -> None:
        data, sender = udp.recvfrom(1 << 16)
        if len(data) < DATAGRAM.size:
            return
        token, number, length = DATAGRAM.unpack_from(data)
        if hmac.compare_digest(token, self.token):
            udp.sendto(ANSWER.pack(token, number).ljust(length, b"\0"), sender)

    def _accept(self, tcp: socket.socket) -> None:
        connection, (address, *_) = tcp.accept()
        connection.setblocking(False)
        if len(self._unproven) >= MOST_UNPROVEN:
            counts = Counter(one.source for one in self._unproven.values())
            (most, _), *_ = counts.most_common(1)
            fits = [one for one in self._unproven.values() if one.source == most]
            aged = [one for one in fits if one.until <= time.monotonic() + HEAD_S - SURE_S]
            # A random one: if a flood shares the source of an honest client, the victim is mostly one of the flood's.
            self._drop(random.choice(aged or fits)).close()
        one = _Unproven(connection, _source(address), time.monotonic() + HEAD_S)
        self._unproven[connection] = one
        self._selector.register(connection, selectors.EVENT_READ, one)

    def _drop(self, one: _Unproven) -> socket.socket:
        """Forgets a connection."""
        del self._unproven[one.connection]
        self._selector.unregister(one.connection)
        return one.connection

    def _read_head(self, one: _Unproven) -> None:
        """Starts a thread for whoever sends the token."""
        if one.connection not in self._unproven:
            return  # evicted meanwhile
        try:
            piece = one.connection.recv(HEAD.size - len(one.head))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        one.head += piece
        if piece and len(one.head) < HEAD.size:
            return
        connection = self._drop(one)
        token, mode, milliseconds = HEAD.unpack(one.head) if piece else (b"", b"", 0)
        proven = hmac.compare_digest(token, self.token) and milliseconds <= MOST_MS
        if not proven or not self._busy.acquire(blocking=False):
            connection.close()
            return
        thread = threading.Thread(
            target=self._converse, args=[connection, mode, milliseconds / 1e3], name="crossrail-doctor", daemon=True
        )
        with self._guard:
            self._connections.add(connection)
            self._threads.add(thread)
        thread.start()

    def _converse(self, connection: socket.socket, mode: bytes, seconds: float) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(HEAD_S)
                if mode == b"p":
                    connection.sendall(HELLO)
                elif mode == b"s":
                    connection.sendall(COUNTED.pack(*count_received(connection, seconds)))
                elif mode == b"o":
                    send_for(connection, seconds)
        finally:
            with self._guard:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())
            self._busy.release()


def _listening(address: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    tcp = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may linger
        tcp.bind((address, port))
        tcp.setblocking(False)
        tcp.listen(MOST_CONNECTIONS)
    except OSError:
        tcp.close()
        raise
    return tcp


def _datagrams(address: str, port: int) -> socket.socket:
    """A socket that answers with datagrams that may not be fragmented. Raises OSError."""
    udp = socket.socket(family_of(address), socket.SOCK_DGRAM)
    try:
        udp.bind((address, port))
        udp.setblocking(False)
        forbid_fragments(udp)
    except OSError:
        udp.close()
        raise
    return udp


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """So many bytes. Raises OSError if the connection ends before, or at its timeout."""
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError(errno.ECONNRESET, "the connection ended")
        data += piece
    return data


def forbid_fragments(udp: socket.socket) -> None:
    """Sets DF on every datagram, of any size that the interface takes."""
    if udp.family == socket.AF_INET6:
        udp.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
    else:
        udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)


def count_received(connection: socket.socket, seconds: float) -> tuple[int, int]:
    """Bytes received within ``seconds``, and the microseconds that were really spent."""
    began = time.monotonic()
    end = began + seconds
    buffer = bytearray(_PIECE)
    total = 0
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            count = connection.recv_into(buffer)
        except TimeoutError:
            break
        if not count:
            break
        total += count
    return total, int((time.monotonic() - began) * 1e6)


def send_for(connection: socket.socket, seconds: float) -> None:
    """Sends for ``seconds``, then drops what is still queued."""
    end = time.monotonic() + seconds
    data = bytes(_PIECE)
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            connection.send(data)
        except TimeoutError:
            break


def bound(mine: Rail, kind: socket.SocketKind) -> socket.socket:
    """A socket that sends by ``mine`` as transfers do: from its address and, where permitted, by its device only.

    Raises OSError.
    """
    made = socket.socket(family_of(mine.address), kind)
    try:
        if not mine.loopback:
            with contextlib.suppress(PermissionError):
                made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, mine.interface.encode())
        made.bind((mine.address, 0))
    except OSError:
        made.close()
        raise
    return made


def reach(mine: Rail, theirs: Rail, ports: Ports, token: bytes) -> float:
    """Connects from one rail to the other; the seconds that took. Raises OSError."""
    until = time.monotonic() + REACH_S
    while True:
        with bound(mine, socket.SOCK_STREAM) as to:
            to.settimeout(REACH_S)
            began = time.perf_counter()
            to.connect((theirs.address, ports.tcp))
            took = time.perf_counter() - began
            try:
                to.sendall(HEAD.pack(token, b"p", 0))
                answer = receive_exactly(to, len(HELLO))
            except ConnectionError:
                if time.monotonic() >= until:
                    raise
                continue  # evicted in favour of other unproven connections
            if answer != HELLO:
                raise ConnectionError(errno.EPROTO, "something else answers at that address")
            return took


def path_mtu(mine: Rail, theirs: Rail, ports: Ports, token: bytes, wait_s: float) -> tuple[int | None, int | None]:
    """The largest packets that pass unfragmented, there and back; None where no datagram passes. Raises OSError."""
    with bound(mine, socket.SOCK_DGRAM) as udp:
        forbid_fragments(udp)
        udp.connect((theirs.address, ports.udp))
        headers, number = headers_of(mine.address), 0

        def passes(there: int, back: int, tries: int) -> bool:
            """Whether one of ``tries`` datagrams is answered; the wait for each is twice that for the one before."""
            nonlocal number
            number += 1
            body = DATAGRAM.pack(token, number, back - headers).ljust(there - headers, b"\0")
            for turn in range(tries):
                try:
                    udp.send(body)
                except OSError as error:
                    if error.errno != errno.EMSGSIZE:
                        raise
                    return False
                udp.settimeout(wait_s * (1 << turn))
                if _answered(udp, number, back - headers):
                    return True
            return False

        small = SMALLEST_MTU
        if not passes(small, small, SURE_TRIES):
            return None, None
        there = _largest(min(mine.mtu, LARGEST), lambda size, tries: passes(size, small, tries))
        return there, _largest(min(theirs.mtu, LARGEST), lambda size, tries: passes(small, size, tries))


def _largest(most: int, passes: Callable[[int, int], bool]) -> int:
    """The largest size that passes: ``most``, or by bisection, to within some bytes."""
    if most <= SMALLEST_MTU or passes(most, SURE_TRIES):
        return most
    low, high = SMALLEST_MTU, most
    while high - low > _SMALLEST_STEP:
        middle = (low + high) // 2
        if passes(middle, TRIES):
            low = middle
        else:
            high = middle
    return low


def _answered(udp: socket.socket, number: int, length: int) -> bool:
    """Whether an answer to probe ``number`` arrives; those to earlier ones are ignored."""
    while True:
        try:
            data = udp.recv(1 << 16)
        except (TimeoutError, ConnectionRefusedError):
            return False
        if len(data) >= ANSWER.size and ANSWER.unpack_from(data)[1] == number:
            return len(data) >= length


@dataclass
class Load:
    """What one direction of one rail carried. ``resent``: the share of segments that were sent again, where known."""

    gbit_per_s: float = 0.0
    resent: float | None = None
    why: str = ""


def load(mine: Rail, theirs: Rail, ports: Ports, token: bytes, seconds: float, *, back: bool) -> Load:
    """Sends over a rail for ``seconds``, or receives if ``back``, over `STREAMS` connections. Never raises."""
    loads: list[tuple[int, int, int, int]] = []
    reasons: list[str] = []

    def stream() -> None:
        try:
            loads.append(_stream(mine, theirs, ports, token, seconds, back))
        except OSError as error:
            reasons.append(error.strerror or str(error))

    threads = [threading.Thread(target=stream, name="crossrail-load", daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not loads:
        return Load(why=reasons[0] if reasons else "no answer")
    rate = sum(nbytes * 8 / microseconds / 1e3 for nbytes, microseconds, _, _ in loads if microseconds)
    if not rate:
        return Load(why=f"nothing arrived within {seconds:g} s")
    segments, resent = sum(one[2] for one in loads), sum(one[3] for one in loads)
    return Load(rate, resent / segments if segments else None)


def _stream(
    mine: Rail, theirs: Rail, ports: Ports, token: bytes, seconds: float, back: bool
) -> tuple[int, int, int, int]:
    """Bytes, microseconds, segments and segments sent again of one connection. Raises OSError."""
    milliseconds = int(seconds * 1e3)
    with bound(mine, socket.SOCK_STREAM) as to:
        to.settimeout(SLACK_S)
        # What is queued when the time is over is dropped: a slow rail would take seconds to carry it.
        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        to.connect((theirs.address, ports.tcp))
        to.sendall(HEAD.pack(token, b"o" if back else b"s", milliseconds))
        if back:
            return (*count_received(to, seconds), 0, 0)
        send_for(to, seconds)
        to.settimeout(SLACK_S)
        counted, microseconds = COUNTED.unpack(receive_exactly(to, COUNTED.size))
        info = to.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        segments = int.from_bytes(info[_SEGS_OUT : _SEGS_OUT + 4].ljust(4, b"\0"), sys.byteorder)
        resent = int.from_bytes(info[_TOTAL_RETRANS : _TOTAL_RETRANS + 4], sys.byteorder)
        return counted, microseconds, segments, resent
