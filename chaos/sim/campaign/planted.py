"""Bugs planted in the product's code while it is simulated: each must be caught by the invariant named beside it.

A simulator that has never failed has proved nothing. `chaos.planted.catalogue` plants what bugs leave in files; here
the bug itself is in the running code, and the faults have to bring it to light within a bounded number of seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chaos.errors import ScenarioError
from chaos.sim.campaign import bugs
from chaos.sim.campaign.cases import FOLDER, load
from chaos.sim.campaign.simulate import Case, Outcome, simulate
from chaos.sim.job.fault import SimFault
from chaos.sim.job.shape import Shape

SEEDS = 60
_SHAPE = Shape(nodes=3, ranks=1, lanes=6, rows=(40, 7, 30, 24), epochs=4, commit_every=3)


UNWATCHED = {"elastic_train.training.loop:check_epoch": bugs.let_epochs_pass}
"""Training ends by itself at the end of an epoch whose samples were not applied once each. It does not while bugs are
planted that lead there: the judge has to see them without its help."""


@dataclass(frozen=True, slots=True)
class SimBug:
    """A bug: what is wrong, the code that it replaces, the invariants that see it, and the faults that lead there."""

    name: str
    bug: str
    code: Callable[[], Mapping[str, object]]
    invariants: Sequence[str]
    faults: Callable[[random.Random], tuple[SimFault, ...]] | str
    """What draws faults, or the name of the kept case in which the bug was found."""
    shape: Shape = field(default=_SHAPE)

    def cases(self) -> Iterator[Case]:
        if isinstance(self.faults, str):
            yield from near(load(FOLDER / f"{self.faults}.yaml"))
            return
        for seed in range(SEEDS):
            yield Case(seed, self.shape, self.faults(random.Random(f"{seed}/{self.name}")))

    def hunt(self) -> tuple[Outcome | None, int]:
        """Return the first run in which a named invariant is false, None if no seed has one; and how many were run."""
        for number, case in enumerate(self.cases(), 1):
            outcome = simulate(case, self.code())
            if any(finding.truth == "false" and finding.invariant in self.invariants for finding in outcome.findings):
                return outcome, number
        return None, SEEDS


def near(kept: Case) -> Iterator[Case]:
    """Yield a kept case, then its like: where the product does a little more, its faults come a little later."""
    yield kept
    for seed in range(SEEDS - 1):
        draws = random.Random(f"{seed}/near")
        faults = [
            replace(fault, nth=fault.nth + draws.randint(-8, 8))
            if fault.nth > 8
            else replace(fault, at_s=fault.at_s * draws.uniform(0.95, 1.05))
            for fault in kept.faults
        ]
        yield replace(kept, seed=kept.seed + seed, faults=tuple(faults))


# The faults that lead there.


def _kills(draws: random.Random) -> tuple[SimFault, ...]:
    """Workers die one after another, and come back."""
    return tuple(SimFault("kill_worker", at_s=draws.uniform(6, 14), node=draws.randrange(3)) for _ in range(3))


def _zombie(draws: random.Random) -> tuple[SimFault, ...]:
    """The leader, if luck has it, freezes in a save, in the midst of a step, and ends both when others continue without
    it; then everybody dies."""
    for_s = draws.uniform(4.0, 6.0)
    frozen = SimFault("stop", point="write", nth=1, for_s=for_s)
    return (SimFault("kill_job", at_s=25.0 + for_s + draws.uniform(0.0, 4.0), for_s=2.0), frozen)


def _late_record(draws: random.Random) -> tuple[SimFault, ...]:
    """The leader freezes before a commit's first file, makes it when others have committed, and soon everybody dies.

    Had it begun to write, the next world's sweep would have taken the record's name.
    """
    for_s = draws.uniform(12.0, 40.0)
    frozen = SimFault("stop", point="write", nth=1, for_s=for_s)
    return (SimFault("kill_job", at_s=10.6 + for_s + draws.uniform(0.0, 6.0), for_s=2.0), frozen)


def _late_listing(draws: random.Random) -> tuple[SimFault, ...]:
    """Everybody dies while listings are late, and another node leads than the one that made the last commits."""
    at_s = draws.uniform(8.0, 16.0)
    return (
        SimFault("kill_node", at_s=6.0, node=0, for_s=0.5),
        SimFault("stale_listing", at_s=at_s, for_s=30.0),
        SimFault("kill_job", at_s=at_s + draws.uniform(1.0, 6.0), for_s=2.0),
    )


def _without_its_mount(draws: random.Random) -> tuple[SimFault, ...]:
    """A node comes back without its mount, and then everybody else dies."""
    at_s, node = draws.uniform(7.0, 10.0), draws.randrange(3)
    others = tuple(
        SimFault("kill_node", at_s=at_s + draws.uniform(6.0, 9.0), node=other, for_s=8.0)
        for other in range(3)
        if other != node
    )
    return (SimFault("private_storage", at_s=at_s, node=node, for_s=60.0), *others)


def _alone_without_its_mount(draws: random.Random) -> tuple[SimFault, ...]:
    """A node comes back without its mount, and nothing else happens."""
    return (SimFault("private_storage", at_s=draws.uniform(20.0, 30.0), node=draws.randrange(3), for_s=100.0),)


def _alone_with_other_code(draws: random.Random) -> tuple[SimFault, ...]:
    """A node comes back with another version, and nothing else happens."""
    return (SimFault("other_code", at_s=draws.uniform(20.0, 30.0), node=draws.randrange(3), for_s=100.0),)


def _blocked(draws: random.Random) -> tuple[SimFault, ...]:
    """No world forms for some minutes."""
    return (SimFault("block_ports", at_s=draws.uniform(6.0, 8.0), for_s=draws.uniform(60.0, 900.0)),)


def _torn(draws: random.Random) -> tuple[SimFault, ...]:
    """Everybody dies in the middle of a commit."""
    nodes = tuple(SimFault("kill_job", at_s=draws.uniform(6.0, 16.0), for_s=2.0) for _ in range(2))
    return (*nodes, SimFault("kill", point="publish", nth=draws.randint(1, 6)))


def _rot(draws: random.Random) -> tuple[SimFault, ...]:
    """A bit of the newest commit flips, and everybody dies."""
    at_s = draws.uniform(8.0, 16.0)
    return SimFault("flip_bit", at_s=at_s, other=draws.randrange(2)), SimFault("kill_job", at_s=at_s, for_s=1.0)


def _dies_saving(draws: random.Random) -> tuple[SimFault, ...]:
    """A rank dies with its part of one of the last commits unwritten."""
    return (SimFault("kill", point="write", nth=draws.randint(17, 22)),)


def _frozen_at_its_record(draws: random.Random) -> tuple[SimFault, ...]:
    """A leader freezes before it makes a record, storage is slow for the next world's sweep, and later all die."""
    frozen = SimFault("stop", point="record", nth=draws.randint(1, 4), for_s=draws.uniform(3.0, 30.0))
    slow = SimFault("storage_slow", at_s=draws.uniform(6.0, 30.0), for_s=6.0)
    return slow, SimFault("kill_job", at_s=draws.uniform(12.0, 40.0), for_s=1.0), frozen


