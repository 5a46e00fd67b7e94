"""Create the services that a job's faults need: etcd, proxies for it, a cable, a tracker, a small disk.

Only what the scenario's kinds of fault need is created; kinds that this machine cannot provide are in `missing`, with
the reason.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from chaos.scenario.kinds import BY_TASKS, CABLED, KINDS, PROXIED, RELAYED
from chaos.scenario.kinds import FREEZING as FREEZING_KINDS
from chaos.scenario.model import Scenario
from chaos.scenario.networks import NETWORKS
from chaos.services.authority import Authority
from chaos.services.etcd_cluster import EtcdCluster
from chaos.services.etcd_proxy import Proxies, Way
from chaos.services.freezing_disk import FreezingDisk, freezing_disk
from chaos.services.mlflow_server import TrackerServer
from chaos.services.network.measured import Link, measure
from chaos.services.network.namespace import Cable, NoNamespacesError, cable
from chaos.services.s3_server import S3
from chaos.services.store_mount import NoMountError, StoreMount, mounted
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.system.failpoints import VARIABLE


class OwnData:
    """A copy of the training set `train` in `folder`."""

    def __init__(self, train: str, folder: Path) -> None:
        shutil.copytree(train, folder)
        self.folder = folder
        self._whole = [
            (file.path, group) for file in load_manifest(str(folder)).files for group in range(len(file.row_groups))
        ]

    def spoil(self, draws: random.Random) -> dict[str, object] | None:
        """Overwrite a row group's pages and return which; None if only one intact group is left, or none is there."""
        return self._damage(draws, lambda content: b"\xff" * len(content))

    def flip(self, draws: random.Random) -> dict[str, object] | None:
        """Flip the last bit of each column of a row group and return which; None if only one intact group is left."""
        return self._damage(draws, lambda content: content[:-1] + bytes([content[-1] ^ 1]))

    def _damage(self, draws: random.Random, change: Callable[[bytes], bytes]) -> dict[str, object] | None:
        if len(self._whole) < 2 or not self.folder.exists():
            return None
        name, group = self._whole.pop(draws.randrange(len(self._whole)))
        path = self.folder / name
        metadata = pq.read_metadata(path).row_group(group)
        with path.open("r+b") as file:
            for number in range(metadata.num_columns):
                chunk = metadata.column(number)
                place = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
                file.seek(place)
                content = file.read(chunk.total_compressed_size)
                file.seek(place)
                file.write(change(content))
        return {"file": name, "row_group": group}


DISK_MB = 64
FREEZING = ("data", "metrics")
"""Run folders that are mounted if a scenario has a `freezing_disk`; `data` also if its disk can become full."""
WAYS = ".ways"
"""End of the name of the folder next to a run's that holds each node's mount of it."""


@dataclass(slots=True)
class Surroundings:
    """The services of a job and its faults; none by default."""

    run_id: str = ""
    etcd: EtcdCluster | None = None
    proxies: Proxies | None = None
    cable: Cable | None = None
    num_cut: int = 0
    """Number of faults of the cable."""
    points: list[Path] = field(default_factory=list)
    disk: Path | None = None
    freezing: list[FreezingDisk] = field(default_factory=list)
    ways: dict[int, StoreMount] = field(default_factory=dict)
    """Each node's private mount of the commit folder."""
    s3: S3 | None = None
    tracker: TrackerServer | None = None
    data: OwnData | None = None
    link: Link | None = None
    """Round trip and rate of the scenario's network, as measured before the job."""
    missing: dict[str, str] = field(default_factory=dict)
    """Kinds of fault that are impossible here, with the reason."""

    def endpoint(self, node: int) -> str | None:
        host = self.cable.address("etcd") if self.cable else "127.0.0.1"
        if self.proxies is not None:
            return self.proxies.endpoint(node, host)
        return self.etcd.endpoint.replace("127.0.0.1", host) if self.etcd is not None else None

    @property
    def tls(self) -> dict[str, str]:
        """TLS files by which nodes and etcd authenticate each other; empty for plain text."""
        return self.etcd.tls if self.etcd is not None else {}

    def flags(self, node: int, count: int) -> list[str]:
        """Return the torchrun options that set a node's address."""
        return [f"--local-addr={self.cable.address('nodes')}"] if self.cable and node != count - 1 else []

    def environ(self, node: int) -> dict[str, str]:
        """Return the environment variables of a node's processes."""
        environ = {VARIABLE: str(self.points[node])} if self.points else {}
        if node in self.ways:
            environ["ELASTIC_TRAIN__CHECKPOINT__URL"] = str(self.ways[node].folder)
        return environ | (self.s3.environ if self.s3 is not None else {})

    @property
    def settings(self) -> list[str]:
        said = [f"--checkpoint.url={self.s3.url(self.run_id)}"] if self.s3 is not None else []
        said += [f"--tracking.mlflow_uri={self.tracker.uri}"] if self.tracker is not None else []
        own = [f"--data.train={self.data.folder}", "--data.quarantine=[unreadable]"] if self.data is not None else []
        return [*said, *own]

    def command(self, node: int, count: int, command: list[str]) -> list[str]:
        """Return the node's command; with a cable, the last node's runs at its other end."""
        return self.cable.command(command) if self.cable and node == count - 1 else command


