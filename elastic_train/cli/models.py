"""`elastic-train export`, `generate`, `evaluate` and `predict`: a run's model outside of training.

Arguments are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from elastic_train.cli.output import Flag, Json, print_done, print_json, print_table, print_text
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import shown
from elastic_train.system.wording import counted, size

if TYPE_CHECKING:
    from elastic_train.checkpoint.commits.record import CommitRecord
    from elastic_train.inference.opening import Trained

_SCORES, _MOST_SHOWN = ("precision", "recall", "f1"), 20
To = Literal["hf", "safetensors", "torch"]
Weights = Literal["trained", "ema"]
_LOADING = {
    "hf": "load {place} with transformers' AutoModel classes, or with peft if it has an adapter",
    "safetensors": "safetensors.torch.load_file('{place}')",
    "torch": "torch.load('{place}')",
}
_NAMES = {"hf": "hf-{step}", "safetensors": "weights-{step}.safetensors", "torch": "weights-{step}.pt"}


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Choice:
    """The model of a run that a command uses."""

    commit: str | None = None
    "newest, best, a step, term-step or key; default: the best if early stopping ended the run or it has keep_best."
    weights: Weights = "trained"
    "ema: the average of the weights, of a run with optimizer.ema_decay."
    train: tuple[str, ...] = ()
    "Where the training set is, if it has moved (once for each source of a mixture)."

    def training_sets(self, run: str) -> list[str]:
        from elastic_train.inference.given_places import find_dataset

        return [find_dataset(run, each) for each in self.train]

    def open(
        self, run: str, train: Sequence[str], validation: str | None = None, max_samples: int | None = None
    ) -> Trained:
        """Load the model; say on stderr if it is not the newest commit's."""
        from elastic_train.inference.opening import check_folder, open_trained

        check_folder(run)
        key, weights = _chosen(run, self.commit).key, self.weights
        return open_trained(run, key, train=train, validation=validation, max_samples=max_samples, weights=weights)


_DEFAULT = Choice()


def export(
    run: str,
    target: Annotated[Path | None, Parameter(name=["--target", "--out"])] = None,
    *,
    to: To = "hf",
    merge: Flag = False,
    choice: Choice = _DEFAULT,
    json_: Json = False,
) -> int:
    """Write RUN's model for transformers, safetensors or torch.

    TARGET: by default a name in RUN's folder. --to hf (the default): a folder that transformers' AutoModel classes
    load, with the tokenizer; the package's own decoder becomes a Llama, with experts a Mixtral or Qwen2-MoE; adapters a
    folder of peft, or with --merge a whole model. --to safetensors or torch: one file of weights, of any task.
    """
    if target is None and "://" in run:
        raise ConfigError(f"{run}: name a TARGET, a place on this machine")
    from elastic_train.inference.given_places import check_new

    check_new(target)
    train, weights = choice.training_sets(run), choice.weights
    from elastic_train.checkpoint.commits.lookup import open_run
    from elastic_train.checkpoint.commits.weights import export as export_file
    from elastic_train.inference.exporting import export_folder

    store, record = open_run(run), _chosen(run, choice.commit)
    name = _NAMES[to].format(step=record.step) + ("-merged" if merge and to == "hf" else "")
    place = target or Path(run) / name
    if to == "hf":
        num_bytes = export_folder(
            run, place, commit=record.key, train=train, weights=weights, is_merged=merge, track=shown
        )
    else:
        export_file(store, record, place, to, weights, shown)
        num_bytes = place.stat().st_size
    if json_:
        return print_json({"commit": record.key, "step": record.step, "target": str(place), "bytes": num_bytes})
    how = _LOADING[to].format(place=place)
    return print_done(f"{record.key} in {place}, {size(num_bytes)}", how)


