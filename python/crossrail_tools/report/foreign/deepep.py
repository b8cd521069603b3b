"""The tests of DeepEP (both versions) and of NIXL EP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..schema import Row
from ..stats import median
from .runs import Foreign, number

_F = r"([\d.]+)"
_BOTH = re.compile(
    rf"\[rank (\d+)\] (num_\w+=.*? )?Dispatch \+ combine bandwidth: {_F} GB/s, avg_t={_F} us"
    rf", min_t={_F} us, max_t={_F} us"
)
_EACH = re.compile(
    rf"\[rank (\d+)\] (num_\w+=.*? )?Dispatch bandwidth(?: \(total\))?: {_F} GB/s, avg_t={_F} us"
    rf" \| Combine bandwidth(?: \(total\))?: {_F} GB/s, avg_t={_F} us"
)
_APART = re.compile(
    rf"\[rank (\d+)\] (num_\w+=.*? )?Dispatch send/recv time: {_F}(?: \+ {_F})? us"
    rf" \| Combine send/recv time: {_F}(?: \+ {_F})? us"
)
_BEST = re.compile(
    rf"\[tuning\] Best (dispatch|combine)(?: \((\w+)\))?: SMs (\d+), (.*?){_F} GB/s"
    rf"(?: \(NVL(?: recv)?\)(?:, t: {_F} us)?|, t: {_F} us)"
)
_NOTIFY = re.compile(rf"{_F} \+ {_F} us|transmit: {_F} us, notify: {_F} us")
_SECOND = re.compile(rf"EP:\s*(\d+)/\s*(\d+) \| ([\w ()]+): {_F} GB/s \(SO\), {_F} GB/s \(SU\), {_F} us, (\d+) bytes")
_LOW = "low latency"


def deepep(text: str, data: Any) -> list[Foreign]:
    """The lines of every rank: medians over the ranks. What a rank prints for the k-th time belongs to the k-th run."""
    runs: list[list[Row]] = []

    def add(number_of_run: int, row: Row) -> None:
        runs.extend([] for _ in range(number_of_run + 1 - len(runs)))
        runs[number_of_run].append(row)

    for number_of_run, lines in enumerate(_by_run(_BOTH.findall(text), 2)):
        for variant, each in _by_variant(lines):
            add(
                number_of_run,
                _ranks("e2e", [number(one[3]) for one in each], [number(one[2]) for one in each], variant),
            )
    for number_of_run, lines in enumerate(_by_run(_EACH.findall(text), 2)):
        for variant, each in _by_variant(lines):
            for what, place in (("dispatch", 2), ("combine", 4)):
                rates, times = ([number(one[place + more]) for one in each] for more in (0, 1))
                add(number_of_run, _ranks(what, times, rates, variant))
    for number_of_run, lines in enumerate(_by_run(_APART.findall(text), 2)):
        for variant, each in _by_variant(lines):
            for what, place in (("dispatch", 2), ("combine", 4)):
                times = [number(one[place]) + number(one[place + 1] or 0) for one in each]
                add(number_of_run, _ranks(what, times, [], f"{variant}, send and receive apart"))
    for number_of_run, best in enumerate(_by_run(_BEST.findall(text), 2)):
        for what, dtype, sms, middle, rate, time, plain in best:
            notify = _NOTIFY.search(middle)
            parts = [number(part) for part in notify.groups() if part] if notify else []
            spent = number(time or plain) if time or plain else sum(parts) if parts else None
            variant = f"best of tuning, {sms} SMs" + (f", {dtype.lower()}" if dtype else "")
            row = Row(what, "deepep", 0, protocol=variant, p50_us=spent, gb_per_s=number(rate), num_sms=int(sms))
            add(number_of_run, row)
    # Key of a line within one run: rank, number of ranks, name of the measurement.
    for number_of_run, lines in enumerate(_by_run(_SECOND.findall(text), 3)):
        named: dict[str, list[Sequence[str]]] = {}
        for found in lines:
            named.setdefault(found[2].strip(), []).append(found)
        for name, each in named.items():
            times, rates = [number(one[5]) for one in each], [number(one[4]) for one in each]
            what = next((one for one in ("dispatch", "combine") if one in name), name)
            add(number_of_run, _ranks(what, times, rates, name if name != what else "elastic"))
    return [Foreign("deepep", rows) for rows in runs]


def _by_run(found: Sequence[Sequence[str]], key: int) -> list[list[Sequence[str]]]:
    """Lines by run: the k-th one with the same first ``key`` cells belongs to run k."""
    seen: Counter[tuple[str, ...]] = Counter()
    runs: list[list[Sequence[str]]] = []
    for line in found:
        who = tuple(line[:key])
        if seen[who] == len(runs):
            runs.append([])
        runs[seen[who]].append(line)
        seen[who] += 1
    return runs


def _by_variant(lines: Sequence[Sequence[str]]) -> list[tuple[str, list[Sequence[str]]]]:
    """Lines of low latency by the shape in them."""
    named: dict[str, list[Sequence[str]]] = {}
    for line in lines:
        named.setdefault(re.sub(r",? *return_recv_hook=\w+", "", line[1]).strip(), []).append(line)
    return [(f"{_LOW}, {name}" if name else _LOW, each) for name, each in named.items()]


def _ranks(what: str, times: list[float], rates: list[float], variant: str) -> Row:
    return Row(
        what,
        "deepep",
        0,
        protocol=variant,
        ranks=len(times),
        p50_us=median(times),
        min_us=min(times),
        max_us=max(times),
        gb_per_s=median(rates) if rates else None,
    )
