"""A run in Weights & Biases, online or as offline folders below <run>/wandb that `wandb sync` uploads later.

`wandb.json` in the run's folder has the run's id, so that every process of a job continues one run, and up to which
step each metric was given to the package; what that then does with it is its own. Values are over a metric `step` of
their own, not over the package's count of calls, which a resumed run may not go back behind. A process has one run of
the package over all of its terms. The package's own process writes it, and ends some milliseconds after ours.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elastic_train.system.atomic_files import write_atomically
from elastic_train.system.extras import needed_for
from elastic_train.tracking.delivery import count_values
from elastic_train.tracking.metric_log import Settled, Values
from elastic_train.tracking.mlflow_run import flatten

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

LINK, LOCK = "wandb.json", "wandb.lock"
Mode = Literal["online", "offline"]
_INIT_TIMEOUT_S = 60.0
_RUNS: dict[str, Run] = {}
"""The runs of this process by id, until they are finished: a term that follows another goes on with its run."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the folder knows of the run there."""

    id: str
    steps: Mapping[str, int] = field(default_factory=dict)


class WeightsAndBiases:
    """A run's values for Weights & Biases; the package is imported, and its process begun, in the thread that sends."""

    name, lock = "Weights & Biases", LOCK
    remedy = "the run's metrics/*.jsonl have all of it"

    def __init__(self, run_dir: Path, config: Mapping[str, object], mode: Mode, project: str, run_name: str) -> None:
        self._run_dir, self._config, self._mode = run_dir, config, mode
        self._project, self._run_name = project, run_name
        self._sent = _Sent("")
        self._run: Run | None = None
        self._tags: dict[str, str] = {}

    def known_id(self) -> str | None:
        return self._recalled().id or None

    def open(self) -> str:
        """Begin or continue the run, and find out which steps it has."""
        found = self._recalled()
        self._sent = found if found.id else _Sent(uuid.uuid4().hex)
        if self._sent.id not in _RUNS:
            self._keep(self._sent)
            _RUNS[self._sent.id] = self._begun()
        self._run = _RUNS[self._sent.id]
        return self._sent.id

    def _begun(self) -> Run:
        """Begin the run in this process; a task's own run of the package is left alone."""
        import wandb

        self._run_dir.mkdir(parents=True, exist_ok=True)
        logging.getLogger("wandb").setLevel(logging.ERROR)
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, save_code=False, init_timeout=_INIT_TIMEOUT_S
        )
        run = wandb.init(
            id=self._sent.id,
            resume="allow",
            reinit="create_new",
            mode=self._mode,
            dir=str(self._run_dir),
            project=self._project,
            name=self._run_name,
            config=dict(flatten(self._config)),
            settings=quiet,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def describe(self) -> list[Exception]:
        """The configuration is given when the run begins."""
        return []

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Log the values that the run lacks, by step."""
        assert self._run is not None, "a run is opened before it is sent to"
        missing, steps = list[Values](), dict(self._sent.steps)
        for line in lines:
            if isinstance(line, Settled):
                self._tags |= line.tags
                continue
            by_name = {name: value for name, value in line.by_name.items() if line.step > steps.get(name, -1)}
            steps |= dict.fromkeys(by_name, line.step)
            if by_name:
                missing.append(replace(line, by_name=by_name))
        for line in missing:
            self._run.log({**line.by_name, "step": line.step})
        if missing:
            self._sent = replace(self._sent, steps=steps)
            self._keep(self._sent)
        return count_values(missing)

    def tag(self) -> None:
        """Put the newest tags into the run's configuration, which is what it shows beside its values."""
        if self._tags and self._run is not None:
            self._run.config.update({"elastic_train": self._tags}, allow_val_change=True)
            self._tags = {}

    def end(self, status: str) -> None:
        """Finish the run: as failed, unless it is done or was asked to leave."""
        run = _RUNS.pop(self._sent.id, None)
        if run is not None:
            run.finish(exit_code=1 if status == "FAILED" else 0)

    def _recalled(self) -> _Sent:
        with suppress(OSError, ValueError, TypeError):  # none yet, or a power cut left half of it
            return _Sent(**json.loads((self._run_dir / LINK).read_text()))
        return _Sent("")

    def _keep(self, sent: _Sent) -> None:
        write_atomically(self._run_dir / LINK, json.dumps(asdict(sent)) + "\n")


def check_installed() -> None:
    """Raise ConfigError with the command that installs the package, if it is missing; to import it takes seconds."""
    with needed_for("tracking.wandb"):
        if find_spec("wandb") is None:
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
