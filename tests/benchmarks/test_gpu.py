"""The GPU benchmark: the sizes it knows, the device's peak, and where it writes its figures."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from benchmarks.gpu.__main__ import BEGIN, END, PARTS, Machine, measure, peak_flops, write
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


def test_figures_are_written_as_they_come_where_the_documentation_has_marks(tmp_path: Path) -> None:
    """Those of the same device that were not measured again stay, with their day; those of another device go."""
    page = tmp_path / "doc.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, {"mfu_compiled": 0.4}, "a device")
    page.write_text(re.sub(r"\d{4}-\d\d-\d\d", "2026-01-02", page.read_text()))
    write(page, {"fast_vs_plain": 0.98}, "a device")
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| `mfu_compiled` | 0.4 | ≥ 0.5 | 2026-01-02 |" in text and f"torch {torch.__version__}" in text
    assert "| `fast_vs_plain` | 0.98 | ≥ 0.99 | 20" in text
    write(page, {"fast_vs_plain": 0.99}, "another device")
    assert "mfu_compiled" not in page.read_text()


def test_the_figures_in_the_documentation_can_be_added_to(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs/benchmarks.md").read_text())
    rows = page.read_text().partition(BEGIN)[2].partition(END)[0].count("| `")
    write(page, {"killed_worker_s": 0.5}, "NVIDIA H200")
    assert page.read_text().partition(BEGIN)[2].partition(END)[0].count("| `") == rows + 1


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.md").write_text("no marks")
    with pytest.raises(SystemExit, match="has no <!-- gpu -->"):
        write(tmp_path / "none.md", {}, "a device")


def test_a_part_that_fails_or_begins_too_late_is_named_and_keeps_no_figure_from_the_others() -> None:
    noted: list[dict[str, object]] = []
    with mock.patch.dict(
        PARTS, {"compiled": lambda _: {"mfu_compiled": 0.4}, "eager": mock.Mock(side_effect=KeyError("none"))}
    ):
        machine, console = Machine("tiny", "cpu", is_quick=True), Console(stderr=True)
        missing = measure(machine, ["eager", "compiled"], 60.0, console, noted.append)
        assert missing == ["eager: KeyError: 'none'"] and noted == [{"mfu_compiled": 0.4}]
        assert measure(machine, ["compiled"], -1.0, console, noted.append) == ["compiled: not begun within -1 s"]
