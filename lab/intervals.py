"""95 % confidence intervals of a mean, by Student's t: over runs, and over the tokens of a text."""

import math

import numpy as np

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # for 1 to 9 degrees of freedom
BLOCKS = 7  # stretches that a text is divided into
LEAST = 100  # windows that a text has to have for an interval


def interval(std, n):
    """Half the interval of the mean of n independent numbers of standard deviation `std`; nan if n < 2."""
    if n < 2:
        return math.nan
    if n - 2 < len(STUDENT):
        t = STUDENT[n - 2]
    else:
        t = 1.96 + 2.37 / (n - 1) + 2.83 / (n - 1) ** 2  # to 0.004
    return t * std / math.sqrt(n)


def unpaired(a, b):
    """The difference of the means of two groups of independent numbers, and half its interval (Welch's, for
    groups of different spread; its degrees of freedom are rounded down). The half is nan if one has less than
    two numbers.

    Args:
        a, b: sequences of numbers.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    difference = a.mean() - b.mean()
    if min(len(a), len(b)) < 2:
        return difference, math.nan
    square_a = a.var(ddof=1) / len(a)  # of the error of the mean
    square_b = b.var(ddof=1) / len(b)
    square = square_a + square_b
    if square == 0:
        return difference, 0.0
    freedom = square**2 / (square_a**2 / (len(a) - 1) + square_b**2 / (len(b) - 1))
    n = int(freedom + 1e-9) + 1  # numbers of one group with as many degrees of freedom
    return difference, interval(math.sqrt(square * n), n)


def of_text(values, sizes):
    """The mean over the tokens of a text, and half its interval.

    Neighbouring windows resemble each other, so they do not count as independent. The interval is a ratio
    estimate over BLOCKS stretches of the text.

    Args:
        values: (n,) a number for each token.
        sizes: the tokens of each window, in the order of the text; the caller makes sure that there are at
            least LEAST windows.
    """
    ends = np.cumsum(sizes)[np.linspace(0, len(sizes), BLOCKS + 1).astype(int)[1:] - 1]
    x = np.asarray(values, dtype=np.float64)
    sums = [part.sum() for part in np.split(x - x.mean(), ends[:-1])]
    deviation = np.linalg.norm(sums) / math.sqrt(BLOCKS - 1)  # of a stretch's sum
    return x.mean(), interval(deviation, BLOCKS) * BLOCKS / len(x)