def generate(
    run: str,
    *,
    prompt: str | None = None,
    chat: Flag = False,
    ids: str | None = None,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    choice: Choice = _DEFAULT,
    json_: Json = False,
) -> int:
    """Continue a --prompt with RUN's language model, and print both.

    --chat: the prompt is a user's message, and the answer is printed alone. --ids 5,6,7 gives token ids in place of a
    text. --tokens: how many follow at most. --temperature 0 takes the likeliest token each time; above 0 tokens are
    drawn from --seed, of the --top-k likeliest if that is given.
    """
    if (prompt is None) == (ids is None):
        raise ConfigError("give one of --prompt and --ids")
    if chat and prompt is None:
        raise ConfigError("--chat needs --prompt, a user's message")
    if tokens < 1 or not temperature >= 0 or top_k < 0:
        raise ConfigError("--tokens must be at least 1, --temperature and --top-k at least 0")
    if not -1 << 63 <= seed < 1 << 64:
        raise ConfigError(f"--seed must fit into 64 bits, not {seed}")
    given = prompt if prompt is not None else _parse_ids(ids or "")
    train = choice.training_sets(run)
    from elastic_train.inference.opening import complete
    from elastic_train.tasks.task import Sampling

    trained = choice.open(run, train)
    found, text = complete(trained, given, Sampling(tokens, temperature, top_k, seed), is_chat=chat)
    if json_:
        return print_json({"commit": trained.record.key, "ids": found, "text": text})
    return print_text(" ".join(map(str, found)) if text is None else f"{'' if chat else prompt or ''}{text}")


def _chosen(run: str, commit: str | None) -> CommitRecord:
    """Return the commit to use; say on stderr if that is not the newest."""
    from elastic_train.checkpoint.commits.lookup import find_trained  # torch

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
    *,
    data: str,
    out: Path,
    batch: int | None = None,
    choice: Choice = _DEFAULT,
    json_: Json = False,
) -> int:
    """Write RUN's predictions for --data to --out, a Parquet file.

    --data is a folder or URL with a manifest, and `id` a row's number in it. A classifier gives the likeliest class,
    its probability and those of all classes (in the order of `classes`, the column's metadata), and needs no labels; a
    language model gives the mean loss of a row, and how many targets it has. Rows of imported images have the name of
    their `file`. --batch: rows at once (default: the run's micro-batch).
    """
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch must be at least 1, not {batch}")
    from elastic_train.inference.given_places import check_parquet, find_dataset

    check_parquet(out)
    train = choice.training_sets(run)
    data = find_dataset(run, data, train)
    from elastic_train.inference.predicting import predict_rows

    trained = choice.open(run, train)
    num_rows, columns, classes = predict_rows(trained, data, out, batch, shown)
    if json_:
        found = {"commit": trained.record.key, "step": trained.record.step, "data": data, "out": str(out)}
        return print_json({**found, "rows": num_rows, "columns": columns, **({"classes": classes} if classes else {})})
    order = f": of {', '.join(classes)}" if 0 < len(classes) <= _MOST_SHOWN else ""
    made = f"{counted(num_rows, 'row')} of {data} by {trained.record.key} in {out} ({', '.join(columns)}{order})"
    return print_done(made, f"pyarrow.parquet.read_table('{out}')")


def evaluate(
    run: str,
    *,
    data: str | None = None,
    max_samples: int | None = None,
    choice: Choice = _DEFAULT,
    json_: Json = False,
) -> int:
    """Compute the loss and metrics of RUN's model on its validation set.

    --data: a folder or URL with a manifest; by default the validation set of the run, where they are those of training,
    to the last bit. --max-samples: only the first ones.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"--max-samples must be at least 1, not {max_samples}")
    from elastic_train.inference.given_places import find_dataset, validation_set

    train = choice.training_sets(run)
    data = find_dataset(run, data or validation_set(run), train)
    from elastic_train.inference.predicting import evaluate_trained
    from elastic_train.training.result import export_command

    trained = choice.open(run, train, validation=data, max_samples=max_samples)
    metrics = dict(trained.plan.task.metrics())
    values = evaluate_trained(trained, metrics, shown)
    matrix, names = _confusion(metrics.get("accuracy"))
    if json_:
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
    return print_done(f"{trained.record.key} is evaluated", export_command(run, trained.plan.task))


def _confusion(metric: object) -> tuple[list[list[int]], list[str]]:
    """Return the counts by class and predicted class, and the classes' names; nothing of other tasks."""
    names = getattr(metric, "names", [])
    return (metric.confmat.tolist() if names else []), names  # type: ignore[attr-defined]


def _print_classes(values: Mapping[str, float | None], matrix: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Print the scores of each class, and how many of its samples each class was predicted for."""
    rows = list(zip(names, matrix, strict=True))
    scores = ((name, sum(row), *(values.get(f"{score}/{name}") for score in _SCORES)) for name, row in rows)
    print_table(("class", "samples", *_SCORES), scores)
    print_table(("class \\ predicted", *names), ((name, *row) for name, row in rows))
