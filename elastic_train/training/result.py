"""The result of a run: result.json, written by rank 0 after the last commit, once all ranks' weights were equal.

The last commit exists before: if result.json cannot be written, only the result is lost, not the job.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_train.checkpoint.commits.record import FORMAT, Improvement, is_exhausted
from elastic_train.core.accounting import CoverageSums, Hole
from elastic_train.core.arrays import Ranges
from elastic_train.core.mixture import Mixture
from elastic_train.errors import ResultError
from elastic_train.job.model_layout import store_in_row_major_order
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.system.files import write_atomically
from elastic_train.system.wording import counted, done
from elastic_train.tasks.task import Exporting, ExportingSome, Finishing, Task
from elastic_train.tracking.run_folder import EARLY_STOPPING, LAST_STEP, look_up_left_out, weights_command
from elastic_train.training.session import Session
from rendezvous.waiting import GivenUp, begin

TRACKER_TIMEOUT_S = WRITE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class SourceResult:
    """The training on one source of a mixture.

    `num_samples` is its size, `share` its number of places among those of all shares, `applied` the number of its
    applied samples, repeats in later epochs included, and `epochs` its number of complete passes.
    """

    name: str
    num_samples: int
    share: int
    applied: int
    epochs: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The end of training, equal on every rank; result.json has the same fields, and a few more about the run.

    `status` is 'done' if all steps are applied, and 'closed' if the other members finished the job without this
    process: then the other fields describe the state of this process, which may be older, and `weights_sha256` is empty
    if it held only a part of the weights. (result.json may also say 'preempted': all ranks were asked to leave before
    the end, and `train` raised Preempted.)

    `step` is the number of applied steps. `metrics` are those of the last validation by name, empty if there was none.
    `coverage` sums all applied samples, over all epochs. `num_samples` is the size of the training set, and `epochs`
    its number of complete passes; for a mixture, of all sources together, and `sources` has the numbers of each.
    `holes` are the unreadable row groups, `num_left_out` is the number of samples lost with them, `num_truncated` the
    number of rows cut to the task's length. `fast_steps` and `skipped_steps` are half-open ranges of steps, counted
    from 0: those whose rounding depended on the world, and those whose update was skipped because loss or gradient was
    not finite, or no sample had a target. `ended_by` is 'last step' or 'early stopping', None if the job is not done;
    `improvement` is the state of early stopping, e.g. the best value and its step, None without it.
    """

    status: str
    step: int
    weights_sha256: str
    metrics: Mapping[str, float | None]
    coverage: CoverageSums
    num_samples: int
    epochs: int
    holes: tuple[Hole, ...]
    num_left_out: int
    num_truncated: int
    fast_steps: Ranges
    skipped_steps: Ranges
    sources: tuple[SourceResult, ...] = ()
    ended_by: str | None = None
    improvement: Improvement | None = None


def result_of(plan: Plan, state: AppliedState, status: str, weights_sha256: str) -> TrainResult:
    """Describe the state at the end of training, whose weights have this digest."""
    account, sources = state.reached.account, source_results(plan, state)
    return TrainResult(
        status=status,
        step=state.step,
        weights_sha256=weights_sha256,
        metrics=dict(state.reached.validation),
        coverage=state.reached.coverage,
        num_samples=plan.manifest.num_rows,
        epochs=plan.order.num_epochs(state.reached.cursor),
        holes=account.holes,
        num_left_out=account.left_out,
        num_truncated=account.truncated,
        fast_steps=state.reached.fast_steps,
        skipped_steps=state.reached.skipped_steps,
        sources=sources,
        ended_by=_ended_by(plan, state) if status == "done" else None,
        improvement=state.reached.improvement,
    )


def source_results(plan: Plan, state: AppliedState) -> tuple[SourceResult, ...]:
    """Describe the training on each source of a mixture; empty for a single training set."""
    if not isinstance(plan.order, Mixture):
        return ()
    passes, sums = plan.order.num_passes(state.reached.cursor.offset).tolist(), state.reached.sources
    return tuple(
        SourceResult(source.name, source.manifest.num_rows, source.share, applied.count, epochs)
        for source, epochs, applied in zip(plan.sources, passes, sums or [CoverageSums()] * len(passes), strict=True)
    )