def _bad_data(draws: random.Random) -> tuple[SimFault, ...]:
    """Everybody dies some steps after a hole, and then all can be read again."""
    at_s = draws.uniform(6.0, 10.0)
    bad = SimFault("bad_row_group", at_s=at_s, node=-1, other=draws.randrange(4), for_s=5.0)
    return bad, SimFault("kill_worker", at_s=at_s + draws.uniform(1.0, 5.0), node=draws.randrange(3))


def _half_applied(draws: random.Random) -> tuple[SimFault, ...]:
    """A rank dies between two ranks' receipts of a step, so that survivors are apart.

    It should be away for long: with a newcomer among them their calls part before anything is recorded.
    """
    point = draws.choice(("exchange", "apply", "applied"))
    return tuple(SimFault("kill", point=point, nth=draws.randint(20, 90)) for _ in range(3))


def _aliens(draws: random.Random) -> tuple[SimFault, ...]:
    """Somebody writes below the job's prefix what is no record."""
    return tuple(SimFault("alien_record", at_s=draws.uniform(6.0, 14.0)) for _ in range(3))


PLANTED = (
    SimBug(
        "strict-records",
        "a record that cannot be read is an error of those who read it",
        lambda: {"rendezvous.membership.records:_known": bugs.known_or_error},
        ("crash",),
        _aliens,
    ),
    SimBug(
        "no-fence",
        "an older world publishes",
        lambda: {
            "rendezvous.membership.fence:carry": bugs.carry_unfenced,
            "elastic_train.world.fencing:StoreFence.publish": lambda self, term, commit: None,
        },
        ("fencing",),
        _zombie,
        replace(_SHAPE, commit_every=8, lane_s=1.0, least_part_bytes=1 << 20),
    ),
    SimBug(
        "fetched-cursor",
        "a world continues from what was fetched instead of applied",
        lambda: {"elastic_train.training.session:Session.steps": bugs.steps_from(1), **UNWATCHED},
        ("coverage", "witness"),
        _kills,
    ),
    SimBug(
        "double-apply",
        "a world applies the last step's samples again",
        lambda: {"elastic_train.training.session:Session.steps": bugs.steps_from(-1), **UNWATCHED},
        ("coverage", "witness"),
        _kills,
    ),
    SimBug(
        "ends-early",
        "a loader that runs dry is taken for the end of the job",
        lambda: {"elastic_train.training.session:Session.steps": bugs.steps_run_dry},
        ("finished",),
        _kills,
    ),
    SimBug(
        "last-commit-left-out",
        "a job ends without a commit of its last steps",
        lambda: {"elastic_train.training.commits:Commits.finish": bugs.finish_without_commit},
        ("deliverable",),
        _kills,
    ),
    SimBug(
        "head-before-shards",
        "the record is there before the files that it promises",
        lambda: {"elastic_train.checkpoint.commits.writer:CommitWriter.publish": bugs.record_first},
        ("atomicity",),
        _torn,
    ),
    SimBug(
        "no-digest",
        "a commit's bytes are not compared with its checksums",
        lambda: {
            "elastic_train.checkpoint.commits.reader:damage_of": lambda store, key: None,
            "chaos.sim.modelled.commit_files:open_checked": bugs.unchecked,
        },
        ("hash", "witness"),
        _rot,
    ),
    SimBug(
        "newest-instead-of-head",
        "the commit made last is taken for the head",
        lambda: {"elastic_train.checkpoint.commits.reader:commit_keys": bugs.newest_by_time},
        ("durability",),
        _late_record,
        replace(_SHAPE, lane_s=1.0, least_part_bytes=1 << 20),
    ),
    SimBug(
        "commit-before",
        "a restart continues from the second newest commit",
        lambda: {"elastic_train.world.restore:discover": bugs.one_before},
        ("durability",),
        _kills,
        replace(_SHAPE, recovery="restart"),
    ),
    SimBug(
        "head-by-listing",
        "the commit that etcd names is looked for in a listing, and not opened by its name",
        lambda: {"elastic_train.world.restore:named": lambda fence: None},
        ("durability", "heads"),
        _late_listing,
    ),
    SimBug(
        "any-store",
        "a node that does not see the job's store is let in",
        lambda: {"elastic_train.world.one_store:check": lambda store, word, still=None: None},
        ("lineage", "durability", "heads"),
        _without_its_mount,
        replace(_SHAPE, epochs=16),
    ),
    SimBug(
        "joins-unproved",
        "a node becomes a member before it has looked at its store, and the world waits for its word",
        lambda: {"elastic_train.world.one_store:check_before_joining": lambda *_: None},
        ("no-harm",),
        _alone_without_its_mount,
        replace(_SHAPE, epochs=30, lane_s=0.5),
    ),
    SimBug(
        "comes-again",
        "a node of another version ends as if it had crashed, and its worker is started again at once",
        lambda: {"elastic_train.training.open_session:check_alike": bugs.crash_if_different},
        ("no-harm",),
        _alone_with_other_code,
        replace(_SHAPE, epochs=30, lane_s=0.5),
    ),
    SimBug(
        "gives-up-at-once",
        "worlds that do not form end the job however short a time they did not",
        lambda: {"elastic_train.world.forming:Standstill": bugs.impatient},
        ("progress",),
        _blocked,
    ),
    SimBug(
        "stale-lanes",
        "a rank keeps another's lanes after the world has grown again",
        lambda: {"elastic_train.training.open_session:owned_lanes": bugs.stale_lanes(), **UNWATCHED},
        ("partition",),
        _kills,
    ),
    SimBug(
        "skipped-barrier",
        "a world begins without bringing its ranks to one step",
        lambda: {"elastic_train.world.restore:hand_over": lambda group, state, places: None},
        ("agreement",),
        _half_applied,
        replace(_SHAPE, warm_s=100.0),
    ),
    SimBug(
        "stale-stride",
        "ranks keep the lanes of the first world, whatever the size of theirs",
        lambda: {"elastic_train.training.open_session:owned_lanes": bugs.first_stride(), **UNWATCHED},
        ("partition", "coverage"),
        _kills,
    ),
    SimBug(
        "dropped-tail",
        "the last short step of an epoch is left out",
        lambda: {"elastic_train.core.order:Order.num_steps": bugs.without_tail, **UNWATCHED},
        ("coverage", "witness"),
        _kills,
    ),
    SimBug(
        "forgotten-holes",
        "a world begins without the holes that its state has",
        lambda: {"elastic_train.training.open_session:known_holes": bugs.forget_holes},
        ("coverage", "sums"),
        _bad_data,
        replace(_SHAPE, unreadable="quarantine"),
    ),
    SimBug(
        "sent-again",
        "what the tracker holds is sent to it once more",
        lambda: {"elastic_train.tracking.delivery:Delivery.send": bugs.send_again},
        ("tracking",),
        _kills,
        replace(_SHAPE, tracked=True),
    ),
    SimBug(
        "sent-unsettled",
        "the tracker is sent what no commit holds, and what is computed again differs",
        lambda: {"elastic_train.tracking.tracker:LineageReader": bugs.Unsettled},
        ("tracking",),
        _kills,
        replace(_SHAPE, tracked=True, recovery="restart"),
    ),
    # What was found on the way, in the case that found it.
    SimBug(
        "any-branch-counts",
        "a world follows the rank that is furthest, even past a published commit",
        lambda: {"elastic_train.world.restore:_is_of": lambda published, state: True},
        ("durability",),
        "published-and-left",
    ),
    SimBug(
        "untold-rollback",
        "a process that gives up steps of an abandoned branch does not report it",
        lambda: {"elastic_train.tracking.history:History.rollback": lambda self, **_: None},
        ("rpo",),
        "published-and-left",
    ),
    SimBug(
        "waits-for-the-dead",
        "waiting for a save checks neither for a broken world nor for progress",
        lambda: {
            "elastic_train.checkpoint.saving.background_saves:Saves.wait": bugs.wait_for_ever,
            "elastic_train.checkpoint.saving.background_saves:Saves._is_stuck": lambda self, flight: False,
        },
        ("finished",),
        _dies_saving,
    ),
    SimBug(
        "sweeps-without-the-name",
        "a sweep deletes an attempt's files without taking its record's name first",
        lambda: {"elastic_train.checkpoint.commits.sweeping:create_once": lambda store, key, content: True},
        ("atomicity", "finished"),
        _frozen_at_its_record,
        replace(_SHAPE, lane_s=1.0),
    ),
    SimBug(
        "keeps-the-damaged",
        "retention counts commits that were passed over as damaged among those that it keeps",
        lambda: {"elastic_train.checkpoint.commits.retention_policies:Candidate.is_of_lineage": True},
        ("finished",),
        "keeps-the-damaged",
    ),
    SimBug(
        "sealed-behind-the-end",
        "a waiting node seals a world when all others have finished, and one of them is about to close the job",
        lambda: {"rendezvous.membership.records:View.is_ending": False},
        ("fencing",),
        "sealed-behind-the-end",
    ),
    SimBug(
        "hole-found-again",
        "a hole that begins earlier than it did before a restart is listed twice",
        lambda: {"elastic_train.training.session:Session.quarantine": bugs.keep_both, **UNWATCHED},
        ("coverage", "sums"),
        "hole-found-again",
    ),
    SimBug(
        "failed-is-the-end",
        "a process that fails sends what no commit holds, although another takes its place",
        lambda: {"elastic_train.world.forming:OneWorld.is_launched": False},
        ("tracking",),
        "failed-is-the-end",
    ),
    SimBug(
        "highest-term-wins",
        "a metrics file does not say which terms applied the steps before its own: a dead branch's values hold",
        lambda: {
            "elastic_train.tracking.metric_log:MetricsWriter.begin": bugs.begin_without_lineage,
            "elastic_train.tracking.tracker:LineageReader": bugs.read_files_alone,
        },
        ("tracking",),
        "values-of-a-dead-branch",
    ),
    # The canary: nothing is wrong with the product, and the judge must say that something is wrong.
    SimBug(
        "canary",
        "storage neither lists nor opens a commit of the last seconds, against its promise",
        lambda: {
            "chaos.sim.machine.object_store:StorageClient.list": bugs.list_late,
            "chaos.sim.machine.object_store:StorageClient.open": bugs.open_late,
        },
        ("durability",),
        _torn,
    ),
)


def named(name: str) -> SimBug:
    """Return the planted bug of a name; ScenarioError with all names if there is none."""
    bugs_by_name = {bug.name: bug for bug in PLANTED}
    if name not in bugs_by_name:
        raise ScenarioError(f"--plant {name}: there is no such bug; known are {', '.join(bugs_by_name)}")
    return bugs_by_name[name]
