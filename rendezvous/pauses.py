"""Random pauses from a separate generator: drawing from the global one would change a task's random numbers."""

from __future__ import annotations

import random

import tenacity

_generator = random.Random()


def between(least_s: float, most_s: float) -> float:
    """Return a random pause."""
    return _generator.uniform(least_s, most_s)


class RandomExponential(tenacity.wait_exponential):
    """Wait for a random fraction of a doubling time, as `tenacity.wait_random_exponential` does."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        return between(self.min, super().__call__(retry_state))
