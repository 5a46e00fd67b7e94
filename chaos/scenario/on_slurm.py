"""Slurm settings of a scenario (`executor: slurm`): batch script, number of jobs and nodes.

They determine the possible kinds: an array has no allocation that can be preempted as a whole, and with two jobs on a
node the loss of it is not a fault of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from chaos.scenario.kinds import KINDS, Kind

_OF_AN_ELEMENT = ("stop_node", "preempt_node")
"""Kinds for a node that is a job of its own, as in an array."""


class OnSlurm(BaseModel):
    """Settings for submitting jobs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    script: Literal["train", "elastic-array"] = "train"
    """Batch script of deploy/slurm. train: all nodes in one allocation. elastic-array: an array of one-node jobs, which
    meet at an etcd on another node."""
    at_first: PositiveInt | None = None
    """Number of nodes at the start, if not all; `start_node` then adds one, as an array of one element."""
    jobs: Literal[1, 2] = 1
    """Number of jobs that share the nodes, each with its own run.dir and verdict; a fault affects the first one, unless
    its `job` is 1."""

    @property
    def is_array(self) -> bool:
        return self.script == "elastic-array"

    @property
    def has_own_etcd(self) -> bool:
        """True if the job's first node starts its etcd: it cannot leave, and none outside the allocation can join."""
        return not self.is_array and self.at_first is None

    def kinds(self) -> list[str]:
        """Return the kinds that can affect such jobs."""
        return [kind.name for kind in KINDS.values() if kind.slurm and self._fits(kind)]

    def problems(self, num_nodes: int) -> Iterator[str]:
        """Yield the contradictions between settings."""
        if self.at_first is not None and self.at_first >= num_nodes:
            yield f"slurm.at_first is {self.at_first}, but there are {num_nodes} nodes: leave it out"
        if self.jobs > 1 and not self.has_own_etcd:
            yield "slurm.jobs: 2 is for jobs of one allocation: leave out script and at_first"

    def _fits(self, kind: Kind) -> bool:
        if self.jobs > 1:
            return kind.aim in ("job", "worker") and kind.name != "preempt_job"
        if kind.name == "start_node":
            return not self.has_own_etcd
        if kind.name in _OF_AN_ELEMENT:
            return self.is_array
        if kind.aim == "job":
            return self.has_own_etcd
        return kind.name != "kill_node" or self.is_array or self.has_own_etcd
