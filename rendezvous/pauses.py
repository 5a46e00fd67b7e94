"""Random pauses, from a generator apart: a draw from the global one, in any thread, would be missing in a task's."""

from __future__ import annotations

import random

import tenacity

_generator = random.Random()


def between(least_s: float, most_s: float) -> float:
    """Draw a pause."""
    return _generator.uniform(least_s, most_s)


class RandomExponential(tenacity.wait_exponential):
    """Wait for a random part of a time that doubles, as `tenacity.wait_random_exponential` does."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        return between(self.min, super().__call__(retry_state))
