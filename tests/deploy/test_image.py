"""The image of deploy/Containerfile: built from the wheel of this source, and run as a pod runs it."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, eventually
from tests.deploy.images import IMAGE, IMAGE_FROM_INDEX, Images

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("images")]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder that the image's user may write to, as a pod's volume is one."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "runs"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_what_is_installed_is_the_wheel(images: Images, wheel: Path) -> None:
    """Every file with its digest, and no torch beside that of the base."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
    with images.mounted() as root:
        (packages,) = (root / "opt" / "elastic-train" / "lib").glob("python3.*/site-packages")
        for name, digest, _ in rows:
            if digest:
                kind, _, expected = digest.partition("=")
                found = hashlib.new(kind, (packages / name).read_bytes()).digest()
                assert base64.urlsafe_b64encode(found).rstrip(b"=").decode() == expected, name
        assert sum(bool(digest) for _, digest, _ in rows) > 300
        assert not list(packages.glob("torch-*"))
        assert not (root / "release").exists()
    config = json.loads(images.podman("image", "inspect", IMAGE).stdout)[0]
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["StartPeriod"] == 1200 * 10**9
    assert config["Config"]["Entrypoint"] == ["elastic-train"]


def test_it_makes_data_trains_and_examines_itself_without_rights(images: Images, runs: Path) -> None:
    """No root, a read-only root, no capability, no network but the machine's own."""
    options = ("--volume", f"{runs}:/runs")
    helped = images.run("--help", options=options)
    assert helped.returncode == 0 and "launch" in helped.stdout, helped.stderr
    made = images.run("data", "synth", "/runs/rows", "--rows", "200", "--rows-per-group", "50", options=options)
    assert made.returncode == 0, made.stderr
    (runs / "config.yaml").write_text(yaml.safe_dump(job_of(steps=3)))
    trained = images.run("train", "/runs/config.yaml", options=options)
    assert trained.returncode == 0, trained.stderr
    assert json.loads((runs / "run" / "result.json").read_text())["step"] == 3
    examined = images.run("doctor", "/runs/config.yaml", "--json", options=options)
    report = json.loads(examined.stdout)
    assert (report["fit"], examined.returncode) == (True, 0), examined.stdout
    refused = images.run("-c", "touch /usr/x", options=(*options, "--entrypoint", "sh"))
    assert refused.returncode != 0 and "Read-only file system" in refused.stderr


def test_it_is_healthy_while_it_trains_and_leaves_when_it_is_stopped(images: Images, runs: Path) -> None:
    """As process 1 of its container it takes SIGTERM, commits and ends with 75."""
    options = ("--volume", f"{runs}:/runs")
    assert images.run("data", "synth", "/runs/rows", "--rows", "200", options=options).returncode == 0
    task = {"path": "chaos.tasks.paced_classifier:PacedClassifier", "params": {"lane_ms": 50.0}}
    (runs / "config.yaml").write_text(yaml.safe_dump(job_of(steps=100_000, **task)))
    port = ("--env", "ELASTIC_TRAIN__MONITORING__PORT=19109")
    images.podman(
        "run", "--detach", "--name", "node", *images.rights, *options, *port, IMAGE, "train", "/runs/config.yaml"
    )
    eventually(lambda: images.podman("healthcheck", "run", "node", may_fail=True).returncode == 0, "it is healthy", 400)
    eventually(lambda: '"op": "step"' in "".join(map(Path.read_text, (runs / "run/history").iterdir())), "a step", 400)
    images.podman("kill", "--signal", "TERM", "node")
    assert images.podman("wait", "node").stdout.strip() == "75", images.podman("logs", "node").stderr
    assert list((runs / "run" / "commits").glob("*.json"))
    assert images.podman("healthcheck", "run", "node", may_fail=True).returncode != 0


def test_without_a_torch_in_its_base_the_pinned_one_comes_from_the_index_that_is_named(
    images: Images, wheel: Path, tmp_path: Path
) -> None:
    """A package index of one's own, with a newer version beside the pin: torch and what it needs come from there."""
    pins = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    pin = next(version for name, _, version in pins if name == "torch")
    for version in (pin, f"{int(pin.partition('.')[0])}.999"):
        add_to_index(tmp_path / "index", "torch", version, "Requires-Dist: of-this-index\n")
    add_to_index(tmp_path / "index", "of-this-index", "1.0")
    images.build_from_index(wheel, tmp_path / "index")
    with images.mounted(IMAGE_FROM_INDEX) as root:
        (packages,) = (root / "opt" / "elastic-train" / "lib").glob("python3.*/site-packages")
        found = {path.name for path in packages.glob("*.dist-info") if path.name.startswith(("torch-", "of_this"))}
        assert found == {f"torch-{pin}.dist-info", "of_this_index-1.0.dist-info"}
        assert (packages / "torch.py").read_text() == f"__version__ = {pin!r}\n"
        assert (packages / "elastic_train").is_dir()


def add_to_index(index: Path, name: str, version: str, requires: str = "") -> None:
    """Put a package of one module into a folder that pip reads as an index."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}"
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{info}-py3-none-any.whl"
    described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}.dist-info/METADATA", described)
        archive.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}.dist-info/RECORD", "")
    links = [f'<a href="{path.name}">{path.name}</a>' for path in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


def job_of(steps: int, path: str = "elastic_train.tasks.text_classifier:TextClassifier", **more: object) -> object:
    """Return a small job on what `data synth` makes."""
    params = {"max_tokens": 16, "dim": 16, "depth": 1, "heads": 2}
    extra = more.get("params", {})
    assert isinstance(extra, dict)
    return {
        "run": {"dir": "/runs/run"},
        "task": {"path": path, "params": params | extra},
        "data": {"train": "/runs/rows", "too_long": "truncate"},
        "batch": {"global_batch": 16, "micro_batch": 8},
        "tracking": {"mlflow_uri": None},
        "max_steps": steps,
    }
