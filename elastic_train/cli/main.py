"""The `elastic-train` command. Each command checks its input first; exit codes are in elastic_train/errors.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from cyclopts import App, CycloptsError, Group
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from elastic_train.cli.output import (
    NO_EMPTY,
    Flag,
    Json,
    LaunchFlags,
    Overrides,
    print_json,
    print_text,
    quiet_output,
    wrong_usage,
)
from elastic_train.config import sources
from elastic_train.config.schema import keys as all_keys
from elastic_train.config.sources import nearest_key
from elastic_train.errors import ConfigError, ElasticTrainError, StorageError, explain, show
from elastic_train.launch.options import Flags

app = App(
    name="elastic-train",
    help="Elastic, fault-tolerant training: every sample counts once, and the weights do not depend on what broke.",
    error_formatter=partial(wrong_usage, "elastic-train"),
    default_parameter=NO_EMPTY,
)
TRAIN, LOOK, DATA, PLACES = map(Group.create_ordered, ("Train", "Look at runs", "Data and models", "Places"))
_PLACES, _MODELS, _RUNS = "elastic_train.cli.places", "elastic_train.cli.models", "elastic_train.cli.runs"
LATER = {
    "export": (f"{_MODELS}:export", "Write RUN's model for transformers, safetensors or torch.", DATA),
    "generate": (f"{_MODELS}:generate", "Continue a --prompt with RUN's language model, and print both.", DATA),
    "evaluate": (f"{_MODELS}:evaluate", "Compute the loss and metrics of RUN's model on its validation set.", DATA),
    "predict": (f"{_MODELS}:predict", "Write RUN's predictions for --data to --out, a Parquet file.", DATA),
    "data": ("elastic_train.cli.datasets:app", "Import, pack, describe and verify datasets.", DATA),
    "compare": (f"{_RUNS}.compare:compare", "Compare runs: keys, metrics, speed, goodput, faults, weights.", LOOK),
    "audit": ("elastic_train.cli.audit:audit", "Prove from RUN's commits that every sample counted once.", LOOK),
    "status": (f"{_RUNS}.status:status", "Say if RUN is done, resumable or failed, and --why it stopped.", LOOK),
    "report": (f"{_RUNS}.report:report", "Summarise runs: progress, time, cost of faults, phases, saves.", LOOK),
    "top": (f"{_RUNS}.top:top", "Show RUN while it trains: progress, nodes, phases, events.", LOOK),
    "profile": (f"{_RUNS}.profile:profile", "Merge the traces of RUN's ranks into one for Perfetto.", LOOK),
    "ckpt": ("elastic_train.cli.checkpoints:app", "List, verify, prune and pin the commits of RUN.", LOOK),
    "plan": ("elastic_train.cli.planning:app", "Predict memory, time, cost and the price of faults.", TRAIN),
    "doctor": (f"{_PLACES}.doctor.command:doctor", "Check whether this machine can be a node of a job.", PLACES),
    "submit": (f"{_PLACES}.submit.command:app", "Submit a job to Slurm or Kubernetes, or print it.", PLACES),
    "leave": (f"{_PLACES}.job:leave", "Ask one node of a job, or --all, to leave after a step.", PLACES),
    "ray": (f"{_PLACES}.on_ray:ray", "Train on a Ray cluster, where each node is an actor.", PLACES),
}
"""Commands that are imported on first use, by name; what the list of all commands says of them, and their groups."""
for _name, _later in LATER.items():
    app.command(_later[0], name=_name)
app.register_install_completion_command(help="Install completion for bash, zsh or fish.")

_NO_FLAGS = Flags()


@app.command(group=TRAIN)
def init(
    kind: Literal["text", "lm", "images", "sft"], folder: Path, *, data: str | None = None, model: str | None = None
) -> int:
    """Write a commented configuration and a task into FOLDER.

    It prints the commands that train them. KIND is text (a classifier of texts), lm (a language model), images, or sft
    (a model of transformers, fine-tuned on chats by LoRA). Without --data it trains on a small dataset that needs no
    download: docstrings, handwritten digits, or chats on Python. --data: the folder or URL of a dataset of your own,
    with `train` and perhaps `validation` in it, as `data import` writes it. --model: the folder of the model that sft
    fine-tunes; without it, a tiny one.
    """
    from elastic_train.cli.templates import write_starter

    return print_text("\n".join(write_starter(kind, folder, data, model)))


@app.command(group=TRAIN)
def train(config: Path, *overrides: Overrides) -> int:
    """Train CONFIG, or resume from the newest valid commit in run.dir.

    This runs one process; for several use `elastic-train launch`, or let torchrun start `-m elastic_train CONFIG`. Any
    key can be set on the command line, --batch.micro-batch 8, or in the environment,
    ELASTIC_TRAIN__BATCH__MICRO_BATCH=8; `elastic-train keys` lists them.
    """
    from elastic_train.training.run import run  # torch takes seconds to import: not before the arguments are read

    return run(config, list(overrides))


@app.command(group=TRAIN)
def launch(config: Path, *overrides: Overrides, flags: LaunchFlags = _NO_FLAGS) -> int:
    """Start one node of a job: the same line on every node.

    Its exit codes tell a scheduler what to do. What is not given is read from PET_* variables, which Kubernetes
    operators set, else from those of Slurm or SkyPilot. Any key of CONFIG can follow.
    """
    from elastic_train.launch import node, options

    checked = sources.load(config, environ=os.environ, arguments=overrides)  # report a mistake once, not by all ranks
    plan = options.resolve(config, overrides, flags, os.environ, options.count_gpus())
    checked.check_num_ranks(plan.ranks)  # of this node; other nodes' surplus stands by
    return node.launch(plan, checked.anchored().run.dir)


@app.command(group=TRAIN)
def validate(config: Path, *overrides: Overrides) -> int:
    """Check CONFIG, its task and its data without training.

    It prints the resolved keys and what follows from them.
    """
    from elastic_train.job.plan import make_plan
    from elastic_train.training.opening.inspection import inspect_alone

    resolved = sources.load(config, environ=os.environ, arguments=overrides)
    for line in sources.given_twice(overrides):
        sys.stderr.write(f"{line}\n")
    plan = make_plan(resolved)
    facts = {**plan.describe(), "rows": inspect_alone(plan)}
    print_text(resolved.to_yaml())
    return print_text("\n".join(f"# {name}: {value}" for name, value in facts.items()))


@app.command(group=TRAIN)
def keys(part: str = "", /, *, json_: Json = False) -> int:
    """List the configuration keys with default, type and meaning.

    PART: only the keys whose name contains it.
    """
    rows = [row for row in all_keys() if part in row[0]]
    if not rows:
        near = nearest_key(part)
        raise ConfigError(f"no key has '{part}' in its name" + (f"; did you mean '{near}'?" if near else ""))
    if json_:
        fields = ("key", "type", "default", "meaning")
        return print_json([dict(zip(fields, row, strict=True)) for row in rows])
    terminal = Console(markup=False, highlight=False)
    for key, kind, default, meaning in rows:
        terminal.print(Text.assemble((key, "bold"), f" = {default}", (f"  ({kind})", "dim")))
        terminal.print(Padding(Text(" ".join(meaning.split())), (0, 0, 0, 4)))
    return 0


@app.command(group=LOOK)
def sync(run: Path, *, mlflow_uri: str | None = None, tensorboard: Flag = False) -> int:
    """Send MLflow or TensorBoard the metrics of RUN that it missed.

    A tracker misses metrics while it is down, or when the run is killed. --tensorboard: write event files for
    TensorBoard instead, of what RUN/tensorboard lacks.
    """
    if tensorboard:
        from elastic_train.tracking.destinations.event_files import FOLDER, sync_event_files

        return print_text(f"{run / FOLDER}: wrote {sync_event_files(run)} values")
    from elastic_train.tracking.mlflow_sync import sync as sync_run

    return print_text(f"{sync_run(run, mlflow_uri=mlflow_uri)}")


RENAMED = {
    "why": "status RUN --why",
    "diff": "compare RUN RUN",
    "resume": "train CONFIG, the same line again",
    "checkpoint": "ckpt ls RUN",
    "ckpt show": "ckpt ls RUN COMMIT",
    "ckpt list": "ckpt ls RUN",
    "ckpt verify": "ckpt ls RUN --verify",
    "ckpt unpin": "ckpt pin RUN COMMIT --remove",
    "ckpt export": "export RUN --to safetensors",
    "job top": "top JOB --etcd HOST:2379",
    "job ls": "top --etcd HOST:2379",
    "job show": "top JOB --etcd HOST:2379 --once",
    "job leave": "leave JOB NODE --etcd HOST:2379",
    "job stop": "leave JOB --all --etcd HOST:2379",
    "job": "top --etcd HOST:2379, or leave JOB NODE --etcd HOST:2379",
    "data lengths": "data verify DATA --add-lengths COLUMN",
    "data checksum": "data verify DATA --add-checksums",
    "data import digits": "data import images OUT --digits",
    "data import jsonl": "data import rows OUT FILE.jsonl",
    "data import csv": "data import rows OUT FILE.csv",
    "data import chats": "data import rows OUT FILE.jsonl --tokenizer MODEL_FOLDER",
    "data import hf": "data import hf-folder OUT FOLDER",
    "import": "data import",
}
"""The successor of each, as it is typed after `elastic-train`; the longest that fits the arguments counts."""


def successor(arguments: Sequence[str]) -> str | None:
    """Return what to say of arguments whose command has another name today; None if they name a command."""
    for length in (3, 2, 1):
        if (today := RENAMED.get(" ".join(arguments[:length]))) is not None and len(arguments) >= length:
            return f"`{' '.join(arguments[:length])}` is now `{today}`"
    return None


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] in ([], ["--help"], ["-h"]):
        for name, (target, summary, group) in LATER.items():
            del app[name]
            app.command(target, name=name, help=summary, group=group)
    try:
        if (now := successor(given)) is not None:
            raise ConfigError(now)
        with quiet_output():
            result = app(arguments, result_action="return_value", exit_on_error=False)
    except CycloptsError:
        sys.exit(ConfigError.exit_code)  # cyclopts has printed what is wrong
    except ElasticTrainError as error:
        sys.stderr.write(explain(error) + "\n")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:  # of no place that anybody named
            show(error)
            sys.exit(1)
        sys.stderr.write(f"error: {error.filename}: {error.strerror}; name another place, or repair this one\n")
        sys.exit(StorageError.exit_code)
    except Exception as error:  # noqa: BLE001 - of a task's code, or ours
        show(error)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def main_train() -> None:
    """Run `python -m elastic_train CONFIG ...` as `elastic-train train CONFIG ...`."""
    if sys.argv[1:2] == ["--help"] or len(sys.argv) < 2:
        main(["train", "--help"])
    main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    main()
