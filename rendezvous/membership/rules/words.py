"""Log texts about waiting: for whom, how long, and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rendezvous.membership.records import Keys, View
from rendezvous.membership.rules import admission
from rendezvous.membership.rules.admission import Policy


def waiting(view: View, policy: Policy, keys: Keys, left_s: float, finished: Mapping[str, str]) -> str:
    """Describe what a member waits for; `finished` has the hosts, by member, whose workers ended with 0."""
    present = admission.count_nodes(view.staying)
    missing = "the others"
    if present >= policy.min_nodes and len(admission.of_whole_nodes(view.staying)) < len(view.staying):
        missing = "the other workers of a node, which have not begun, or were asked to leave"
    return (
        f"{present} of at least {policy.min_nodes} nodes are there, under {keys.prefix}: waiting for "
        f"{missing}, giving up in {left_s:.0f} s{_finished(view, finished)}"
    )


def standing_by(view: View, policy: Policy, keys: Keys) -> str:
    """Say that there is no room for a node."""
    num_nodes = admission.count_nodes(view.mates)
    return (
        f"this node stands by until one is lost: the job under {keys.prefix} has {num_nodes} of at most "
        f"{policy.max_nodes} nodes"
    )


def too_few(view: View, policy: Policy, keys: Keys, waited_s: float, finished: Mapping[str, str]) -> str:
    """Say that too few nodes came, or that a world of all that did was not sealed."""
    present = admission.count_nodes(view.staying)
    unready = ", and not all were ready" if present >= policy.min_nodes else ""
    size = policy.cell.size
    cells = f" A world is made of whole cells, of {size}." if size > 1 else ""
    return (
        f"{present} of at least {policy.min_nodes} nodes came within {waited_s:.0f} s{unready} "
        f"(run id in {keys.prefix}, last term {view.term}){_finished(view, finished)}.{cells} "
        "Start the missing nodes with the same --rdzv_id, or lower the minimum of --nnodes."
    )


def _finished(view: View, finished: Mapping[str, str]) -> str:
    """Name the nodes that will not come back, because their workers have ended with 0."""
    world = view.world
    gone = {**dict.fromkeys(world.left if world is not None else (), "a node whose host is not known"), **finished}
    if not gone:
        return ""
    nodes = ", ".join(f"{host} (member {member})" for member, host in sorted(gone.items()))
    return (
        f"; nodes of term {view.term} whose workers ended with 0 have finished, and come back only if somebody starts "
        f"them: {nodes}"
    )
