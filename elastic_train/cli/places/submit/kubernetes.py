"""Manifests for Kubernetes: those of `deploy/kubernetes`, with a run's configuration, name, sizes and image."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.launch.options import parse_nodes

MANIFESTS = Path(__file__).parents[1] / "deploy" / "kubernetes"
MOUNT = "/runs/"
"""What the pods share; everything else is in the image, or gone with the pod."""
_NAME, MOST_CHARS = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 50
"""A name of Kubernetes' to which controllers add endings of their own."""
_AMOUNT = re.compile(r"\d+(\.\d+)?(m|[KMGTP]i?)?")


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """What is to be rendered; `kind` is a folder of `deploy/kubernetes`."""

    config: Config
    kind: str
    name: str
    nodes: str
    image: str | None
    cpus: str
    memory: str

    def problems(self) -> Iterator[str]:
        """Yield all that is wrong with it."""
        wrong: list[str] = []
        parse_nodes(self.nodes, wrong)
        yield from wrong
        if not _NAME.fullmatch(self.name) or len(self.name) > MOST_CHARS:
            yield f"--id {self.name!r}: a name has to be of small letters, digits and '-', {MOST_CHARS} at most"
        if not self.image or any(char.isspace() for char in self.image):
            yield "--image REGISTRY/NAME:TAG is needed: one that has elastic-train and the task"
        for flag, amount in (("--cpus", self.cpus), ("--memory", self.memory)):
            if not _AMOUNT.fullmatch(amount):
                yield f"{flag} {amount!r} is not an amount as Kubernetes has it, such as 4, 500m or 16Gi"
        if not self.config.run.dir.startswith(MOUNT):
            yield f"run.dir is {self.config.run.dir}: pods share {MOUNT} alone, so name a folder below it"
        train = self.config.data.train
        if isinstance(train, str) and "://" not in train and not train.startswith(MOUNT):
            yield f"data.train is {train}: pods share {MOUNT} alone, so put it there, or name a URL"
        uri = self.config.tracking.mlflow_uri
        if uri is not None and urlsplit(uri).password:
            yield "tracking.mlflow_uri has a password, and a ConfigMap is no secret: put it into the secret mlflow"

    def params(self) -> dict[str, str]:
        """Return what params.env has to say."""
        assert self.image is not None, "it was checked"
        most = parse_nodes(self.nodes, [])[1]
        least_most = self.nodes if ":" in self.nodes else f"{most}:{most}"
        return {
            "RUN": self.name, "NODES": str(most), "MIN_MAX": least_most, "IMAGE": self.image,
            "CPUS": self.cpus, "MEMORY": self.memory, "STORAGE": "100Gi",
        }  # fmt: skip


def render(job: KubernetesJob) -> str:
    """Return the manifests; raises ConfigError with all that is wrong."""
    if problems := list(job.problems()):
        raise ConfigError(*problems)
    with tempfile.TemporaryDirectory(prefix="elastic-train-") as folder:
        copy = Path(folder) / "kubernetes"
        shutil.copytree(MANIFESTS, copy)
        (copy / "base" / "params.env").write_text("".join(f"{key}={value}\n" for key, value in job.params().items()))
        (copy / "base" / "train.yaml").write_text(job.config.to_yaml())
        return _kubectl("kustomize", str(copy / job.kind))


def apply(manifests: str) -> str:
    """Hand manifests to the cluster and the namespace that kubectl is set to; return what it says."""
    return _kubectl("apply", "-f", "-", given=manifests)


def _kubectl(*arguments: str, given: str | None = None) -> str:
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on PATH: it renders the manifests (kubectl kustomize), and submits them")
    done = subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ElasticTrainError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
