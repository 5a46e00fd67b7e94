"""A job's secrets are in none of its files, and its user of etcd needs its own prefix only."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyetcd
import pytest

from elastic_train.errors import ConfigError
from elastic_train.tracking.mlflow_sync import sync
from rendezvous import EtcdServer
from rendezvous.errors import StoreDeniedError
from rendezvous.etcd.server import free_ports
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.records import Keys
from tests.conftest import PATIENCE_S, start
from tests.elastic_train.training.jobs import CLASSIFIER, config, succeed
from tests.elastic_train.training.live.test_live import finish, launch, nothing_left, until_whole, write_config
from tests.rendezvous.etcd.test_refusals import Users, etcd_options
from tests.rendezvous.rendezvous_sides import patient

pytestmark = pytest.mark.process
__all__ = ["nothing_left"]
PLANTED = {
    "AWS_ACCESS_KEY_ID": "planted-key-id-1f6b",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-key-8c21",
    "AWS_SESSION_TOKEN": "planted-session-token-5d07",
    "MLFLOW_TRACKING_USERNAME": "planted-user-90aa",
    "MLFLOW_TRACKING_PASSWORD": "planted-password-3e4c",
    "MLFLOW_TRACKING_TOKEN": "planted-token-77f2",
}
PASSWORD = "planted-etcd-password-b318"


def allow_only(users: Users, run_id: str) -> None:
    """Make a user `mine` that may read and write below the prefix of one job."""
    rpc, prefix = pyetcd.etcdrpc, Keys(run_id).prefix.encode()
    users.change("UserAdd", rpc.AuthUserAddRequest(name="mine", password=PASSWORD))
    users.change("RoleAdd", rpc.AuthRoleAddRequest(name="mine"))
    granted = rpc.AuthRoleGrantPermissionRequest(name="mine")
    granted.perm.permType, granted.perm.key, granted.perm.range_end = 2, prefix, prefix[:-1] + b"0"
    users.change("RoleGrantPermission", granted)
    users.change("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="mine", role="mine"))


def all_values(server: EtcdServer) -> bytes:
    """Return everything that an etcd holds, as its root sees it."""
    root = patient(server.endpoint, {"user": "root", "password": "right"})
    try:
        return repr(root.get("/")).encode()
    finally:
        root.close()


def test_no_secret_is_in_logs_files_etcd_or_mlflow(tmp_path: Path, rows: Path, uri: str) -> None:
    """Of a job that reports to MLflow, loses a worker and ends, under a user of etcd for this job alone."""
    (tmp_path / "tmp").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "ELASTIC_TRAIN__TRACKING__MLFLOW_URI": uri, **PLANTED}
    with EtcdServer() as server:
        allow_only(Users(server), tmp_path.name)
        known = tmp_path / "known"
        written = write_config(tmp_path, rows, 60, lane_ms=120.0, until=known)
        job = launch(tmp_path, server, written, ranks=2, conf=f",user=mine,password={PASSWORD}", **own)
        _, ranks = until_whole(tmp_path / "run", 2)
        os.kill(ranks[1], signal.SIGKILL)
        known.touch()
        finish(job, tmp_path)
        stranger = EtcdStore(
            etcd_options(server.endpoint, {"user": "mine", "password": PASSWORD}), give_up_after_s=PATIENCE_S
        )
        with pytest.raises(StoreDeniedError):
            stranger.get(Keys("of-others").prefix)
        stranger.close()
        left = {"etcd": all_values(server)}
    database = Path(uri.removeprefix("sqlite:///"))
    files = [path for folder in (tmp_path, database.parent) for path in folder.rglob("*") if path.is_file()]
    left |= {str(path): path.read_bytes() for path in files}
    assert tmp_path.name.encode() in left["etcd"]
    # The variable that says where MLflow is came from the same environment.
    assert any(tmp_path.name.encode() in text for name, text in left.items() if name.startswith(str(database)))
    secrets = [secret.encode() for secret in (*PLANTED.values(), PASSWORD)]
    assert [(name, secret) for name, text in left.items() for secret in secrets if secret in text] == []


def test_no_password_of_an_address_is_in_logs_or_files(tmp_path: Path, rows: Path) -> None:
    """Not of MLflow, which cannot be reached; nor does `sync` ask where it has none."""
    (port,), folder = free_ports(1), tmp_path / "job"
    addresses = {
        "tracking": {"mlflow_uri": f"http://me:planted@127.0.0.1:{port}"},
        "checkpoint": {"every": "2 steps", "url": str(tmp_path / "commits")},
    }
    path = config(folder, rows, CLASSIFIER, max_steps=2, validation={"every": None}, **addresses)
    done = succeed(start([path]))
    assert "MLflow cannot be reached" in done.output
    kept = [each for each in tmp_path.rglob("*") if each.is_file() and str(each) != path]
    assert {"config.yaml", "00000001.yaml"} <= {each.name for each in kept}
    assert "planted" not in done.output
    assert [each for each in kept if b"planted" in each.read_bytes()] == []
    with pytest.raises(ConfigError, match=r"http://\*\*\*@127.0.0.1:\d+: its user and password are not kept, give"):
        sync(folder / "run")
