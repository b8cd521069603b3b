"""Units are always printed, and powers of ten and of two never mixed."""

import pytest

from crossrail_tools.report.units import format_bytes, format_duration_us, format_rate, format_size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1000, "1000"),
        (1024, "1K"),
        (65536, "64K"),
        (3 << 20, "3M"),
        (1 << 30, "1G"),
        (5 << 40, "5T"),
    ],
)
def test_sizes_are_exact_powers_of_two(size: int, text: str) -> None:
    assert format_size(size) == text


def test_bytes_are_powers_of_ten() -> None:
    assert format_bytes(67_108_864) == "67.11 MB"
    assert format_bytes(1_000_000_000) == "1.00 GB"
    assert format_bytes(999) == "999 B"
    assert format_bytes(1500) == "1.50 kB"


def test_rates_and_times_pick_a_readable_unit() -> None:
    assert [format_rate(rate) for rate in (12.345, 353.0, 0.0123, 0.00001)] == [
        "12.35 GB/s",
        "353 GB/s",
        "12.30 MB/s",
        "10.00 kB/s",
    ]
    assert [format_duration_us(us) for us in (0.22, 67_100.0, 2_500_000.0)] == ["0.22 us", "67.10 ms", "2.50 s"]
