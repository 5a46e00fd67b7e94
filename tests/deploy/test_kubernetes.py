"""The manifests of deploy/kubernetes: valid by their APIs, safe by policy, understood by the launcher they start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from elastic_train.cli.main import app, main
from elastic_train.config import sources
from elastic_train.errors import ConfigError, CorruptError, NoProgressError, Preempted
from elastic_train.launch.options import Flags, Launch, resolve
from rendezvous.errors import ServerError
from rendezvous.etcd.options import ETCD_KEYS
from rendezvous.etcd.server import find_binary
from tests.conftest import ROOT
from tests.deploy.manifests import BESIDES, FOLDER, WAYS, Tree, job_spec, one, places, refusal, rendered, with_typo
from tests.deploy.pages import command

pytestmark = pytest.mark.deploy
ALL = (*WAYS, *BESIDES)
MONITORED_PORT = 9109


def pod_of(name: str) -> Tree:
    """Return the specification of a job's pods, as a folder renders it."""
    return dict(job_spec(name, one(name, WAYS[name]))["template"]["spec"])


def node_of(name: str) -> Tree:
    return dict(pod_of(name)["containers"][0])


@pytest.mark.parametrize("name", ALL)
def test_their_apis_take_them(name: str) -> None:
    """Those of Kubernetes, JobSet, Kubeflow's trainer and operator, cert-manager, and the Prometheus operator."""
    for doc in rendered(name):
        assert refusal(doc) is None, doc["kind"]


@pytest.mark.parametrize("name", ALL)
def test_a_typo_anywhere_in_them_is_refused(name: str) -> None:
    """A check that lets one pass proves nothing: so one is planted in each place that has keys of the API."""
    for doc in rendered(name):
        taken = [path for path in places(doc) if path and refusal(with_typo(doc, path)) is None]
        assert not taken, (doc["kind"], taken)


@pytest.mark.parametrize("name", WAYS)
def test_a_pod_of_any_kind_is_one_of_kubernetes(name: str) -> None:
    """Operators hand it on, and some of their models look at less than Kubernetes does."""
    template = job_spec(name, one(name, WAYS[name]))["template"]
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "train"}, "template": template}
    assert refusal(pod) is None
    assert refusal(with_typo(pod, ("template", "spec", "containers", 0, "startupProbe", "httpGet"))) is not None


