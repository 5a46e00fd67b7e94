"""For all tests a Slurm cluster and an image, where these can be made, and the launcher as jobs run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.services.slurm.cluster import SlurmCluster, folder_of_a_cluster, why_no_slurm
from chaos.services.slurm.machines import eventually
from tests.conftest import ROOT
from tests.deploy.images import Images, why_no_images

LAUNCHER = f"""#!/bin/sh
export PYTHONPATH={ROOT} OMP_NUM_THREADS=1
exec {sys.executable} -m elastic_train.command "$@"
"""
"""What users install as `elastic-train`; the folder of the trainer is shared by all nodes, as theirs has to be."""


LONGEST_S = 2400
"""Longer than the tests' own patience, which say what did not come."""
BEGIN_FIRST = ("test_ray.py", "test_slurm_scenarios.py")
"""They take longest: begun last, they would delay the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of this folder the time that they may take on a busy machine, and begin with the longest."""
    items.sort(key=lambda item: item.path.name not in BEGIN_FIRST)
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONGEST_S))


def _is_of_a_call(report: object) -> bool:
    return getattr(report, "when", None) == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have measured, from whatever process they ran in."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports if _is_of_a_call(report)]
    for name, value in (each for report in reports for each in getattr(report, "user_properties", ())):
        if getattr(value, "__float__", None) is not None:
            terminalreporter.write_line(f"{name}: {value:.3g}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes, which share the tests' folders, the sources and the environment, wherever these are."""
    if why := why_no_slurm():
        pytest.skip(why)
    shared = [tmp_path_factory.getbasetemp(), ROOT, Path(sys.prefix)]
    with folder_of_a_cluster() as folder, SlurmCluster(folder, 3, shared=shared) as started:
        yield started


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, with all nodes on and idle before a test and after it."""
    yield cluster
    cluster.run("sh", "-c", "scancel --signal=KILL --full -u root; scancel -u root; scancel -u root --state=PENDING")
    for name in cluster.nodes:
        cluster.restore(name)
    eventually(lambda: is_empty(cluster), "no jobs are left")
    cluster.await_idle(len(cluster.nodes))


def is_empty(cluster: SlurmCluster) -> bool:
    """Say whether there are no jobs; cancel those that were requeued since, as a node that lost its power came back."""
    return not cluster.run("sh", "-c", "scancel -u root --state=PENDING; squeue -h").strip()


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """The path of `elastic-train`, and beside it, so that it can be first on PATH, of an etcd."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "elastic-train").write_text(LAUNCHER)
    (programs / "elastic-train").chmod(0o755)
    from rendezvous.etcd.server import find_binary

    shutil.copy(find_binary(), programs / "etcd")
    return str(programs / "elastic-train")


@pytest.fixture
def path(launcher: str) -> dict[str, str]:
    """The environment in which jobs find the launcher and an etcd."""
    return {"PATH": f"{Path(launcher).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source, as a release has it."""
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Iterator[Images]:
    """The image of deploy/Containerfile, on a base of Debian's packages."""
    if why := why_no_images():
        pytest.skip(why)
    made = Images(Path(tempfile.mkdtemp(prefix="images-", dir="/tmp")))  # podman refuses long names of its folders
    try:
        made.make_base()
        made.build(request.getfixturevalue("wheel"))
        yield made
    finally:
        made.close()
