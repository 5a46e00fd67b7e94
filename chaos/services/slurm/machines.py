"""Machines as namespaces of this one, each with its own processes, address, name, cable and /tmp.

All are connected to one switch in an enclosing namespace, which is itself the first machine, `ctl`. A power loss is a
SIGKILL to a machine's init, on which the kernel ends all its processes. Nothing outlives the process that created the
machines or remains on this machine: addresses and interfaces exist only inside. Folders outside /tmp are shared by all.

Needs root, and the programs of util-linux and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.errors import RunError
from rendezvous.orphans import bound_command
from rendezvous.process_table import children_of, is_alive, pids, stat_of

LOGIN = "ctl"
START_TIMEOUT_S = 300.0
PROGRAMS = ("unshare", "nsenter", "ip", "mount")
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
LOOK_EVERY_S = 0.2
"""Seconds between two looks, each of which may start a command of Slurm's or read a job's whole history."""
_SWITCH, _NETWORK = "switch", "10.77.0"

_KEEP_ONLY = """
mount -t tmpfs tmpfs /mnt
while [ "$1" != -- ]; do
    case $1 in /tmp/*) mkdir -p "/mnt${1#/tmp}"; mount --bind "$1" "/mnt${1#/tmp}";; esac
    shift
done
shift
mount --move /mnt /tmp
"""
"""Mounts a private /tmp in which the shared folders keep their paths."""

# A query to an unreachable name server takes seconds, even for names in /etc/hosts.
_LOGIN_INIT = """
set -e
hosts=$1 address=$2; shift 2
mount --bind "$hosts" /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
hostname ctl
ip link set lo up
ip link add switch type bridge
ip addr add "$address/24" dev switch
ip link set switch up
exec "$@"
"""

_NODE_INIT = f"""
set -e
name=$1 address=$2 gateway=$3; shift 3
hostname "$name"
{_KEEP_ONLY}
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip addr add "$address/24" dev eth0
ip link set eth0 up
ip route add default via "$gateway"
exec "$@"
"""


def why_no_machines() -> str | None:
    """Return why no machines can be created here; None if they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True, slots=True)
class Machine:
    """A running machine: the outer process id of its init, and that process's start time."""

    init: int
    born: int
    waiter: subprocess.Popen[bytes]

    @property
    def is_on(self) -> bool:
        return is_alive(self.init, self.born)

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs `command` on the machine."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "-u", "--", *command]

    def processes(self) -> Iterator[int]:
        """Yield the machine's processes by their outer process ids."""
        space = _space_of(self.init)
        return (pid for pid in pids() if space is not None and _space_of(pid) == space)

    def process(self, number: int) -> int | None:
        """Return the outer process id of the machine's process `number`; None if there is none."""
        return next((pid for pid in self.processes() if _innermost_number(pid) == number), None)

    def power_off(self) -> None:
        """Kill all processes on the machine at once, without notice."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.waiter.kill()
        self.waiter.wait()
        eventually(lambda: not self.is_on, "the machine is off")


class Machines:
    """`ctl`, and nodes that are switched on and off by name; each runs its program until it is off.

    `shared` are the folders below /tmp that all machines share.
    """

    def __init__(self, names: Sequence[str], *, shared: Sequence[Path], hosts: Path) -> None:
        self._shared, self._hosts = shared, hosts
        self.addresses = {LOGIN: f"{_NETWORK}.1", **{name: f"{_NETWORK}.{10 + i}" for i, name in enumerate(names, 1)}}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        hosts.write_text("\n".join(lines) + "\n")
        self._on: dict[str, Machine] = {}

    def __getitem__(self, name: str) -> Machine:
        if not self.is_on(name):
            raise RunError(f"the machine {name} is off")
        return self._on[name]

    def switch_on_login(self, *program: str, environ: Mapping[str, str], log: Path) -> None:
        """Create the network and the machine from which jobs are submitted."""
        init = ("sh", "-c", _LOGIN_INIT, "sh", str(self._hosts), self.addresses[LOGIN], *program)
        self._on[LOGIN] = _started(["unshare", *_NAMESPACES, *init], 1, environ, log)

    def switch_on(self, name: str, *program: str, environ: Mapping[str, str], log: Path) -> None:
        """Boot a node, and plug in its cable."""
        gateway = self.addresses[LOGIN]
        arguments = (name, self.addresses[name], gateway, *map(str, self._shared), "--")
        init = ("sh", "-c", _NODE_INIT, "sh", *arguments, *program)
        login = self[LOGIN].init
        inside = ["nsenter", "-t", str(login), "-n", "-m", "-p", "--", "unshare", *_NAMESPACES, *init]
        node = _started(inside, 2, environ, log)
        end = ("type", "veth", "peer", "name", "eth0", "netns", str(node.init))
        self._ip("link", "add", _cable(name), *end)
        self._ip("link", "set", _cable(name), "master", _SWITCH, "up")
        self._on[name] = node

    def is_on(self, name: str) -> bool:
        return name in self._on and self._on[name].is_on

    def power_off(self, name: str) -> None:
        self[name].power_off()

    def plug(self, name: str, *, is_in: bool) -> None:
        """Plug in a node's cable, or pull it."""
        self._ip("link", "set", _cable(name), "up" if is_in else "down")

    def freeze(self, name: str) -> None:
        """Stop all processes of a node, as a hypervisor's suspend does, including those just starting."""

        def is_frozen() -> bool:
            self._signal(name, signal.SIGSTOP)
            stats = [stat_of(pid) for pid in self[name].processes()]
            return all(stat is None or stat.has_ended or stat.state in "Tt" for stat in stats)

        eventually(is_frozen, f"all of {name} has stopped")

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def close(self) -> None:
        """Switch everything off: the kernel ends all processes in `ctl`."""
        for name in (LOGIN, *self._on):
            if name in self._on:
                self._on.pop(name).power_off()

    def _signal(self, name: str, number: signal.Signals) -> None:
        for pid in self[name].processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ip(self, *arguments: str) -> None:
        command = ["nsenter", "-t", str(self[LOGIN].init), "-n", "--", "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def eventually(is_so: Callable[[], object], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until `is_so` returns a true value; raises RunError on timeout."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise RunError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(LOOK_EVERY_S)


def _started(command: list[str], depth: int, environ: Mapping[str, str], log: Path) -> Machine:
    """Start a machine whose init is `depth` generations below the command's process."""
    with log.open("ab") as said:
        waiter = subprocess.Popen(
            bound_command(*command), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=dict(environ)
        )
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [waiter.pid]
        for _ in range(depth):
            found[:] = [child for parent in found for child in children_of(parent)]
        # before it has its namespaces, it is a fork that has not executed its program yet
        return bool(found) and _space_of(found[0]) not in (None, _space_of(os.getpid()))

    try:
        eventually(is_there, f"a machine is on; {log} says why")
    except RunError:
        waiter.kill()
        waiter.wait()
        raise
    stat = stat_of(found[0])
    return Machine(found[0], stat.born if stat else 0, waiter)


def _innermost_number(pid: int) -> int | None:
    """Return a process's id in its own PID namespace; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), None)


def _space_of(pid: int) -> str | None:
    """Return the identity of a process's PID namespace; None if it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - no path
    except OSError:
        return None


def _cable(name: str) -> str:
    return f"to-{name}"
