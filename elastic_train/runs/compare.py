"""Compare runs: configuration, final metrics, throughput, goodput, faults, and equality of the weights' hashes.

Keys and values are compared as text by dotted name. Runs are labelled a, b, c, … in the given order.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elastic_train.errors import ConfigError
from elastic_train.runs.report import finite, report_on
from elastic_train.tracking.metric_log import final_metrics
from elastic_train.tracking.mlflow_run import flatten
from elastic_train.tracking.run_folder import RunFolder, existing_folder

V = TypeVar("V")
LETTERS = string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class Finding:
    """The facts of one run; `weights_sha256` is None if no result names it.

    `format` is the commit format that defines the hash, None if unknown. `figures` come from the history, with None for
    unknown values.
    """

    name: str
    config: Mapping[str, str]
    metrics: Mapping[str, float]
    weights_sha256: str | None
    format: int | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two or more runs side by side."""

    runs: Sequence[Finding]

    def config(self) -> dict[str, tuple[str | None, ...]]:
        """Return the keys whose values differ, with None where a run lacks the key."""
        rows = _side_by_side(run.config for run in self.runs)
        return {key: values for key, values in rows.items() if len(set(values)) > 1}

    def metrics(self) -> dict[str, tuple[float | None, ...]]:
        """Return the final values of all metrics, with None where a run lacks the metric."""
        return _side_by_side(run.metrics for run in self.runs)

    def figures(self) -> dict[str, tuple[float | None, ...]]:
        """Return the figures from the histories: time, throughput, goodput, faults."""
        rows = _side_by_side(run.figures for run in self.runs)
        return {name: values for name, values in rows.items() if any(value is not None for value in values)}

    def same_weights(self) -> bool | None:
        """Return True if all weights are bit-identical; None if a run's hash is unknown or follows other rules."""
        hashes = {run.weights_sha256 for run in self.runs}
        if None in hashes or (len(hashes) > 1 and self.rules_differ()):
            return None
        return len(hashes) == 1

    def rules_differ(self) -> bool:
        """Return True if the hashes follow the rules of different formats."""
        return len({run.format for run in self.runs if run.format is not None}) > 1

    def as_json(self) -> dict[str, object]:
        """Return the comparison by letter; non-finite values become text, as JSON has no such numbers."""
        return {
            **_lettered([run.name for run in self.runs]),
            "config": {key: _lettered(values) for key, values in self.config().items()},
            "metrics": {key: self._measured(values) for key, values in self.metrics().items()},
            "figures": {key: self._measured(values) for key, values in self.figures().items()},
            "weights": {**_lettered([run.weights_sha256 for run in self.runs]), "same": self.same_weights()},
        }

    def _measured(self, values: Sequence[float | None]) -> dict[str, object]:
        """Return values by letter; for two runs with their difference."""
        apart = {"difference": finite(difference(values))} if len(values) == 2 else {}
        return {**_lettered([finite(value) for value in values]), **apart}


def compare(*runs: str | Path) -> Comparison:
    """Compare runs by their folders; raises one ConfigError that lists all missing runs."""
    if not 2 <= len(runs) <= len(LETTERS):
        raise ConfigError(f"name 2 to {len(LETTERS)} runs to compare, not {len(runs)}")
    found, wrong = list[Finding](), list[str]()
    for run in runs:
        try:
            found.append(_from_folder(existing_folder(run)))
        except ConfigError as error:
            wrong += [problem for problem in error.problems if problem not in wrong]
    if wrong:
        raise ConfigError(*wrong)
    return Comparison(found)


def _from_folder(folder: Path) -> Finding:
    run = RunFolder(folder)
    config, result = run.config(), run.result() or {}
    weights, measured = result.get("weights_sha256"), result.get("metrics")
    validation = {
        f"validation/{name}": value for name, value in (measured if isinstance(measured, dict) else {}).items()
    }
    metrics = {**final_metrics(folder), **validation}
    rule = result.get("format")
    known = rule if isinstance(rule, int) else None
    digest = None if weights is None else str(weights)
    return Finding(str(folder), flatten(config), metrics, digest, known, _figures(folder))


def _figures(folder: Path) -> dict[str, float | None]:
    """Return the figures from a run's history; empty without one."""
    found = report_on(str(folder), with_coverage=False)
    if not found.story.worlds:
        return {}
    prices = [change.rto_s for change in found.faults if change.rto_s is not None]
    return {
        "goodput": found.goodput,
        "seconds": found.seconds,
        "step_s": found.step_s,
        "samples_per_s": found.samples_per_s,
        "samples_per_s_in_all": found.samples_per_s_in_all,
        "worlds": float(len(found.story.worlds)),
        "faults": float(len(found.faults)),
        "steps_lost": float(sum(change.steps_lost for change in found.faults)),
        "longest_rto_s": max(prices, default=None),
        **{f"phase/{name}_s": seconds for name, seconds in found.phases_s().items()},
    }


def _side_by_side(runs: Iterable[Mapping[str, V]]) -> dict[str, tuple[V | None, ...]]:
    every = list(runs)
    return {name: tuple(run.get(name) for run in every) for name in sorted({name for run in every for name in run})}


def _lettered(values: Sequence[V]) -> dict[str, V]:
    return dict(zip(LETTERS, values, strict=False))


def difference(values: Sequence[float | None]) -> float | None:
    a, b = values
    return None if a is None or b is None else b - a
