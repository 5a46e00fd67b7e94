"""Compare saves with torch.save, dcp.save and dcp.async_save: stall of training, time of a save, speed of loading.

    python -m benchmarks.checkpoint [--json] [--quick] [--only NAME]

stall_ms_per_gb        milliseconds that training waits for a save, for each GB, by size and side (ours: at most 110)
whole_s                seconds of a whole save; of ours and of `dcp.save` it is hashed, or not, and on the disk
load_vs_dcp            time of dcp.load over ours, which checks every block (goal: at least 1.0)
load_vs_dcp_from_disk  the same where no file is in the page cache

All sides save the same state (a model's weights and AdamW's moments) in the same process, in turn; figures are medians.
A stall is the time that the training thread spends in a save: in the call at the step boundary, and, where a copy runs
beside forward and backward, waiting for it before the update. `dcp.async_save` of 4 GB is measured with kept memory
only: they need about 14 GB of memory (the state, gradients, and two staged copies). The last line is JSON.
"""

from __future__ import annotations

import tempfile

from benchmarks.beside import in_process
from benchmarks.checkpoint.measure import medians
from benchmarks.figures import Effort, measure_chosen

SIZES_GB, QUICK_SIZES_GB = (1.0, 4.0), (0.1,)
NAMES = ("stall_ms_per_gb", "whole_s", "load_vs_dcp", "load_vs_dcp_from_disk")


def saves(effort: Effort) -> dict[str, object]:
    """Measure all sides with states of each size."""
    found: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    for size_gb in QUICK_SIZES_GB if effort.is_quick else SIZES_GB:
        with tempfile.TemporaryDirectory() as folder:
            measured = in_process(medians, size_gb, folder)
        for (figure, case), value in measured.items():
            found[figure][f"{size_gb:g} GB, {case}"] = round(value, 3)
        effort.say(f"{size_gb:g} GB: {measured}")
    return dict(found)


if __name__ == "__main__":
    measure_chosen("benchmarks.checkpoint", __doc__, dict.fromkeys(NAMES, saves))
