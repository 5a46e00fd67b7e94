"""Faults in quick succession, several at a time and during recovery too, each sparing one node.

Kills, freezes shorter and longer than a lease, nodes that leave and come back. The third node is cut off where others
freeze, from all or from the other nodes alone; that needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.jobs import TTL_S, write_live_job
from benchmarks.live import run_job
from benchmarks.network import CableNode, behind_the_cable
from chaos.errors import RunError
from chaos.evidence import collect, whole
from chaos.injected import check_kept
from chaos.network import NoNamespacesError, cable
from chaos.schedule import Due


def measure(folder: Path, num_faults: int, seed: int) -> dict[str, object]:
    """Send three nodes through faults in quick succession, tell them to leave, and repeat the same steps without."""
    due = storm(num_faults, seed)
    config = write_live_job(folder, 10 * sum(fault.after_s or 0.0 for fault in due), ranks=3)
    told, place, laid = "", None, None
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(NoNamespacesError):
            laid = undo.enter_context(cable())
            place = partial(behind_the_cable, CableNode, laid)
        try:
            run_job(folder / "faulted", config, due, ranks=1, timeout_s=2400, num_nodes=3, place=place, laid=laid)
        except RunError as error:  # expected: told to leave, no node ends with 0
            told = str(error)
    run = collect(folder / "faulted")
    if run.result is None:
        raise SystemExit(f"storm of seed {seed}: {told}")
    check_kept(run)
    steps = whole(run.result, "step")
    alone = ["elastic_train", config, "--run.dir", str(folder / "alone"), "--max_steps", str(steps)]
    subprocess.run([sys.executable, "-m", *alone], check=True, stdout=subprocess.DEVNULL)
    expected = json.loads((folder / "alone" / "result.json").read_text())
    return {
        "storm_faults": len(run.of("fault")) - len(_LAST),
        "storm_has_cuts": place is not None,
        "storm_worlds": len({line["term"] for line in run.of("form")}),
        "storm_steps": steps,
        "storm_hash_equal": expected["weights_sha256"] == run.result["weights_sha256"],
        "storm_coverage_equal": expected["coverage"] == run.result["coverage"],
    }


def storm(num_faults: int, seed: int) -> list[Due]:
    """Draw faults in bursts; each spares one node, so that a replica lives, and the next waits until all are back."""
    rng = random.Random(seed)
    due: list[Due] = []
    while len(due) < num_faults:
        spared, is_up = rng.randrange(3), {0: True, 1: True, 2: True}
        for turn in range(8):
            node = rng.choice([other for other in is_up if other != spared])
            pause_s = 15.0 if turn == 0 else rng.choice([0.0, 0.1, 0.5, 1.0, 3.0])
            if not is_up[node]:
                due.append(Due("start_node", node, None, pause_s))
                is_up[node] = True
                continue
            kind = rng.choice(["kill_worker", "kill_worker", "freeze_worker", "freeze_node", "kill_node", "stop_node"])
            for_s = rng.choice([1.0, 2 * TTL_S]) if kind.startswith("freeze") else None
            due.append(Due(kind, node, None, pause_s, for_s=for_s))
            is_up[node] = kind not in ("kill_node", "stop_node")
        due += [Due("start_node", node, None, 1.0) for node, up in is_up.items() if not up]
    return [*due, *_LAST]


_LAST = (Due("stop_node", 2, None, 20.0), Due("stop_node", 1, None, 0.0), Due("stop_node", 0, None, 0.0))
