"""Install all replacements for the duration of a simulation."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from chaos.sim.job.host import Host
from chaos.sim.job.install.machine import machine
from chaos.sim.job.install.stand_ins import Replacement
from chaos.sim.job.install.tensors import tensors
from chaos.sim.job.install.world import launch, track, world
from chaos.sim.job.live_node import Node


@contextlib.contextmanager
def installed(
    host: Host, nodes: Sequence[Node], reach: Callable[[str], None], bug: Mapping[str, object]
) -> Iterator[None]:
    """Run the product over a job's simulated world within this context.

    `reach` is called at every failpoint; `bug` replaces product code by path.
    """
    outside = (*machine(host.around), *world(host, reach), *launch(host, nodes), *track(host.around.tracking))
    with contextlib.ExitStack() as undo:
        undo.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        for module, name, stand_in in (*outside, *tensors(host, is_planted=bool(bug)), *planted(bug)):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield


def planted(bug: Mapping[str, object]) -> Iterator[Replacement]:
    """Yield what a bug replaces; raise AttributeError if the product has no such name."""
    for path, stand_in in bug.items():
        module, _, name = path.partition(":")
        owner: object = importlib.import_module(module)
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        getattr(owner, last)
        yield owner, last, stand_in  # type: ignore[misc]  # a class, where the bug is in a method
