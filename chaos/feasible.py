"""What of a scenario's faults real runs on one machine cannot do, told before anything is started or taken away.

That is known from the file alone; what the machine itself lacks, `chaos.services.surroundings` finds when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from chaos.real.acts.network import CABLED
from chaos.scenario.kinds import LOCAL
from chaos.scenario.model import Scenario


def undoable(scenario: Scenario) -> Iterator[str]:
    """Yield every fault that is the simulator's alone, or of a cable that its node has not."""
    last = scenario.nodes.count - 1
    for number, fault in enumerate(scenario.faults):
        where = f"'faults.{number}'"
        if fault.kind not in LOCAL:
            yield f"{where}: {fault.kind} is for the simulator alone: `elastic-chaos sim` does it"
        if fault.kind in CABLED and fault.node != last:
            have = f"here only the last node, {last}, has a cable of its own: say node: {last}"
            yield f"{where}: {fault.kind} on node {fault.node}: {have}"
