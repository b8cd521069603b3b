"""iperf3's JSON: of `-J`, and of `--json-stream`, an event a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..schema import Lane, Row
from .runs import Foreign, ForeignError, number


def iperf3(text: str, data: Any) -> list[Foreign]:
    """The rate of every interval, and a lane for each stream. With `--bidir` a row for each direction.

    A total that the receiver did not report is the sender's; a note states it.
    """
    return [_run(one) for one in _documents(data or [])]


def _documents(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The runs among JSON values: whole documents, and what events add up to."""
    found: list[dict[str, Any]] = []
    for value in values:
        if not isinstance(value, dict):
            continue
        if "start" in value and ("end" in value or "intervals" in value):
            found.append(value)
        elif value.get("event") == "start":
            found.append({"start": value.get("data"), "intervals": []})
        elif found and value.get("event") == "interval":
            found[-1].setdefault("intervals", []).append(value.get("data"))
        elif found and value.get("event") in ("end", "error"):
            found[-1][value["event"]] = value.get("data")
    return found


def _run(data: dict[str, Any]) -> Foreign:
    if data.get("error"):
        raise ForeignError(f"iperf3 failed: {data['error']}")
    if not data.get("end"):
        raise ForeignError("JSON of iperf3 without its totals; was the run cut short?")
    try:
        start, end = data["start"], data["end"]
        test = start["test_start"]
        streams = end.get("streams", [])
        both = bool(test.get("bidir"))
        rows = [_row(data, test, streams, "", both)]
        if both:
            forth = [one for one in streams if _is_sender(one)]
            back = [one for one in streams if not _is_sender(one)]
            rows = [_row(data, test, forth, "", both), _row(data, test, back, "_bidir_reverse", both)]
            total = sum(row.gb_per_s or 0.0 for row in rows)
            rows[0].notes.append(f"both directions together: {total:.3g} GB/s")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ForeignError(f"JSON of iperf3 without its figures ({type(error).__name__}: {error})") from None
    return Foreign(str(start.get("version", "iperf3")), rows, str(start.get("system_info", "")))


def _is_sender(stream: Any) -> bool:
    return bool((stream.get("sender") or stream.get("udp"))["sender"])


def _row(data: dict[str, Any], test: Any, streams: Sequence[Any], direction: str, both: bool) -> Row:
    end = data["end"]
    total = end.get(f"sum_received{direction}") or end.get(f"sum{direction}") or end[f"sum_sent{direction}"]
    notes = [f"{test.get('num_streams', 1)} streams, {total.get('seconds', 0):.1f} s"]
    if not total["bytes"] and end.get(f"sum_sent{direction}", {}).get("bytes"):
        total = end[f"sum_sent{direction}"]
        notes.append("the receiver reported nothing: the rate is the sender's")
    total_rate, lost = number(total["bits_per_second"]) / 8e9, _lost(total)
    if lost:
        notes.append(f"{lost:.2%} of the datagrams were lost")
        if total.get("sender"):  # releases before 3.11 report what was sent only
            total_rate *= 1 - lost
    lanes = [_stream(one, index) for index, one in enumerate(streams)]
    carried = sum(lane.bytes for lane in lanes)
    lanes = [replace(lane, share=lane.bytes / carried if carried else 0.0) for lane in lanes]
    return Row(
        "stream",
        str(test["protocol"]).lower(),
        int(test.get("blksize", 0)),
        protocol=("reverse" if direction else "forward") if both else None,
        gb_per_s=total_rate,
        rounds=[rate for one in data.get("intervals", []) if (rate := _interval(one, direction)) is not None],
        bytes_logical=int(total["bytes"]),
        lanes=lanes,
        notes=notes,
    )


def _lost(total: Any) -> float:
    """The share of datagrams that did not arrive; 0 for streams."""
    packets = number(total.get("packets") or 0)
    return number(total.get("lost_packets") or 0) / packets if packets else 0.0


def _interval(one: Any, direction: str) -> float | None:
    """The rate of one interval in a direction; None for those left out (`-O`), and if the direction is not known."""
    found = one.get(f"sum{direction}")
    if found is not None and found.get("omitted"):
        return None
    # Old releases write both directions under the same key, of which JSON keeps the last.
    if found is None or (direction == "" and "sum_bidir_reverse" not in one and found.get("sender") is False):
        return None
    return number(found["bits_per_second"]) / 8e9


def _stream(one: Any, index: int) -> Lane:
    sender, receiver = one.get("sender") or one.get("udp"), one.get("receiver") or one.get("udp")
    if not receiver["bytes"] and sender["bytes"]:
        receiver = sender
    return Lane(
        f"stream {index + 1}",
        int(receiver["bytes"]),
        0.0,
        gb_per_s=number(receiver["bits_per_second"]) / 8e9,
        retransmits=sender.get("retransmits"),
    )
