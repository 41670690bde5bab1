"""Intervals that hold the truth as often as they say."""

import math

import numpy as np
import pytest

from lab.intervals import BLOCKS, interval, of_text, unpaired


def test_of_runs():
    """Catches the normal distribution's where seeds are few or a dozen: Student's t of the tables."""
    for std, n, half in ((2.0, 5, 2.776 / math.sqrt(5)), (2.0, 2, 12.706 / math.sqrt(2))):
        assert interval(std, n) == pytest.approx(2 * half)
    for n, t in ((10, 2.262), (11, 2.228), (21, 2.086), (100, 1.984)):
        assert interval(n**0.5, n) == pytest.approx(t, abs=4e-3)
    assert math.isnan(interval(2.0, 1))


def test_unpaired():
    """Catches spreads that are pooled, and degrees of freedom of both groups where one is exact."""
    a, b = [1.0, 2.0, 3.0], [5.0, 5.1, 4.9, 5.0]
    difference, half = unpaired(a, b)
    error = math.sqrt(np.var(a, ddof=1) / 3 + np.var(b, ddof=1) / 4)
    assert difference == pytest.approx(-3.0) and half == pytest.approx(4.303 * error)  # 2.02 degrees
    equal = unpaired([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])[1]  # as by Student's t: 4 degrees
    assert equal == pytest.approx(2.776 * math.sqrt(2 / 3))
    assert math.isnan(unpaired([1.0], [2.0, 3.0])[1])


@pytest.mark.parametrize("windows", [100, 300, 1000])
def test_of_text(windows):
    """Catches an interval by tokens or by windows: of 2,000 differences whose truth is 0 and whose windows
    are as alike as measured in texts, 95 % of the intervals hold it."""
    lags = [1, 0.14, 0.09, 0.12, 0.13, 0.04]  # correlations of the sums of windows, by distance
    distance = np.abs(np.subtract.outer(np.arange(windows), np.arange(windows)))
    root = np.linalg.cholesky(np.where(distance < len(lags), np.array(lags)[distance.clip(max=5)], 0))
    each = np.random.default_rng(0).normal(size=(2000, windows)) @ root.T
    held = []
    for row in each:
        mean, half = of_text(np.repeat(row, 4), [4] * windows)
        held.append(abs(mean) < half)
    assert 0.93 < np.mean(held) < 0.97


def test_stretches():
    """Catches stretches that are not of as many windows, and windows of other sizes that count alike."""
    x = np.random.default_rng(1).normal(size=8 * BLOCKS)
    mean, half = of_text(x, [8] * BLOCKS)
    expected = 2.447 * x.reshape(BLOCKS, 8).mean(1).std(ddof=1) / BLOCKS**0.5
    assert (mean, half) == (pytest.approx(x.mean()), pytest.approx(expected))
    sizes = [3, 13] * (BLOCKS // 2) + [8]
    parts = np.split(x - x.mean(), np.cumsum(sizes)[:-1])
    by_hand = 2.447 * np.std([part.sum() for part in parts], ddof=1) * BLOCKS**0.5 / len(x)
    assert of_text(x, sizes)[1] == pytest.approx(by_hand)