def _ended_by(plan: Plan, state: AppliedState) -> str:
    stopping = plan.config.validation.early_stopping
    return EARLY_STOPPING if is_exhausted(stopping, state.reached.improvement) else LAST_STEP


def last_line(session: Session, result: TrainResult) -> str:
    """Return a finished job's last line: what it produced and how to use it."""
    config, head = session.plan.config, session.commits.head
    early = " (early stopping)" if result.ended_by == EARLY_STOPPING else ""
    better, known = "", result.improvement
    if known is not None and known.best is not None and (early or config.checkpoint.keep_best):
        better = f"; evaluate and export use the best, step {known.best_step} ({known.metric}: {known.best:.4f})"
    validated = None if config.data.validation is None else result.metrics.get("loss")
    kind, loss = ("loss", session.loss) if validated is None else ("validation loss", validated)
    shown = "" if loss is None else f", {kind} {loss:.4f}"
    left_out = "" if not result.skipped_steps else f", {look_up_left_out(config.run.dir, result.skipped_steps)}"
    where = config.checkpoint_url + ("" if head is None else f" ({head.key})")
    made = f"{counted(result.step, 'step')}{early}{shown}{left_out}, weights in {where}{better}"
    return done(made, export_command(config.run.dir, session.plan.task))


def export_command(run: str, task: Task) -> str:
    """Return the command that exports a run's model: for transformers if its prepared task can, and is known."""
    is_folder = isinstance(task, Exporting)
    if isinstance(task, ExportingSome):
        is_folder = task.why_not_exported() is None
    return f"elastic-train export {shlex.quote(run)}" if is_folder else weights_command(run)


def write_result(session: Session, result: TrainResult) -> ResultError | None:
    """Write result.json on rank 0, and let the task write its own results.

    Waits for no peers. Returns an error if something could not be written, else None.
    """
    session.say_rest()  # before the history's last line
    session.world.history.end(
        status=result.status, step=result.step, weights_sha256=result.weights_sha256, coverage=result.coverage
    )
    if session.world.group.rank != 0:
        return None
    folder, unwritten = Path(session.plan.config.run.dir), list[str]()
    if result.status == "done" and isinstance(session.plan.task, Finishing):
        store_in_row_major_order(session.state.model, session.state.layout.dims)  # safetensors refuses other strides
        with _noting(unwritten, "what the task leaves"):
            session.plan.task.finish(session.state.model, folder)
    found = {**asdict(result), "holes": [hole.to_dict() for hole in result.holes]}
    if not result.sources:
        del found["sources"]  # only for a mixture
    fields = {
        "status": found.pop("status"),
        "step": found.pop("step"),
        "term": session.world.term,
        **found,
        "world": session.world.group.size,
        "format": FORMAT,
        **({"cut_dims": dims} if (dims := session.state.layout.dims) else {}),
        "num_failed_saves": session.commits.num_failed,
        "num_skipped_saves": session.commits.num_skipped,
        **_phases_of(session),
        "mlflow_run_id": session.tracker.wait_run_id(TRACKER_TIMEOUT_S) if session.tracker else None,
    }
    with _noting(unwritten, f"{folder}/result.json"):
        text = json.dumps(fields, indent=2) + "\n"
        begin("result.json", lambda: write_atomically(folder / "result.json", text)).result(WRITE_TIMEOUT_S)
    if not unwritten:
        return None
    return ResultError(
        f"step {result.step} is committed, but the result could not be written: {'; '.join(unwritten)}; "
        "make room there and start again: no step is trained twice"
    )


def _phases_of(session: Session) -> dict[str, object]:
    """Return where this process's steps, as leader, spent their time."""
    if session.watch is None:
        return {}
    phases = session.watch.totals.summary()
    return {} if phases is None else {"phases": phases}


@contextlib.contextmanager
def _noting(unwritten: list[str], what: str) -> Iterator[None]:
    """Collect write errors as text, and continue."""
    try:
        yield
    except GivenUp:
        unwritten.append(f"{what}: no answer in {WRITE_TIMEOUT_S:.0f} s; is the storage reachable?")
    except OSError as error:
        unwritten.append(f"{what}: {error}")
