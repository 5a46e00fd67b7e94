"""Invariant of validation: evaluating the last commit on the validation set reproduces the result's metrics.

The text classifier and the decoder are computed in float64 from their definitions (`text_classifier`,
`language_model`); the witness's loss is the sum of its weights. Averaged weights come from the optimizer state. For
other tasks and transformers models the judge has no definition: the metrics must equal those logged at validation, and
the finding says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from chaos.judge.delivery.claims import last_record
from chaos.judge.delivery.language_model import LanguageModel, is_language_model
from chaos.judge.delivery.text_classifier import Classifier, Floats, is_classifier
from chaos.judge.evidence.applied import result_of
from chaos.judge.evidence.run_files import MANIFEST, Evidence, Line, items, part, whole
from chaos.judge.evidence.stored_weights import Tensors
from chaos.judge.findings import Unknown, Violated

_WITNESS = "elastic_train.tasks.witness:Witness"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed deviation of a trainer's arithmetic from float64."""

    relative: float
    area: float
    """For areas under curves, which are exact except for score pairs that rounding swaps."""
    close: float
    """Gap between the two likeliest classes below which either may be chosen."""


TOLERANCES = {"fp32": Tolerance(1e-4, 1e-3, 1e-3)}
_HALF = Tolerance(2e-2, 2e-2, 5e-2)
"""For products in 8 or 11 bits."""
_TOGETHER = 1.25
"""Factor by which close rows that flip together may change a metric more than the sum of single flips."""
Doubts = dict[str, float]


def validation(run: Evidence) -> str:
    """The result's metrics are those of the last commit's weights on the validation set."""
    result = result_of(run)
    claimed = part(result, "metrics") if "metrics" in result else {}
    data, task = _section(run, "data"), _section(run, "task")
    place = data.get("validation")
    if place is None:
        if claimed:
            raise Violated(f"result.json has the metrics {sorted(claimed)}, and the job has no validation set")
        return "the job has no validation set, and its result claims no metrics"
    if result.get("status") != "done":
        raise Unknown("the job has not finished: the newest commit need not have been validated")
    if nameless := [name for name, value in claimed.items() if not _is_number(value)]:
        raise Violated(f"result.json has the metric {nameless[0]} as {claimed[nameless[0]]}, which is not a number")
    if not claimed:
        raise Violated("result.json has no metrics, and the job has a validation set")
    logged = _check_logged(run, claimed)
    if why := _not_evaluated(run, task):
        return _by_logs(claimed, logged, f"not evaluated here: {why}")
    allowed = TOLERANCES.get(str(run.config.get("precision", "fp32")), _HALF)
    found, doubts = _evaluated(run, str(place), task, allowed)
    for name, value in found.items():
        if name not in claimed:
            raise Violated(f"result.json lacks the metric {name}, which is {value:.6g} on {place}")
        if not _agrees(name, claimed[name], value, doubts.get(name, 0.0), allowed):
            raise Violated(f"result.json says {name} {claimed[name]}, the last commit has {value:.6g} on {place}")
    summary = f"the last commit was evaluated on {int(found['samples'])} rows of {place}: {_shown(found)}"
    if others := {name: claimed[name] for name in sorted(claimed.keys() - found.keys())}:
        return _by_logs(others, logged, f"{summary}; not evaluated here: {', '.join(others)}")
    return summary


def _not_evaluated(run: Evidence, task: Line) -> str:
    """Return why the last commit cannot be evaluated here; "" if it can."""
    path, params = task.get("path"), part(task, "params") if "params" in task else {}
    if path == _WITNESS or is_classifier(path) or is_language_model(path, params):
        return ""
    return f"the judge does not know what the task {path} computes"


def _by_logs(claimed: Line, logged: set[str], summary: str) -> str:
    """Return a summary saying that the metrics were logged; raise Unknown if a defined one was not."""
    if missing := [name for name, value in claimed.items() if value is not None and name not in logged]:
        raise Unknown(f"{summary}; and no line of the last validation in metrics/ has {missing[0]}")
    return f"{summary}; as logged when the last step was validated"


