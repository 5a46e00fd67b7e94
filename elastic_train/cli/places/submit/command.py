"""The commands. Each checks the configuration and all flags first; what is wrong is said before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from elastic_train.cli.output import Flag, LaunchFlags, Overrides, print_text
from elastic_train.cli.places.submit import kubernetes, slurm
from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.launch.options import Flags

app = App(name="submit", help="Submit a job to a cluster, or print what would be submitted (--dry-run).")
_NO_FLAGS = Flags()


@app.command(name="slurm")
def submit_slurm(
    config: Path,
    *overrides: Overrides,
    flags: LaunchFlags = _NO_FLAGS,
    time: str | None = None,
    gpus: int | None = None,
    array: Flag = False,
    sbatch: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = (),
    dry_run: Flag = False,
) -> int:
    """Submit CONFIG to Slurm on N or MIN:MAX --nodes.

    The job is one allocation, started by deploy/slurm/train.sbatch. Of N nodes any number trains, from 1 on; of
    MIN:MAX, MIN at least. --time: a limit as sbatch takes it; two minutes before, the job commits and is requeued.
    --endpoint HOST:PORT of an etcd, or @FILE; without, the first node starts one. --id: the job's name there, by which
    others can join. --gpus: of each node. --array: MAX jobs of one node in place of one allocation, which come and go
    as the queue gives them; needs --endpoint and --id. --sbatch=--partition=gpu: one more option of sbatch, which may
    be repeated; its value needs no quotes. All other flags are those of `launch`. --dry-run prints the script, which
    can be submitted as it is.
    """
    variables = sources.variables_in(config, os.environ)
    job = slurm.SlurmJob(
        config.absolute(),
        overrides,
        flags,
        time,
        gpus,
        is_array=array,
        options=tuple(sbatch),
        environ=os.environ,
        variables=variables,
    )
    _checked(config, overrides, os.environ, list(job.problems()))
    script = slurm.render(job)
    return print_text(script.rstrip("\n") if dry_run else slurm.submit(script))


@app.command(name="k8s")
def submit_k8s(
    config: Path,
    *overrides: Overrides,
    nodes: str,
    run_id: Annotated[str, Parameter(name="--id")],
    image: str | None = None,
    kind: Literal["indexed-job", "jobset", "trainer-v2", "pytorchjob"] = "indexed-job",
    cpus: str | None = None,
    memory: str | None = None,
    gpus: int | None = None,
    no_claim: Flag = False,
    openshift: Flag = False,
    dry_run: Flag = False,
) -> int:
    """Submit CONFIG to Kubernetes on N or MIN:MAX --nodes.

    The manifests are those of deploy/kubernetes. --id: its name. --image: one that has elastic-train and the task.
    --kind: an indexed-job (the default), a jobset, or what Kubeflow's trainer-v2 or its pytorchjob operator runs.
    --cpus, --memory, --gpus: of each node; by default 4 CPUs and 16Gi for each GPU, or for one rank. --no-claim: no
    volume that nodes share; commits go to checkpoint.url. --openshift: the cluster gives pods their users. It needs
    kubectl, and an etcd in the namespace (deploy/kubernetes/etcd). --dry-run prints the manifests.
    """
    resolved = _checked(config, overrides, os.environ, [])
    job = kubernetes.KubernetesJob(
        resolved, kind, run_id, nodes, image, cpus, memory, gpus, has_claim=not no_claim, is_openshift=openshift
    )
    manifests = kubernetes.render(job)
    return print_text((manifests if dry_run else kubernetes.apply(manifests)).rstrip("\n"))


def _checked(path: Path, overrides: Sequence[str], environ: Mapping[str, str], problems: list[str]) -> Config:
    """Return the configuration; raises ConfigError with what is wrong with it, and with the flags."""
    try:
        config = sources.load(path, environ=environ, arguments=overrides)
    except ConfigError as error:
        raise ConfigError(*error.problems, *problems) from error
    if problems:
        raise ConfigError(*problems)
    return config
