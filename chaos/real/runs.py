"""Run a scenario's job once, or a soak: the job with endless faults, then the same number of steps without any.

Shows progress, and leaves histories and commits in the run's folder for the judge.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import fsspec
from rich.console import Console

from chaos.errors import RunError, ScenarioError
from chaos.judge.evidence.copies import in_words
from chaos.judge.evidence.run_files import MANIFEST, collect, copy_of_manifest, part, record_files, whole
from chaos.judge.verdict import (
    FAULTED,
    REFERENCE,
    REPORT,
    VERDICT,
    Verdict,
    examine,
)
from chaos.real.causes import record_causes
from chaos.real.forked_node.begin import launch
from chaos.real.history_tail import Followed
from chaos.real.job import Job
from chaos.real.slurm.run import BESIDE, folder_beside, run_on_slurm
from chaos.scenario.kinds import CABLED, KINDS, LOCAL
from chaos.scenario.model import Scenario
from chaos.scenario.networks import NETWORKS
from chaos.scenario.schedule import Due
from chaos.scenario.soak import Drawn, kinds_of
from chaos.services.surroundings import FREEZING, WAYS, Surroundings, surroundings
from elastic_train.config.schema import Config
from elastic_train.config.sources import as_argument
from elastic_train.core.mixture import RunOrder
from elastic_train.core.order import Order
from elastic_train.data.corpora.synthetic import synthesise
from elastic_train.data.dataset import training_sources
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.dataset.training_sources import join, load_sources
from elastic_train.system.wording import counted
from elastic_train.tracking.mlflow_sync import sync
from elastic_train.tracking.progress import Progress, ResumeBanner, Status
from elastic_train.tracking.run_folder import RunFolder

Say = Callable[[str], None]
_OF_A_RUN = {"history", "result.json", "manifest.json", "failpoints", "holes", "ids", FAULTED, REFERENCE}
"""Names of which a run's folder has at least one, from its beginning."""


def undoable(scenario: Scenario) -> Iterator[str]:
    """Yield every fault that real runs on one machine cannot do: simulator-only ones, or those that need a missing
    cable.

    This depends on the file alone, before anything is started or deleted; `chaos.services.surroundings` finds what the
    machine lacks.
    """
    last = scenario.nodes.count - 1
    for number, fault in enumerate(scenario.faults):
        where = f"'faults.{number}'"
        if scenario.executor == "local" and fault.kind not in LOCAL:
            elsewhere = "Slurm: `executor: slurm` does it"
            if not KINDS[fault.kind].slurm:
                elsewhere = "the simulator alone: `elastic-chaos sim` does it"
            yield f"{where}: {fault.kind} is for {elsewhere}"
        if fault.kind in CABLED and fault.node != last:
            have = f"here only the last node, {last}, has its own cable: say node: {last}"
            yield f"{where}: {fault.kind} on node {fault.node}: {have}"


