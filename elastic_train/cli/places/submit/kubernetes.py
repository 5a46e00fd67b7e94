"""Manifests for Kubernetes: those of `deploy/kubernetes`, with a run's configuration, name, sizes and image."""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_train.config.credentials import has_password, texts, without_password
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.launch.options import parse_nodes

MANIFESTS = Path(__file__).parents[1] / "deploy" / "kubernetes"
MOUNT = "/runs/"
"""Folder that the pods share if they have a claim. Everything else is in the image, or lost with the pod."""
SCRATCH = (MOUNT, "/tmp/", "/dev/shm/")
"""Folders in which a pod can write."""
_NAME, MOST_CHARS = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 50
"""A name of Kubernetes' to which controllers add endings of their own."""
CPUS_PER_RANK, GIB_PER_RANK = 4, 16
_CPUS = re.compile(r"(\d+(?:\.\d+)?)(m)?", re.ASCII)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([MGTPE]i?|Ki|k)?", re.ASCII)
_LEAST_MEMORY = 256 << 20
"""Minimum memory, in bytes, of a process with torch; a smaller number was probably meant with a unit."""
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """A job to be rendered; `kind` is a folder of `deploy/kubernetes`."""

    config: Config
    kind: str
    name: str
    nodes: str
    image: str | None
    cpus: str | None = None
    memory: str | None = None
    """Memory of each node; default: enough for its ranks, one per GPU."""
    gpus: int | None = None
    """GPUs of each node."""
    has_claim: bool = True
    """True if the nodes share a volume at MOUNT."""
    is_openshift: bool = False
    """True if the cluster assigns users to pods."""

    def problems(self) -> Iterator[str]:
        wrong: list[str] = []
        parse_nodes(self.nodes, wrong)
        yield from wrong
        if not _NAME.fullmatch(self.name) or len(self.name) > MOST_CHARS:
            yield f"--id {self.name!r}: a name has to be of small letters, digits and '-', {MOST_CHARS} at most"
        if not self.image or any(char.isspace() for char in self.image):
            yield "--image REGISTRY/NAME:TAG is needed: one that has elastic-train and the task"
        yield from _wrong_amounts(self.cpus, self.memory)
        if self.gpus is not None and self.gpus < 1:
            yield f"--gpus must be at least 1, not {self.gpus}; leave it out for a job on CPUs"
        yield from _out_of_reach(self.config, has_claim=self.has_claim)
        for key in _with_credentials(self.config.model_dump(mode="json")):
            yield (
                f"{key} has a password or a token in it, and a ConfigMap is not secret: leave it out, and put it into "
                "the secret mlflow, or s3, whose keys become variables of the pods"
            )

    def params(self) -> dict[str, str]:
        """Return what params.env has to say."""
        assert self.image is not None, "it was checked"
        least, most = parse_nodes(self.nodes, [])
        ranks, threads = self.gpus or 1, self.config.threads_per_rank
        cpus = self.cpus or f"{ranks * max(CPUS_PER_RANK, threads)}"
        memory = self.memory or f"{ranks * GIB_PER_RANK}Gi"
        return {
            "RUN": self.name, "NODES": str(most), "MIN_MAX": f"{least}:{most}", "MAX_FAILED": str(min(1, most - least)),
            "MIN_AVAILABLE": str(min(1, most - 1)), "IMAGE": self.image, "CPUS": cpus, "MEMORY": memory,
            "THREADS": str(threads), "STORAGE": "100Gi",
        }  # fmt: skip

    @property
    def components(self) -> list[str]:
        """The folders of `deploy/kubernetes` whose changes are made to every kind of job."""
        used = {"gpus": self.gpus, "without-claim": not self.has_claim, "openshift": self.is_openshift}
        return [name for name, is_used in used.items() if is_used]


def _wrong_amounts(cpus: str | None, memory: str | None) -> Iterator[str]:
    found = None if cpus is None else _CPUS.fullmatch(cpus)
    if cpus is not None and (found is None or not float(found[1])):
        yield f"--cpus {cpus!r} is not an amount of CPUs as Kubernetes has it, such as 4 or 500m"
    found = None if memory is None else _MEMORY.fullmatch(memory)
    if memory is not None and found is None:
        yield f"--memory {memory!r} is not an amount of memory as Kubernetes has it, such as 16Gi or 16G"
    elif found is not None:
        unit = found[2] or ""
        num_bytes = float(found[1]) * (1024 if unit.endswith("i") else 1000) ** _UNITS[unit[:1].replace("K", "k")]
        if num_bytes < _LEAST_MEMORY:
            yield f"--memory {memory} is {num_bytes:,.0f} bytes, too few: name the unit, such as {found[1]}Gi"


