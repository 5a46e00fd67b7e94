"""A local MLflow server with its own database, which can be killed or frozen while a job logs to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from chaos.errors import RunError
from rendezvous.etcd.server import hold_ports
from rendezvous.orphans import bound_command

_STARTING_S, _LOOK_EVERY_S, _ANSWER_S = 180.0, 0.1, 0.5
_ENVIRON = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


class TrackerServer:
    """A local server: `with TrackerServer(folder) as server: … server.uri`; database and log stay in the folder."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host, self._held = folder, host, contextlib.ExitStack()
        (self._port,) = hold_ports(self._held, 1)
        self._process: subprocess.Popen[bytes] | None = None
        self.database_uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"

    @property
    def uri(self) -> str:
        return f"http://{self._host}:{self._port}"

    def begin(self) -> list[int]:
        """Start the server, or restart it on the same database, without waiting; return its process id."""
        assert self._process is None, "it runs already"
        self._folder.mkdir(parents=True, exist_ok=True)
        options = {
            "--backend-store-uri": self.database_uri,
            "--default-artifact-root": (self._folder / "artifacts").absolute().as_uri(),
            "--host": self._host,
            "--port": str(self._port),
            "--workers": "1",
        }
        words = [word for option in options.items() for word in option]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                bound_command(sys.executable, "-m", "mlflow", "server", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **_ENVIRON},
            )
        return [self._process.pid]

    @property
    def is_answering(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), opener.open(f"{self.uri}/health", timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
        return False

    def kill(self) -> list[int]:
        """SIGKILL the server and its child processes; return its process id, or none if it is not running."""
        if self._process is None:
            return []
        self._signal(signal.SIGKILL)
        self._process.wait()
        pids, self._process = [self._process.pid], None
        return pids

    def freeze(self) -> list[int]:
        return self._signal(signal.SIGSTOP)

    def thaw(self) -> list[int]:
        return self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> list[int]:
        if self._process is None:
            return []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        return [self._process.pid]

    def __enter__(self) -> TrackerServer:
        self.begin()
        until = time.monotonic() + _STARTING_S
        while not self.is_answering:
            if time.monotonic() > until or self._process is None or self._process.poll() is not None:
                self.kill()
                raise RunError(f"MLflow did not come up on {self.uri}; see {self._folder / 'server.log'}")
            time.sleep(_LOOK_EVERY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._held.close()
