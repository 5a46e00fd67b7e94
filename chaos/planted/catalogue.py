"""Planted bugs: the cause, the traces in a run's files, and the invariant that must be violated.

A checker that has never failed proves nothing. Planting an entry of `PLANTED` in a copy of a good run and judging the
copy must give the named invariant the named verdict; every invariant has at least one entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos.judge.evidence.run_files import MANIFEST
from chaos.judge.findings import Truth
from chaos.planted import (
    damage,
    damage_around,
    damage_claims,
    damage_commits,
    damage_delivered,
    damage_plausible,
    damage_written,
)
from chaos.planted.edits import Damage, in_lines, in_result, removed, without, written


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug: its cause, the function that leaves its traces in a run's folder, and the expected verdict."""

    name: str
    bug: str
    plant: Damage
    invariant: str
    truth: Truth = "false"


PLANTED = (
    Planted("repeat", "a step's samples applied twice", damage.repeat, "coverage"),
    Planted("skip", "a step's samples not applied at all", damage.skip, "coverage"),
    Planted("fetched-cursor", "resumed from what was fetched instead of applied", damage.fetched_cursor, "coverage"),
    Planted("dropped-tail", "the last short step left out", damage.dropped_tail, "coverage"),
    Planted("filtered-rows", "a row with missing metadata filtered out", damage.filtered_rows, "coverage"),
    Planted("unlisted-hole", "samples left out, and not listed as holes", damage.unlisted_hole, "coverage"),
    Planted("silent-drop", "a hole that lists other samples than are missing", damage.other_hole, "sums"),
    Planted("disagreement", "ranks with different sums", damage.disagreement, "agreement"),
    Planted("skipped-line", "a rank that skipped a step", damage.skipped_line, "agreement"),
    Planted("one-ranks-weights", "a rank that ended with different weights", damage.one_ranks_weights, "agreement"),
    Planted("stale-lanes", "wrong lanes after the world changed", damage.stale_lanes, "partition"),
    Planted("idle-lane", "a lane without an owner", damage.idle_lane, "partition"),
    Planted("wrong-sum", "a sample in place of another", damage.wrong_sum, "sums"),
    Planted("miscounted-commit", "coverage sums that ran ahead of the commit", damage.miscounted_commit, "sums"),
    Planted("witness-repeat", "a sample applied twice", damage.witness_repeat, "witness"),
    Planted("witness-skip", "a sample left out", damage.witness_skip, "witness"),
    Planted("witness-swap", "a sample in place of another", damage.witness_swap, "witness"),
    Planted("lost-witness", "no counts of the witness", removed("witness.npy"), "witness", "unknown"),
    Planted("damaged-record", "a flipped byte, no digest checked", damage_commits.damaged_record, "lineage"),
    Planted("torn-record", "a record that was published before it was whole", damage_commits.torn_record, "lineage"),
    Planted("wrong-parent", "a commit outside the lineage", damage_commits.wrong_parent, "lineage"),
    Planted("interval-gap", "a step in no interval", damage_commits.interval_gap, "lineage"),
    Planted("interval-overlap", "a step in two intervals", damage_commits.interval_overlap, "lineage"),
    Planted("wrong-terms", "steps credited to a term that did not apply them", damage_commits.wrong_terms, "lineage"),
    Planted("no-fence", "a paused world published after a newer one had formed", damage_commits.no_fence, "fencing"),
    Planted("twin-world", "two worlds under one term", damage_commits.twin_world, "fencing"),
    Planted(
        "shrinking-terms", "terms that started over after etcd lost its data", damage_commits.shrinking_terms, "fencing"
    ),
    Planted("older-commit", "the head was not the newest commit", damage_commits.older_commit, "durability"),
    Planted("begun-anew", "commits that were not found", damage_commits.begun_anew, "durability"),
    Planted("passed-over-head", "a head that was not listed", damage_commits.passed_over_head, "durability"),
    Planted("unread-head", "a head that was not opened by name", damage_commits.passed_over_head, "atomicity"),
    Planted("beside", "a commit that nothing continues", damage_commits.beside_the_lineage, "heads"),
    Planted("half-a-commit", "a record before the files that it promises", damage_commits.half_a_commit, "atomicity"),
    Planted("another-damaged", "a good commit refused", damage_commits.another_damaged, "atomicity"),
    Planted("extra-step", "a step applied beyond the end", damage.extra_step, "rpo"),
    Planted("other-weights", "rounding that depends on the world", damage.other_weights, "hash"),
    Planted("other-commit", "a commit of weights that are not its step's", damage.other_commit, "weights"),
    Planted("different-losses", "dropout drawn from the rank", damage.different_losses, "losses"),
    Planted("other-metrics", "validation that repeats a padded sample", damage.other_metrics, "metrics"),
    Planted("late-recovery", "a job that takes hours to continue", damage.long_ago, "rto"),
    Planted("orphan", "a worker that outlived its agent", in_lines("clean", orphans=[4711]), "cleanliness"),
    Planted("leaked-lease", "a lease that was never ended", damage_around.leaked_lease, "cleanliness"),
    Planted("leaked-draft", "a file without its name", damage_around.leaked_draft, "cleanliness"),
    Planted("leaked-memory", "shared memory without an owner", damage_around.leaked_memory, "cleanliness"),
    Planted("sent-twice", "a value sent again after a lost answer", damage_around.sent_twice, "tracking"),
    Planted("sent-too-early", "a value sent before it held", damage_around.sent_before_it_held, "tracking"),
    Planted("sent-of-nothing", "a given-up step's value in the tracker", damage_around.sent_of_nothing, "tracking"),
    Planted("logged-twice", "two values of a step in one term", damage_around.logged_twice, "tracking"),
    Planted("other-loss", "a loss that is not the step's", damage_around.other_loss, "tracking"),
    Planted("not-sent", "values that never reached the tracker", damage_around.not_sent, "tracking", "unknown"),
    Planted("nobody-asked", "a tracker that was never read", removed("tracked.json"), "tracking", "unknown"),
    Planted("nothing-logged", "no metrics", damage_around.nothing_logged, "tracking", "unknown"),
    Planted("never-healed", "a job that stays broken once all is undone", damage_around.never_healed, "liveness"),
    Planted("standstill", "a job that stands still, with nothing wrong", damage.standstill, "liveness"),
    Planted("unwatched", "healing that was not timed", damage_around.unwatched, "liveness", "unknown"),
    Planted("ended-early", "a job that ended after 6 of 600 epochs", damage_delivered.ended_early, "finished"),
    Planted("fewer-rows", "a training set of which rows were not read", damage_delivered.fewer_rows, "finished"),
    Planted("missing-file", "a commit without one of its files", damage_delivered.missing_file, "deliverable"),
    Planted("flipped-byte", "a commit of which a byte changed", damage_delivered.flipped_byte, "deliverable"),
    Planted(
        "other-delivery", "the last commit holds an older state", damage_delivered.other_step_delivered, "deliverable"
    ),
    Planted("other-claim", "a hash that the files do not have", damage_delivered.other_claim, "deliverable"),
    Planted("nan-weights", "weights that are not numbers", damage_delivered.nan_weights, "deliverable"),
    Planted("earlier-flip", "a bit of an earlier commit flipped", damage_claims.earlier_flip, "deliverable"),
    Planted("earlier-files", "an earlier commit without its files", damage_claims.earlier_files, "deliverable"),
    Planted("unsealed", "a record that was changed after its seal", damage_claims.unsealed_record, "lineage"),
    Planted("invented-metrics", "metrics that the weights do not have", damage_claims.invented_metrics, "validation"),
    Planted("nan-metrics", "a validation without a number", damage_claims.nan_metrics, "validation"),
    Planted("invented-skips", "updates left out for no reason", damage_claims.invented_skips, "claims"),
    Planted("invented-cuts", "cut rows that nobody counted", in_result(num_truncated=12), "claims"),
    Planted("invented-end", "an end that the job did not have", in_result(ended_by="early stopping"), "claims"),
    Planted("no-validations", "validations that left no line", without("validate"), "complete", "unknown"),
    Planted("no-exits", "nodes without an end", without("exit"), "complete", "unknown"),
    Planted("no-terms", "terms that nobody claimed", damage_claims.no_terms, "complete"),
    Planted("another-claim", "a term that another process claimed", damage_claims.another_claim, "complete"),
    Planted("empty-proof", "an effect that nothing showed", in_lines("effect", proof=""), "faults", "unknown"),
    Planted("blamed-survivor", "a survivor that is blamed for a kill", damage_claims.survivor_blamed, "causes"),
    Planted("repair-a-kill", "a kill that is to be fixed", damage_claims.fix_advised, "causes"),
    Planted("other-exit-code", "a verdict with another exit code", damage_claims.other_exit_code, "causes"),
    Planted(
        "start-when-done", "a job that is done and started again", damage_claims.start_advised_at_the_end, "causes"
    ),
    Planted("empty-manifest", "a manifest without files", written(MANIFEST, "{}"), "complete"),
    Planted("broken-line", "a history that was damaged", damage_claims.broken_line, "complete"),
    Planted("lanes-swapped", "ranks that computed each other's lanes", damage_plausible.lanes_swapped, "partition"),
    Planted(
        "steps-swapped", "two steps that applied each other's samples", damage_plausible.steps_swapped, "agreement"
    ),
    Planted("line-twice", "a line that a history has twice", damage_plausible.line_twice, "complete"),
    Planted("no-commit-lines", "commits without a line", without("commit"), "complete", "unknown"),
    Planted("linked-history", "evidence that is a link", damage_plausible.linked_history, "complete"),
    Planted("killed-twice", "a kill of a process that was dead", damage_plausible.killed_twice, "faults"),
    Planted("kill-survived", "a kill that ended nobody", damage_plausible.kill_survived, "faults"),
    Planted("kill-elsewhere", "a kill of another node's process", damage_plausible.kill_elsewhere, "faults"),
    Planted(
        "unclaimed-start", "a node that came back unclaimed", damage_plausible.unclaimed_start, "faults", "unknown"
    ),
    Planted("no-code", "a node that ended without a code", in_lines("exit", code=False), "deaths", "unknown"),
    Planted("orphan-before", "an orphan that was seen once", damage_plausible.orphan_before, "cleanliness"),
    Planted("other-seed", "a configuration of another run", damage_plausible.other_seed, "job"),
    Planted("other-draws", "records of other random numbers", damage_plausible.other_draws, "job"),
    Planted("extra-key", "a result with an unknown key", damage_plausible.extra_key, "job"),
    Planted("other-state", "a commit of another optimizer state", damage_delivered.other_state, "weights"),
    Planted("files-elsewhere", "a commit of files outside the run", damage_plausible.files_elsewhere, "deliverable"),
    Planted(
        "unwritten-commit", "a commit that its publisher never wrote of", damage_written.unwritten_commit, "records"
    ),
    Planted("another-job", "a record of a job with another seed", damage_written.one_of_another_job, "records"),
    Planted("other-credit", "a step credited to a term that did not apply it", damage_written.other_credit, "records"),
    Planted("unlisted-file", "a commit's file without a digest", damage_written.unlisted_file, "deliverable"),
    Planted("other-digest", "a line with a digest that no commit has", damage_written.other_digest, "lineage"),
    Planted("headless", "a history without its world", damage_written.headless, "order"),
    Planted("other-hour", "a rank whose steps are an hour after the others'", damage_written.other_hour, "order"),
    Planted("quick-restore", "seconds below zero", in_lines("restore", seconds=-1.0), "order"),
    Planted("other-kind", "a number in words", damage_written.other_kind, "complete"),
    Planted("other-end", "a rank that ended otherwise than the job", in_lines("end", status="preempted"), "agreement"),
    Planted("formed-twice", "a world that formed twice", damage_written.formed_twice, "order"),
    Planted("no-operation", "lines that say nothing known", in_lines("commit", op="comit"), "complete"),
    Planted("other-cursor", "a record that continues further on", damage_claims.other_cursor, "records"),
    Planted("other-sums", "a record that counted other samples", damage_claims.other_sums, "sums"),
    Planted("other-account", "a record with an epoch too many", damage_claims.other_account, "records"),
    Planted("other-best", "a best validation that there was not", damage_claims.other_improvement, "records"),
    Planted("older-metrics", "an old record's metrics made up", damage_claims.older_metrics, "records"),
    Planted("other-skips", "an old record with an update left out", damage_claims.other_skips, "records"),
    Planted("other-head", "a named head that no commit is", damage_claims.other_head, "complete"),
    Planted("other-run", "another job's run in the tracker", damage_claims.other_tracked_run, "complete"),
    Planted("other-store", "a store without its word", written("store-id", "another store"), "complete"),
    Planted("nobody-killed", "a kill without a process", damage_written.nobody_killed, "faults"),
    Planted("nan-tracked", "a tracker without a number", damage_plausible.nan_tracked, "tracking"),
    Planted("endless", "a result of more steps than were applied", in_result(step=10**300), "rpo"),
    Planted("no-result", "a job that hung or died", removed("result.json"), "finished"),
    Planted("preempted", "a job that was not started again", in_result(status="preempted"), "finished"),
    Planted("unseen-leases", "an etcd that did not answer", in_lines("clean", leases=None), "cleanliness", "unknown"),
    Planted("unlooked", "orphans were not looked for", without("clean"), "cleanliness", "unknown"),
    Planted("no-faults", "nothing was put to the test", without("fault"), "faults", "unknown"),
    Planted("never-came", "a fault at a place that no process came to", damage_around.never_came, "faults", "unknown"),
    Planted("no-proof", "faults that may have had no effect", without("effect"), "faults", "unknown"),
    Planted("harmless-kill", "a kill that lost nothing", damage.harmless_kill, "faults", "unknown"),
    Planted("vain-fault", "a fault that changed nothing", damage.vain_fault, "rto", "unknown"),
    Planted("unexplained-term", "a world that broke by itself", damage.unexplained_term, "deaths", "unknown"),
    Planted("long-ago", "a world that broke hours after a fault", damage.long_ago, "deaths", "unknown"),
    Planted("unexplained-death", "a rank that died by itself", damage.unexplained_death, "deaths", "unknown"),
    Planted("failed-node", "a node that failed by itself", in_lines("exit", node=99, code=1), "deaths", "unknown"),
    Planted("given-up", "a job that gave up although it got on", damage.given_up, "progress"),
    Planted("unreadable", "a check that throws", damage.unreadable, "partition", "unknown"),
)
