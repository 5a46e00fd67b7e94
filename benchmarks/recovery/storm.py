"""Faults in quick succession, several at a time and also during recovery; each burst spares one node.

Kills, freezes shorter and longer than a lease, and nodes that leave and come back. Instead of a freeze, the third node
is disconnected, from everything or only from the other nodes; that needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path

from benchmarks.recovery.jobs import TTL_S, write_live_job
from benchmarks.recovery.live import repeat, run_job
from chaos.judge.evidence.run_files import whole
from chaos.judge.invariants.whole_run import check_kept
from chaos.scenario.schedule import Due
from chaos.services.network.namespace import NoNamespacesError, cable

LEAVE_AFTER_S = 20.0


def measure(folder: Path, num_faults: int, seed: int) -> dict[str, object]:
    """Run three nodes through faults in quick succession, ask them to leave, and repeat the steps without faults."""
    config, laid = write_live_job(folder, ranks=3), None
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(NoNamespacesError):
            laid = undo.enter_context(cable())
        due = storm(num_faults, seed, has_cable=laid is not None)
        run = run_job(
            folder / "faulted",
            config,
            due,
            ranks=1,
            leave_after_s=LEAVE_AFTER_S,
            timeout_s=2400,
            num_nodes=3,
            laid=laid,
        )
    check_kept(run)
    assert run.result is not None, "every run leaves one"
    expected = repeat(folder / "alone", config, run)
    return {
        "storm_faults": len(due),
        "storm_has_cuts": laid is not None,
        "storm_worlds": len({line["term"] for line in run.of("form")}),
        "storm_steps": whole(run.result, "step"),
        "storm_hash_equal": expected["weights_sha256"] == run.result["weights_sha256"],
        "storm_coverage_equal": expected["coverage"] == run.result["coverage"],
    }


def storm(num_faults: int, seed: int, *, has_cable: bool) -> list[Due]:
    """Draw bursts of faults; each spares one node, so that a replica survives, and the next waits until all are back.

    With a cable, the node at its end is disconnected instead of frozen, alternating between all and only the other
    nodes.
    """
    rng, cuts = random.Random(seed), itertools.cycle(("cut_node", "cut_link"))
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
            if has_cable and kind == "freeze_node" and node == 2:
                kind = next(cuts)
            due.append(Due(kind, node, None, pause_s, for_s=for_s))
            is_up[node] = kind not in ("kill_node", "stop_node")
        due += [Due("start_node", node, None, 1.0) for node, up in is_up.items() if not up]
    return due