def _out_of_reach(config: Config, *, has_claim: bool) -> Iterator[str]:
    """Yield which places of a configuration pods could not see, or not write."""
    yield from _runs_elsewhere(config)
    data, checkpoint, tracker = config.data, config.checkpoint, config.tracking.mlflow_uri
    shared = {"data.train": data.train, "data.validation": data.validation, "checkpoint.url": checkpoint.url}
    shared |= {f"data.mixture.{i}.source": each.source for i, each in enumerate(data.mixture or ())}
    shared |= {"tracking.mlflow_uri": None if (tracker or "").startswith("databricks") else tracker}
    has = f"share {MOUNT} alone" if has_claim else "share no folder (--no-claim)"
    for key, place in shared.items():
        path = None if place is None else _local_path(place)
        if path is not None and not (has_claim and _is_below(path, MOUNT)):
            yield f"{key} is {place}: pods {has}; " + (
                f"name a folder below {MOUNT}, or a URL" if has_claim else "name a URL"
            )
    if not has_claim and checkpoint.url is None:
        yield "--no-claim needs checkpoint.url, an object store for what the nodes commit"
    for key, folder in (("data.cache_dir", data.cache_dir), ("checkpoint.near_dir", checkpoint.near_dir)):
        if folder is not None and not any(_is_below(folder, place) for place in SCRATCH):
            yield f"{key} is {folder}: a pod can write below {', '.join(SCRATCH)} alone"


def _runs_elsewhere(config: Config) -> Iterator[str]:
    if not _is_below(config.run.dir, MOUNT):
        yield f"run.dir is {config.run.dir}: pods write their runs to {MOUNT}, so name a folder below it"
    if "/" in config.task.path:
        yield f"task.path is {config.task.path}: a file is not in the image; install it there, and name module:Class"
    for key, value in texts(config.task.params, "task.params"):
        if value.startswith("~") or _is_below(value, f"{Path.home()}/"):
            yield f"{key} is {value}: pods do not have your home folder; put it into the image, or below {MOUNT}"


def _is_below(path: str, folder: str) -> bool:
    return posixpath.normpath(path).startswith(folder)


def _local_path(place: str) -> str | None:
    """Return the path of a place in a file system; None for a URL of somewhere else."""
    scheme, found, path = place.partition("://")
    if not found:
        return place
    if scheme.startswith("sqlite"):
        return path.partition("?")[0].removeprefix("/")  # sqlite:///relative, sqlite:////absolute
    return path if scheme in ("file", "local") else None


def _with_credentials(tree: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys of URLs with a password in them, or with what a server of the web may take for a token.

    A name alone is not secret elsewhere: a user of hdfs://, a container of abfs://.
    """
    for key, text in texts(tree):
        is_of_the_web = text.startswith(("http://", "https://"))
        if has_password(text) or (is_of_the_web and without_password(text) != text):
            yield key


def render(job: KubernetesJob) -> str:
    """Return the manifests; raises ConfigError with all that is wrong."""
    if problems := list(job.problems()):
        raise ConfigError(*problems)
    with tempfile.TemporaryDirectory(prefix="elastic-train-") as folder:
        copy = Path(folder) / "kubernetes"
        shutil.copytree(MANIFESTS, copy, copy_function=shutil.copyfile)  # the package may be read-only
        base = copy / "base"
        (base / "params.env").write_text("".join(f"{key}={value}\n" for key, value in job.params().items()))
        (base / "train.yaml").write_text(job.config.to_yaml())
        (copy / "gpus" / "gpus.env").write_text(f"GPUS={job.gpus}\n")
        used = ", ".join(f"../{name}" for name in job.components)
        with (base / "kustomization.yaml").open("a") as kustomization:
            kustomization.write(f"components: [{used}]\n")
        return _kubectl("kustomize", str(copy / job.kind))


def apply(manifests: str) -> str:
    """Hand manifests to the cluster and the namespace that kubectl is set to; return what it says.

    Raises ElasticTrainError if it refuses any, such as a configuration that is not that of a job of the same name.
    """
    return _kubectl("apply", "-f", "-", given=manifests)


def _kubectl(*arguments: str, given: str | None = None) -> str:
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on PATH: it renders the manifests (kubectl kustomize), and submits them")
    done = subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip()
        if "immutable" in said:
            said += "\na job of this name has another configuration or size: take another --id, or delete that one"
        raise ElasticTrainError(f"kubectl {' '.join(arguments)}: {said}")
    return done.stdout
