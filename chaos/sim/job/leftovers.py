"""What a simulated job left for the judge: its histories, its commits as they lie in storage, its result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.judge.evidence.run_files import Commit, Evidence, is_void

if TYPE_CHECKING:
    from chaos.sim.job.job import Job


def left_by(job: Job) -> Evidence:
    """Return the evidence of a job that has been run."""
    shape = job.shape
    told = {"recovery": shape.recovery, "patience_s": shape.patience_s, "max_restarts": shape.max_restarts}
    job.record("chaos", "scenario", name="sim", seed=job.seed, **told, command=[])
    files = job.storage.files
    return Evidence(
        folder=Path("sim"),
        processes=[job.lines[name] for name in sorted(job.lines)],
        commits=[
            Commit(key, hashlib.sha256(files[key][0]).hexdigest(), json.loads(files[key][0]))
            for key in sorted(files)
            if key.startswith("commits/") and not is_void(files[key][0])
        ],
        config=job.plan.config.model_dump(mode="json"),
        result=job.result,
        witness=job.witness if job.is_done else None,
        metrics=None if job.tracking is None else job.tracking.metrics,
        tracked=None if job.tracking is None else job.tracking.server.held(),
    )