@contextlib.contextmanager
def surroundings(
    folder: Path, run_id: str, kinds: Collection[str], scenario: Scenario, train: str | None = None
) -> Iterator[Surroundings]:
    """Create what these kinds of fault need, for nodes that train on `train`, and remove it afterwards."""
    count, members = scenario.nodes.count, scenario.etcd_members
    with contextlib.ExitStack() as undo:
        has_points = any(KINDS[kind].aim == "point" or kind in BY_TASKS for kind in kinds)
        around = Surroundings(run_id, points=folders(folder, count) if has_points else [])
        if scenario.network is not None:
            around.cable = undo.enter_context(cable(NETWORKS[scenario.network]))
            around.link = measure(around.cable)
        elif set(CABLED) & set(kinds):
            try:
                around.cable = undo.enter_context(cable())
            except NoNamespacesError as error:
                around.missing |= dict.fromkeys(CABLED, str(error))
        if around.cable is not None and around.cable.relay is None:
            around.missing |= dict.fromkeys(RELAYED, "no TUN interfaces can be made here")
        if scenario.freezing_disk:
            try:
                around.freezing = _freezing(undo, folder)
            except NoMountError as error:
                around.missing |= dict.fromkeys(FREEZING_KINDS, str(error))
        if around.freezing:
            around.disk = around.freezing[0].folder
        elif "storage_full" in kinds:
            try:
                around.disk = undo.enter_context(_small_disk(folder / "data"))
            except subprocess.CalledProcessError as error:
                around.missing["storage_full"] = f"no file system can be mounted: {error.stderr.decode().strip()}"
        if "readonly_dir" in kinds:
            try:
                around.ways = _ways(undo, folder, count)
            except NoMountError as error:
                around.missing["readonly_dir"] = str(error)
        if scenario.s3:
            around.s3 = undo.enter_context(S3())
            undo.callback(around.s3.mirror, run_id, folder)
        if scenario.tracker:
            where = around.cable.address("etcd") if around.cable else "127.0.0.1"
            around.tracker = undo.enter_context(TrackerServer(folder / "tracker", where))
        if scenario.own_data:
            assert train is not None, "a script brings data of its own"
            around.data = OwnData(train, folder / "dataset")
        host = "0.0.0.0" if around.cable else "127.0.0.1"
        listening = "127.0.0.1" if set(PROXIED) & set(kinds) else host
        around.etcd = undo.enter_context(EtcdCluster(members, listening, _authority(folder) if scenario.tls else None))
        if set(PROXIED) & set(kinds):
            targets = [member.endpoint for member in around.etcd.members]
            around.proxies = Proxies(host, targets, [Way() for _ in range(count)])
            around.proxies.start()
            undo.callback(around.proxies.close)
        yield around


def _authority(folder: Path) -> Authority:
    (folder / "certificates").mkdir()
    return Authority(folder / "certificates")


def _ways(undo: contextlib.ExitStack, folder: Path, count: int) -> dict[int, StoreMount]:
    """Mount a run's folder once more for each node, next to it."""
    outside = folder.with_name(f"{folder.name}{WAYS}")
    outside.mkdir()
    undo.callback(outside.rmdir)
    return {number: undo.enter_context(mounted(folder, outside / str(number))) for number in range(count)}


def _freezing(undo: contextlib.ExitStack, folder: Path) -> list[FreezingDisk]:
    """Put the folders of commit files and of metrics on file systems that can be frozen: both, or none."""
    with contextlib.ExitStack() as made:
        disks = [made.enter_context(freezing_disk(folder / name)) for name in FREEZING]
        undo.push(made.pop_all())
    return disks


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of a few megabytes, and keep its contents as plain files of the folder at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "elastic-chaos", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        kept = folder.with_name(f"{folder.name}.kept")
        shutil.copytree(folder, kept)
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
        folder.rmdir()
        kept.rename(folder)


def folders(folder: Path, count: int) -> list[Path]:
    """Create the folders in which each node's failpoints are armed."""
    made = [folder / "failpoints" / str(number) for number in range(count)]
    for path in made:
        path.mkdir(parents=True, exist_ok=True)
    return made