def run_once(
    scenario: Scenario,
    config: Config,
    folder: Path,
    due: Sequence[Due],
    seed: int,
    changes: list[str],
    total_steps: int,
    replay: str,
    is_quiet: bool,
) -> None:
    """Run the scenario's job with these faults to its end; without any, on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [fault.kind for fault in due]
    if scenario.executor == "slurm":
        if due:
            for each in [folder, folder_beside(folder)][: scenario.slurm.jobs]:
                each.mkdir(parents=True, exist_ok=True)
                copy_manifests(config, each)
            say = Console(markup=False, quiet=is_quiet).print
            own = own_of_second(config)
            run_on_slurm(scenario, folder, due, seed, changes, replay, say, beside=own)
            for each in [folder, folder_beside(folder)][: scenario.slurm.jobs]:
                record_causes(each)
            return
        scenario = scenario.model_copy(update={"nodes": scenario.nodes.model_copy(update={"count": 1, "min": 1})})
    with _around(scenario, config, folder, kinds) as around:
        _tell_network(scenario, around, Console(markup=False, soft_wrap=True, quiet=is_quiet).print)
        if absent := [f"{kind} cannot be done here: {why}" for kind, why in around.missing.items() if kind in kinds]:
            raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in absent))
        _run(scenario, config, folder, due, seed, changes, total_steps, replay, is_quiet, around)
    if due:
        record_causes(folder)


def _tell_network(scenario: Scenario, around: Surroundings, say: Callable[[str], None]) -> None:
    """Say what was asked of the network, and what was measured."""
    if scenario.network is not None:
        say(f"network {scenario.network}: {NETWORKS[scenario.network]}; measured: {around.link}")


def own_of_second(config: Config) -> list[str]:
    """Return the arguments that give the second of two jobs on one Slurm weights of its own."""
    return [f"--run.seed={config.run.seed + 1}"]


def run_soak(
    scenario: Scenario,
    seed: int,
    folder: Path,
    changes: list[str],
    config: Config,
    replay: str,
    is_quiet: bool,
    say: Say,
) -> Verdict:
    """Run a soak and the same number of steps without faults; judge it, even if it got stuck."""
    assert scenario.soak is not None, "only called for a soak"
    clear(folder)
    faulted = folder / FAULTED
    faulted.mkdir(parents=True)
    kinds, per_epoch = kinds_of(scenario, {}), steps_per_epoch(config)
    with _around(scenario, config, faulted, kinds) as around:
        _tell_network(scenario, around, say)
        drawn = Drawn(scenario, seed, around.missing)
        for kind, why in around.missing.items():
            say(f"left out: {kind}: {why}")
        num, nodes = f"{scenario.soak.faults} faults of {len(drawn.kinds)} kinds", scenario.nodes
        where = f"{nodes.count} nodes of {counted(nodes.ranks, 'rank')}, {in_words(config.parallel.model_dump())}"
        say(f"soak, seed {seed}: {num}, {where}, in {faulted}")
        try:
            landing = land(lambda step: -(-(step + 1) // per_epoch) * per_epoch)
            _run(scenario, config, faulted, drawn, seed, changes, None, replay, is_quiet, around, landing)
        except RunError as error:
            say(f"STUCK: {error}")
    record_causes(faulted)
    verdict = examine(folder)
    if verdict.run.result is None or verdict.run.result["status"] != "done":
        return verdict
    say(f"training the same {verdict.run.result['step']} steps without faults, in {folder / REFERENCE}")
    one = scenario.nodes.model_copy(update={"count": 1, "ranks": config.parallel.cell.size})
    plain = scenario.model_copy(update={"nodes": one, "soak": None, "tracker": False, "network": None})
    steps = f"--max_steps={verdict.run.result['step']}"
    quick = [
        *changes,
        *unslowed(config, spoilt_lanes(config, folder)),
        "--parallel.shards=none",
        "--parallel.offload=none",
        steps,
    ]  # unsharded, so that sharding must not show in its bits
    copy_holes(folder)
    run_once(plain, config, folder / REFERENCE, [], seed, quick, int(str(verdict.run.result["step"])), replay, is_quiet)
    return examine(folder)


def unslowed(config: Config, spoilt: Sequence[tuple[int, int]] = ()) -> list[str]:
    """Return the arguments that remove a task's delays, and spoil the losses of these lanes.

    Other parameters are unchanged.
    """
    params = config.task.params
    changed = ({"lane_ms": 0} if "lane_ms" in params else {}) | ({"spoilt": [*map(list, spoilt)]} if spoilt else {})
    if not changed:
        return []
    return [as_argument("task.params", {**params, **changed})]


def spoilt_lanes(config: Config, folder: Path) -> list[tuple[int, int]]:
    """Return one (sample, epoch) of each lane because of which the run with faults skipped an update."""
    result = json.loads((folder / FAULTED / "result.json").read_text())
    left_out = {step + 1 for lo, hi in result.get("skipped_steps", ()) for step in range(lo, hi)}
    spoilt, order = dict[int, tuple[int, int]](), order_of_job(config) if left_out else None
    for line in collect(folder / FAULTED).of("nonfinite") if left_out else ():
        samples = [ranges[0][0] for ranges in part(line, "samples").values() if isinstance(ranges, list) and ranges]
        if line["step"] in left_out and samples and order is not None:
            step = whole(line, "step")
            spoilt[step] = epoch_of(order, step, samples[0], config.batch.micro_batch), samples[0]
    return [spoilt[step] for step in sorted(spoilt)]


def clear(folder: Path) -> None:
    """Delete what an earlier run has left; raise ScenarioError if anything else is in the way."""
    names = (FAULTED, REFERENCE, BESIDE)
    for path in (folder / name for name in names if (folder / name).exists()):
        held = {each.name for each in path.iterdir()}
        if path.is_symlink() or (held and held.isdisjoint(_OF_A_RUN)):
            raise ScenarioError(f"{path}: is no run's folder, and would be deleted; name another --out")
    for name in (VERDICT, REPORT):
        (folder / name).unlink(missing_ok=True)
    for name in names:
        ways = folder / f"{name}{WAYS}"
        for way in ways.glob("*"):  # left, like disks, by a run that was killed
            subprocess.run(["umount", "-l", str(way)], check=False, capture_output=True)
            way.rmdir()
        if ways.exists():
            ways.rmdir()
        for disk in (folder / name / mounted for mounted in FREEZING):
            if os.path.ismount(disk):  # left, maybe frozen, by a run that was killed
                subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=False, capture_output=True)
                subprocess.run(["umount", "-l", str(disk)], check=True)
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def make_data(scenario: Scenario, config: Config, say: Say) -> None:
    """Make the scenario's synthetic training set, unless it exists."""
    if scenario.rows is None:
        return
    if config.data.train is None:
        raise ScenarioError("rows: makes data.train up, and the configuration has data.mixture: make its sources first")
    train = Path(config.data.train)
    if not (train / "manifest.json").exists():
        say(f"making up {scenario.rows} rows in {train}")
        synthesise(str(train), scenario.rows, seed=1)


