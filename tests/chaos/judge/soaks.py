"""A synthetic soak: two nodes, and a tracker that is down twice a minute."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chaos.judge.evidence.run_files import Evidence, Line


def a_soak(*lines: Line, until: float = 7200.0) -> Evidence:
    """Return a soak of two nodes: one is hit once at the beginning, and the tracker is down twice a minute."""
    spells = [
        {"op": "fault", "t": t, "kind": "tracker_outage", "node": None, "pids": [], "for_s": 1.0}
        for t in np.arange(20.0, until, 30.0).tolist()
    ]
    scenario: Line = {"op": "scenario", "t": 0.0, "recovery": "live", "patience_s": 180.0}
    hit: Line = {"op": "fault", "t": 5.0, "kind": "cut_off_etcd", "node": 1, "nodes": [1], "pids": [8], "for_s": 2.0}
    placed: list[Line] = [{"op": "node", "t": 0.5, "node": rank, "pids": [7 + rank]} for rank in (0, 1)]
    return Evidence(Path("soak"), [[scenario, hit, *placed, *spells, *lines]], [], {}, None, None)


def a_world(t: float, term: int, *pids: int, size: int = 2) -> list[Line]:
    return [
        {"op": "form", "t": t, "term": term, "rank": rank, "pid": pid, "world": size, "sealed_at": t}
        for rank, pid in enumerate(pids)
    ]
