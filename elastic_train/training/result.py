"""The end of a run on disk: result.json, written by rank 0 after every rank was found to hold the same weights.

The last commit exists before: a disk that takes no result costs the result, and never the job.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.errors import ResultError
from elastic_train.system.atomic_files import write_atomically
from elastic_train.tasks.task import Finishing
from elastic_train.training.session import Session
from elastic_train.world.uniformity import check_agreement

TRACKER_TIMEOUT_S = 20.0


def write_result(session: Session, status: str) -> ResultError | None:
    """Compare the weights of all ranks, write result.json, and let the task leave its own results.

    Returns what is wrong if some of it could not be written.
    """
    digest = weights_digest(session.state.model)
    check_agreement(session.world.group, digest, session.state.step)
    session.world.history.end(
        status=status, step=session.state.step, weights_sha256=digest, coverage=session.state.coverage
    )
    if session.world.group.rank != 0:
        return None
    folder, unwritten = Path(session.plan.config.run.dir), list[str]()
    if status == "done" and isinstance(session.plan.task, Finishing):
        with _noting(unwritten, "what the task leaves"):
            session.plan.task.finish(session.state.model, folder)
    result = {
        "status": status,
        "step": session.state.step,
        "term": session.world.term,
        "weights_sha256": digest,
        "metrics": dict(session.state.reached.validation),
        "coverage": asdict(session.state.coverage),
        "num_samples": session.plan.manifest.num_rows,
        "epochs": session.state.cursor.epoch,
        "holes": [hole.to_dict() for hole in session.state.reached.account.holes],
        "num_left_out": session.state.reached.account.left_out,
        "num_truncated": session.state.reached.account.truncated,
        "world": session.world.group.size,
        "num_failed_saves": session.commits.num_failed,
        "num_skipped_saves": session.commits.num_skipped,
        "mlflow_run_id": session.tracker.wait_run_id(TRACKER_TIMEOUT_S) if session.tracker else None,
    }
    with _noting(unwritten, f"{folder}/result.json"):
        write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")
    if not unwritten:
        return None
    return ResultError(
        f"step {session.state.step} is committed, but the result could not be written: {'; '.join(unwritten)}; "
        "make room there and start again: no step is trained twice"
    )


@contextlib.contextmanager
def _noting(unwritten: list[str], what: str) -> Iterator[None]:
    """Note what cannot be written, and why, and go on."""
    try:
        yield
    except OSError as error:
        unwritten.append(f"{what}: {error}")
