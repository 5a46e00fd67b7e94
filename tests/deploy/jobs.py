"""Jobs of the tests here: one that a busy machine disturbs in no way, and what its histories say of its worlds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import yaml

from chaos.services.slurm.cluster import SlurmCluster
from chaos.services.slurm.machines import eventually
from tests.conftest import ROOT
from tests.deploy.pages import command
from tests.elastic_train.training.live.test_live import JOB, NO_HANG_S, history, until_whole, write_config

SCRIPTS = ROOT / "deploy" / "slurm"
PATIENCE_S = 900.0
"""For whatever has to come: nodes have their imports to do first, and a machine may do much else."""
STEPS, LANE_MS = 160, 600.0
"""Of a job that waits for faults: what is left of its steps once they are over is computed, so few long ones cost less
than many short ones."""
COMMIT_EVERY = int(str(dict(JOB["checkpoint"])["every"]).split()[0])  # type: ignore[call-overload]


def write_patient_config(
    folder: Path, rows: Path, steps: int, lane_ms: float | None = None, until: Path | None = None
) -> str:
    """Write a job's configuration in which nobody takes a process that gets no processor for one that hangs."""
    config = Path(write_config(folder, rows, steps, lane_ms, until))
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"hang_timeout_s": NO_HANG_S}))
    return str(config)


def worlds(run: Path) -> list[int]:
    """Return the sizes of the worlds in which steps were taken, by term."""
    sizes = {line["term"]: line["world"] for line in history(run) if line["op"] == "form"}
    stepped = {line["term"] for line in history(run) if line["op"] == "step"}
    return [sizes[term] for term in sorted(sizes) if term in stepped]


def newest_term(run: Path) -> int:
    """Return the term of the newest world; 0 before there is one."""
    lines = history(run) if (run / "history").is_dir() else []
    return max((line["term"] for line in lines if line["op"] == "form"), default=0)


def until_ranks(run: Path, size: int, *, above: int = 0) -> tuple[int, dict[int, int]]:
    """Wait as `until_whole` does, for as long as other tests here; return the term and the processes by rank."""
    return until_whole(run, size, above=above, timeout_s=PATIENCE_S)


def until_world(run: Path, size: int, *, above: int = 0) -> int:
    """Wait until a world of that size, the newest of all and of a term above `above`, takes steps; return its term."""

    def trains() -> bool:
        newest = newest_term(run)
        if newest <= above or worlds(run)[-1:] != [size]:
            return False
        return sum(line["op"] == "step" and line["term"] == newest for line in history(run)) > 3 * size

    eventually(trains, f"{size} ranks train in {run}", PATIENCE_S)
    return newest_term(run)


def first_step_s(run: Path, term: int) -> float:
    """Return when the first step of a term was applied, in unix seconds."""
    return min(float(line["t"]) for line in history(run) if line["op"] == "step" and line["term"] == term)


def steps_done_twice(run: Path) -> list[int]:
    """Return the steps that were applied in more than one term: those that a fault has cost."""
    applied = {(line["step"], line["term"]) for line in history(run) if line["op"] == "step"}
    return [step for step, times in Counter(step for step, _ in applied).items() if times > 1]


def submit_train(
    slurm: SlurmCluster, folder: Path, config: str, path: dict[str, str], *options: str, grace_s: int = 100
) -> str:
    """Submit train.sbatch as its page does, in a folder, where its log goes, too; return the job's id."""
    filled = {"train.sbatch": str(SCRIPTS / "train.sbatch"), "CONFIG": config}
    _, (program, nodes, *script) = command("slurm.md", "sbatch --nodes=4 train.sbatch", filled)
    assert (program, nodes) == ("sbatch", "--nodes=4"), "tests have fewer"
    out = ("-D", str(folder), "-o", str(folder / "log"))
    return slurm.submit(*options, *out, *script, "--grace-s", f"{grace_s}", **path)
