"""`elastic-train export`, `generate`, `evaluate` and `predict`: what a run's model is worth, outside of training."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from elastic_train.checkpoint.commits.export import export as export_file
from elastic_train.checkpoint.commits.lookup import find_trained, open_run
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.weights import Weights
from elastic_train.cli.output import cell, narrow_table, print_json, print_text
from elastic_train.errors import ConfigError
from elastic_train.inference.evaluating import evaluate_trained
from elastic_train.inference.exporting import export_folder
from elastic_train.inference.generating import complete
from elastic_train.inference.opening import open_trained
from elastic_train.inference.predicting import predict_rows
from elastic_train.system.progress_bar import shown
from elastic_train.system.wording import counted, size
from elastic_train.tasks.task import Sampling

_SCORES, _MOST_SHOWN = ("precision", "recall", "f1"), 20
To = Literal["hf", "safetensors", "torch"]
_LOADING = {
    "hf": "load {place} with transformers' AutoModel classes, or with peft if it has an adapter",
    "safetensors": "safetensors.torch.load_file('{place}')",
    "torch": "torch.load('{place}')",
}
_NAMES = {"hf": "hf-{step}", "safetensors": "weights-{step}.safetensors", "torch": "weights-{step}.pt"}


def export(
    run: str,
    target: Path | None,
    *,
    to: To,
    commit: str | None,
    train: Sequence[str],
    merge: bool,
    weights: Weights,
    is_json: bool,
) -> int:
    """Write a commit's model, and print where it is."""
    if target is None and "://" in run:
        raise ConfigError(f"{run}: name a TARGET, a place on this machine")
    store, record = open_run(run), _chosen(run, commit)
    place = target or Path(run) / _NAMES[to].format(step=record.step)
    if to == "hf":
        num_bytes = export_folder(run, place, commit=record.key, train=train, weights=weights, is_merged=merge)
    else:
        export_file(store, record, place, to, weights)
        num_bytes = place.stat().st_size
    if is_json:
        return print_json({"commit": record.key, "step": record.step, "target": str(place), "bytes": num_bytes})
    how = _LOADING[to].format(place=place)
    return print_text(f"Done: {record.key} in {place}, {size(num_bytes)}, next: {how}")


def generate(
    run: str,
    prompt: str | None,
    *,
    ids: str | None,
    commit: str | None,
    train: Sequence[str],
    weights: Weights,
    sampling: Sampling,
    is_chat: bool,
    is_json: bool,
) -> int:
    """Print what a run's model makes of a prompt."""
    if (prompt is None) == (ids is None):
        raise ConfigError("give one of --prompt and --ids")
    if is_chat and prompt is None:
        raise ConfigError("--chat needs --prompt, a user's message")
    if sampling.num_tokens < 1 or not sampling.temperature >= 0 or sampling.top_k < 0:
        raise ConfigError("--tokens must be at least 1, --temperature and --top-k at least 0")
    trained = open_trained(run, commit, train=train, weights=weights)
    found, text = complete(trained, prompt if prompt is not None else _parse_ids(ids or ""), sampling, is_chat=is_chat)
    if is_json:
        return print_json({"commit": trained.record.key, "ids": found, "text": text})
    return print_text(" ".join(map(str, found)) if text is None else f"{'' if is_chat else prompt or ''}{text}")


def _chosen(run: str, commit: str | None) -> CommitRecord:
    """Return the commit to use; say on stderr if that is not the newest."""
    record, why = find_trained(run, commit)
    if why is not None:
        sys.stderr.write(f"{why}\n")
    return record


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"--ids '{text}': write token ids, such as 5,6,7") from error


def predict(
    run: str,
    data: str,
    out: Path,
    *,
    commit: str | None,
    train: Sequence[str],
    batch: int | None,
    weights: Weights,
    is_json: bool,
) -> int:
    """Write what a run's model makes of each row of a dataset, and print where it is."""
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch must be at least 1, not {batch}")
    trained = open_trained(run, _chosen(run, commit).key, train=train, weights=weights)
    num_rows, columns = predict_rows(trained, data, out, batch, shown)
    if is_json:
        found = {"commit": trained.record.key, "step": trained.record.step, "data": data, "out": str(out)}
        return print_json({**found, "rows": num_rows, "columns": columns})
    return print_text(
        f"Done: {counted(num_rows, 'row')} of {data} by {trained.record.key} in {out} ({', '.join(columns)}), next: "
        f"pyarrow.parquet.read_table('{out}')"
    )


def evaluate(
    run: str,
    data: str,
    *,
    commit: str | None,
    train: Sequence[str],
    max_samples: int | None,
    weights: Weights,
    is_json: bool,
) -> int:
    """Print the loss and the metrics of a run's model over a dataset."""
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"--max-samples must be at least 1, not {max_samples}")
    trained = open_trained(
        run, _chosen(run, commit).key, train=train, validation=data, max_samples=max_samples, weights=weights
    )
    metrics = dict(trained.plan.task.metrics())
    values = evaluate_trained(trained, metrics, shown)
    matrix, names = _confusion(metrics.get("accuracy"))
    if is_json:
        found = {"commit": trained.record.key, "step": trained.record.step, "data": data, "metrics": values}
        return print_json({**found, "confusion": matrix, "classes": names} if names else found)
    num_samples = int(values.pop("samples") or 0)
    lines = "\n".join(
        f"{name} is no number" if value is None else f"{name} {value:.6g}"
        for name, value in values.items()
        if "/" not in name
    )
    print_text(f"{trained.record.key} over {counted(num_samples, 'sample')} of {data}\n{lines}")
    if 0 < len(names) <= _MOST_SHOWN:
        _print_classes(values, matrix, names)
    return print_text(f"Done: {trained.record.key} is evaluated, next: elastic-train export {shlex.quote(run)}")


def _confusion(metric: object) -> tuple[list[list[int]], list[str]]:
    """Return the counts by class and predicted class, and the classes' names; nothing of other tasks."""
    names = getattr(metric, "names", [])
    return (metric.confmat.tolist() if names else []), names  # type: ignore[attr-defined]


def _print_classes(values: Mapping[str, float | None], matrix: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Print the scores of each class, and how many of its samples each class was predicted for."""
    scores = narrow_table("class", "samples", *_SCORES)
    counts = narrow_table("class \\ predicted", *names)
    for name, row in zip(names, matrix, strict=True):
        scores.add_row(name, str(sum(row)), *(cell(values.get(f"{score}/{name}")) for score in _SCORES))
        counts.add_row(name, *map(str, row))
    Console(markup=False).print(scores, counts)
