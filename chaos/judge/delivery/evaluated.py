"""Invariant of validation: the last commit, evaluated here on the validation set, gives the result's metrics.

The text classifier is computed from its definition (`text_classifier`), in float64; of the witness the loss is
the sum of its weights. Other tasks cannot be evaluated here, and that is said.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from chaos.judge.delivery.claims import last_record
from chaos.judge.delivery.held_out import manifest_at, rows_at
from chaos.judge.delivery.text_classifier import Classifier, Floats, is_classifier
from chaos.judge.evidence.applied import result_of
from chaos.judge.evidence.run_files import Evidence, Line, number, part, whole
from chaos.judge.evidence.stored_weights import Tensors
from chaos.judge.findings import Unknown, Violated

_WITNESS = "elastic_train.tasks.witness:Witness"
_PRECISE = 1e-4
"""Relative: float32 in another order, against float64."""
_PRECISE_AUC = 0.05
"""Trainers may count scores in bins."""
_CLOSE = 1e-3
"""Rows whose two likeliest classes are as close may be counted for either."""
Ints = npt.NDArray[np.int64]


def validation(run: Evidence) -> str:
    """The metrics of the result are those that the last commit's weights have on the validation set."""
    result = result_of(run)
    claimed = part(result, "metrics") if "metrics" in result else {}
    data, task = _section(run, "data"), _section(run, "task")
    place = data.get("validation")
    if place is None:
        if claimed:
            raise Violated(f"result.json has the metrics {sorted(claimed)}, and the job has no validation set")
        return "the job has no validation set, and its result claims no metrics"
    if result.get("status") != "done":
        raise Unknown("the job has not come to its end: the newest commit need not have been validated")
    if nameless := [name for name, value in claimed.items() if not _is_finite(value)]:
        raise Violated(f"result.json has the metric {nameless[0]} as {claimed[nameless[0]]}, which is not a number")
    if not claimed:
        raise Violated("result.json has no metrics, and the job has a validation set")
    _check_logged(run, claimed)
    found, close = _evaluated(run, str(place), task)
    for name, value in found.items():
        if name not in claimed:
            raise Violated(f"result.json lacks the metric {name}, which is {value:.6g} on {place}")
        if not _agrees(name, number(claimed, name), value, close):
            raise Violated(f"result.json says {name} {claimed[name]}, the last commit has {value:.6g} on {place}")
    if others := sorted(claimed.keys() - found.keys()):
        raise Unknown(f"the metrics {', '.join(others)} cannot be computed here; {_shown(found)} are those of {place}")
    return f"the last commit was evaluated on {int(found['samples'])} rows of {place}: {_shown(found)}"


def _section(run: Evidence, name: str) -> Line:
    return part(run.config, name) if name in run.config else {}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_logged(run: Evidence, claimed: Line) -> None:
    """What the last term logged of the last validation is what the result says."""
    step, term = whole(result_of(run), "step"), whole(result_of(run), "term")
    for line in (run.metrics or {}).get(term, ()):
        values = part(line, "values") if "values" in line and line.get("step") == step else {}
        for name, value in values.items():
            own = name.removeprefix("validation/")
            if own != name and own in claimed and claimed[own] != value:
                raise Violated(f"result.json says {own} {claimed[own]}, metrics/{term:08d}.jsonl has {value}")


def _evaluated(run: Evidence, place: str, task: Line) -> tuple[dict[str, float], int]:
    """Return the metrics computed here, and how many rows have two classes that are nearly as likely."""
    record, path = last_record(run), task.get("path")
    if record is None or record.fields is None or run.load is None:
        raise Unknown("there is no commit of the last step that could be evaluated")
    if path != _WITNESS and not is_classifier(path):
        raise Unknown(f"the task {path} cannot be evaluated here: metrics were compared with records and logs alone")
    validation_, data = _section(run, "validation"), _section(run, "data")
    if validation_.get("weights", "trained") != "trained":
        raise Unknown("validation is of averaged weights (validation.weights), which cannot be evaluated here")
    manifest, most = manifest_at(place), validation_.get("max_samples")
    weights = run.load(record.fields)
    limit = most if isinstance(most, int) else None
    if path == _WITNESS:
        return _of_witness(weights, len(rows_at(place, manifest, [next(iter(part(manifest, "columns")))], limit)))
    params = part(task, "params") if "params" in task else {}
    trained_on = manifest_at(str(data.get("train"))) if data.get("train") else manifest
    classifier = Classifier.of(weights, params, trained_on)
    rows = rows_at(place, manifest, classifier.columns, limit)
    return _of_classes(classifier.logits(rows), classifier.labels(rows), _class_weights(params, trained_on, weights))


def _of_witness(weights: Tensors, num_rows: int) -> tuple[dict[str, float], int]:
    """Its loss has no weight, so it is the sum itself."""
    counts = next(iter(weights.values())).double().numpy()
    return {"loss": -float(counts[:num_rows].sum()), "samples": float(num_rows)}, 0


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


def _of_classes(logits: Floats, labels: Ints, class_weights: Floats) -> tuple[dict[str, float], int]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    own = class_weights[labels]
    loss = -float((own * logs[np.arange(len(labels)), labels]).sum() / own.sum())
    num_classes, likeliest = logits.shape[1], logits.argmax(axis=1)
    pairs = np.zeros((num_classes, num_classes))
    np.add.at(pairs, (labels, likeliest), 1)
    scores = [_f1(pairs, each) for each in range(num_classes) if pairs[each].sum() + pairs[:, each].sum()]
    found = {"loss": loss, "samples": float(len(labels)), "macro_f1": float(np.mean(scores))}
    chances = np.exp(logs)
    if num_classes == 2:
        found |= {"f1": _f1(pairs, 1), "auc": _auc(chances[:, 1], labels == 1)}
    else:
        present = [each for each in range(num_classes) if 0 < (labels == each).sum() < len(labels)]
        found["auc"] = float(np.mean([_auc(chances[:, each], labels == each) for each in present]))
    top = np.sort(chances, axis=1)
    return found, int((top[:, -1] - top[:, -2] < _CLOSE).sum())


def _f1(pairs: Floats, each: int) -> float:
    right, said, real = pairs[each, each], pairs[:, each].sum(), pairs[each].sum()
    return float(2 * right / (said + real)) if said + real else 0.0


def _auc(scores: Floats, is_positive: npt.NDArray[np.bool_]) -> float:
    """Return the chance that a positive row has the higher score (Mann and Whitney 1947); nan without either kind."""
    num, both = int(is_positive.sum()), len(scores)
    if num in (0, both):
        return math.nan
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[is_positive].sum() - num * (num + 1) / 2) / (num * (both - num)))


def _agrees(name: str, claimed: float, found: float, close: int) -> bool:
    if name == "auc":
        return math.isnan(found) or abs(claimed - found) <= _PRECISE_AUC
    if name in ("macro_f1", "f1") and close:
        return abs(claimed - found) <= 0.02 * close
    return abs(claimed - found) <= _PRECISE * max(1e-3, abs(found))


def _shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in found.items() if name != "samples")
