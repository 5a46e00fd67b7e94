"""The facts of a run, computed once for terminal, scripts, page and comparison.

Everything is read from the run's folder, except the proof of coverage, which is read from its commits, wherever they
are. Unknown values are None, and `notes` explains in sentences what is missing and why. Reads no clock: the same files
give the same report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.errors import ConfigError, DataError, ElasticTrainError
from elastic_train.insight.phases import PHASES, Utilisation, read_utilisation
from elastic_train.runs.goodput import Change, changes, goodput, time_spent
from elastic_train.runs.memory import RanOut, WorldMemory, memory_of, ran_out_in
from elastic_train.runs.story import Phases, Story, read_story
from elastic_train.system.wording import counted, first_line
from elastic_train.tracking.metric_log import Settled, Values, read_metrics, recorded_end
from elastic_train.tracking.mlflow_run import GIT_TAG, TORCH_TAG, VERSION_TAG, flatten
from elastic_train.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from elastic_train.data.dataset.manifest import Manifest

Curve = Sequence[tuple[int, float]]
_LAYOUT = ("batch.global_batch", "batch.micro_batch", "parallel.", "reduction", "device", "dtype", "compile", "threads")
MOST_RAN_OUT = 3
"""Number of out-of-memory ranks to name in the notes."""
_TAGS = {VERSION_TAG: "elastic-train", TORCH_TAG: "torch", GIT_TAG: "git"}


@dataclass(frozen=True, slots=True)
class Coverage:
    """The proof, from the run's commits, of which samples it used: the sentences of `elastic-train audit`."""

    proven: Sequence[str] = ()
    unproven: Sequence[str] = ()
    wrong: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run; `curves` are by metric, over kept steps."""

    name: str
    state: str
    story: Story = field(repr=False)
    config: Mapping[str, str] = field(repr=False)
    result: Mapping[str, object] = field(repr=False)
    curves: Mapping[str, Curve] = field(repr=False)
    tags: Mapping[str, str] = field(repr=False)
    spent: Mapping[str, float]
    changes: Sequence[Change]
    coverage: Coverage
    notes: Sequence[str]
    memory: WorldMemory | None = field(repr=False, default=None)
    ran_out: Sequence[RanOut] = ()
    utilisation: Utilisation | None = None
    planned: Mapping[str, float] = field(default_factory=dict)
    """Planned bytes of a rank's memory by component; empty without a plan."""

    @property
    def step(self) -> int:
        """The furthest kept step, from the history, the result or the metrics."""
        ended = self.result.get("step")
        furthest = max((curve[-1][0] for curve in self.curves.values() if curve), default=0)
        return max(self.story.step, ended if isinstance(ended, int) else 0, 0 if self.story.worlds else furthest)

    @property
    def seconds(self) -> float:
        return sum(self.spent.values())

    @property
    def goodput(self) -> float | None:
        return goodput(dict(self.spent))

    @property
    def faults(self) -> list[Change]:
        return [change for change in self.changes if change.is_fault]

    @property
    def weights_sha256(self) -> str | None:
        value = self.result.get("weights_sha256")
        return value if isinstance(value, str) and value else None

    @property
    def samples_per_s(self) -> float | None:
        """Median over the kept steps; None if no step has a duration."""
        rates = [step.num_samples / step.seconds for step in self.story.kept if step.seconds > 0]
        return statistics.median(rates) if rates else None

    @property
    def samples_per_s_in_all(self) -> float | None:
        """Kept samples divided by the run's total time."""
        return sum(step.num_samples for step in self.story.kept) / self.seconds if self.seconds > 0 else None

    @property
    def mfu(self) -> float | None:
        """Median over the kept steps; None if the FLOPs per sample or the device's peak are unknown."""
        rate = self._rate_of_a_rank
        return None if self.utilisation is None or rate is None else self.utilisation.mfu(rate, 1)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: like `mfu`, but with recomputed operations."""
        rate = self._rate_of_a_rank
        return None if self.utilisation is None or rate is None else self.utilisation.hfu(rate, 1)

    @property
    def _rate_of_a_rank(self) -> float | None:
        """Median samples/s per rank over the kept steps."""
        worlds = [(world.size, step) for world in self.story.worlds for step in world.kept if step.seconds > 0]
        rates = [step.num_samples / step.seconds / size for size, step in worlds if size]
        return statistics.median(rates) if rates else None

    @property
    def step_s(self) -> float | None:
        return statistics.median(step.seconds for step in self.story.kept) if self.story.kept else None

    def final_metrics(self) -> dict[str, float]:
        return {name: curve[-1][1] for name, curve in sorted(self.curves.items()) if curve}

    def phases_s(self) -> dict[str, float]:
        """Return the mean seconds per step of each phase, and of overlapped exchanges, over all ranks and worlds."""
        return mean_phases([row for world in self.story.worlds for row in world.phases])

    def layout(self) -> dict[str, str]:
        """Return the run's layout over devices, and the sizes of its worlds."""
        keys = {name: value for name, value in self.config.items() if name.startswith(_LAYOUT)}
        sizes = [world.size for world in self.story.worlds]
        worlds = {"worlds": f"{len(sizes)}, of {min(sizes)} to {max(sizes)} ranks"} if sizes else {}
        return {**keys, **worlds}

    def environment(self) -> dict[str, str]:
        tags = {shown: self.tags[tag] for tag, shown in _TAGS.items() if tag in self.tags}
        hosts = sorted({host for world in self.story.worlds for host in world.hosts.values()})
        shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
        return {**tags, "hosts": shown} if hosts else tags

    def hosts_in(self, term: int) -> Mapping[int, str]:
        return next((world.hosts for world in self.story.worlds if world.term == term), {})

    def as_json(self) -> dict[str, object]:
        """Return everything except the curves, which are in metrics/*.jsonl, as JSON-compatible values."""
        saves = [saved for world in self.story.worlds for saved in world.saves]
        return {
            "name": self.name,
            "state": self.state,
            "step": self.step,
            "began": self.story.began or None,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "spent_s": dict(self.spent),
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "samples_per_s_in_all": self.samples_per_s_in_all,
            "steps_given_up": sum(len(world.given_up) for world in self.story.worlds),
            "changes": [{**asdict(change), "is_fault": change.is_fault} for change in self.changes],
            "worlds": [
                {"term": w.term, "size": w.size, "cause": w.cause, "lo": w.lo, "hi": w.hi, "cut": w.cut}
                for w in self.story.worlds
            ],
            "phases_s": self.phases_s(),
            "memory": self.memory.as_json(self.hosts_in(self.memory.term)) if self.memory else None,
            "planned_memory": dict(self.planned) or None,
            "ran_out_of_memory": [asdict(one) for one in self.ran_out],
            "events": [asdict(event) for world in self.story.worlds for event in world.events],
            "saves": {
                "count": len(saves),
                "seconds": statistics.median(saved.seconds for saved in saves) if saves else None,
                "stall_s": statistics.median(saved.stall_s for saved in saves) if saves else None,
                "most_stall_s": max((saved.stall_s for saved in saves), default=None),
                "failed": self.result.get("num_failed_saves"),
                "skipped": self.result.get("num_skipped_saves"),
            },
            "metrics": {name: finite(value) for name, value in self.final_metrics().items()},
            "coverage": asdict(self.coverage),
            "layout": self.layout(),
            "environment": self.environment(),
            "weights_sha256": self.weights_sha256,
            "notes": list(self.notes),
        }