def order_of_job(config: Config) -> RunOrder:
    sources = load_sources(config.data, config.batch.num_lanes)
    return training_sources.order_of(
        config, join(sources) if sources else load_manifest(config.data.sources[0]), sources
    )


def count_steps(config: Config) -> int:
    """Return how many steps the configured job takes."""
    return training_sources.count_steps(config, order_of_job(config))


def steps_per_epoch(config: Config) -> int:
    """Return the steps per epoch; 1 for a mixture, which may end anywhere, as its sources' epochs differ."""
    order = order_of_job(config)
    return order.num_steps(config.batch.micro_batch) if isinstance(order, Order) else 1


def epoch_of(order: RunOrder, step: int, sample: int, micro_batch: int) -> int:
    """Return the epoch of a sample in a step (counted from 1): the job's, or in a mixture its source's."""
    cursor = order.cursor_at(step - 1, micro_batch)
    for lane in range(order.num_lanes):
        found = order.samples(cursor, lane, micro_batch)
        if not isinstance(found.epochs, int) and (found.ids == sample).any():
            return int(found.epochs[found.ids == sample][0])
    return cursor.epoch


def copy_manifests(config: Config, folder: Path) -> None:
    """Copy the training set's manifests to the evidence: the judge counts rows by them, not by the run's claims."""
    for number, source in enumerate(config.data.sources):
        with fsspec.open(f"{source.rstrip('/')}/{MANIFEST}", "rb") as file:
            (folder / copy_of_manifest(number)).write_bytes(file.read())


def copy_holes(folder: Path) -> None:
    """Give the run without faults the holes of the other one, with the steps from which they apply."""
    result = json.loads((folder / FAULTED / "result.json").read_text())
    if result.get("holes"):
        (folder / REFERENCE / "holes").mkdir(parents=True)
        (folder / REFERENCE / "holes" / "known.json").write_text(json.dumps(result["holes"]))


def _around(
    scenario: Scenario, config: Config, folder: Path, kinds: Sequence[str]
) -> AbstractContextManager[Surroundings]:
    if scenario.own_data and config.data.train is None:
        raise ScenarioError("own_data: damages a copy of data.train, and the configuration has data.mixture")
    return surroundings(folder, f"{scenario.name}-{folder.name}", kinds, scenario, config.data.train)


