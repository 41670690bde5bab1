"""95 % confidence intervals of a mean, by Student's t: over runs, and over the tokens of a text."""

import math

import numpy as np

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # for 1 to 9 degrees of freedom
# Stretches that a text is divided into: few, so that each is long and nearly independent of the others.
BLOCKS = 7
# Windows that a text must have for an interval, so that each stretch has 14 or more.
LEAST = 100


def student_t(freedom):
    """The factor of a 95 % interval for a number of degrees of freedom."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    # A fit to Student's quantiles from 10 degrees of freedom on, with an error below 0.004.
    return 1.96 + 2.37 / freedom + 2.83 / freedom**2


def interval(std, n):
    """Half the interval of the mean of n independent numbers of standard deviation `std`; nan if n < 2."""
    if n < 2:
        return math.nan
    return student_t(n - 1) * std / math.sqrt(n)


def unpaired(a, b):
    """Compare two groups of independent numbers, by Welch's interval, which allows them different spreads.

    Args:
        a, b: sequences of numbers.

    Returns:
        The difference of their means, and half its interval: nan if a group has fewer than two numbers.
    """
    a = np.asarray(a, dtype=np.float64)
    b = np.asarray(b, dtype=np.float64)
    difference = a.mean() - b.mean()
    if min(len(a), len(b)) < 2:
        return difference, math.nan
    square_a = a.var(ddof=1) / len(a)  # squared standard error of the mean
    square_b = b.var(ddof=1) / len(b)
    square = square_a + square_b
    if square == 0:
        return difference, 0.0
    freedom = square**2 / (square_a**2 / (len(a) - 1) + square_b**2 / (len(b) - 1))
    whole = int(freedom + 1e-9)  # rounded down, which makes the interval wider; the margin is for rounding
    return difference, student_t(whole) * math.sqrt(square)


def of_text(values, sizes):
    """The mean over the tokens of a text, and half its interval.

    Neighbouring windows resemble each other, so they do not count as independent. The interval is a ratio
    estimate over BLOCKS stretches of the text, which have about as many windows each.

    Args:
        values: (n,) a number for each token.
        sizes: the tokens of each window, in the order of the text; the caller makes sure that there are at
            least LEAST windows.
    """
    last_windows = np.linspace(0, len(sizes), BLOCKS + 1).astype(int)[1:] - 1  # of each stretch
    ends = np.cumsum(sizes)[last_windows]  # where each stretch ends, in tokens
    x = np.asarray(values, dtype=np.float64)
    sums = [part.sum() for part in np.split(x - x.mean(), ends[:-1])]
    deviation = np.linalg.norm(sums) / math.sqrt(BLOCKS - 1)  # of these sums, whose mean is 0
    half = interval(deviation, BLOCKS)  # of the mean sum of a stretch
    return x.mean(), half * BLOCKS / len(x)  # from the mean sum of a stretch to the mean per token