def reports_on(
    runs: Iterable[str], *, with_coverage: bool = True, planned: Mapping[str, float] | None = None
) -> list[RunReport]:
    """Read each run once; raise ConfigError with the problems of all that are none."""
    reports, wrong = [], list[str]()
    for run in dict.fromkeys(runs):
        try:
            reports.append(report_on(run, with_coverage=with_coverage, planned=planned))
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(*wrong)
    return reports


def report_on(run: str, *, with_coverage: bool = True, planned: Mapping[str, float] | None = None) -> RunReport:
    """Read a run; raises ConfigError if it is not one. `with_coverage` reads its commits, which imports torch."""
    story = read_story(run)
    folder = RunFolder(story.folder)
    notes = list[str]()
    config = _or_none(folder.config, notes) or {}
    result = _or_none(folder.result, notes) or {}
    curves, tags = _metrics(story.folder)
    spent = time_spent(story) if story.worlds else {}
    coverage = _coverage(run, notes) if with_coverage else Coverage()
    ran_out = ran_out_in(story.folder)
    notes += map(str, ran_out[-MOST_RAN_OUT:])
    return RunReport(
        name=run,
        state=_state(story, result),
        story=story,
        config=flatten(config),
        result=result,
        curves=curves or _losses(story),
        tags=tags,
        spent=spent,
        changes=changes(story),
        coverage=coverage,
        notes=[*notes, *_missing(story, curves)],
        memory=memory_of(story.folder),
        ran_out=ran_out,
        utilisation=read_utilisation(story.folder),
        planned=planned or {},
    )


