"""The Kubernetes manifests of deploy/kubernetes, rendered by kubectl, and read by the models of their real APIs."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
WAYS = {"indexed-job": "Job", "jobset": "JobSet", "trainer-v2": "TrainingRuntime", "pytorchjob": "PyTorchJob"}
"""The folders that run a job, and the kind that holds its pods."""
BESIDES = ("etcd", "monitoring")
KUBERNETES = "1.37"
Tree = dict[str, Any]


@functools.cache
def _rendered(folder: Path) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here: install it to render the manifests")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(name: str | Path) -> list[Tree]:
    """Return the documents of a folder."""
    return list(yaml.safe_load_all(_rendered(FOLDER / name)))


def one(name: str | Path, kind: str) -> Tree:
    """Return a folder's document of a kind."""
    return next(doc for doc in rendered(name) if doc["kind"] == kind)


def job_spec(name: str, doc: Tree) -> Tree:
    """Return what a document has of a Job: its specification, or as much of it as the kind knows."""
    if name == "jobset":
        return dict(doc["spec"]["replicatedJobs"][0]["template"]["spec"])
    if name == "trainer-v2":
        return dict(doc["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"])
    if name == "pytorchjob":
        return {"template": doc["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]}
    return dict(doc["spec"])


def refusal(doc: Tree) -> str | None:
    """Return why the API of a document's kind would refuse it, as far as its models and schemas say, or None."""
    if doc["apiVersion"].partition("/")[0] in ("v1", "apps", "batch", "policy", "networking.k8s.io"):
        return _by_schema(doc)
    try:
        back = _round_trip(copy.deepcopy(doc))
    except (ValueError, TypeError) as error:
        return str(error)
    gone = list(_lost(doc, back))
    return f"unknown or changed: {', '.join(gone)}" if gone else None


def _by_schema(doc: Tree) -> str | None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    try:
        kubernetes_validate.validate(doc, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return None


def _round_trip(doc: Tree) -> object:
    """Read a document with the models of its API, and write it again: what they do not know is not written."""
    kind = doc["kind"]
    if doc["apiVersion"] == "kubeflow.org/v1":
        client = pytest.importorskip("kubeflow.training").ApiClient()
        return client.sanitize_for_serialization(
            client.deserialize(SimpleNamespace(data=json.dumps(doc)), f"KubeflowOrgV1{kind}")
        )
    if kind in ("JobSet", "TrainJob", "TrainingRuntime"):
        models = pytest.importorskip("kubeflow_trainer_api.models")
        prefix = "JobsetV1alpha2" if kind == "JobSet" else "TrainerV1alpha1"
        return getattr(models, f"{prefix}{kind}").from_dict(doc).to_dict()
    package = "prometheus_operator" if kind == "ServiceMonitor" else "cert_manager"
    model = getattr(pytest.importorskip(f"cloudcoil.models.{package}.v1"), kind)
    return model.model_validate(doc).model_dump(by_alias=True, mode="json", exclude_unset=True)


def _lost(given: object, back: object, path: str = "") -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(back, dict) or key not in back:
                yield f"{path}.{key}"
            else:
                yield from _lost(value, back[key], f"{path}.{key}")
    elif isinstance(given, list):
        there = back if isinstance(back, list) else []
        for i, value in enumerate(given):
            yield from _lost(value, there[i] if i < len(there) else None, f"{path}[{i}]")
    elif given != back:
        yield f"{path}: {given!r} became {back!r}"


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every mapping whose keys the API defines: not labels, limits, and other maps of users."""
    if isinstance(value, dict):
        if not path or path[-1] not in ("labels", "annotations", "matchLabels", "limits", "requests", "data"):
            yield path
            for key, each in value.items():
                yield from places(each, (*path, key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from places(each, (*path, i))


def with_typo(doc: Tree, path: tuple[str | int, ...]) -> Tree:
    """Return a copy that has one more key, which no API knows, at a place."""
    changed = copy.deepcopy(doc)
    at: Any = changed
    for step in path:
        at = at[step]
    at["replica"] = 1
    return changed
