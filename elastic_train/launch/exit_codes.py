"""Combine the workers' exit codes into the node's, which a scheduler can act on (codes are in errors.py)."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from elastic_train.errors import (
    ConfigError,
    CorruptError,
    HungError,
    NoProgressError,
    Preempted,
    ResultError,
    TooFewNodesError,
    UnfitError,
)
from elastic_train.launch.departure import REQUESTS

TELLING_CODES = (
    CorruptError.exit_code,
    ConfigError.exit_code,
    UnfitError.exit_code,
    NoProgressError.exit_code,
    HungError.exit_code,
    TooFewNodesError.exit_code,
    ResultError.exit_code,
)
"""Codes more informative than plain failure, most specific first."""


def exit_code(codes: Sequence[int], *, has_failed: bool, is_asked: bool = False) -> int:
    """Return the node's exit code: its workers' most specific one; 75 if all left cleanly and some early; else 0 or 1.

    `is_asked`: this node was asked to leave. A worker killed by the same signal had no handler yet and held no state,
    so it counts as preempted; so does a node without workers, and one killed at the end of its grace period: the next
    start continues from a commit, and schedulers restart only for 75.
    """
    if is_asked:
        by_request = [-number for number in (*REQUESTS, signal.SIGKILL)]
        codes = [Preempted.exit_code if code in by_request else code for code in codes] or [Preempted.exit_code]
    telling = next((code for code in TELLING_CODES if code in codes), None)
    if telling is not None:
        return telling
    if Preempted.exit_code in codes and set(codes) <= {0, Preempted.exit_code}:
        return Preempted.exit_code
    return int(has_failed or any(codes))


def outstayed(codes: Sequence[int]) -> int:
    """Return how many workers were still running when the grace period of a leaving node ended."""
    return sum(code == -signal.SIGKILL for code in codes)
