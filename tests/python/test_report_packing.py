"""The compact form of reports: what it rounds, what it packs, and that readers see no difference."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import p2p_report

from crossrail_tools.report.packing import PACKED_FROM, compact, packed, unpacked, with_lists
from crossrail_tools.report.schema import Report, SchemaError

NANOSECONDS = st.lists(st.integers(-(10**15), 10**15))


@given(NANOSECONDS)
def test_packed_times_are_those_to_the_nanosecond(nanoseconds: list[int]) -> None:
    times = [count / 1e3 for count in nanoseconds]
    assert unpacked(packed(times)) == times
    assert json.loads(json.dumps(packed(times))) == packed(times)


def test_times_are_rounded_to_the_nanosecond_and_nothing_else_is() -> None:
    text = compact({"p50_us": 1.23456, "stages_us": {"cast": 2.00049}, "gb_per_s": 1.23456, "iters": [0.12345]})
    assert json.loads(text) == {"p50_us": 1.235, "stages_us": {"cast": 2.0}, "gb_per_s": 1.23456, "iters": [0.12345]}


def test_rates_of_a_packed_file_keep_six_digits() -> None:
    text = compact(
        {"gb_per_s": 383.3532639275667, "share": 1 / 3, "bytes": 123456789, "p50_us": 123456.7891}, pack=True
    )
    assert json.loads(text) == {"gb_per_s": 383.353, "share": 0.333333, "bytes": 123456789, "p50_us": 123456.789}


def test_a_row_is_a_line() -> None:
    rows = [{"what": "put", "samples_us": [1.0] * 100}, {"what": "get", "lanes": [{"name": "a"}, {"name": "b"}]}]
    text = compact({"schema": "any", "rows": rows, "peers": {"nccl": [{"rows": rows}], "none": []}})
    assert json.loads(text) == {"schema": "any", "rows": rows, "peers": {"nccl": [{"rows": rows}], "none": []}}
    lines = [line.strip() for line in text.splitlines()]
    assert len(lines) == 13
    assert lines[4] == '{"what":"get","lanes":[{"name":"a"},{"name":"b"}]}'


def test_only_long_lists_of_times_are_packed() -> None:
    rows = [{"samples_us": [1.0] * PACKED_FROM, "few_us": [1.0] * (PACKED_FROM - 1), "sizes": [1.0] * 100}]
    data = json.loads(compact({"rows": rows}, pack=True))
    assert isinstance(data["rows"][0]["samples_us"], str)
    assert data["rows"][0]["few_us"] == rows[0]["few_us"] and data["rows"][0]["sizes"] == rows[0]["sizes"]
    assert with_lists(data) == {"rows": rows}


def test_packed_and_plain_reports_read_the_same() -> None:
    plain = p2p_report()
    samples = [float(count) for count in range(100)]
    report = replace(plain, rows=[replace(plain.rows[0], samples_us=samples)])
    text = compact(json.loads(report.dumps()), pack=True)
    assert '"ns:' in text and len(text) < len(report.dumps())
    assert Report.loads(text).rows[0].samples_us == samples


@pytest.mark.parametrize("bad", ["us:", "ns:!", "ns:abcde", packed([1.0])[:-2], "ns: "])
def test_what_does_not_unpack_says_where(bad: str) -> None:
    data = json.loads(p2p_report().dumps())
    data["rows"][0]["samples_us"] = bad
    with pytest.raises(SchemaError, match=r"report\.rows\[0\]\.samples_us: packed times"):
        Report.loads(json.dumps(data))