def _section(run: Evidence, name: str) -> Line:
    return part(run.config, name) if name in run.config else {}


def _is_number(value: object) -> bool:
    """Return True for a finite number, or None (undefined for the validation set)."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _check_logged(run: Evidence, claimed: Line) -> set[str]:
    """Return the metrics that the last term logged for the last validation; raise Violated if the result differs."""
    logged = set[str]()
    step, term = whole(result_of(run), "step"), whole(result_of(run), "term")
    for line in (run.metrics or {}).get(term, ()):
        values = part(line, "values") if "values" in line and line.get("step") == step else {}
        for name, value in values.items():
            own = name.removeprefix("validation/")
            if own == name or own not in claimed:
                continue
            if claimed[own] != value:
                raise Violated(f"result.json says {own} {claimed[own]}, metrics/{term:08d}.jsonl has {value}")
            logged.add(own)
    return logged


def _evaluated(run: Evidence, place: str, task: Line, allowed: Tolerance) -> tuple[dict[str, float], Doubts]:
    """Return the metrics computed here, and how far close rows may move those that count the likeliest class."""
    record = last_record(run)
    if record is None or record.fields is None or run.load is None:
        raise Unknown("there is no commit of the last step that could be evaluated")
    data = _section(run, "data")
    manifest, most = manifest_at(place), _section(run, "validation").get("max_samples")
    weights = _validated_weights(run, record.fields)
    limit = most if isinstance(most, int) else None
    if task.get("path") == _WITNESS:
        return _of_witness(weights, len(rows_at(place, manifest, [next(iter(part(manifest, "columns")))], limit)))
    params = part(task, "params") if "params" in task else {}
    trained_on = manifest_at(str(data.get("train"))) if data.get("train") else manifest
    if not is_classifier(task.get("path")):
        model = LanguageModel.of(weights, params, trained_on)
        found, share = model.metrics(rows_at(place, manifest, model.columns, limit), allowed.close)
        return found, {"token_accuracy": share}
    classifier = Classifier.of(weights, params, trained_on)
    rows = rows_at(place, manifest, classifier.columns, limit)
    class_weights = _class_weights(params, trained_on, weights)
    return _of_classes(classifier.logits(rows), classifier.labels(rows), class_weights, allowed.close)


def _validated_weights(run: Evidence, record: Line) -> Tensors:
    """Return the weights that are validated: the trained ones, or their averages if one is kept."""
    assert run.load is not None, "looked at before"
    weights = run.load(record)
    if _section(run, "validation").get("weights", "trained") != "ema":
        return weights
    averages = run.averages(record) if run.averages is not None else {}
    if not averages or averages.keys() - weights.keys():
        raise Unknown(
            "validation is of averaged weights, and the last commit holds none that fit: it was not evaluated"
        )
    return {**weights, **averages}


def _of_witness(weights: Tensors, num_rows: int) -> tuple[dict[str, float], Doubts]:
    """Return the sum of the counts as the loss: it has no weights."""
    counts = next(iter(weights.values())).double().numpy()
    return {"loss": -float(counts[:num_rows].sum()), "samples": float(num_rows)}, {}


def _class_weights(params: Line, manifest: Line, weights: Tensors) -> Floats:
    num_classes = len(weights["head.bias"])
    said = params.get("class_weights")
    if isinstance(said, list):
        return np.array(said, np.float64)
    if said is None:
        return np.ones(num_classes)
    counts = np.zeros(num_classes)
    listed = manifest.get("label_counts")
    counts[: len(listed)] = listed if isinstance(listed, list) else ()  # type: ignore[arg-type]
    counts = np.maximum(counts, 1)
    found: Floats = counts.sum() / (num_classes * counts)
    return found


def _of_classes(logits: Floats, labels: Ints, class_weights: Floats, close: float) -> tuple[dict[str, float], Doubts]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    own = class_weights[labels]
    loss = -float((own * logs[np.arange(len(labels)), labels]).sum() / own.sum())
    num_classes, likeliest = logits.shape[1], logits.argmax(axis=1)
    pairs = np.zeros((num_classes, num_classes))
    np.add.at(pairs, (labels, likeliest), 1)
    found = {"loss": loss, "samples": float(len(labels)), **_f1_scores(pairs)}
    chances = np.exp(logs)
    if num_classes == 2:
        found["auc"] = _auc(chances[:, 1], labels == 1)
    else:
        present = [each for each in range(num_classes) if 0 < (labels == each).sum() < len(labels)]
        areas = [_auc(chances[:, each], labels == each) for each in present]
        found["auc"] = float(np.mean(areas)) if areas else math.nan
    return found, _doubts(pairs, labels, chances, close)


def _doubts(pairs: Floats, labels: Ints, chances: Floats, close: float) -> Doubts:
    """Return how far F1 scores move if every row with two close likeliest classes counts for the second."""
    order = np.argsort(chances, axis=1)
    places = np.arange(len(labels))
    gaps = chances[places, order[:, -1]] - chances[places, order[:, -2]]
    found, doubts = _f1_scores(pairs), Doubts()
    for row in np.flatnonzero(gaps < close):
        moved = pairs.copy()
        moved[labels[row], order[row, -1]] -= 1
        moved[labels[row], order[row, -2]] += 1
        for name, value in _f1_scores(moved).items():
            doubts[name] = doubts.get(name, 0.0) + _TOGETHER * abs(value - found[name])
    return doubts


def _f1_scores(pairs: Floats) -> dict[str, float]:
    """Return the mean over classes that occur or are predicted, and for two classes the second one's score."""
    scores = [_f1(pairs, each) for each in range(len(pairs)) if pairs[each].sum() + pairs[:, each].sum()]
    return {"macro_f1": float(np.mean(scores)), **({"f1": _f1(pairs, 1)} if len(pairs) == 2 else {})}


