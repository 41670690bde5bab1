"""95 % intervals of a mean, by Student's t: over runs, and over the tokens of a text."""

import math

import numpy as np

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # of 1 to 9 degrees of freedom
BLOCKS, LEAST = 7, 100  # stretches of a text; windows that they have to have


def interval(std, n):
    """Half the interval of the mean of n independent numbers with this standard deviation; nan for one."""
    if n < 2:
        return math.nan
    t = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96 + 2.37 / (n - 1) + 2.83 / (n - 1) ** 2  # to 0.004
    return t * std / math.sqrt(n)


def of_text(values, sizes):
    """The mean over the tokens of a text, and half its interval.

    Windows beside each other are alike, so that they do not count as independent: the interval is by BLOCKS
    stretches of the text, a ratio estimate.

    Args:
        values: (n,) of each token. sizes: tokens of each window, in the order of the text; at least
            LEAST, of which the caller makes sure.
    """
    ends = np.cumsum(sizes)[np.linspace(0, len(sizes), BLOCKS + 1).astype(int)[1:] - 1]
    x = np.asarray(values, dtype=np.float64)
    sums = [part.sum() for part in np.split(x - x.mean(), ends[:-1])]
    deviation = np.linalg.norm(sums) / math.sqrt(BLOCKS - 1)  # of a stretch's sum
    return x.mean(), interval(deviation, BLOCKS) * BLOCKS / len(x)
