"""A scenario: the job, its nodes, and which faults to inject when. Typed YAML; all mistakes are reported at once.

One file serves every executor: `chaos.scenario.schedule` fixes when its faults come, `chaos.scenario.kinds` defines
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from chaos.errors import ScenarioError
from chaos.scenario.kinds import IN_LIVE_JOBS, IN_PLAIN, KINDS, LOCAL, ON_DISK
from chaos.scenario.networks import NETWORKS
from chaos.scenario.on_slurm import OnSlurm
from elastic_train.config.yaml12 import NOT_YAML
from elastic_train.system.failpoints import POINTS
from elastic_train.system.wording import did_you_mean, nearest

FOLDER = Path(__file__).parent / "shipped"
Role = Literal["leader", "other", "lost", "one", "minority", "majority", "writer", "all"]
Target = int | str
_LOCAL_ONLY = ("network", "s3", "tracker", "freezing_disk", "tls", "own_data", "orders")
"""Fields that only the executor of one machine supports."""
Section = TypeVar("Section", bound=BaseModel)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Point(_Section):
    """The n-th time that a process of the target reaches a failpoint, counted from when all earlier faults are done."""

    name: str
    """One of `elastic_train.system.failpoints.POINTS`."""
    nth: PositiveInt = 1
    """Counted from 1."""
    worker: int | None = Field(default=None, ge=0)
    """Worker of the node in the current world, by rank from 0; any worker by default."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in POINTS:
            raise ValueError(f"no failpoint '{name}'{_hint(name, list(POINTS))}")
        return name


class Fault(_Section):
    """One fault: kind, target and time: seconds, a step, a drawn step, a failpoint, or after the previous fault."""

    kind: str
    """One of `chaos.scenario.kinds`; `elastic-chaos kinds` describes them."""
    node: Target | None = None
    """Number of a node from 0, or its role at that time: leader (rank 0's node), writer (of a commit), other (not the
    leader), one (drawn), minority, majority, all, lost (to be started). Etcd and storage need none."""
    at_s: float | None = Field(default=None, ge=0)
    """Seconds after the job's first step."""
    at_step: PositiveInt | None = None
    """Number of applied steps."""
    within: tuple[float, float] | None = None
    """A step drawn from the seed between these two fractions of the job."""
    after_s: float | None = Field(default=None, ge=0)
    """Seconds after the previous fault."""
    at_point: Point | None = None
    """At a failpoint; later faults do not wait for it."""
    for_s: float | None = Field(default=None, gt=0)
    """Seconds until it is undone: a freeze shorter than a lease may go unnoticed, a longer one is a loss."""
    job: int = Field(default=0, ge=0)
    """Index of the affected job, from 0, if there are several on Slurm (slurm.jobs)."""

    @field_validator("kind")
    @classmethod
    def _is_kind(cls, kind: str) -> str:
        if kind not in KINDS:
            raise ValueError(f"no '{kind}'{_hint(kind, list(KINDS))}")
        return kind

    @field_validator("node")
    @classmethod
    def _is_node(cls, node: Target | None) -> Target | None:
        if node is not None and node not in get_args(Role) and (not isinstance(node, int) or node < 0):
            raise ValueError(f"must be a node's number from 0, or one of {', '.join(get_args(Role))}, not {node!r}")
        return node

    @model_validator(mode="after")
    def _has_one_moment(self) -> Fault:
        moments = (self.at_s, self.at_step, self.within, self.after_s, self.at_point)
        if sum(moment is not None for moment in moments) != 1:
            raise ValueError(
                "say when: exactly one of at_step, within: [from, to] (parts of the job), after_s, at_s, at_point"
            )
        if self.within is not None and not 0 <= self.within[0] < self.within[1] <= 1:
            raise ValueError(f"within must be two growing parts of the job between 0 and 1, not {self.within}")
        return self

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Fault:
        kind = KINDS[self.kind]
        if self.node is None and kind.aim in ("worker", "node") and self.kind != "kill_job":
            raise ValueError(f"'node' is missing: {self.kind} needs one")
        if (self.at_point is not None) != (kind.aim == "point"):
            at_points = ", ".join(name for name, other in KINDS.items() if other.aim == "point")
            raise ValueError(f"at_point belongs to {at_points}, and to nothing else")
        if self.at_point is not None and self.kind in ON_DISK and self.at_point.name != "sync":
            raise ValueError(f"{self.kind} is what an operating system reports: it can be at the point 'sync' only")
        if kind.lasts != "may" and (self.for_s is not None) != (kind.lasts == "must"):
            raise ValueError(
                f"{self.kind} needs for_s" if kind.lasts == "must" else f"{self.kind} is not undone: no for_s"
            )
        if (self.node == "lost") != (self.kind == "start_node") and isinstance(self.node, str):
            raise ValueError(f"{self.kind} cannot be done to '{self.node}': a lost node can be started, no other")
        return self