def _run(
    scenario: Scenario,
    config: Config,
    folder: Path,
    due: Iterable[Due] | Drawn,
    seed: int,
    changes: list[str],
    total_steps: int | None,
    replay: str,
    is_quiet: bool,
    around: Surroundings,
    landing: Callable[[Job], None] | None = None,
) -> None:
    copy_manifests(config, folder)
    progress = Progress(Console(markup=False, soft_wrap=True, quiet=is_quiet))
    own = ["--run.dir", str(folder), "--run.name", around.run_id, *around.settings]
    nodes = launch(scenario, "", folder, [*changes, *own], around.run_id, around)
    look = _shown(progress, total_steps)
    job = Job(folder, nodes, scenario, (), seed, look, progress.event, replay, around, landing)
    job.cell_size, job.stage_size = config.parallel.cell.size, config.parallel.cell.stage_size
    job.faults = due(lambda: job.num_faults) if isinstance(due, Drawn) else due
    try:
        job.run()
        if around.tracker is None:
            note_tracked(folder)
        else:
            progress.event(str(sync(folder)))  # an outage may have outlived the job
            note_tracked(folder, around.tracker.database_uri)
    finally:
        progress.close()


def _shown(progress: Progress, total_steps: int | None) -> Callable[[Followed], None]:
    """Return a function that shows a job's progress; an endless job shows its steps so far as the total."""
    shown = [0]

    def look(followed: Followed) -> None:
        if followed.term != shown[0] and followed.world:
            progress.event(f"term {followed.term}: {followed.world} ranks")
            shown[0] = followed.term
        if followed.resumed is not None:
            progress.banner(ResumeBanner(**followed.resumed))  # type: ignore[arg-type]
            followed.resumed = None
        if followed.step:
            progress.update(
                Status(
                    step=followed.step,
                    total_steps=total_steps or followed.step,
                    loss=followed.loss,
                    samples_per_s=followed.samples_per_s,
                    world=followed.world,
                    last_commit_step=followed.commit,
                    epochs=followed.epoch or 0,
                    total_epochs=None,
                )
            )

    return look


def land(last_step: Callable[[int], int]) -> Callable[[Job], None]:
    """Return the function that ends a soak; `last_step` returns the end of the epoch of a step."""

    def bring_down(job: Job) -> None:
        job.await_healed()
        for node in range(len(job.nodes)):
            job.inject(Due("stop_node", node, None, 0.0))
        while any(node.is_up for node in job.nodes):
            job.look("all nodes' leaving")
            job.check_progress("all nodes' leaving")
        until = last_step(newest_commit(job.folder))
        job.on_event(f"landing: the job ends at step {until}")
        job.record("horizon", steps=until)
        for each in job.nodes:
            each.command = [*each.command, "--max_steps", str(until)]
        for node in range(len(job.nodes)):
            job.inject(Due("start_node", node, None, 0.0))

    return bring_down


def newest_commit(folder: Path) -> int:
    """Return the step of the newest commit; 0 if there is none."""
    records = record_files(folder)
    return int(records[-1].stem.rpartition("-")[2]) if records else 0


def note_tracked(folder: Path, database_uri: str | None = None) -> None:
    """Write {metric: [[step, value], …]} of the run in MLflow; nothing if it has none, or cannot be reached.

    Read the server's own database, if available, instead of the server.
    """
    run = RunFolder(folder)
    uri, link = run.setting("tracking", "mlflow_uri"), run.link()
    if uri is None or link is None or link.run_id is None:
        return
    from mlflow import MlflowClient  # takes seconds to import; few commands need it
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=database_uri or uri)
    try:
        names = client.get_run(link.run_id).data.metrics
        held = {
            name: [[metric.step, metric.value] for metric in client.get_metric_history(link.run_id, name)]
            for name in names
        }
    except MlflowException:
        return  # the judge reports the missing data
    (folder / "tracked.json").write_text(json.dumps(held) + "\n")
