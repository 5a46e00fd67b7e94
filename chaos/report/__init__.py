"""The report on a run: report.html, a self-contained page next to verdict.json."""

from __future__ import annotations

from pathlib import Path

from chaos.judge.verdict import REPORT, Verdict
from chaos.report.page import render


def write(folder: Path, verdict: Verdict) -> Path:
    """Write the page into a run's folder; return its path."""
    path = folder / REPORT
    path.write_text(render(verdict), encoding="utf-8")
    return path
