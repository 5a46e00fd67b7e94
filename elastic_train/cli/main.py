"""`elastic-train`: what people type. A command checks its input first, and ends with the code that errors.py names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from elastic_train.config import schema as configuration
from elastic_train.config import sources
from elastic_train.errors import ConfigError, ElasticTrainError, explain

app = App(
    name="elastic-train",
    help="Elastic, fault-tolerant training: every sample counts once, and the weights do not depend on what broke.",
)
# Imported by name on first use: `data` and `ckpt` pull in pyarrow and torch, which `--help` need not wait for.
app.command("elastic_train.cli.datasets:app", name="data")
app.command("elastic_train.cli.checkpoints:app", name="ckpt")

Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


@app.command
def train(config: Path, *overrides: Overrides) -> int:
    """Train as CONFIG says, or go on from the newest valid commit in its run.dir.

    Start it by itself for one process, or let torchrun start `-m elastic_train CONFIG` on many. Any key can be set on
    the command line: --batch.micro-batch 8 (see `elastic-train keys`), or as ELASTIC_TRAIN__BATCH__MICRO_BATCH=8.
    """
    from elastic_train.training.run import run  # torch takes seconds to import: not before the arguments are read

    return run(config, list(overrides))


@app.command
def launch(
    config: Path,
    *overrides: Overrides,
    nodes: str | None = None,
    ranks: int | None = None,
    endpoint: str | None = None,
    run_id: Annotated[str | None, Parameter(name="--id")] = None,
    recovery: str = "live",
    max_restarts: int = 100,
    ttl_s: float = 3.0,
    grace_s: float = 30.0,
) -> int:
    """Start one node of a job: run the same line on every node, and see exit codes that a scheduler can act on.

    --nodes MIN:MAX (1), --ranks N per node (its GPUs, else 1), --endpoint HOST:PORT of an etcd, --id JOB: what is not
    given is taken from PET_* variables (Kubernetes operators) or Slurm's. Without an endpoint an etcd is started for a
    job of one node, or on a Slurm job's first; several nodes elsewhere need one. --recovery live (survivors never stop)
    or restart. --max-restarts of workers, in live mode per cause and hour. --ttl-s: seconds after which a silent worker
    is lost. --grace-s: seconds from SIGTERM to SIGKILL. Any key of CONFIG can follow.
    """
    from elastic_train.launch import node as launching

    sources.load(config, environ=os.environ, arguments=overrides)  # a mistake is told once, not by every rank
    flags = launching.Flags(nodes, ranks, endpoint, run_id, recovery, max_restarts, ttl_s, grace_s)
    return launching.launch(launching.resolve(config, overrides, flags, os.environ, launching.count_gpus()))


@app.command
def validate(config: Path, *overrides: Overrides) -> int:
    """Check CONFIG, its task and its data without training; print all keys as resolved, and what follows from them."""
    from elastic_train.job.plan import make_plan

    resolved = sources.load(config, environ=os.environ, arguments=overrides)
    facts = make_plan(resolved).describe()
    print_text(resolved.to_yaml())
    print_text("\n".join(f"# {name}: {value}" for name, value in facts.items()))
    return 0


@app.command
def keys(*, json_: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """List every key of a configuration: its type, its default, what it means."""
    rows = list(configuration.keys())
    if json_:
        fields = ("key", "type", "default", "meaning")
        print_text(json.dumps([dict(zip(fields, row, strict=True)) for row in rows], indent=2))
        return 0
    table = Table("key", "type", "default", "meaning")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 0


@app.command
def compare(
    run_a: str, run_b: str, *, mlflow_uri: str | None = None, json_: Annotated[bool, Parameter(name="--json")] = False
) -> int:
    """Show how two runs differ: configuration, metrics, weights. RUN is a run's folder, or an MLflow run id."""
    from elastic_train.tracking.compare import compare as compare_runs

    comparison = compare_runs(run_a, run_b, mlflow_uri=mlflow_uri)
    if json_:
        print_text(comparison.to_json())
    else:
        Console().print(comparison.render())
    return 0


@app.command
def audit(
    run: str,
    *,
    data: str | None = None,
    forensic: Annotated[bool, Parameter(negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Prove from RUN's commits that every sample counted once; say in words what is proven, and what is not.

    RUN is a run's folder, or the URL of its commits; the job may be running. --data: the training set's folder or URL,
    if it is not where the run's config.yaml says; only an unfinished epoch needs it. --forensic names the samples that
    are repeated or missing, where the run was trained with `run.forensic`. Ends with 0 if all is proven, 65 if
    something is wrong, 1 if something could not be proven.
    """
    from elastic_train.cli.audit import audit as audit_run

    return audit_run(run, data=data, is_forensic=forensic, is_json=json_)


@app.command
def sync(run: Path, *, mlflow_uri: str | None = None) -> int:
    """Send what MLflow has missed (a tracker that was down, a killed run) from RUN's local metrics."""
    from elastic_train.tracking.mlflow_sync import sync as sync_run

    print_text(f"{sync_run(run, mlflow_uri=mlflow_uri)}")
    return 0


def print_text(text: str) -> None:
    """Print text as it is, without markup."""
    sys.stdout.write(text + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave with its exit code."""
    try:
        result = app(arguments, result_action="return_value", exit_on_error=False)
    except CycloptsError:
        sys.exit(ConfigError.exit_code)  # cyclopts has said what is wrong
    except ElasticTrainError as error:
        sys.stderr.write(explain(error) + "\n")
        sys.exit(error.exit_code)
    sys.exit(result if isinstance(result, int) else 0)


def main_train() -> None:
    """`python -m elastic_train CONFIG ...` is `elastic-train train CONFIG ...`."""
    if sys.argv[1:2] == ["--help"] or len(sys.argv) < 2:
        main(["train", "--help"])
    main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    main()
