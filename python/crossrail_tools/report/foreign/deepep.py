"""The tests of DeepEP (both versions) and of NIXL EP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..schema import Row
from ..stats import median
from .runs import Foreign, number, without_ranks

_F = r"([\d.]+)"
_BOTH = re.compile(
    rf"\[rank (\d+)\] Dispatch \+ combine bandwidth: {_F} GB/s, avg_t={_F} us, min_t={_F} us, max_t={_F} us"
)
_EACH = re.compile(
    rf"\[rank (\d+)\] Dispatch bandwidth: {_F} GB/s, avg_t={_F} us \| Combine bandwidth: {_F} GB/s, avg_t={_F} us"
)
_BEST = re.compile(
    rf"\[tuning\] Best (dispatch|combine)(?: \((\w+)\))?: SMs (\d+), (.*?){_F} GB/s \(NVL\)(?:, t: {_F} us)?"
)
_NOTIFY = re.compile(rf"{_F} \+ {_F} us")
_SECOND = re.compile(rf"EP:\s*(\d+)/\s*(\d+) \| ([\w ()]+): {_F} GB/s \(SO\), {_F} GB/s \(SU\), {_F} us, (\d+) bytes")
_LOW = "low latency"


def deepep(text: str, data: Any) -> list[Foreign]:
    """The lines of every rank: medians over the ranks. What a rank prints for the k-th time belongs to the k-th run."""
    text = without_ranks(text)
    runs: list[list[Row]] = []

    def add(number_of_run: int, row: Row) -> None:
        runs.extend([] for _ in range(number_of_run + 1 - len(runs)))
        runs[number_of_run].append(row)

    for number_of_run, both in enumerate(_by_run(_BOTH.findall(text), 1)):
        add(number_of_run, _ranks("e2e", [number(one[2]) for one in both], [number(one[1]) for one in both], _LOW))
    for number_of_run, each in enumerate(_by_run(_EACH.findall(text), 1)):
        for what, place in (("dispatch", 1), ("combine", 3)):
            rates, times = ([number(one[place + more]) for one in each] for more in (0, 1))
            add(number_of_run, _ranks(what, times, rates, _LOW))
    for number_of_run, best in enumerate(_by_run(_BEST.findall(text), 2)):
        for what, dtype, sms, middle, rate, time in best:
            notify = _NOTIFY.search(middle)
            spent = number(time) if time else sum(map(number, notify.groups())) if notify else None
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
        gb_per_s=median(rates),
    )
