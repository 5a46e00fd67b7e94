"""The meaning of a refused connection: death if the agent was reached before, else possibly a wrong address."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rendezvous.agent.identity import Answer
from rendezvous.membership import known_agents
from rendezvous.membership.dead_agents import LOOK_S, DeadAgentProbe, believed, is_looking
from rendezvous.membership.known_agents import KnownAgents
from rendezvous.membership.records import Member, Seat, View, World


def worker(name: str, node: str) -> Member:
    return Member(name, "host", node, 1, after=0, node=node, agent=f"{node}:1")


class Net:
    """Answers for every agent at once."""

    answer: Answer = "itself"

    def __call__(self, *_: object) -> Answer:
        return self.answer


def known(*answers: Answer) -> tuple[KnownAgents, list[str]]:
    """Ask for two workers of one node repeatedly; return the result of each time."""
    net = Net()
    agents, found = KnownAgents("here", net), []
    for answer in answers:
        net.answer = answer
        found.append(str(agents.ask([worker("b0", "b"), worker("b1", "b")], 1.0)))
    return agents, found


def test_a_refusal_is_death_only_to_who_has_met_the_agent() -> None:
    """Otherwise the address may belong to another machine: docker gives 172.17.0.2 to a container on every host."""
    assert known("refused", "other", "silent", "mute")[1] == ["away"] * 4
    assert known("itself", "refused")[1] == ["here", "gone"]
    assert known("itself", "other")[1] == ["here", "gone"], "its port was given to another process"
    assert known("itself", "silent", "mute")[1] == ["here", "away", "here"], "cut off; frozen, or busy"


def test_a_node_that_was_taken_for_dead_and_registers_again_is_not_known() -> None:
    """If the refusal still counted as death, every member that has reached it would end a healthy world again."""
    net = Net()
    agents = KnownAgents("here", net)
    agents.ask([worker("b0", "b")], 1.0)
    net.answer = "refused"
    assert agents.ask([worker("b0", "b")], 1.0) == "gone"
    assert agents.ask([worker("b0-again", "b")], 1.0) == "away"


def test_own_workers_and_those_without_an_agent_need_not_be_met() -> None:
    """There is nothing to ask."""
    agents = KnownAgents("here", Net())
    without = Member("a", "host", "a", 1, after=0)
    assert agents.has_met(worker("x", "here")) and agents.has_met(without)
    assert not agents.has_met(worker("b0", "b"))
    agents.ask([worker("b0", "b")], 1.0)
    assert agents.has_met(worker("b0", "b"))
    agents.forget_all_but(View(1, ()))
    assert not agents.has_met(worker("b0", "b"))


def test_more_nodes_look_the_longer_they_wait() -> None:
    """The first ones may have died together; only one worker of each looks."""
    view = View(2, tuple(worker(f"{node}{turn}", node) for turn in range(2) for node in "abcde"))

    def looking(waited_s: float) -> str:
        return "".join(member.node for member in view.members if is_looking(view, member.id, waited_s))

    assert [looking(waited_s * LOOK_S) for waited_s in (0.0, 0.9, 1.0, 9.0)] == ["abc", "abc", "abcd", "abcde"]


def test_who_waits_buries_late_members_that_it_has_met_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a joiner whose address the others reach differently ends healthy worlds ten times a second."""
    net = Net()
    agents = KnownAgents("a", net)
    a, b, c = worker("a0", "a"), worker("b0", "b"), worker("c0", "c")
    world = World(1, (Seat("a0", 1), Seat("b0", 1), Seat("c0", 1)), "start", "a", 1, 0.0)
    monkeypatch.setattr(known_agents, "refuses", lambda *_: True)
    waiting = View(2, (Member("a0", "host", "a", 1, after=1, node="a", agent="a:1"), b, c), world)
    agents.ask([b], 1.0)
    assert [member.id for member in DeadAgentProbe(agents).gone(waiting)] == ["b0"]
    assert a not in DeadAgentProbe(agents).gone(waiting)


def test_who_is_refused_by_most_suspects_itself() -> None:
    """It removes one node, or up to half of several; otherwise it would stop the healthy ones and train alone."""
    assert believed({"b"}, 1) == {"b"} and believed({"b"}, 2) == {"b"}
    assert believed({"b", "c"}, 2) == set()
    assert believed({"b", "c"}, 4) == {"b", "c"} and believed({"b", "c", "d"}, 4) == set()


@pytest.mark.parametrize(("refusing", "dead"), [("bd", ["b0"]), ("bcd", []), ("bc", [])])
def test_who_is_refused_by_the_living_as_well_buries_nobody(
    monkeypatch: pytest.MonkeyPatch, refusing: str, dead: list[str]
) -> None:
    """A late node may be busy with a long step, and a firewall of one's own machine refuses in its name.

    Here `b` is late; `c`, and once `d`, are ready.
    """
    agents, ready = KnownAgents("a", Net()), [replace(worker(f"{node}0", node), after=1) for node in "acd"]
    for member in (worker("b0", "b"), *ready[1 : 2 + (len(refusing) == 3)]):
        agents.ask([member], 1.0)
    world = World(1, tuple(Seat(f"{node}0", 1) for node in "abcd"), "start", "a", 1, 0.0)
    monkeypatch.setattr(known_agents, "refuses", lambda agent, *_: agent[0] in refusing)
    view = View(2, (ready[0], worker("b0", "b"), *ready[1:]), world)
    assert [member.id for member in DeadAgentProbe(agents).gone(view)] == dead
