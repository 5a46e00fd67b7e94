"""Measure sharded state: memory, step time, and the cost of a lost rank and of a commit.

    python -m benchmarks.sharding [--json] [--quick] [--only NAME]

live_ratio            bytes a parameter that a rank holds (weights, gradients, moments, sums put aside), over the 16 of
                      whole state; names are the mode, the ranks and the copies, as in gradients_w4_c1 (goal: 0.45)
step_vs_replicated    time of a step over that of whole state in the same processes, in turn (goals with two ranks: at
                      most 1.05 for optimizer, 1.15 for gradients)
sent_vs_all_reduce    bytes that a rank gives to a step's exchange over an all-reduce's 2n(W - 1)/W
counter_chunks_max    the most sums that a rank has put aside for its share, by the lanes L of a step, over 1 to 4 ranks
                      and both numbers of copies (goal: at most 1 + log2 L)
step_vs_fsdp2         time of a step over that of torch's fully_shard (FSDP2) of the same model, lanes, optimizer and
                      clipping, in the same processes, in turn: of `mode`, which has the most in shards, with one copy
                      (goal: at most 1.0)
peak_rss_vs_fsdp2     the same for the most resident memory of a rank above what its process had before its model;
                      `lean` is beside FSDP2 that reduces after each lane (goal: at most 0.7)
plan_s                seconds of a core for all that a rank works out when the world changes, for a model of 6.7 billion
                      elements: seats, holdings and plan, its runs, its part of gradient sums and of commits; by ranks
                      before and after, and copies; `cells` are of two stages by four (goals: 0.1 with 256 ranks, 0.4
                      with 1,024)
moved_over_lost       elements that the plan moves, over those that lost ranks held, or that a new one is to hold (goal
                      from eight ranks to seven: 1.3)
live_worker_s         seconds from the kill of one of four workers of a live job, with 0.5 GB of state in two copies, to
                      the next applied step (goal: p50 at most 0.6, max at most 1.0 + `link`); see `recovery`
rpo_steps_max         the most applied steps that a kill costs, over kills of workers at every point of a step (goal: 0)
model_rebuilt         whether a process that lives through those kills trains another model object afterwards, or is not
                      the same process (goal: false)
kills_at_points       how many kills that were, whether the weights are those of a run without, the most steps that were
                      computed again although somebody may have applied them, and processes that ended without a kill
overlap_wait_ratio    time that two ranks wait for a step's gradient with buckets beside the backward pass, over what
                      they wait if all is exchanged after it, on a wire of 0.25 GB/s, by mode and parallel.bucket_mb
                      (goal: 0.6)
save_stall_ms_per_gb  what a rank's training waits for a save in the background, for each GB that it writes (goal: 110),
                      and over a bare copy of as many bytes
load_vs_dcp           time of torch's dcp.load over ours, which checks every block: the same files, written by as many
                      ranks in pieces, into the same shards by rows (goal: at least 1.0)
dcp_load_equal        whether stock dcp.load reads commits of 1, 3, 4 and 7 ranks, two copies, as the state of one rank
                      that holds everything

Steps are of a transformer encoder with AdamW and clipping, its lanes dealt to all ranks. The last line is JSON.
"""

from __future__ import annotations

from benchmarks.figures import Measure, measure_chosen
from benchmarks.sharding import commits, overlap, peers, plans, recovery, steps

FIGURES: dict[str, Measure] = {
    "live_ratio": steps.beside_whole,
    "step_vs_replicated": steps.beside_whole,
    "sent_vs_all_reduce": steps.beside_whole,
    "counter_chunks_max": steps.counters,
    "step_vs_fsdp2": peers.step_times,
    "peak_rss_vs_fsdp2": peers.peak_memory,
    "plan_s": plans.plans,
    "moved_over_lost": plans.plans,
    "live_worker_s": recovery.live_worker,
    "rpo_steps_max": recovery.kills_at_points,
    "model_rebuilt": recovery.kills_at_points,
    "kills_at_points": recovery.kills_at_points,
    "overlap_wait_ratio": overlap.wait_ratio,
    "save_stall_ms_per_gb": commits.save_stall,
    "load_vs_dcp": commits.load_times,
    "dcp_load_equal": commits.dcp_equal,
}


if __name__ == "__main__":
    measure_chosen("benchmarks.sharding", __doc__, FIGURES)