def _f1(pairs: Floats, each: int) -> float:
    right, said, real = pairs[each, each], pairs[:, each].sum(), pairs[each].sum()
    return float(2 * right / (said + real)) if said + real else 0.0


def _auc(scores: Floats, is_positive: npt.NDArray[np.bool_]) -> float:
    """Return the probability that a positive row scores higher (Mann and Whitney 1947); nan without both kinds."""
    num, both = int(is_positive.sum()), len(scores)
    if num in (0, both):
        return math.nan
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[is_positive].sum() - num * (num + 1) / 2) / (num * (both - num)))


def _agrees(name: str, claimed: object, found: float, doubt: float, allowed: Tolerance) -> bool:
    """Return True if a claim agrees with the computed value; undefined (nan) is None in a result."""
    if math.isnan(found) or not isinstance(claimed, int | float):
        return math.isnan(found) and claimed is None
    if name == "auc":
        return abs(claimed - found) <= allowed.area
    if name == "perplexity":
        return claimed > 0 and abs(math.log(claimed / found)) <= allowed.relative * max(1e-3, math.log(found))
    return abs(claimed - found) <= doubt + allowed.relative * max(1e-3, abs(found))


def _shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in found.items() if name != "samples")


def manifest_at(place: str) -> Line:
    """Return a dataset's manifest; raise Unknown if it cannot be read."""
    try:
        found = json.loads((Path(place) / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise Unknown(f"the dataset {place} cannot be read here ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise Unknown(f"{place}/{MANIFEST} is not a manifest")
    return found


def rows_at(place: str, manifest: Line, columns: Sequence[str], most: int | None = None) -> pa.Table:
    """Return the first rows of a dataset, or all of them."""
    tables, left = list[pa.Table](), most
    for file in cast(list[Line], items(manifest, "files")):
        if left is not None and left <= 0:
            break
        try:
            table = pq.read_table(Path(place) / str(file["path"]), columns=list(columns), memory_map=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise Unknown(f"{place}/{file['path']} cannot be read: {error}") from error
        tables.append(table if left is None else table.slice(0, left))
        left = None if left is None else left - len(tables[-1])
    return pa.concat_tables(tables)