class Nodes(_Section):
    """Launch settings of the job: one torchrun per node."""

    count: PositiveInt = 2
    """Number of nodes at the start, and at most."""
    ranks: PositiveInt = 1
    """Ranks per node (--nproc-per-node)."""
    min: PositiveInt = 1
    """Fewest nodes that train (--nnodes=MIN:COUNT)."""
    max_restarts: int = Field(default=10, ge=0)
    """--max-restarts of every node."""
    lease_ttl_s: float = Field(default=3.0, ge=2)
    """Seconds after which a silent node counts as lost."""
    recovery: Literal["restart", "live"] = "restart"
    """restart: a fault restarts the workers from a commit; live: survivors continue in their processes."""
    forked: bool = False
    """Fork nodes from a process that has imported the trainer. The default starts programs, each of which imports it
    for seconds of a core; nodes do not differ otherwise."""


class Soak(_Section):
    """Faults drawn from the seed in bursts, each once all earlier ones are undone and the job has recovered."""

    faults: PositiveInt = 500
    """Number of faults after which the job is ended."""
    minutes: float | None = Field(default=None, gt=0)
    """Minutes after which the job is ended, if earlier."""
    burst: PositiveInt = 4
    """Most faults in a burst."""
    kinds: tuple[str, ...] | None = None
    """Kinds to draw from; default: all that this machine can do."""
    shards: bool = False
    """Also draw from the seed which state is sharded, and the number of copies; the run without faults is unsharded.
    `parallel` in `set` or --set takes precedence."""
    most_ranks: PositiveInt | None = None
    """Also draw the ranks per node from the seed, up to this number, instead of `nodes.ranks`."""
    heal_s: float = Field(default=300.0, gt=0)
    """Seconds within which the full world must train again once everything is undone."""

    @field_validator("kinds")
    @classmethod
    def _are_known(cls, kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
        unknown = [kind for kind in kinds or () if kind not in LOCAL]
        if unknown:
            raise ValueError(f"no '{unknown[0]}'{_hint(unknown[0], list(LOCAL))}")
        return kinds


class Scenario(_Section):
    name: str = Field(pattern=r"^[^./][^/]*$")
    """Results go to runs/<name>."""
    description: str
    """Summary in one line."""
    config: str | None = None
    """The trainer's configuration; scenarios without one are for `run --command`."""
    set: dict[str, object] = Field(default_factory=dict)
    """Configuration keys to change."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of drawn steps; by default a new one each time, which is printed."""
    nodes: Nodes = Field(default_factory=Nodes)
    executor: Literal["local", "slurm"] = "local"
    """local: each node is a torchrun on this machine. slurm: the nodes are machines in namespaces of this one, under a
    real Slurm (needs root, and Slurm's programs); `slurm` selects the batch script."""
    slurm: OnSlurm = Field(default_factory=OnSlurm)
    faults: tuple[Fault, ...] = ()
    soak: Soak | None = None
    """Draw faults from the seed instead of listing `faults`; the job continues until they are over."""
    etcd_members: Literal[1, 3] = 1
    """Members of the job's etcd: one of three can be lost."""
    s3: bool = False
    """Publish commits to an S3 server on this machine, which can be disturbed, instead of the run's folder."""
    tracker: bool = False
    """Log to an MLflow server on this machine, with its own database, which can be taken down."""
    freezing_disk: bool = False
    """Put commit files and metrics on a separate file system that can be frozen (needs root)."""
    tls: bool = False
    """Run etcd with TLS and client certificates, which can be renewed under the job."""
    network: str | None = None
    """Put the last node behind a link of `chaos.scenario.networks` (needs root)."""
    orders: bool = False
    """True if the task is one of `chaos.tasks`, which do to themselves what is impossible from outside."""
    own_data: bool = False
    """Train on a copy of the training set whose row groups can be damaged; unreadable ones become holes."""
    rows: PositiveInt | None = None
    """Rows of a synthetic training set, made if the configured one does not exist."""
    reference: bool = True
    """Also run the job without faults and compare; --no-reference skips this."""
    nonfinite: bool = False
    """Accept non-finite final weights; otherwise they are a finding."""
    timeout_s: float = Field(default=300, gt=0)
    """Most seconds that one of the two runs may take."""
    patience_s: float = Field(default=180, gt=0)
    """Most seconds from a fault's own end until all its consequences are over and the job trains again."""

    @field_validator("network")
    @classmethod
    def _is_network(cls, network: str | None) -> str | None:
        if network is not None and network not in NETWORKS:
            raise ValueError(f"no network '{network}'{_hint(network, list(NETWORKS))}")
        return network

    @model_validator(mode="after")
    def _executor_does_it(self) -> Scenario:
        is_slurm = self.executor == "slurm"
        known = self.slurm.kinds()
        wrong = [fault.kind for fault in self.faults if is_slurm and fault.kind not in known]
        if wrong:
            raise ValueError(f"{wrong[0]} is not done to such jobs on Slurm; there are {', '.join(known)}")
        if not is_slurm and self.slurm != OnSlurm():
            raise ValueError("slurm: belongs to executor: slurm")
        if problems := list(self.slurm.problems(self.nodes.count)):
            raise ValueError(problems[0])
        brought = [name for name in _LOCAL_ONLY if getattr(self, name)]
        if is_slurm and (brought or self.soak is not None or self.nodes.recovery != "live"):
            why = f"no {', '.join(brought)}" if brought else "no soak, and nodes.recovery: live"
            raise ValueError(f"a scenario on Slurm has {why}")
        return self

    @model_validator(mode="after")
    def _faults_have_a_job(self) -> Scenario:
        for fault in self.faults:
            if fault.job >= self.slurm.jobs:
                raise ValueError(f"{fault.kind} is for job {fault.job}, and slurm.jobs is {self.slurm.jobs} (from 0)")
            if fault.kind == "kill_node" and self.slurm.is_array and fault.for_s is None:
                raise ValueError("kill_node needs for_s in an array: its job waits for the node")
        return self

    @model_validator(mode="after")
    def _soak_has_commits_at_hand(self) -> Scenario:
        if self.soak is not None and self.s3:
            raise ValueError("a soak damages and counts commits in the run's folder: leave out s3, or list faults")
        return self


def find(name: str) -> Path:
    """Return the path of a scenario: a file, or the name of a shipped one."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    if name not in known:
        raise ScenarioError(f"no scenario '{name}'{_hint(name, known)}")
    return FOLDER / f"{name}.yaml"


def load(path: Path) -> Scenario:
    """Read and check a scenario; raise ScenarioError with every problem found."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except NOT_YAML as error:
        raise ScenarioError(f"{path}: is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ScenarioError(f"{path}: must be a mapping with name, description, config and faults")
    problems: list[str] = []
    scenario = _validate(Scenario, tree, problems)
    nodes = _validate(Nodes, tree.get("nodes", {}), [])
    written = tree.get("faults", [])
    faults = [_validate(Fault, fault, []) for fault in written] if isinstance(written, list) else []
    if nodes is not None:
        slurm = _validate(OnSlurm, tree.get("slurm", {}), [])
        problems += impossible(nodes, faults, None if slurm is None else slurm.at_first)
    problems += [
        f"'faults.{number}': {fault.kind} needs {needs}: true"
        for number, fault in enumerate(faults)
        if fault is not None and (needs := KINDS[fault.kind].needs) and not tree.get(needs)
    ]
    problems += [
        f"'faults.{number}': {fault.kind} is done to an etcd in plain text: leave out tls, or this fault"
        for number, fault in enumerate(faults)
        if fault is not None and fault.kind in IN_PLAIN and tree.get("tls")
    ]
    if scenario is not None and scenario.soak is not None:
        problems += _undrawable(scenario, scenario.soak)
    if problems or scenario is None:
        raise ScenarioError(*(f"{path}: {problem}" for problem in problems))
    return scenario


def _undrawable(scenario: Scenario, soak: Soak) -> Iterator[str]:
    """Yield every kind that a soak names but cannot draw."""
    for kind in soak.kinds or LOCAL if scenario.tls else ():
        if kind in IN_PLAIN:
            yield f"'soak.kinds': {kind} is done to an etcd in plain text: leave out tls, or this kind"
    for kind in soak.kinds or ():
        needs = KINDS[kind].needs
        if needs == "s3":
            yield f"'soak.kinds': {kind} needs an S3, and a soak has none: leave it out"
        elif needs is not None and not getattr(scenario, needs):
            yield f"'soak.kinds': {kind} needs {needs}: true"
    if set(soak.kinds or ()) == {"start_node"}:
        yield "'soak.kinds': start_node only follows a fault that ends a node: name such a kind, too"


def bounded(scenario: Scenario, faults: int | None, minutes: float | None) -> Scenario:
    """Return a soak that ends after this many faults or minutes; raise ScenarioError if it is not a soak."""
    if faults is None and minutes is None:
        return scenario
    if scenario.soak is None:
        raise ScenarioError(f"{scenario.name} is not a soak: leave out --faults and --minutes")
    asked = {key: value for key, value in (("faults", faults), ("minutes", minutes)) if value is not None}
    try:
        soak = Soak.model_validate(scenario.soak.model_dump() | asked)
    except ValidationError as error:
        wrong = [(item["loc"][0], item["input"], item["msg"]) for item in error.errors()]
        raise ScenarioError(*(f"--{key} {value}: {message}" for key, value, message in wrong)) from error
    return scenario.model_copy(update={"soak": soak})


def impossible(nodes: Nodes, faults: Sequence[Fault | None], at_first: int | None = None) -> Iterator[str]:
    """Yield every impossible fault: on an unknown node, on one that is already lost, or in the wrong order.

    `at_first` is the number of nodes at the start, if not all.
    """
    if nodes.min > nodes.count:
        yield f"'nodes.min' is {nodes.min}, but there are {nodes.count} nodes"
    up, until, is_exact = set(range(at_first or nodes.count)), 0.0, None not in faults
    for number, fault in enumerate(faults):
        where = f"'faults.{number}'"
        is_beyond = fault is not None and isinstance(fault.node, int) and fault.node >= nodes.count
        if fault is not None and is_beyond:
            yield f"{where} is for node {fault.node}, but there are {nodes.count} (from 0)"
        if fault is not None and fault.kind in IN_LIVE_JOBS and nodes.recovery != "live":
            yield f"{where}: {fault.kind} needs recovery: live: else no machine is examined before it joins"
        if fault is not None and KINDS[fault.kind].aim in ("job", "etcd", "storage", "tracker", "data", "point"):
            continue
        is_exact = is_exact and fault is not None and isinstance(fault.node, int)
        if fault is None:
            continue
        if fault.within is not None and fault.within[0] < until:
            yield f"{where} may be drawn before the fault above it: begin its within at {until:g} or later"
        until = max(until, fault.within[1] if fault.within else 0.0)
        if is_exact and not is_beyond:
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
    if fault.for_s is not None:
        return up
    return up - {fault.node} if fault.kind in ("kill_node", "stop_node") else up


def _validate(section: type[Section], tree: object, problems: list[str]) -> Section | None:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(section, item) for item in error.errors()]
        return None


def _explain(section: type[BaseModel], item: Mapping[str, object]) -> str:
    location = item["loc"]
    assert isinstance(location, tuple), "pydantic's errors say where"
    key = ".".join(str(part) for part in location) or "scenario"
    last = str(location[-1]) if location else ""
    if item["type"] == "extra_forbidden":
        inner: dict[object, type[BaseModel]] = {"nodes": Nodes, "faults": Fault, "soak": Soak, "slurm": OnSlurm}
        owner = inner.get(location[0], section) if len(location) > 1 else section
        return f"unknown key '{key}'{_hint(last, sorted(owner.model_fields))}"
    if item["type"] == "missing":
        return f"'{key}' is missing"
    return f"'{key}': {str(item['msg']).removeprefix('Value error, ')}"


def _hint(name: str, known: list[str]) -> str:
    return did_you_mean(nearest(name, known), f"; there are: {', '.join(known)}")
