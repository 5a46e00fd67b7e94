"""One vocabulary: every kind is implemented where the vocabulary says, and there are no others."""

from __future__ import annotations

from chaos.real.acts import ACTS
from chaos.real.slurm import acts as slurm_acts
from chaos.scenario.kinds import KINDS, asks_all_to_leave, ends_world
from chaos.scenario.on_slurm import OnSlurm
from chaos.sim.job import fault, kinds
from elastic_train.system import failpoints


def test_the_local_executor_does_every_local_kind() -> None:
    """Its acts, directly and at failpoints, are those of the vocabulary."""
    assert set(ACTS) == {kind.name for kind in KINDS.values() if kind.local and kind.aim != "point"}
    assert set(failpoints.KINDS) == {kind.name for kind in KINDS.values() if kind.local and kind.aim == "point"}


def test_the_executor_for_slurm_does_every_kind_of_slurm() -> None:
    """Kinds that affect a whole job make it leave its nodes; a drained node costs nothing."""
    assert set(slurm_acts.ACTS) == {kind.name for kind in KINDS.values() if kind.slurm}
    of_job = {"preempt_job", "requeue_job", "hold_job", "end_time_limit"}
    assert {name for name in slurm_acts.ACTS if asks_all_to_leave(name)} == of_job
    assert not ends_world("drain_node")


def test_what_affects_a_job_on_slurm_follows_from_how_it_is_submitted() -> None:
    """Nodes of an array are jobs, which can be cancelled; two jobs are hit by faults that leave the nodes alone."""
    allocation, array = OnSlurm(), OnSlurm(script="elastic-array")
    grown, shared = OnSlurm(at_first=1), OnSlurm(jobs=2)
    assert set(allocation.kinds()) == set(slurm_acts.ACTS) - {"stop_node", "start_node", "preempt_node"}
    of_job = {kind for kind in slurm_acts.ACTS if asks_all_to_leave(kind)}
    assert set(array.kinds()) == set(slurm_acts.ACTS) - of_job
    assert set(grown.kinds()) == {"start_node", "kill_worker", "drain_node"}
    assert set(shared.kinds()) == {"kill_worker"} | of_job - {"preempt_job"}


def test_the_simulators_kinds_are_in_the_vocabulary() -> None:
    """The simulator's faults have the same names, directly and at failpoints."""
    assert set(kinds.KINDS) <= {kind.name for kind in KINDS.values() if kind.sim and kind.aim != "point"}
    assert set(fault.AT_POINTS) <= {kind.name for kind in KINDS.values() if kind.sim and kind.aim == "point"}


def test_only_known_kinds_may_be_harmless() -> None:
    """An unknown kind is assumed to end a world, so that its name alone never makes it harmless."""
    assert ends_world("kill_node")
    assert ends_world("kill@commit")
    assert ends_world("unheard of")
    assert not ends_world("freeze_node")
