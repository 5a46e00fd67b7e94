"""The planted bugs: description, code that causes it, invariants that detect it, faults that expose it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chaos.errors import ScenarioError
from chaos.sim.campaign.planted import bugs, faults
from chaos.sim.campaign.planted.cells import IN_CELLS_PLANTED
from chaos.sim.campaign.planted.hunt import SHAPE, SimBug
from chaos.sim.campaign.planted.shards import SHARDS
from chaos.sim.campaign.planted.shared_weights import SHARED_WEIGHTS
from chaos.sim.campaign.planted.shares_in_cells import SHARES_IN_CELLS
from elastic_train.job.reshard import Taken
from elastic_train.tracking.metric_log import LineageReader
from elastic_train.world.forming import Standstill

UNWATCHED = {"elastic_train.training.loop:check_epoch": lambda *_: None}
"""Disables the product's own coverage check at an epoch's end, so that the judge must find these bugs itself."""

PLANTED = (
    SimBug(
        "strict-records",
        "a record that cannot be read is an error of those who read it",
        lambda: {"rendezvous.membership.records:_known": bugs.known_or_error},
        ("crash",),
        faults.aliens,
    ),
    SimBug(
        "no-fence",
        "an older world publishes",
        lambda: {
            "rendezvous.membership.fence:carry": bugs.carry_unfenced,
            "elastic_train.world.fencing:StoreFence.publish": lambda self, term, commit: None,
        },
        ("fencing",),
        faults.zombie,
        replace(SHAPE, commit_every=8, lane_s=1.0, least_part_bytes=1 << 20),
    ),
    SimBug(
        "fetched-cursor",
        "a world continues from what was fetched instead of applied",
        lambda: {"elastic_train.training.session:Session.steps": bugs.steps_from(1), **UNWATCHED},
        ("coverage", "witness"),
        faults.kills,
    ),
    SimBug(
        "double-apply",
        "a world applies the last step's samples again",
        lambda: {"elastic_train.training.session:Session.steps": bugs.steps_from(-1), **UNWATCHED},
        ("coverage", "witness"),
        faults.kills,
    ),
    SimBug(
        "ends-early",
        "a loader that runs dry is taken for the end of the job",
        lambda: {"elastic_train.training.session:Session.steps": bugs.steps_run_dry},
        ("finished",),
        faults.kills,
    ),
    SimBug(
        "last-commit-left-out",
        "a job ends without a commit of its last steps",
        lambda: {"elastic_train.training.commits:Commits.finish": lambda self: None},
        ("deliverable",),
        faults.kills,
    ),
    SimBug(
        "head-before-shards",
        "the record is there before the files that it promises",
        lambda: {"elastic_train.checkpoint.commits.writer:CommitWriter.publish": bugs.record_first},
        ("atomicity",),
        faults.torn,
    ),
    SimBug(
        "no-digest",
        "a commit's bytes are not compared with its checksums",
        lambda: {
            "elastic_train.checkpoint.commits.reader:damage_of": lambda store, key: None,
            "chaos.sim.modelled.commit_files:open_checked": bugs.unchecked,
        },
        ("hash", "witness"),
        faults.rot,
    ),
    SimBug(
        "newest-instead-of-head",
        "the commit made last is taken for the head",
        lambda: {"elastic_train.checkpoint.commits.reader:commit_keys": bugs.newest_by_time},
        ("durability",),
        faults.late_record,
        replace(SHAPE, lane_s=1.0, least_part_bytes=1 << 20),
    ),
    SimBug(
        "commit-before",
        "a restart continues from the second newest commit",
        lambda: {"elastic_train.world.restore:discover": bugs.one_before},
        ("durability",),
        faults.kills,
        replace(SHAPE, recovery="restart"),
    ),
    SimBug(
        "head-by-listing",
        "the commit that etcd names is looked for in a listing, and not opened by its name",
        lambda: {"elastic_train.world.restore:named": lambda fence: None},
        ("durability", "heads"),
        faults.late_listing,
    ),
    SimBug(
        "any-store",
        "a node that does not see the job's store is admitted, and continues from what its own store has",
        lambda: {
            "elastic_train.world.one_store:check": lambda *_: None,
            "elastic_train.world.restore:_KnownCommits.check": lambda *_: None,
        },
        ("lineage", "durability", "heads"),
        faults.without_its_mount,
        replace(SHAPE, epochs=16),
    ),
    SimBug(
        "joins-unproved",
        "a node becomes a member before it has looked at its store, and the world waits for its word",
        lambda: {"elastic_train.world.one_store:check_before_joining": lambda *_: None},
        ("no-harm",),
        faults.alone_without_its_mount,
        replace(SHAPE, epochs=30, lane_s=0.5),
    ),
    SimBug(
        "comes-again",
        "a node of another version ends as if it had crashed, and its worker is started again at once, for ever",
        lambda: {
            "elastic_train.training.open_session:check_alike": bugs.crash_if_different,
            "rendezvous.torchelastic.live_agent:LiveAgent._pause_s": lambda agent, rank, now: 0.0,
            "rendezvous.torchelastic.live_agent:Budget.take": lambda budget, cause, rank, now: True,
        },
        ("no-harm",),
        faults.alone_with_other_code,
        replace(SHAPE, epochs=75, lane_s=0.2),
    ),
    SimBug(
        "lets-the-unfit-in",
        "a worker joins whatever the examination of its machine has found",
        lambda: {"elastic_train.health.precheck:Proof.demand": lambda self, is_stopped: None},
        ("unfit",),
        faults.alone_on_a_wrong_processor,
        replace(SHAPE, epochs=30, lane_s=0.5),
    ),
    SimBug(
        "charged-for-each",
        "a node pays a restart for each of its workers that one fault ends at once",
        lambda: {"rendezvous.torchelastic.live_agent:TOGETHER_S": -1.0},
        ("deaths",),
        "all-workers-at-once",
    ),
    SimBug(
        "claims-from-the-living",
        "a job claims a term in a folder in which another one is at work, and both fence each other off",
        lambda: {"elastic_train.world.claims:Rivals.check": lambda self, newest: None},
        ("no-harm",),
        faults.another_job,
        replace(SHAPE, epochs=30, lane_s=0.5),
    ),
    SimBug(
        "compares-nothing",
        "ranks do not compare their weights before they commit them",
        lambda: {"elastic_train.training.commits:check_same_weights": lambda group, weights, step: None},
        ("hash", "weights"),
        faults.flipped,
    ),
    SimBug(
        "asks-no-loss",
        "a step is applied whatever its loss is",
        lambda: {"elastic_train.training.loop:StepFacts": bugs.facts_of_a_sound_step},
        ("updates",),
        faults.losses_gone,
    ),
    SimBug(
        "gives-up-at-once",
        "worlds that do not form end the job however short a time they did not",
        lambda: {"elastic_train.world.forming:Standstill": lambda most, least_s, reached: Standstill(2, 0.0, reached)},
        ("progress",),
        faults.blocked,
    ),
    SimBug(
        "stale-lanes",
        "a rank keeps another's lanes after the world has grown again",
        lambda: {"elastic_train.training.session:Session.lanes": bugs.stale_lanes(), **UNWATCHED},
        ("partition",),
        faults.kills,
    ),
    SimBug(
        "adds-from-left-to-right",
        "the ranks' sums are added in the order of ranks instead of along the tree",
        lambda: {"elastic_train.parallel.exchange:merge_plan": bugs.merge_from_left_to_right},
        ("hash",),
        faults.kills,
        replace(SHAPE, vectors=True),
    ),
    SimBug(
        "cut-off-by-one",
        "the upper half of a sum begins one element too late, and ranks do not compare their weights",
        lambda: {
            "elastic_train.parallel.exchange:halving_turns": bugs.halving_off_by_one,
            "elastic_train.training.commits:check_same_weights": lambda group, weights, step: None,
        },
        ("hash",),
        faults.kills,
        replace(SHAPE, vectors=True, nodes=4, lanes=8),
    ),
    SimBug(
        "asked-is-done",
        "an exchange between devices counts as done once it was asked for",
        lambda: {"elastic_train.parallel.devices.device:DeviceGroup.finish": lambda self, operations: None},
        ("hash",),
        faults.kills,
        replace(SHAPE, vectors=True, device=True),
    ),
    SimBug(
        "device-not-freed",
        "an abandoned world leaves its operations on the device",
        lambda: {"elastic_train.parallel.group:abort_all": lambda groups: True},
        ("finished",),
        faults.kills,
        replace(SHAPE, vectors=True, device=True),
    ),
    SimBug(
        "applies-too-soon",
        "a rank applies a step before it knows that the others can",
        lambda: {"elastic_train.training.loop:meet": lambda session, norm: (norm, None)},
        ("rpo",),
        faults.dies_ahead,
    ),
    SimBug(
        "drops-what-may-be-applied",
        "a rank that loses a peer at the point of no return drops its step, which the peer may have applied",
        lambda: {"elastic_train.training.loop:meet": bugs.meet_or_drop},
        ("rpo",),
        faults.dies_ahead,
    ),
    SimBug(
        "skipped-barrier",
        "a world begins without bringing its ranks to one step",
        lambda: {"elastic_train.world.restore:take_state": lambda *_: Taken(np.empty(0, np.int64))},
        ("agreement",),
        faults.half_applied,
        replace(SHAPE, warm_s=100.0),
    ),
    SimBug(
        "stale-stride",
        "ranks keep the lanes of the first world, whatever the size of theirs",
        lambda: {"elastic_train.training.session:Session.lanes": bugs.first_stride(), **UNWATCHED},
        ("partition", "coverage"),
        faults.kills,
    ),
    SimBug(
        "dropped-tail",
        "the last short step of an epoch is left out",
        lambda: {
            "elastic_train.core.order:Order.num_steps": lambda order, micro_batch: (
                order.num_samples // order.num_lanes // micro_batch
            ),
            **UNWATCHED,
        },
        ("coverage", "witness"),
        faults.kills,
    ),
    SimBug(
        "forgotten-holes",
        "a world begins without the holes that its state has",
        lambda: {"elastic_train.training.open_session:known_holes": lambda *_: ()},
        ("coverage", "sums"),
        faults.bad_data,
        replace(SHAPE, unreadable="quarantine"),
    ),
    SimBug(
        "sent-again",
        "what the tracker holds is sent to it once more",
        lambda: {"elastic_train.tracking.delivery:Delivery.send": bugs.send_again},
        ("tracking",),
        faults.kills,
        replace(SHAPE, tracked=True),
    ),
    SimBug(
        "sent-unsettled",
        "the tracker is sent what no commit holds, and what is computed again differs",
        lambda: {"elastic_train.tracking.tracker:LineageReader": bugs.Unsettled},
        ("tracking",),
        faults.kills,
        replace(SHAPE, tracked=True, recovery="restart"),
    ),
    # Bugs found during development, each with the case that found it.
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
        faults.dies_saving,
    ),
    SimBug(
        "sweeps-without-the-name",
        "a sweep deletes an attempt's files without taking its record's name first",
        lambda: {"elastic_train.checkpoint.commits.pruning:create_once": lambda store, key, content: True},
        ("atomicity", "finished"),
        faults.frozen_at_its_record,
        replace(SHAPE, lane_s=1.0),
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
            "elastic_train.tracking.tracker:LineageReader": lambda run_dir, _: LineageReader(run_dir),
        },
        ("tracking",),
        "values-of-a-dead-branch",
    ),
    *SHARDS,
    *SHARED_WEIGHTS,
    *IN_CELLS_PLANTED,
    *SHARES_IN_CELLS,
    # The canary: the product is correct, but the judge must report a violation.
    SimBug(
        "canary",
        "storage neither lists nor opens a commit of the last seconds, against its promise",
        lambda: {
            "chaos.sim.machine.object_store:StorageClient.list": bugs.list_late,
            "chaos.sim.machine.object_store:StorageClient.open": bugs.open_late,
        },
        ("durability",),
        faults.torn,
    ),
)


def named(name: str) -> SimBug:
    """Return the planted bug with this name; raise ScenarioError with all known names if there is none."""
    bugs_by_name = {bug.name: bug for bug in PLANTED}
    if name not in bugs_by_name:
        raise ScenarioError(f"--plant {name}: there is no such bug; known are {', '.join(bugs_by_name)}")
    return bugs_by_name[name]
