"""Faults that expose planted bugs, drawn within bounds: each bug shows in some runs only."""

from __future__ import annotations

import random

from chaos.sim.job.fault import SimFault


def kills(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill workers one after another; they come back."""
    return tuple(SimFault("kill_worker", at_s=draws.uniform(6, 14), node=draws.randrange(3)) for _ in range(3))


def kills_on_one_node(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill the worker of one node repeatedly, before the job's first commit."""
    node = draws.randrange(3)
    return tuple(SimFault("kill_worker", at_s=at_s + draws.uniform(0.0, 2.0), node=node) for at_s in (9, 20, 31, 42))


def zombie(draws: random.Random) -> tuple[SimFault, ...]:
    """Freeze a process that writes a commit, possibly the leader, in mid-step; it finishes both after others have
    continued without it; then kill all nodes."""
    for_s = draws.uniform(4.0, 6.0)
    frozen = SimFault("stop", point="write", nth=1, for_s=for_s)
    return (SimFault("kill_job", at_s=25.0 + for_s + draws.uniform(0.0, 4.0), for_s=2.0), frozen)


def late_record(draws: random.Random) -> tuple[SimFault, ...]:
    """Freeze the leader before a commit's first file; it writes the commit after others have committed; then kill all
    nodes.

    If it had begun to write, the next world's sweep would have claimed the record's name.
    """
    for_s = draws.uniform(12.0, 40.0)
    frozen = SimFault("stop", point="write", nth=1, for_s=for_s)
    return (SimFault("kill_job", at_s=10.6 + for_s + draws.uniform(0.0, 6.0), for_s=2.0), frozen)


def late_listing(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill all nodes while listings are stale; the new leader is not the node that wrote the last commits."""
    at_s = draws.uniform(8.0, 16.0)
    return (
        SimFault("kill_node", at_s=6.0, node=0, for_s=0.5),
        SimFault("stale_listing", at_s=at_s, for_s=30.0),
        SimFault("kill_job", at_s=at_s + draws.uniform(1.0, 6.0), for_s=2.0),
    )


def without_its_mount(draws: random.Random) -> tuple[SimFault, ...]:
    """Restart a node without its mount, then kill all others."""
    at_s, node = draws.uniform(7.0, 10.0), draws.randrange(3)
    others = tuple(
        SimFault("kill_node", at_s=at_s + draws.uniform(6.0, 9.0), node=other, for_s=8.0)
        for other in range(3)
        if other != node
    )
    return (SimFault("private_storage", at_s=at_s, node=node, for_s=60.0), *others)


def alone_without_its_mount(draws: random.Random) -> tuple[SimFault, ...]:
    """Restart a node without its mount; no other fault."""
    return (SimFault("private_storage", at_s=draws.uniform(20.0, 30.0), node=draws.randrange(3), for_s=100.0),)


def alone_with_other_code(draws: random.Random) -> tuple[SimFault, ...]:
    """Restart a node with another version of the code; no other fault."""
    return (SimFault("other_code", at_s=draws.uniform(20.0, 30.0), node=draws.randrange(3), for_s=100.0),)


def alone_on_a_wrong_processor(draws: random.Random) -> tuple[SimFault, ...]:
    """Restart a node on a processor that computes wrongly; no other fault."""
    return (SimFault("unfit_node", at_s=draws.uniform(8.0, 12.0), node=draws.randrange(3), for_s=100.0),)


def another_job(draws: random.Random) -> tuple[SimFault, ...]:
    """Start another job in the same folder; no other fault."""
    return (SimFault("twin_dir", at_s=draws.uniform(20.0, 30.0), for_s=100.0),)


def flipped(draws: random.Random) -> tuple[SimFault, ...]:
    """Flip a bit of one rank's weights between two commits."""
    return (
        SimFault("flip_memory", node=draws.randrange(3), other=draws.randrange(32), step=3 * draws.randint(1, 4) + 1),
    )


def losses_gone(draws: random.Random) -> tuple[SimFault, ...]:
    """Make the losses of some steps NaN."""
    return tuple(SimFault("nan_loss", at_s=draws.uniform(6, 14), node=draws.randrange(3)) for _ in range(2))


def blocked(draws: random.Random) -> tuple[SimFault, ...]:
    """Keep worlds from forming for some minutes."""
    return (SimFault("block_ports", at_s=draws.uniform(6.0, 8.0), for_s=draws.uniform(60.0, 900.0)),)


def torn(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill all nodes in the middle of a commit."""
    nodes = tuple(SimFault("kill_job", at_s=draws.uniform(6.0, 16.0), for_s=2.0) for _ in range(2))
    return (*nodes, SimFault("kill", point="publish", nth=draws.randint(1, 6)))


def rot(draws: random.Random) -> tuple[SimFault, ...]:
    """Flip a bit of the newest commit and kill all nodes."""
    at_s = draws.uniform(8.0, 16.0)
    return SimFault("flip_bit", at_s=at_s, other=draws.randrange(2)), SimFault("kill_job", at_s=at_s, for_s=1.0)


def dies_saving(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill a rank before it has written its part of one of the last commits."""
    return (SimFault("kill", point="write", nth=draws.randint(17, 22)),)


def frozen_at_its_record(draws: random.Random) -> tuple[SimFault, ...]:
    """Freeze a leader before it creates a record; slow down storage for the next sweep; later kill all nodes."""
    frozen = SimFault("stop", point="record", nth=draws.randint(1, 4), for_s=draws.uniform(3.0, 30.0))
    slow = SimFault("storage_slow", at_s=draws.uniform(6.0, 30.0), for_s=6.0)
    return slow, SimFault("kill_job", at_s=draws.uniform(12.0, 40.0), for_s=1.0), frozen


def bad_data(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill a worker some steps after a hole; then all data become readable again."""
    at_s = draws.uniform(6.0, 10.0)
    bad = SimFault("bad_row_group", at_s=at_s, node=-1, other=draws.randrange(4), for_s=5.0)
    return bad, SimFault("kill_worker", at_s=at_s + draws.uniform(1.0, 5.0), node=draws.randrange(3))


def half_applied(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill a rank after only some ranks have received a step, so that survivors are one step apart.

    It should stay away for long: with a newcomer, the collective calls diverge before anything is recorded.
    """
    point = draws.choice(("exchange", "apply", "applied"))
    return tuple(SimFault("kill", point=point, nth=draws.randint(20, 90)) for _ in range(3))


def dies_ahead(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill ranks that have applied and recorded a step before others have received its whole gradient."""
    return tuple(SimFault("kill", point="data", nth=draws.randint(20, 90)) for _ in range(3))


def wakes(draws: random.Random) -> tuple[SimFault, ...]:
    """Freeze a worker until others have continued without it, then wake it."""
    frozen = SimFault(
        "freeze_worker", at_s=draws.uniform(8.0, 14.0), node=draws.randrange(3), for_s=draws.uniform(4.0, 7.0)
    )
    return (frozen,)


def gives_up_its_branch(draws: random.Random) -> tuple[SimFault, ...]:
    """Freeze a worker ahead of the newest commit and kill the other; the successor commits before the first wakes."""
    full = SimFault("storage_full", at_s=draws.uniform(4.3, 4.7), for_s=2.3)
    frozen = SimFault("freeze_worker", at_s=draws.uniform(6.6, 7.2), node=1, for_s=7.0)
    return full, frozen, SimFault("kill_worker", at_s=draws.uniform(6.6, 7.3), node=0)


def breaks_while_seated(draws: random.Random) -> tuple[SimFault, ...]:
    """Stop all nodes but one and restart them; kill one while ranks exchange their shards."""
    left = draws.randrange(4)
    away = [
        SimFault("stop_node", at_s=draws.uniform(7.0, 7.3), node=node, for_s=3.0) for node in range(4) if node != left
    ]
    return (*away, SimFault("kill", point="hand-over", nth=draws.randint(10, 24)))


def aliens(draws: random.Random) -> tuple[SimFault, ...]:
    """Write invalid records below the job's prefix."""
    return tuple(SimFault("alien_record", at_s=draws.uniform(6.0, 14.0)) for _ in range(3))
