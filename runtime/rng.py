"""Counter-based random numbers: each is a function of (seed, purpose, index) and of nothing else.

Holds no stream state, so a draw does not depend on batch, slot, worker, preemption or replay.
"""

from enum import IntEnum

import numpy as np

_MASK = 2**64 - 1


class Purpose(IntEnum):
    """Keeps draws for different ends apart. Values are part of reproducibility: never renumber."""

    SAMPLE = 1


def uniform(seed: int, purpose: Purpose, index: int) -> float:
    """A float64 in [0, 1) with 53 random bits."""
    key = np.array([seed & _MASK, int(purpose)], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=index).random_raw())
    return (bits >> 11) * 2.0**-53