def mean_phases(windows: Sequence[Phases]) -> dict[str, float]:
    """Return the mean seconds per step of each phase, and of overlapped exchanges, over windows of ranks' rows."""
    num = sum(window.steps for window in windows)
    names = (*PHASES, "hidden")
    sums = {
        name: sum(sum(row[place] for row in window.rows) / len(window.rows) for window in windows)
        for place, name in enumerate(names)
    }
    return {name: value / num for name, value in sums.items()} if num else {}


def finite(value: float | None) -> float | str | None:
    """Return a JSON-compatible value; non-finite numbers become text."""
    return str(value) if value is not None and value - value != 0 else value


def _state(story: Story, result: Mapping[str, object]) -> str:
    status = result.get("status")
    if status == "done":
        return "done"
    end = recorded_end(story.folder)
    if end is not None and end.status == "FAILED":
        return "failed"
    last = story.worlds[-1].status if story.worlds else None
    if last is not None:
        return last
    return "not ended: it is running, or was killed" if story.worlds or end is None else str(end.status).lower()


def _missing(story: Story, curves: Mapping[str, Curve]) -> list[str]:
    notes = []
    if not story.worlds:
        notes.append(
            "there is no history (history/ is empty or gone), so nothing is known of time, faults, phases and saves"
            + ("; curves are from metrics/" if curves else "; and there are no metrics: no step was applied yet")
        )
    if story.num_pruned:
        notes.append(
            f"the histories of terms up to {story.num_pruned} are deleted, and with them "
            f"{story.pruned_s:.0f} s of training: times begin after those"
        )
    holes = sum(
        after.step - before.step - 1
        for world in story.worlds
        for before, after in zip(world.steps, world.steps[1:], strict=False)
    )
    if holes:
        notes.append(f"{counted(holes, 'step')} have no line any more in the histories, whose size is limited")
    if story.worlds and not any(world.phases for world in story.worlds):
        notes.append("no phases of ranks: the run ended before the first were written, or is of an older version")
    return notes


def _coverage(run: str, notes: list[str]) -> Coverage:
    from elastic_train.checkpoint.audit.coverage_proof import audit  # imports torch, to read commits
    from elastic_train.checkpoint.commits.lookup import open_run

    try:
        found = audit(open_run(run), manifests_of(run))
    except ElasticTrainError as error:
        notes.append(f"coverage is not proven: {first_line(error)}")
        return Coverage()
    return Coverage(found.proven, found.unproven, found.wrong)


def _metrics(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    curves, tags = dict[str, list[tuple[int, float]]](), dict[str, str]()
    for line in read_metrics(folder):
        if isinstance(line, Settled):
            tags |= line.tags
        elif isinstance(line, Values):
            for name, value in line.by_name.items():
                curves.setdefault(name, []).append((line.step, value))
    return curves, tags


def _losses(story: Story) -> dict[str, Curve]:
    """Return the losses from the histories, for runs without metrics."""
    losses = [(step.step, step.loss) for step in story.kept if step.loss is not None]
    return {"train/loss": losses} if losses else {}


def _or_none(read: Callable[[], Mapping[str, object] | None], notes: list[str]) -> Mapping[str, object] | None:
    try:
        return read()
    except ElasticTrainError as error:
        notes.append(first_line(error))
        return None


def manifests_of(run: str) -> list[Manifest]:
    """Return the manifests of the training data in a run's configuration; empty if they cannot be read here."""
    from elastic_train.data.dataset.manifest import load_manifest

    try:
        return [load_manifest(url) for url in RunFolder(Path(run)).training_sets()]
    except (ConfigError, DataError):
        return []
