"""Machines that are namespaces of this one: each with processes, an address, a name, a cable and a /tmp of its own.

All hang on one switch, in a namespace around them; the first, `ctl`, is that namespace itself. Losing power is one
SIGKILL to a machine's init, with which the kernel ends everything on it. Nothing outlives the process that made them,
or is left on this machine: addresses and interfaces exist inside only. Folders outside of /tmp are shared by all.

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
_LOOK_EVERY_S = 0.02
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
"""A /tmp of its own, in which the shared folders that are below it are where they were."""

# Who asks a name server that is out of reach waits for seconds, also for names that /etc/hosts has.
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
    """Return why there can be no machines here; None if there can be."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True, slots=True)
class Machine:
    """A running one: its init, in this machine's numbers, and when that began."""

    init: int
    born: int
    waiter: subprocess.Popen[bytes]

    @property
    def is_on(self) -> bool:
        return is_alive(self.init, self.born)

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs a command on it."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "-u", "--", *command]

    def processes(self) -> Iterator[int]:
        """Yield all that runs on it, in this machine's numbers."""
        space = _space_of(self.init)
        return (pid for pid in pids() if space is not None and _space_of(pid) == space)

    def process(self, number: int) -> int | None:
        """Return the number that a process of it has on this machine, where it is given its number there."""
        return next((pid for pid in self.processes() if _innermost_number(pid) == number), None)

    def power_off(self) -> None:
        """End all that runs on it at once, without a word to anybody."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.waiter.kill()
        self.waiter.wait()
        eventually(lambda: not self.is_on, "the machine is off")


class Machines:
    """`ctl`, and nodes that are switched on and off by name; they run what `programs` says until they are off.

    `shared` are the folders below /tmp that all have in common.
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
        """Make the network, and the machine from which jobs are submitted."""
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
        """Stop all that runs on a node, as a hypervisor that suspends it does; also what is being started meanwhile."""

        def is_frozen() -> bool:
            self._signal(name, signal.SIGSTOP)
            stats = [stat_of(pid) for pid in self[name].processes()]
            return all(stat is None or stat.has_ended or stat.state in "Tt" for stat in stats)

        eventually(is_frozen, f"all of {name} has stopped")

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def close(self) -> None:
        """Switch everything off: with `ctl` the kernel ends all that runs in it."""
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
    """Wait until something is so; raises RunError if it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise RunError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(_LOOK_EVERY_S)


def _started(command: list[str], depth: int, environ: Mapping[str, str], log: Path) -> Machine:
    """Start a machine whose init is that many generations below the command's process."""
    with log.open("ab") as said:
        waiter = subprocess.Popen(
            bound_command(*command), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=dict(environ)
        )
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [waiter.pid]
        for _ in range(depth):
            found[:] = [child for parent in found for child in children_of(parent)]
        # until it has its namespaces, it is a fork that is about to become one of the command's programs
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
    """Return a process's number in its own PID namespace; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), None)


def _space_of(pid: int) -> str | None:
    """Return what names a process's PID namespace; None if it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - no path
    except OSError:
        return None


def _cable(name: str) -> str:
    return f"to-{name}"
