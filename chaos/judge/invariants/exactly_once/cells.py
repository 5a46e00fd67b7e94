"""Invariant of cells: every world consists of complete cells, and a stage's ranks are on one node.

Ranks of a stage communicate within every block, so they must be together; stages may be on different nodes.
"""

from __future__ import annotations

from collections import defaultdict

from chaos.judge.evidence.copies import node_of
from chaos.judge.evidence.run_files import Evidence, whole
from chaos.judge.findings import Violated
from chaos.judge.job_shape import cell_size, stage_size


def cells(run: Evidence) -> str:
    """No world lacks a stage of a cell, and no stage spans two nodes."""
    size, per_stage, nodes = cell_size(run.config), stage_size(run.config), node_of(run)
    groups: dict[tuple[int, int], set[object]] = defaultdict(set)
    terms, num_spread = set[int](), 0
    for line in run.of("form"):
        term, world, rank = whole(line, "term"), whole(line, "world"), whole(line, "rank")
        terms.add(term)
        if world % size:
            raise Violated(f"term {term}: a world of {world} ranks is not of whole cells of {size}")
        if (node := nodes.get(line["pid"])) is not None:
            groups[term, rank // per_stage].add(node)
    for (term, number), found in groups.items():
        cell, stage = divmod(number, size // per_stage)
        if len(found) > 1:
            on = " and ".join(sorted(map(str, found)))
            raise Violated(f"term {term}: stage {stage} of cell {cell} is on the nodes {on}")
        others = groups.get((term, number - 1), found) if stage else found
        num_spread += others != found
    return f"{len(terms)} worlds of whole cells of {size}; {num_spread} borders between stages were between nodes"
