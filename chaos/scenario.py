"""A scenario: which job to run on which nodes, and which faults to inject when. Typed YAML, all mistakes at once.

A step is given, or drawn from the seed `within` a part of the job; a drawn step lies in the middle of a commit
interval, behind the first commit, so that a kill loses applied steps. The same seed draws the same steps.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from chaos.errors import ScenarioError

FOLDER = Path(__file__).parent / "scenarios"
SMALLEST_INTERVAL = 4
"""Steps between commits that a drawn step needs, to lie neither on a commit nor beside one."""

Kind = Literal["kill_worker", "kill_node", "freeze_worker", "freeze_node", "stop_node", "start_node"]
Role = Literal["leader", "other", "lost"]
Target = int | str
Section = TypeVar("Section", bound="_Section")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Fault(_Section):
    """One fault: what, to which node, and when: at a step, at a drawn step, or some seconds after the last fault."""

    kind: Kind
    """kill_worker: SIGKILL to one rank; kill_node: to agent and ranks at once; freeze_…: SIGSTOP, and SIGCONT after
    for_s; stop_node: SIGTERM; start_node."""
    node: Target
    """A node's number from 0, or its role when the fault is due: leader (rank 0's node), other, lost (to start)."""
    at_step: PositiveInt | None = None
    """When this many steps are applied."""
    within: tuple[float, float] | None = None
    """At a step drawn from the seed between these two parts of the job."""
    after_s: float | None = Field(default=None, ge=0)
    """So many seconds after the fault before this one."""
    for_s: float | None = Field(default=None, gt=0)
    """How long a freeze lasts: shorter than a lease it goes unnoticed, longer it is a loss."""

    @field_validator("node")
    @classmethod
    def _is_node(cls, node: Target) -> Target:
        if node not in get_args(Role) and (not isinstance(node, int) or node < 0):
            raise ValueError(f"must be a node's number from 0, or one of {', '.join(get_args(Role))}, not {node!r}")
        return node

    @model_validator(mode="after")
    def _has_one_moment(self) -> Fault:
        if sum(moment is not None for moment in (self.at_step, self.within, self.after_s)) != 1:
            raise ValueError("say when: exactly one of at_step, within: [from, to] (parts of the job), after_s")
        if self.within is not None and not 0 <= self.within[0] < self.within[1] <= 1:
            raise ValueError(f"within must be two growing parts of the job between 0 and 1, not {self.within}")
        if (self.for_s is not None) != self.kind.startswith("freeze_"):
            raise ValueError("for_s belongs to freeze_worker and freeze_node, and to nothing else")
        if (self.node == "lost") != (self.kind == "start_node") and isinstance(self.node, str):
            raise ValueError(f"{self.kind} cannot be done to '{self.node}': a lost node can be started, no other")
        return self


class Nodes(_Section):
    """How the job is launched: one torchrun a node."""

    count: PositiveInt = 2
    """Nodes at the start, and at most."""
    ranks: PositiveInt = 1
    """Ranks of a node (--nproc-per-node)."""
    min: PositiveInt = 1
    """Fewest nodes that train (--nnodes=MIN:COUNT)."""
    max_restarts: int = Field(default=10, ge=0)
    """--max-restarts of every node."""
    lease_ttl_s: float = Field(default=3.0, ge=2)
    """Seconds after which a silent node counts as lost."""
    recovery: Literal["restart", "live"] = "restart"
    """restart: a fault restarts the workers from a commit; live: survivors go on in their processes."""


class Scenario(_Section):
    name: str
    """Results lie in runs/<name>."""
    description: str
    """What happens, in one line."""
    config: str
    """The trainer's configuration."""
    set: dict[str, object] = Field(default_factory=dict)
    """Keys of that configuration to change."""
    seed: int | None = Field(default=None, ge=0)
    """Draws the steps; a new one each time, and printed, if not given."""
    nodes: Nodes = Field(default_factory=Nodes)
    faults: tuple[Fault, ...] = ()
    timeout_s: float = Field(default=300, gt=0)
    """Longest time that one of the two runs may take."""


@dataclass(frozen=True, slots=True)
class Due:
    """A fault with its moment settled: a step, or seconds after the fault before it.

    A drawn step has a `safe` range of places in a commit interval of `interval` steps: if the job has run past it
    when the fault is due, the next interval's is waited for.
    """

    kind: Kind
    target: Target
    step: int | None
    after_s: float | None
    interval: int | None = None
    for_s: float | None = None

    @property
    def is_drawn(self) -> bool:
        return self.interval is not None

    def has_come(self, seen_step: int) -> bool:
        """Say whether the job has come to the fault's step."""
        if self.step is None or seen_step < self.step:
            return self.step is None
        return self.interval is None or seen_step % self.interval in _middle(self.interval)


