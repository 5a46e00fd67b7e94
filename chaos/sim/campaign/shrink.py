"""Shrink a failing case: fewer faults, then shorter ones, then fewer nodes, while the same invariant is violated.

Delta debugging (Zeller, Hildebrandt: Simplifying and Isolating Failure-Inducing Input, TSE 2002) over the list of
faults. Every fault and subsystem has a random stream of its own, so that removing one fault hardly changes the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chaos.sim.campaign.simulate import Case
from chaos.sim.job.fault import SimFault

Fails = Callable[[Case], bool]
MOST_TRIES = 200


def shrink(case: Case, fails: Fails) -> Case:
    """Return the smallest failing case found; `fails` runs one."""
    tries = 0

    def still(smaller: Case) -> bool:
        nonlocal tries
        tries += 1
        return tries <= MOST_TRIES and fails(smaller)

    case = _fewer_faults(case, still)
    case = _shorter_faults(case, still)
    return _fewer_nodes(case, still)


def _fewer_faults(case: Case, fails: Fails) -> Case:
    """Leave out ever smaller pieces of the list (ddmin's complements)."""
    num_pieces = 2
    while len(case.faults) > 1:
        for piece in range(num_pieces):
            lo, hi = (len(case.faults) * end // num_pieces for end in (piece, piece + 1))
            smaller = replace(case, faults=(*case.faults[:lo], *case.faults[hi:]))
            if fails(smaller):
                case, num_pieces = smaller, max(2, num_pieces - 1)
                break
        else:
            if num_pieces >= len(case.faults):
                break
            num_pieces = min(2 * num_pieces, len(case.faults))
    return case


def _shorter_faults(case: Case, fails: Fails) -> Case:
    for place, fault in enumerate(case.faults):
        for part in (0.25, 0.5):
            shorter = replace(
                case, faults=_with(case.faults, place, replace(fault, for_s=round(fault.for_s * part, 3)))
            )
            if fault.for_s and fails(shorter):
                case = shorter
                break
    return case


def _with(faults: tuple[SimFault, ...], place: int, fault: SimFault) -> tuple[SimFault, ...]:
    return (*faults[:place], fault, *faults[place + 1 :])


def _fewer_nodes(case: Case, fails: Fails) -> Case:
    while case.shape.nodes > max(1, case.shape.min_nodes):
        smaller = replace(case, shape=replace(case.shape, nodes=case.shape.nodes - 1))
        if not fails(smaller):
            break
        case = smaller
    return case
