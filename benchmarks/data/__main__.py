"""Our loader beside its peers, on the same rows of the same machine, each in processes of its own and in turn.

    python -m benchmarks.data [--json] [--rows 200000] [--rounds 3] [--seconds 3] [--peers lit,grains] [--keep FOLDER]

Peers come from PyPI into a virtual environment that is made here. A peer that cannot be installed, or cannot do
something, says so. The last line is JSON: `samples_per_s_vs_best_peer` and `resume_vs_best_peer` (medians over rounds,
goals 1.5 and 10, among the peers that read more than fits into memory; the time to resume with decoded row groups in
our cache, since the peers have their own decoded formats on the disk; `uncached_...` without), `samples_per_cpu_s_...`
(the same per second of CPU time, which hardly depends on what else runs), `repeats` and `skips` of ours over resizes,
`order_build_ms` and `seek_ms` at 42 million rows, `decode_vs_pyarrow` and `loader_vs_decode` (goals 0.9).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.data.full_size import write_full_size
from benchmarks.data.rows import write_numbered_rows, write_rows

OURS, CACHED = "ours", "ours_cached"
PEERS = {
    "lit": "litdata",
    "hugging_map": "Hugging Face datasets, map-style",
    "hugging_stream": "Hugging Face datasets, streaming",
    "mosaic": "mosaicml-streaming",
    "grains": "grain",
    "plain": "StatefulDataLoader, table in memory",
}
IN_MEMORY = "plain"
TORCH = "torch==2.13.0"
PACKAGES = ("mosaicml-streaming", "litdata", "grain", "datasets", "torchdata", "pyarrow", TORCH)
STAGES = {"4-3-5": [[4, 100], [3, 60], [5, 0]], "8-7-5-8": [[8, 40], [7, 40], [5, 40], [8, 0]]}
NUM_NUMBERED, NUM_FULL, FULL_ROWS_PER_GROUP = 10_007, 42_000_000, 2000
TIMEOUT_S = 900.0
Found = dict[str, float | int | str]


@dataclass
class Loader:
    """One loader, and its results by measurement."""

    name: str
    python: str
    found: dict[str, list[float]] = field(default_factory=dict)
    resizes: dict[str, Found] = field(default_factory=dict)
    cannot: str | None = None

    def run(self, module: str, *arguments: str) -> Found:
        """Run a measurement in its own process; an unsupported one is noted and gives an empty result."""
        command = [self.python, "-m", f"benchmarks.data.peers.{module}", self.name, *arguments]
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **quiet, "PYTHONPATH": str(Path(__file__).parents[2])},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            found: Found = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            found = {"cannot": f"{arguments[0]}: not done in {TIMEOUT_S:.0f} s"}
        except (subprocess.CalledProcessError, ValueError, IndexError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            found = {"cannot": f"{arguments[0]}: {said[-1][:160] if said else 'failed'}"}
        if "cannot" in found:
            self.cannot = str(found["cannot"])
        for name, value in found.items():
            if isinstance(value, float | int):
                self.found.setdefault(name, []).append(float(value))
        return found

    def median(self, name: str) -> float | None:
        """Return the median of the results under a name."""
        return statistics.median(self.found[name]) if self.found.get(name) else None


def main() -> None:
    """Measure everything; print the tables, then one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long a loader is read in a round")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--keep", type=Path, help="folder for rows and environments, used again the next time")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        _make_rows(folder, chosen.rows)
        python = _make_environment(folder / "environment")
        names = [name for name in chosen.peers.split(",") if name]
        loaders = [
            Loader(OURS, sys.executable),
            Loader(CACHED, sys.executable),
            *(Loader(name, python) for name in names),
        ]
        _measure(loaders, folder, chosen.rows, chosen.rounds, chosen.seconds)
        alone = _run_alone(folder, chosen.rows)
    if not chosen.json:
        _print(loaders, alone)
    print(json.dumps(_summary(loaders, alone)))


def _make_rows(folder: Path, num_rows: int) -> None:
    if not (folder / f"rows-{num_rows}").exists():
        write_rows(folder / f"rows-{num_rows}", num_rows)
    if not (folder / "numbered").exists():
        write_numbered_rows(folder / "numbered", NUM_NUMBERED)
    if not (folder / "full").exists():
        write_full_size(folder / "full", NUM_FULL, FULL_ROWS_PER_GROUP)


