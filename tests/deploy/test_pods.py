"""The pod of deploy/kubernetes, played by podman: three of them train, one is killed and comes back, all leave."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import yaml

from rendezvous import EtcdServer
from tests.deploy.images import DEPENDENCIES, IMAGE, Images
from tests.deploy.jobs import steps_done_twice, until_ranks, write_patient_config
from tests.deploy.manifests import Tree, one
from tests.elastic_train.training.live.test_live import etcd

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("images")]
__all__ = ["etcd"]
MONITORED_PORT = 19110
"""Of the first; all have the network of this machine."""


def pod_of(number: int, etcd: EtcdServer, folder: Path, images: Images) -> Tree:
    """Return the pod of the Job as kubectl renders it, with what is here in place of a cluster's volumes and etcd."""
    template = copy.deepcopy(one("indexed-job", "Job")["spec"]["template"])
    pod, (node,) = template["spec"], template["spec"]["containers"]
    node["image"], node["imagePullPolicy"] = IMAGE, "Never"
    command = node["command"]
    command[command.index("--endpoint") + 1] = etcd.endpoint
    command[command.index("--monitoring.port") + 1] = f"0.0.0.0:{MONITORED_PORT + number}"
    node["env"] = [each for each in node["env"] if each["name"] != "PET_RDZV_CONF"]  # that etcd has no TLS
    pod["volumes"] = [each for each in pod["volumes"] if each["name"] not in ("etcd", "runs")]
    node["volumeMounts"] = [each for each in node["volumeMounts"] if each["name"] not in ("etcd", "runs")]
    for name, path, at in (("runs", folder, str(folder)), ("torch", images.dependencies, DEPENDENCIES)):
        pod["volumes"].append({"name": name, "hostPath": {"path": str(path)}})
        node["volumeMounts"].append({"name": name, "mountPath": at})
    pod["hostNetwork"] = True
    for other in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):  # podman opens no port of the machine's
        node.pop(other)
    metadata = {"name": f"train-{number}", "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def play(images: Images, pod: Tree, folder: Path) -> None:
    """Have podman play a pod with the job's configuration, in place of one of its name."""
    config = copy.deepcopy(one("indexed-job", "ConfigMap"))
    config["data"] = {"train.yaml": (folder / "config.yaml").read_text()}
    file = folder / f"{pod['metadata']['name']}.yaml"
    file.write_text(yaml.safe_dump_all([config, pod]))
    images.podman("kube", "play", "--replace", "--network", "host", str(file))


def test_pods_train_together_and_one_that_was_killed_comes_back(
    images: Images, etcd: EtcdServer, tmp_path: Path, rows: Path
) -> None:
    """As user 1000, with a read-only root: no step is lost, and SIGTERM ends all with 75."""
    tmp_path.chmod(0o777)
    data = shutil.copytree(rows, tmp_path / "rows")
    for path in (data, *data.rglob("*")):
        path.chmod(0o755)  # a manifest is for whoever has written it alone
    write_patient_config(tmp_path, data, 100_000, lane_ms=200.0)
    pods = [pod_of(i, etcd, tmp_path, images) for i in range(3)]
    for pod in pods:
        play(images, pod, tmp_path)
    run = tmp_path / "run"
    term, _ = until_ranks(run, 3)
    images.podman("kill", "--signal", "KILL", "train-1-node")
    term, _ = until_ranks(run, 2, above=term)
    play(images, pods[1], tmp_path)
    until_ranks(run, 3, above=term)
    names = [f"train-{i}-node" for i in range(3)]
    images.podman("kill", "--signal", "TERM", *names)
    assert images.podman("wait", *names).stdout.split() == ["75"] * 3
    assert steps_done_twice(run) == []