@pytest.mark.parametrize("name", [*WAYS, "etcd"])
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    """No root, a read-only root, no capabilities, no token of the cluster, and limits."""
    pod = pod_of(name) if name in WAYS else one("etcd", "StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all("hostPath" not in volume for volume in pod["volumes"])
    for container in pod["containers"]:
        allowed = container["securityContext"]
        assert allowed["readOnlyRootFilesystem"] is True
        assert allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"].keys() == container["resources"]["requests"].keys() == {"cpu", "memory"}
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert written == ({"/runs", "/tmp", "/dev/shm"} if name in WAYS else {"/data"})


OPERATORS = {
    "indexed-job": {"JOB_COMPLETION_INDEX": "1"},
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "trainer-v2": {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
    },
    "pytorchjob": {
        "PET_RDZV_BACKEND": "etcd",
        "PET_NNODES": "1:4",
        "PET_MAX_RESTARTS": "100",
        "MASTER_ADDR": "train-worker-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "4",
        "RANK": "1",
        "PYTHONUNBUFFERED": "1",
    },
}
"""Variables that the operators document to add to a container's environment."""
OF_ONE_JOB = ("Job", "JobSet", "TrainJob", "TrainingRuntime", "PyTorchJob", "ConfigMap", "PodDisruptionBudget")
"""Kinds of which each job has its own; the others are shared by all jobs of a namespace."""


def launch_of(name: str) -> Launch:
    """Return what the launcher makes of a pod of one kind, as the folder is."""
    return launched(node_of(name), OPERATORS[name])


def launched(node: Tree, operators: dict[str, str]) -> Launch:
    """Return what a pod's launcher makes of its command and of all variables that it gets."""
    environ = {each["name"]: each["value"] for each in node["env"]} | operators
    program, *words = node["command"]
    assert program == "elastic-train"
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    assert command.__name__ == "launch"
    given = dict(bound.arguments)
    return resolve(given["config"], given["overrides"], given.get("flags", Flags()), environ, num_gpus=0)


@pytest.mark.parametrize("name", WAYS)
def test_the_launcher_understands_command_and_variables(name: str) -> None:
    """Whatever an operator sets: 1 to 4 nodes, the etcd of deploy/kubernetes/etcd with TLS, time to leave."""
    plan, pod = launch_of(name), pod_of(name)
    assert (plan.min_nodes, plan.max_nodes, plan.run_id) == (1, 4, "train")
    assert plan.endpoint == "etcd-0.etcd:2379,etcd-1.etcd:2379,etcd-2.etcd:2379"
    assert not plan.warnings
    files = {key: value for key, value in plan.conf.items() if key in ETCD_KEYS}
    assert files == {"ca_cert": "/etcd/ca.crt", "cert": "/etcd/tls.crt", "key": "/etcd/tls.key"}
    assert plan.grace_s < pod["terminationGracePeriodSeconds"]
    assert all("lifecycle" not in container for container in pod["containers"])
    config = sources.load(FOLDER / "base" / "train.yaml", environ={}, arguments=plan.overrides)
    assert config.monitoring.address == ("0.0.0.0", MONITORED_PORT)
    node = node_of(name)
    assert node["ports"] == [{"name": "metrics", "containerPort": MONITORED_PORT}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert node[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    patience_s = node["startupProbe"]["periodSeconds"] * node["startupProbe"]["failureThreshold"]
    assert patience_s > plan.timeout_s, "a node that waits for others is not killed"
    alive_s = node["livenessProbe"]["periodSeconds"] * node["livenessProbe"]["failureThreshold"]
    assert alive_s > plan.timeout_s
    assert str(plan.config).startswith("/config/")


@pytest.mark.parametrize("name", ["indexed-job", "jobset", "trainer-v2"])
def test_exit_codes_mean_in_a_cluster_what_they_mean_to_us(name: str) -> None:
    """75 and evictions cost nothing; a node that would end the same way again is not replaced, and two end the job."""
    spec = job_spec(name, one(name, WAYS[name]))
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    by_codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert by_codes["Ignore"]["values"] == [Preempted.exit_code]
    fatal = [ConfigError.exit_code, CorruptError.exit_code, NoProgressError.exit_code]
    assert by_codes["FailIndex"]["values"] == fatal
    assert spec["maxFailedIndexes"] == 1 and spec["backoffLimitPerIndex"] > 0
    assert {rule["containerName"] for rule in by_codes.values()} == {node_of(name)["name"]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_names_agree_across_documents() -> None:
    """Every mounted, selected or addressed object exists under that name."""
    etcd, job = rendered("etcd"), rendered("indexed-job")
    secrets = {doc["spec"].get("secretName") for doc in etcd if doc["kind"] == "Certificate"}
    pod = pod_of("indexed-job")
    mounted = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert mounted <= secrets
    maps = {doc["metadata"]["name"]: doc for doc in job if doc["kind"] == "ConfigMap"}
    assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} == maps.keys()
    assert all(each["immutable"] is True for each in maps.values()), "a pod that comes back reads what others have read"
    labels = one("indexed-job", "Job")["spec"]["template"]["metadata"]["labels"]
    budget, policy = one("indexed-job", "PodDisruptionBudget"), one("indexed-job", "NetworkPolicy")
    for selector in (budget["spec"]["selector"], policy["spec"]["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    served = next(d for d in etcd if d["metadata"]["name"] == "etcd-server")
    hosts = [part.partition(":")[0] for part in str(launch_of("indexed-job").endpoint).split(",")]
    assert set(hosts) <= set(served["spec"]["dnsNames"])
    replicas = one("etcd", "StatefulSet")["spec"]["replicas"]
    assert hosts == [f"etcd-{i}.etcd" for i in range(replicas)]
    monitor, service = one("monitoring", "ServiceMonitor"), one("indexed-job", "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_params_change_every_place_that_depends_on_them(tmp_path: Path) -> None:
    """Name, sizes and image of a run are in one file, whatever the kind."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    params = tmp_path / "kubernetes" / "base" / "params.env"
    old = dict(line.split("=", 1) for line in params.read_text().splitlines() if not line.startswith("#"))
    new = {
        "RUN": "big",
        "NODES": "7",
        "MIN_MAX": "2:7",
        "MAX_FAILED": "0",
        "MIN_AVAILABLE": "0",
        "IMAGE": "r/e:9",
        "CPUS": "9",
        "MEMORY": "9Gi",
        "STORAGE": "9Ti",
        "THREADS": "3",
    }
    assert old.keys() == new.keys()
    params.write_text("".join(f"{key}={value}\n" for key, value in new.items()))
    for name, kind in WAYS.items():
        folder = tmp_path / "kubernetes" / name
        doc = one(folder, kind)
        node = job_spec(name, doc)["template"]["spec"]["containers"][0]
        assert node["image"] == "r/e:9"
        assert node["resources"]["limits"] == {"cpu": "9", "memory": "9Gi"}
        assert {"name": "OMP_NUM_THREADS", "value": "3"} in node["env"]
        assert {"big", "2:7"} <= set(node["command"])
        text = yaml.safe_dump_all(rendered(folder))
        assert "registry.example.com" not in text
        assert "1:4" not in text
        assert "run: train" not in text
        assert job_spec(name, doc).get("parallelism", 7) == 7
        assert job_spec(name, doc).get("maxFailedIndexes", 0) == 0
        budget = one(folder, "PodDisruptionBudget")["spec"]
        assert budget["selector"]["matchLabels"] == {"run": "big"}
        assert (budget["minAvailable"], budget["unhealthyPodEvictionPolicy"]) == (0, "AlwaysAllow")
        assert refusal(doc) is None
        assert [doc["metadata"]["name"] for doc in rendered(folder) if doc["kind"] in OF_ONE_JOB] == ["big"] * (
            4 if name == "trainer-v2" else 3
        )
    assert one(tmp_path / "kubernetes" / "trainer-v2", "TrainJob")["spec"]["runtimeRef"]["name"] == "big"


def with_components(folder: Path, *names: str) -> Path:
    """Return a copy of all manifests in which a job of any kind has some components, as the page says to add them."""
    shutil.copytree(FOLDER, folder)
    with (folder / "base" / "kustomization.yaml").open("a") as base:
        base.write(f"components: [{', '.join(f'../{name}' for name in names)}]\n")
    return folder


@pytest.mark.parametrize("name", [*WAYS, "etcd"])
def test_where_the_cluster_gives_users_pods_name_none(name: str, tmp_path: Path) -> None:
    """OpenShift refused the fixed one; the other rights stay away."""
    folder = with_components(tmp_path / "kubernetes", "openshift")
    with (folder / "etcd" / "kustomization.yaml").open("a") as kustomization:
        kustomization.write("components: [../openshift]\n")
    doc = one(folder / name, WAYS.get(name, "StatefulSet"))
    pod = (job_spec(name, doc) if name in WAYS else doc["spec"])["template"]["spec"]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert refusal(doc) is None


@pytest.mark.parametrize("name", WAYS)
def test_each_kind_of_job_can_have_gpus(name: str, tmp_path: Path) -> None:
    """As many for each node as are asked for, on machines that are kept for them, and a rank for each."""
    folder = with_components(tmp_path / "kubernetes", "gpus")
    (folder / "gpus" / "gpus.env").write_text("GPUS=4\n")
    doc = one(folder / name, WAYS[name])
    assert refusal(doc) is None
    template = job_spec(name, doc)["template"]
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "train"}, "template": template}
    assert refusal(pod) is None
    node = template["spec"]["containers"][0]
    assert node["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "4"}
    assert template["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    plan = launched(node, OPERATORS[name])
    assert (plan.ranks, plan.max_nodes, plan.warnings) == (4, 4, ())
    assert "gpus" not in [doc["metadata"]["name"] for doc in rendered(folder / name)]


@pytest.mark.parametrize("name", WAYS)
def test_the_claim_can_be_left_out(name: str, tmp_path: Path) -> None:
    """Then a folder of the pod's own is where the volume was."""
    folder = with_components(tmp_path / "kubernetes", "without-claim", "gpus")
    documents = rendered(folder / name)
    assert "PersistentVolumeClaim" not in {doc["kind"] for doc in documents}
    assert [refusal(doc) for doc in documents] == [None] * len(documents)
    volumes = job_spec(name, one(folder / name, WAYS[name]))["template"]["spec"]["volumes"]
    assert [volume for volume in volumes if volume["name"] == "runs"] == [
        {"name": "runs", "emptyDir": {"sizeLimit": "100Gi"}}
    ]
    assert not [volume for volume in volumes if "persistentVolumeClaim" in volume]


@pytest.mark.parametrize("begins", ["kubectl apply -k deploy/kubernetes/etcd", "kubectl apply -k deploy/kubernetes/in"])
def test_what_the_page_applies_is_a_folder_that_is_rendered(begins: str) -> None:
    _, (*program, folder) = command("kubernetes.md", begins)
    assert program == ["kubectl", "apply", "-k"]
    assert (ROOT / folder).parent == FOLDER and rendered(Path(folder).name)


def test_what_the_page_deletes_is_what_a_job_has_of_its_own() -> None:
    """The claim and the policies stay, for the next job."""
    _, (program, verb, *named) = command("kubernetes.md", "kubectl delete")
    assert (program, verb) == ("kubectl", "delete")
    own = {f"{doc['kind'].lower()}/{doc['metadata']['name']}" for doc in rendered("indexed-job")}
    assert set(named) == {"job/train", "configmap/train"} <= own


def test_the_secret_that_the_page_creates_is_the_one_that_pods_read() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here: install it to render the secret")
    _, words = command("kubernetes.md", "kubectl create secret")
    done = subprocess.run([*words, "--dry-run=client", "-o", "yaml"], capture_output=True, text=True, check=True)
    made = yaml.safe_load(done.stdout)
    assert set(made["data"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert made["metadata"]["name"] in [source["secretRef"]["name"] for source in node_of("indexed-job")["envFrom"]]


def test_etcd_knows_the_flags_that_it_is_given() -> None:
    try:
        known = subprocess.run([find_binary(), "--help"], capture_output=True, text=True, check=False)
    except ServerError as error:
        pytest.skip(str(error))
    program, *flags = one("etcd", "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert program == "etcd"
    words = set((known.stdout + known.stderr).split())
    assert [flag for flag in (flag.partition("=")[0] for flag in flags) if flag not in words] == []


@pytest.mark.parametrize("name", WAYS)
def test_what_submit_renders_is_valid_and_loads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configuration that was given, the environment's keys among it, and nothing else of this machine."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here: install it to render the manifests")
    (tmp_path / "mine.yaml").write_text(
        "run: {dir: /runs/mine}\ndata: {train: 's3://mine/rows'}\ncheckpoint: {url: 's3://mine/commits'}\n"
    )
    monkeypatch.setenv("ELASTIC_TRAIN__EPOCHS", "9")
    job = ("--nodes", "2:5", "--id", "mine", "--image", "r/e:9", "--memory", "8Gi", "--gpus", "2", "--no-claim")
    with pytest.raises(SystemExit) as left:
        main(
            [
                "submit",
                "k8s",
                str(tmp_path / "mine.yaml"),
                *job,
                "--kind",
                name,
                "--batch.micro-batch",
                "2",
                "--dry-run",
            ]
        )
    assert left.value.code == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert all(refusal(doc) is None for doc in documents)
    (given,) = (doc for doc in documents if doc["kind"] == "ConfigMap")
    (tmp_path / "given.yaml").write_text(given["data"]["train.yaml"])
    config = sources.load(tmp_path / "given.yaml", environ={})
    assert (config.run.dir, config.batch.micro_batch, config.epochs) == ("/runs/mine", 2, 9)
    (doc,) = (doc for doc in documents if doc["kind"] == WAYS[name])
    node = job_spec(name, doc)["template"]["spec"]["containers"][0]
    assert {"mine", "2:5"} <= set(node["command"])
    assert node["resources"]["limits"] == {"cpu": "8", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert launched(node, OPERATORS[name]).ranks == 2
    assert "PersistentVolumeClaim" not in {doc["kind"] for doc in documents}
