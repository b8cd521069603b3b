"""Percentiles, rates and ratios: against NumPy, and at their edges."""

import math

import numpy as np
import pytest

from crossrail_tools.report.stats import better, gb_per_s, median, percentile, summarize


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys_default(count: int) -> None:
    samples = np.random.default_rng(count).exponential(3.0, count).tolist()
    for rank in (0, 1, 25, 50, 90, 99, 99.9, 100):
        assert percentile(samples, rank) == pytest.approx(np.percentile(samples, rank), rel=1e-12)


def test_the_order_of_samples_does_not_matter_and_they_are_left_alone() -> None:
    samples = [3.0, 1.0, 2.0]
    assert median(samples) == 2.0
    assert samples == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(("samples", "rank"), [([], 50), ([1.0], -1), ([1.0], 101), ([math.nan], 50), ([math.inf], 50)])
def test_what_has_no_percentile_is_an_error(samples: list[float], rank: float) -> None:
    with pytest.raises(ValueError):
        percentile(samples, rank)


def test_a_summary_names_all_five() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0])
    assert (summary.min, summary.max, summary.avg, summary.p50) == (1.0, 4.0, 2.5, 2.5)
    assert summary.p99 == pytest.approx(3.97)


def test_a_gigabyte_is_1e9_bytes() -> None:
    assert gb_per_s(1_000_000_000, 1_000_000) == 1.0
    assert gb_per_s(1 << 30, 1_000_000) == pytest.approx(1.073741824)
    with pytest.raises(ValueError):
        gb_per_s(1, 0)


def test_more_than_one_is_better_for_times_and_rates_alike() -> None:
    assert better(0.2, 0.3, "time") == pytest.approx(1.5)
    assert better(15.0, 10.0, "rate") == pytest.approx(1.5)
    with pytest.raises(ValueError):
        better(0.0, 1.0, "rate")
