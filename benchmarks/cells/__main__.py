"""Compare replica groups with torch's own tensor parallelism and pipelining: speed, and the cost of a lost rank.

    python -m benchmarks.cells [--json] [--quick] [--only NAME]

`tp2_vs_torch`: passes a second of two ranks that hold the decoder as a cell, over those of a loop of torch's own parts
(`parallelize_module`), at the same degree and on the same tokens; the figure is that of the medians (goal at least
0.95). `tp2_cpu_vs_torch` is the same of processor time, which other programs on the machine do not change.

`pp2_vs_torch`: steps a second of two stages of the decoder on eight lanes, over those of a loop of
`torch.distributed.pipelining`, by schedule (goal at least 0.95), with two chunks each where it is interleaved;
`pp2_cpu_vs_torch` of processor time. `pp_1f1b_peak_lanes`: a stage's most lanes alive at once (goal: stages - stage).

`rpo_steps_max`, `model_rebuilt`: over kills of each worker of two cells at each of ten points of a step, the most
applied steps that one costs (goal: 0), and whether a process that lives on trains another model (goal: false).
`kills_at_points` has how many kills that were, and whether the weights are those of one cell without a fault;
`peer_killed_given_up_s` how long peers wait for the killed rank (goal: p50 at most 0.2).

`live_worker_s`: seconds from the kill of one of four workers of two cells, with 0.06 GB of state, to the next applied
step (goal: p50 at most 0.8); `live_worker_s.large` with 0.35 GB, and `step` is what a step takes when all is well.
`spare_fill_s`: the latter where a fifth worker takes the place at once (goal: p50 at most 2 + `link`, which is what it
takes to send as many bytes as a place holds).

`ep2_vs_torch`: steps a second of two ranks over which the decoder's experts are spread, over those of a loop of torch's
own parts (all-to-all, DistributedDataParallel), on the same four lanes (goal at least 0.95); `ep2_cpu_vs_torch` of
processor time.
"""

from __future__ import annotations

from benchmarks.cells import experts, pipeline, recovery, tensor
from benchmarks.figures import Measure, measure_chosen


def figures() -> dict[str, Measure]:
    """Return the function that measures each figure."""
    beside = dict.fromkeys(tensor.NAMES, tensor.beside_torch)
    staged = dict.fromkeys((*pipeline.NAMES, "pp_1f1b_peak_lanes"), pipeline.beside_torch)
    at_points = ("rpo_steps_max", "model_rebuilt", "peer_killed_given_up_s", "kills_at_points")
    lost: dict[str, Measure] = dict.fromkeys(at_points, recovery.kills_at_points)
    live = {"live_worker_s": recovery.live_worker, "spare_fill_s": recovery.spare_fill}
    live["live_worker_s.large"] = recovery.live_worker_large
    return {**beside, **staged, **lost, **live, **dict.fromkeys(experts.NAMES, experts.beside_torch)}


if __name__ == "__main__":
    measure_chosen("benchmarks.cells", __doc__, figures())
