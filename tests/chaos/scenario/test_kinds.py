"""One vocabulary: every kind is implemented where the vocabulary says, and there are no others."""

from __future__ import annotations

from chaos.real import slurm_acts
from chaos.real.acts import ACTS
from chaos.scenario.kinds import KINDS, asks_all_to_leave, ends_world
from chaos.sim.job import fault, kinds
from elastic_train.system import failpoints


def test_the_local_executor_does_every_local_kind() -> None:
    """What the local executor does, by itself and at failpoints, is what the vocabulary says."""
    assert set(ACTS) == {kind.name for kind in KINDS.values() if kind.local and kind.aim != "point"}
    assert set(failpoints.KINDS) == {kind.name for kind in KINDS.values() if kind.local and kind.aim == "point"}


def test_the_executor_for_slurm_does_every_kind_of_slurm() -> None:
    """And those that befall a whole job have it leave its nodes; a node that is drained costs nothing."""
    assert set(slurm_acts.ACTS) == {kind.name for kind in KINDS.values() if kind.slurm}
    assert {name for name in slurm_acts.ACTS if not asks_all_to_leave(name)} == {"kill_node", "drain_node"}
    assert not ends_world("drain_node")


def test_the_simulators_kinds_are_in_the_vocabulary() -> None:
    """The simulator's faults have the same names, by themselves and at failpoints."""
    assert set(kinds.KINDS) <= {kind.name for kind in KINDS.values() if kind.sim and kind.aim != "point"}
    assert set(fault.AT_POINTS) <= {kind.name for kind in KINDS.values() if kind.sim and kind.aim == "point"}


def test_only_known_kinds_may_be_harmless() -> None:
    """A kind that is not known is taken to end a world, so that nothing passes for ridden out by its name."""
    assert ends_world("kill_node")
    assert ends_world("kill@commit")
    assert ends_world("unheard of")
    assert not ends_world("freeze_node")
