"""What a cell costs beside torch's own tensor parallelism and pipelining, and whether it shows in the weights.

    python -m benchmarks.cells [--json] [--quick] [--only NAME]

`tp2_vs_torch`: passes a second of two ranks that hold the decoder as a cell, over those of a loop of torch's own parts
(`parallelize_module`), at the same degree and on the same tokens; the figure is that of the medians (goal at least
0.95). `tp2_cpu_vs_torch` is the same of processor time, which other programs on the machine do not change.

`pp2_vs_torch`: steps a second of two stages of the decoder on eight lanes, over those of a loop of
`torch.distributed.pipelining`, by schedule (goal at least 0.95); `pp2_cpu_vs_torch` of processor time.
`pp_1f1b_peak_lanes`: how many lanes a stage had alive at once (goal: stages - stage).

`one_hash.pp2`: whether live jobs in stages end with the weights of one rank, bit for bit (goal: true).
"""

from __future__ import annotations

from benchmarks.cells import hashes, pipeline, tensor
from benchmarks.figures import measure_chosen


def main() -> None:
    """Measure what is asked for."""
    beside = dict.fromkeys(tensor.NAMES, tensor.beside_torch)
    staged = dict.fromkeys((*pipeline.NAMES, "pp_1f1b_peak_lanes"), pipeline.beside_torch)
    measure_chosen("benchmarks.cells", __doc__, {**beside, **staged, "one_hash.pp2": hashes.one_hash})


if __name__ == "__main__":
    main()