def _make_environment(folder: Path) -> str:
    """Create the peers' virtual environment, with the pinned torch first; return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, *PACKAGES], check=True)
    return str(python)


def _measure(loaders: list[Loader], folder: Path, num_rows: int, rounds: int, seconds: float) -> None:
    """Measure all loaders in turn, round after round, so that disturbances affect all of them."""
    rows, numbered = str(folder / f"rows-{num_rows}"), str(folder / "numbered")
    for name in (OURS, CACHED):  # results of an earlier version of our loader do not apply
        shutil.rmtree(folder / "converted" / name, ignore_errors=True)
    for loader in loaders:
        for source in (rows, numbered):
            out = _out(folder, loader, source)
            if not (out / "prepared").exists() and "cannot" not in loader.run("measure", "prepare", source, str(out)):
                (out / "prepared").touch()
        if loader.cannot is None and not (_out(folder, loader, rows) / "state").exists():
            kept = str(_out(folder, loader, rows) / "state")
            loader.run("measure", "half", rows, str(_out(folder, loader, rows)), kept)
    for _ in range(rounds):
        for loader in loaders:
            folder_of = str(_out(folder, loader, rows))
            if loader.cannot is None:
                loader.run("measure", "speed", rows, folder_of, str(seconds))
                loader.run("measure", "resume", rows, folder_of, f"{folder_of}/state")
    for loader in loaders:
        for name, stages in STAGES.items():
            loader.resizes[name] = _resize(loader, _out(folder, loader, numbered), numbered, name, stages)


def _resize(loader: Loader, out: Path, rows: str, name: str, stages: list[list[int]]) -> Found:
    """Count a loader's repeats and skips; a peer's deterministic result may come from an earlier run."""
    earlier = out / f"resize-{name}.json"
    if earlier.exists():
        found: Found = json.loads(earlier.read_text())
        return found
    found = loader.run("resize", rows, str(out), json.dumps(stages))
    if "cannot" not in found:
        earlier.write_text(json.dumps(found))
    return found


def _out(folder: Path, loader: Loader, rows: str) -> Path:
    return folder / "converted" / loader.name / Path(rows).name


def _run_alone(folder: Path, num_rows: int) -> Found:
    """Measure the figures that concern only our own loader."""
    found: Found = {}
    for what in ("scale", "decode"):
        rows = folder / ("full" if what == "scale" else f"rows-{num_rows}")
        command = [sys.executable, "-m", "benchmarks.data.data_alone", what, str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        found |= json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _summary(loaders: list[Loader], alone: Found) -> dict[str, object]:
    (ours, cached), peers = loaders[:2], [loader for loader in loaders[2:] if loader.name != IN_MEMORY]
    speeds = [speed for peer in peers if (speed := peer.median("samples_per_s")) is not None]
    cpu_us = [cost for peer in peers if (cost := peer.median("cpu_us_per_sample")) is not None]
    resumes = [resume for peer in peers if (resume := peer.median("resume_s")) is not None]

    def faster(loader: Loader) -> float | None:
        speed = loader.median("samples_per_s")
        return round(speed / max(speeds), 3) if speed and speeds else None

    def cheaper(loader: Loader) -> float | None:
        cost = loader.median("cpu_us_per_sample")
        return round(min(cpu_us) / cost, 3) if cost and cpu_us else None

    def sooner(loader: Loader) -> float | None:
        resume = loader.median("resume_s")
        return round(min(resumes) / resume, 3) if resume and resumes else None

    resizes = [*ours.resizes.values(), *cached.resizes.values()]
    return {
        "samples_per_s_vs_best_peer": faster(ours),
        "cached_samples_per_s_vs_best_peer": faster(cached),
        "samples_per_cpu_s_vs_best_peer": cheaper(ours),
        "cached_samples_per_cpu_s_vs_best_peer": cheaper(cached),
        "resume_vs_best_peer": sooner(cached),
        "uncached_resume_vs_best_peer": sooner(ours),
        "repeats": sum(int(found["repeats"]) for found in resizes),
        "skips": sum(int(found["skips"]) for found in resizes),
        **alone,
    }


def _print(loaders: list[Loader], alone: Found) -> None:
    columns = {
        "samples_per_s": "samples/s",
        "cpu_us_per_sample": "CPU µs/sample",
        "first_batch_s": "first batch s",
        "resume_s": "resume at 50 % s",
        "memory_mb": "memory MB",
    }
    titles = {OURS: "elastic_train.data", CACHED: "elastic_train.data, cached", **PEERS}
    table = Table("loader", *columns.values(), *(f"{name}: repeats, skips" for name in STAGES))
    for loader in loaders:
        numbers = [f"{value:,.3g}" if (value := loader.median(name)) is not None else "-" for name in columns]
        resizes = [
            str(found.get("cannot") or f"{found['repeats']}, {found['skips']}") for found in loader.resizes.values()
        ]
        table.add_row(titles[loader.name], *numbers, *resizes)
    console = Console(width=180)
    console.print(table)
    for loader in loaders:
        if loader.cannot:
            console.print(f"{loader.name} cannot: {loader.cannot}")
    console.print(alone)


if __name__ == "__main__":
    main()