def find(name: str) -> Path:
    """Return the path of a scenario: a file, or the name of one that comes with the package."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    if name not in known:
        raise ScenarioError(f"no scenario '{name}'{_nearest(name, known)}")
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
    problems: list[str] = []
    scenario = _validate(Scenario, tree, problems)
    nodes = _validate(Nodes, tree.get("nodes", {}), [])
    written = tree.get("faults", [])
    faults = [_validate(Fault, fault, []) for fault in written] if isinstance(written, list) else []
    if nodes is not None:
        problems += impossible(nodes, faults)
    if problems or scenario is None:
        raise ScenarioError(*(f"{path}: {problem}" for problem in problems))
    return scenario


def impossible(nodes: Nodes, faults: Sequence[Fault | None]) -> Iterator[str]:
    """Yield every fault that cannot happen: to no such node, to one that is lost already, or in the wrong order."""
    if nodes.min > nodes.count:
        yield f"'nodes.min' is {nodes.min}, but there are {nodes.count} nodes"
    up, until, is_exact = set(range(nodes.count)), 0.0, None not in faults
    for number, fault in enumerate(faults):
        where, is_exact = f"'faults.{number}'", is_exact and fault is not None and isinstance(fault.node, int)
        if fault is None:
            continue
        if fault.within is not None and fault.within[0] < until:
            yield f"{where} may be drawn before the fault above it: begin its within at {until:g} or later"
        until = max(until, fault.within[1] if fault.within else 0.0)
        if isinstance(fault.node, int) and fault.node >= nodes.count:
            yield f"{where} is for node {fault.node}, but there are {nodes.count} (from 0)"
        elif is_exact:
            if (fault.node in up) == (fault.kind == "start_node"):
                yield f"{where}: {fault.kind} on node {fault.node}, which is {'up' if fault.node in up else 'lost'}"
            up = _after(up, fault)
            following = faults[number + 1] if number + 1 < len(faults) else None
            if len(up) < nodes.min and (following is None or following.after_s is None):
                yield f"{where} leaves {len(up)} nodes, fewer than nodes.min, and no node is started after_s"


def _after(up: set[int], fault: Fault) -> set[int]:
    assert isinstance(fault.node, int), "only called for numbers"
    if fault.kind == "start_node":
        return up | {fault.node}
    return up - {fault.node} if fault.kind in ("kill_node", "stop_node") else up


def schedule(scenario: Scenario, seed: int, total_steps: int, commit_every: int) -> list[Due]:
    """Settle every fault's moment; drawn steps come from the seed alone and grow."""
    problems = []
    if any(fault.within for fault in scenario.faults) and commit_every < SMALLEST_INTERVAL:
        problems.append(f"a commit every {commit_every} steps leaves none to lose; {SMALLEST_INTERVAL} are needed")
    rng = random.Random(seed)
    due: list[Due] = []
    for fault in scenario.faults:
        drawn = _draw(rng, fault.within, total_steps, commit_every) if fault.within and not problems else None
        step = drawn or fault.at_step
        due.append(
            Due(fault.kind, fault.node, step, fault.after_s, commit_every if fault.within else None, fault.for_s)
        )
        if step is not None and step >= total_steps:
            problems.append(f"{fault.kind} is due at step {step}, but the job has {total_steps} steps")
    if problems:
        raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in problems))
    return due


def _draw(rng: random.Random, within: tuple[float, float], total_steps: int, commit_every: int) -> int:
    """Draw a step from the middle of a commit interval that begins behind the first commit."""
    lo, hi = (int(part * total_steps) for part in within)
    first, last = max(1, lo // commit_every), max(1, hi // commit_every - 1)
    return rng.randint(first, max(first, last)) * commit_every + rng.choice(_middle(commit_every))


def _middle(interval: int) -> range:
    """Return the places in a commit interval that are well apart from both commits."""
    margin = max(1, interval // 3)
    return range(margin, interval - margin + 1)


def _validate(section: type[Section], tree: object, problems: list[str]) -> Section | None:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(section, item) for item in error.errors()]
        return None


def _explain(section: type[_Section], item: Mapping[str, object]) -> str:
    location = item["loc"]
    assert isinstance(location, tuple), "pydantic's errors say where"
    key = ".".join(str(part) for part in location) or "scenario"
    last = str(location[-1]) if location else ""
    if item["type"] == "extra_forbidden":
        inner: dict[object, type[_Section]] = {"nodes": Nodes, "faults": Fault}
        owner = inner.get(location[0], section) if len(location) > 1 else section
        return f"unknown key '{key}'{_nearest(last, sorted(owner.model_fields))}"
    if item["type"] == "missing":
        return f"'{key}' is missing"
    if item["type"] == "literal_error":
        return f"'{key}': no '{item['input']}'{_nearest(str(item['input']), list(get_args(Kind)))}"
    return f"'{key}': {str(item['msg']).removeprefix('Value error, ')}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(known)}"
