"""Proofs that a network fault took effect, on a real cable to a network namespace."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos.real.acts import ACTS
from chaos.real.acts.effects import Effect
from chaos.scenario.schedule import Due
from chaos.services.network.namespace import Cable

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("network")]


def strike(kind: str, laid: Cable) -> Effect:
    """Apply the fault to a node without processes; return the function that looks for the proof."""
    node = SimpleNamespace(is_up=True, pids=list)
    job: Any = SimpleNamespace(nodes=[node], around=SimpleNamespace(cable=laid, num_cut=0))
    struck = ACTS[kind](job, Due(kind, 0, None, 1.0))
    assert struck is not None and struck.effect is not None
    return cast(Effect, struck.effect)


@pytest.mark.parametrize("kind", ["cut_node", "cut_link", "cut_one_way", "refuse_address"])
def test_a_cut_is_seen(kind: str, laid: Cable) -> None:
    """A node that answered before no longer does; one cut off from all does not reach etcd either."""
    proof = strike(kind, laid)()
    assert proof is not None and "does not answer" in proof
    assert laid.answers_inside("etcd") == (kind != "cut_node")
    assert ("etcd" in proof) == (kind == "cut_node")


def test_a_node_that_still_reaches_etcd_is_not_cut_off(laid: Cable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes' silence, which `cut_link` causes as well, is not enough to prove `cut_node`."""
    monkeypatch.setattr(Cable, "pull", Cable.part)
    assert strike("cut_node", laid)() is None


@pytest.mark.parametrize(("kind", "before"), [("cut_node", Cable.pull), ("cut_link", Cable.silence)])
def test_a_node_that_never_answered_proves_no_cut(
    kind: str, before: Callable[[Cable], None], laid: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was unreachable before the fault does not prove it."""
    monkeypatch.setattr(Cable, "mend", lambda laid: None)
    before(laid)
    assert strike(kind, laid)() is None
