"""The simulated world under a job: time, network, etcd, storage, data and tracker, all drawn from one seed."""

from __future__ import annotations

import itertools
import random

from chaos.sim.job.shape import Shape
from chaos.sim.machine.etcd import Etcd
from chaos.sim.machine.kernel import Kernel, Process
from chaos.sim.machine.network import Net
from chaos.sim.machine.object_store import Storage
from chaos.sim.machine.tracker import Tracking
from chaos.sim.modelled.training_data import Dataset


class Surroundings:
    """The simulated machines of one job; `tracking` is None without a tracker."""

    def __init__(self, shape: Shape, seed: int, *, may_spoil_data: bool, first_pid: int) -> None:
        self.shape, self.seed = shape, seed
        self._first_pid = first_pid
        self._processes: dict[int, list[Process]] = {}
        self.kernel = Kernel()
        self.net = Net(self.kernel, self.draws("net"), shape.delay_s)
        self.etcd = Etcd(self.kernel, self.draws("etcd"), shape.delay_s, shape.piece_s)
        self.storage = Storage(self.kernel, self.draws("storage"), 3 * shape.delay_s)
        self.data = Dataset(self.kernel, may_spoil=may_spoil_data)
        self.other_code = set[int]()
        """Nodes with another version of the package."""
        self.unfit = set[int]()
        """Nodes whose processors compute wrongly."""
        self.tracking = self._make_tracking() if shape.tracked else None

    def draws(self, name: str) -> random.Random:
        """Return a random stream for one purpose, so that removing a fault changes no other draws."""
        return random.Random(f"{self.seed}/{name}")

    def process(self, node: int, name: str) -> Process:
        """Make a process with the lowest free pid of its node, as in a container."""
        living = [process for process in self._processes.get(node, ()) if not process.is_dead]
        taken = {process.pid for process in living}
        pid = next(pid for pid in itertools.count(self._first_pid) if pid not in taken)
        made = Process(pid, node, name, self.kernel.now)
        made.skew_s = self.kernel.skews.get(node, 0.0)
        self._processes[node] = [*living, made]
        return made

    def _make_tracking(self) -> Tracking:
        return Tracking(self.kernel, self.draws("tracker"), 3 * self.shape.delay_s, self.process)
