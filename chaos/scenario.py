"""A scenario: which job to run on which nodes, and which faults to inject when. Typed YAML, all mistakes at once.

A step is given, or drawn from the seed `within` a part of the job; a drawn step lies in the middle of a commit
interval, behind the first commit, so that a kill loses applied steps. The same seed draws the same steps.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from chaos.errors import ScenarioError

FOLDER = Path(__file__).parent / "scenarios"
Kind = Literal["kill_worker", "kill_node", "stop_node", "start_node"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fault(_Section):
    """One fault: what, to which node, and when: at a step, at a drawn step, or some seconds after the last fault."""

    kind: Kind
    node: int = Field(ge=0)
    at_step: PositiveInt | None = None
    within: tuple[float, float] | None = None
    after_s: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_one_moment(self) -> Fault:
        if sum(moment is not None for moment in (self.at_step, self.within, self.after_s)) != 1:
            raise ValueError("say when: exactly one of at_step, within: [from, to] (parts of the job), after_s")
        if self.within is not None and not 0 <= self.within[0] < self.within[1] <= 1:
            raise ValueError(f"within must be two growing parts of the job between 0 and 1, not {self.within}")
        return self


class Nodes(_Section):
    """How the job is launched: one torchrun a node."""

    count: PositiveInt = 2
    ranks: PositiveInt = 1
    min: PositiveInt = 1
    max_restarts: int = Field(default=10, ge=0)
    lease_ttl_s: float = Field(default=3.0, ge=2)


class Scenario(_Section):
    name: str
    description: str
    config: str
    set: dict[str, object] = Field(default_factory=dict)
    nodes: Nodes = Field(default_factory=Nodes)
    faults: tuple[Fault, ...] = ()
    timeout_s: float = Field(default=300, gt=0)

    @model_validator(mode="after")
    def _nodes_exist(self) -> Scenario:
        for number, fault in enumerate(self.faults):
            if fault.node >= self.nodes.count:
                raise ValueError(f"fault {number} targets node {fault.node}, but there are {self.nodes.count} (from 0)")
        return self


@dataclass(frozen=True, slots=True)
class Due:
    """A fault with its moment settled: a step, or seconds after the fault before it."""

    kind: Kind
    node: int
    step: int | None
    after_s: float | None


def find(name: str) -> Path:
    """Return the path of a scenario: a file, or the name of one that comes with the package."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    if name not in known:
        raise ScenarioError(f"no scenario '{name}'{_nearest(name, known)}; there are: {', '.join(known)}")
    return FOLDER / f"{name}.yaml"


def load(path: Path) -> Scenario:
    """Read and check a scenario; raise ScenarioError with every problem found."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ScenarioError(f"{path}: must be a mapping with name, description, config and faults")
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        raise ScenarioError(*(f"{path}: {_explain(item)}" for item in error.errors())) from error


def schedule(scenario: Scenario, seed: int, total_steps: int, commit_every: int) -> list[Due]:
    """Settle every fault's moment; drawn steps come from the seed alone and grow."""
    rng = random.Random(seed)
    due: list[Due] = []
    for fault in scenario.faults:
        step = fault.at_step
        if fault.within is not None:
            step = _draw(rng, fault.within, total_steps, commit_every)
        due.append(Due(fault.kind, fault.node, step, fault.after_s))
    return due


def _draw(rng: random.Random, within: tuple[float, float], total_steps: int, commit_every: int) -> int:
    """Draw a step from the middle third of a commit interval that begins behind the first commit."""
    lo, hi = (int(part * total_steps) for part in within)
    first, last = max(1, lo // commit_every), max(1, hi // commit_every - 1)
    interval = rng.randint(first, max(first, last))
    margin = max(1, commit_every // 3)
    return interval * commit_every + rng.randint(margin, max(margin, commit_every - 1 - margin))


def _explain(item: object) -> str:
    assert isinstance(item, dict), "pydantic's errors are dicts"
    key = ".".join(str(part) for part in item["loc"]) or "scenario"
    if item["type"] == "extra_forbidden":
        known = {*Scenario.model_fields, *Nodes.model_fields, *Fault.model_fields}
        return f"unknown key '{key}'{_nearest(key.rsplit('.', 1)[-1], sorted(known))}"
    if item["type"] == "missing":
        return f"'{key}' is missing"
    return f"'{key}': {str(item['msg']).removeprefix('Value error, ')}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
