"""The GPU benchmark: the sizes it knows, the device's peak, and where it writes its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import BEGIN, END, peak_flops, write
from benchmarks.gpu.job import GIB, SIZES, size_for
from elastic_train.tasks.decoder.model import Decoder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("memory", "size"), [(80 * GIB, "1b"), (24 * GIB, "300m"), (8 * GIB, "100m")])
def test_the_largest_model_that_fits_is_measured(memory: int, size: str) -> None:
    assert size_for(memory) == size


def test_flops_are_those_of_the_formula() -> None:
    """Of the decoder itself, counted by hand: two products forward, four backward, for each weight and token."""
    size = SIZES["tiny"]
    num_weights = sum(parameter.numel() for parameter in Decoder(size.shape).parameters())
    assert size.num_parameters == num_weights
    assert size.flops_per_token == 6 * num_weights + 12 * 2 * 64 * 64


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12), ("Other", None)],
)
def test_peaks_are_known_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_figures_are_written_where_the_documentation_has_marks(tmp_path: Path) -> None:
    (tmp_path / "doc.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(tmp_path / "doc.md", {"device": "a device", "mfu": 0.5})
    text = (tmp_path / "doc.md").read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| `mfu` | 0.5 | ≥ 0.45 |" in text and f"torch {torch.__version__}" in text
    assert BEGIN in (ROOT / "docs/benchmarks.md").read_text()
    (tmp_path / "none.md").write_text("no marks")
    with pytest.raises(SystemExit, match="has no <!-- gpu -->"):
        write(tmp_path / "none.md", {"device": "a device"})
