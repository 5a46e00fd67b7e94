"""MFU and HFU, the share of the devices' peak that a run uses, and the file with their inputs in a run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "utilisation.json"


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs per sample, FLOPs per sample that recomputation adds, and the peak FLOP/s of a rank's device."""

    flops_per_sample: float
    recomputed_flops_per_sample: float
    peak_flops: float

    def mfu(self, samples_per_s: float, num_ranks: int) -> float:
        """Return the share of all devices' peak that the model's own operations use."""
        return samples_per_s * self.flops_per_sample / (num_ranks * self.peak_flops)

    def hfu(self, samples_per_s: float, num_ranks: int) -> float:
        """Return the share of all devices' peak that all operations use, recomputed ones included."""
        return self.mfu(samples_per_s, num_ranks) * (1 + self.recomputed_flops_per_sample / self.flops_per_sample)

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_utilisation(run_dir: Path) -> Utilisation | None:
    """Read the file in a run's folder; None if it is missing or unreadable."""
    try:
        found = Utilisation(**json.loads((run_dir / FILE).read_text()))
        return found if found.flops_per_sample > 0 and found.peak_flops > 0 else None
    except (OSError, ValueError, TypeError):
        return None
