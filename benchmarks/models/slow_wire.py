"""Throughput compared with DDP's on two ranks with a slow network, and the gain by overlap.

The network is a namespace with a loopback of limited bandwidth (tc's token bucket filter), both directions together.
Both sides use it in turn, in the same two processes. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.jobs import LARGE, write_job

NUM_RANKS, STEPS_A_TURN = 2, 1
FAST_BYTES_PER_S = 4e9
PORTS = ("29500", "29501")
"""Ports of the trainer and of DDP; nothing else runs in the namespace."""
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Beside:
    """Medians over a two-rank job's turns: seconds of the trainer's step, and the ratio of DDP's step time to it."""

    step_s: float
    over_ddp: float
    num_bytes: int
    """Bytes of the gradient."""


@dataclass(frozen=True, slots=True)
class Network:
    """A namespace with a slow loopback."""

    name: str

    def let_through(self, bytes_per_s: float) -> None:
        """Change the bandwidth."""
        rate = f"{max(1, round(8 * bytes_per_s / 1e3))}kbit"
        run("tc", "-n", self.name, "qdisc", "replace", "dev", "lo", "root", "tbf", "rate", rate, "burst", "256kb",
            "latency", "400ms")  # fmt: skip

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


@contextmanager
def slow_network() -> Iterator[Network]:
    """Create a namespace and remove it afterwards; raises SystemExit if not permitted."""
    network = Network(f"slow-{os.getpid()}")
    try:
        run("ip", "netns", "add", network.name)
        run("ip", "-n", network.name, "link", "set", "lo", "up")
        network.let_through(FAST_BYTES_PER_S)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"a slow network needs root, iproute2 and the kernel's tbf: {error}") from error
    try:
        yield network
    finally:
        with suppress(subprocess.CalledProcessError):
            run("ip", "netns", "del", network.name)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def beside_ddp(name: str, num_turns: int) -> tuple[Beside, Beside, float]:
    """Return comparisons with DDP, with and without overlap of exchange and backward pass, and the network's bytes/s.

    The bandwidth is chosen so that an exchange takes as long as a step's computation.
    """
    with slow_network() as network, tempfile.TemporaryDirectory() as folder:
        alone = _beside(network, Path(folder) / "fast", name, 2, {"parallel.bucket_mb": None})
        rate = NUM_RANKS * alone.num_bytes / alone.step_s
        network.let_through(rate)
        after = _beside(network, Path(folder) / "after", name, num_turns, {"parallel.bucket_mb": None})
        overlapped = _beside(network, Path(folder) / "overlapped", name, num_turns, {})
    return overlapped, after, rate


def _beside(network: Network, folder: Path, name: str, num_turns: int, overrides: Mapping[str, object]) -> Beside:
    folder.mkdir()
    path = write_job(folder, LARGE[name], num_lanes=NUM_RANKS, max_steps=(num_turns + 1) * STEPS_A_TURN + 1)
    out = folder / "found.json"
    program = (sys.executable, "-m", "benchmarks.models.ranks_beside_ddp")
    words = (name, path, str(out), str(STEPS_A_TURN), PORTS[1], json.dumps(dict(overrides)))
    ranks = [
        subprocess.Popen(network.command(*program, *words), env=_environ(rank), stdout=subprocess.DEVNULL)
        for rank in range(NUM_RANKS)
    ]
    try:
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"{' '.join(program)} ended with {codes}")
    found = json.loads(out.read_text())
    ours_s, ddp_s = found["ours_s"][1:], found["ddp_s"][1:]
    over_ddp = statistics.median(ddp / ours for ours, ddp in zip(ours_s, ddp_s, strict=True))
    return Beside(statistics.median(ours_s) / STEPS_A_TURN, over_ddp, found["num_bytes"])


def _environ(rank: int) -> dict[str, str]:
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1"}
    return {**os.environ, **here, "MASTER_PORT": PORTS[0], "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
