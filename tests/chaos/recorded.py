"""A small run as the trainer records it, synthesised without training: three worlds, a kill, a preemption, a new node.

101 rows on 6 lanes with micro-batches of 4: 5 steps an epoch, 6 epochs, a commit every 5 steps, the last 3 kept. Term 1
(2 ranks) is killed after step 13 and loses 3 steps; term 2 (1 rank) is asked to leave at step 22, for a node that
joins; term 3 (3 ranks) finishes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
import yaml
from blake3 import blake3

from chaos.judge.evidence.run_files import seal_of
from chaos.judge.invariants.written.records import identity_of
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.order import Order

ROWS, LANES, MICRO_BATCH, EPOCHS, EVERY, KEPT = 101, 6, 4, 6, 5, 3
HELD_OUT = 16
STEPS_PER_EPOCH = 5
STEPS = EPOCHS * STEPS_PER_EPOCH
START = 1_800_000_000.0
STEP_S = 0.1


@dataclass(frozen=True)
class Worlds:
    """A term: its number of ranks, its steps, how it ended, and whether it commits when it leaves."""

    ranks: int
    lo: int
    hi: int
    status: str


FAULTED = (Worlds(2, 0, 13, "killed"), Worlds(1, 10, 22, "preempted"), Worlds(3, 22, STEPS, "done"))
REFERENCE = (Worlds(2, 0, STEPS, "done"),)


def model_at(step: int) -> dict[str, torch.Tensor]:
    """Return the weights after a step: plainly synthetic."""
    return {"w": torch.full((ROWS,), step / 7)}


@cache
def digest_at(step: int) -> str:
    """Return the hash of the weights after a step, as specified in docs/formats.md."""
    lines = ""
    for name, tensor in model_at(step).items():
        grain = hashlib.sha256(tensor.numpy().tobytes()).digest()  # there are few elements, so it is one
        content = f"{tensor.dtype} {tuple(tensor.shape)} in 1 grains of 65536\n".encode() + grain
        lines += f"{name} {hashlib.sha256(content).hexdigest()}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def metrics_at(step: int) -> dict[str, float]:
    """Return the metrics on the first rows: the witness's loss is the negative sum of its weights."""
    return {"loss": -float(model_at(step)["w"][:HELD_OUT].sum()), "samples": float(HELD_OUT)}


def loss_of(step: int) -> float:
    return 1 / (step + 1)


def samples_until(step: int) -> int:
    """Count samples by iterating over every lane and step, slowly and simply."""
    sizes = [(lane + 1) * ROWS // LANES - lane * ROWS // LANES for lane in range(LANES)]
    epochs, steps = divmod(step, STEPS_PER_EPOCH)
    return epochs * ROWS + sum(min(size, steps * MICRO_BATCH) for size in sizes)


JOB, DATA = {"seed": 7}, {"block_row_groups": 8}
BATCH = {"global_batch": LANES * MICRO_BATCH, "micro_batch": MICRO_BATCH}
TASK = {"path": "elastic_train.tasks.witness:Witness"}
ORDER = Order([60, ROWS - 60], num_lanes=LANES, seed=7, block_row_groups=8)


@cache
def sums_at(step: int) -> CoverageSums:
    """Return the sums over the samples of the first steps, in the trainer's order."""
    epochs, steps = divmod(step, STEPS_PER_EPOCH)
    ids = [ORDER.epoch(epochs).ids(lane, 0, ROWS)[: steps * MICRO_BATCH] for lane in range(LANES)]
    return CoverageSums.of_all(ROWS) * epochs + CoverageSums.of_ids(np.concatenate(ids))


def coverage_at(step: int) -> dict[str, int]:
    sums = sums_at(step)
    assert sums.count == samples_until(step)
    return {"count": sums.count, "sum_a": sums.sum_a, "sum_b": sums.sum_b}


@dataclass
class Recorder:
    """Writes a run's files; the clock is virtual."""

    folder: Path
    first_pid: int
    now: float = START
    head: tuple[str, str] | None = None
    intervals: list[dict[str, int]] = field(default_factory=list)
    files: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    metrics: dict[int, list[dict[str, object]]] = field(default_factory=dict)

    def write(self, file: str, op: str, /, **fields: object) -> None:
        self.files.setdefault(file, []).append({"op": op, "t": round(self.now, 4), **fields})

    def term(self, term: int, world: Worlds) -> None:
        names = [f"{term:08d}-{rank:05d}-{self.first_pid + 10 * term + rank}" for rank in range(world.ranks)]
        sealed_at, self.now = self.now + 0.5, self.now + 2.0
        key = self.head[0] if self.head else None
        for rank, name in enumerate(names):
            times = {"joined_at": sealed_at - 0.1, "sealed_at": sealed_at, "started_at": sealed_at + 0.2}
            who = {"term": term, "rank": rank}
            self.write(name, "form", **who, world=world.ranks, pid=int(name[-5:]), cause="start", **times)
            where = {"step": world.lo, "epoch": world.lo // 5, "offset": world.lo % 5 * MICRO_BATCH, "commit": key}
            self.write(name, "restore", **who, **where, seconds=0.1, skipped=[], resumed=None)
            self.write("chaos", "node", node=rank % 2, pids=[int(name[-5:])])
        self.metrics[term] = [{"t": self.now, "term": term, "begins_at": world.lo}]
        for step in range(world.lo + 1, world.hi + 1):
            self.now += STEP_S
            self.step(term, world, names, step)
            if step % EVERY == 0 or (step == world.hi and world.status != "killed"):
                self.commit(term, names[0], step)
        if world.status == "done":
            for rank, name in enumerate(names):
                self.write(name, "validate", term=term, rank=rank, step=world.hi)
        if world.status != "killed":
            for rank, name in enumerate(names):
                outcome = {"status": world.status, "step": world.hi, "weights_sha256": digest_at(world.hi)}
                self.write(name, "end", term=term, rank=rank, **outcome, coverage=coverage_at(world.hi))

    def step(self, term: int, world: Worlds, names: list[str], step: int) -> None:
        epoch, place = divmod(step - 1, STEPS_PER_EPOCH)
        num_samples = samples_until(step) - samples_until(step - 1)
        for rank, name in enumerate(names):
            lanes = [rank * LANES // world.ranks, (rank + 1) * LANES // world.ranks]
            where = {"epoch": epoch, "lo": place * MICRO_BATCH, "hi": (place + 1) * MICRO_BATCH, "lanes": lanes}
            what = {"num_samples": num_samples, "world": world.ranks, "loss": loss_of(step)}
            self.write(name, "step", term=term, rank=rank, step=step, **where, **what)
        self.metrics[term].append({"t": self.now, "term": term, "step": step, "values": {"train/loss": loss_of(step)}})

    def commit(self, term: int, name: str, step: int) -> None:
        before = [interval for interval in self.intervals if interval["term"] < term and interval["lo"] < step]
        lo = self.lo_of(term)
        self.intervals = [*({**i, "hi": min(i["hi"], lo)} for i in before), {"term": term, "lo": lo, "hi": step}]
        key, parent = f"commits/{term:08d}-{step:012d}.json", self.head[1] if self.head else None
        places: dict[str, object] = {
            "step": step,
            "term": term,
            "intervals": self.intervals,
            "coverage": coverage_at(step),
        }
        places |= self.save(term, step)
        record = {**places, "parent": parent, "parent_key": self.head[0] if self.head else None, "created_at": self.now}
        path = self.folder / key
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record | {"seal": seal_of(record)}))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.now += 0.01
        what = {"digest": digest, "parent": parent, "weights_sha256": record["weights_sha256"], "seconds": 0.01}
        self.write(name, "commit", term=term, rank=0, step=step, key=key, **what)
        self.head = (key, digest)
        for old in sorted(path.parent.glob("*.json"))[:-KEPT]:
            shutil.rmtree(self.folder / json.loads(old.read_text())["attempt"])
            old.unlink()

    def save(self, term: int, step: int) -> dict[str, object]:
        """Write a commit's files with torch's own writer; return their entries for the record."""
        attempt = f"data/step-{step:012d}/{term:08d}-made"
        state = {"model": model_at(step), "optimizer": {"moment": torch.full((3,), step / 3)}}
        dcp.save(state, checkpoint_id=self.folder / attempt, no_dist=True)
        contents = {path.name: path.read_bytes() for path in (self.folder / attempt).iterdir()}
        files = {
            name: {"size": len(held), "blake3": blake3(held).hexdigest(), "blocks": [zlib.crc32(held)]}
            for name, held in contents.items()
        }
        epochs, steps = divmod(step, STEPS_PER_EPOCH)
        past = [coverage_at(each * STEPS_PER_EPOCH) for each in range(1, epochs + 1)]
        return {
            "format": 4,
            "account": {"epochs": past, "holes": [], "left_out": 0, "truncated": 0},
            "cursor": {"epoch": epochs, "offset": steps * MICRO_BATCH},
            "config_digest": identity_of({"run": JOB, "task": TASK, "batch": BATCH, "data": DATA}),
            "metrics": metrics_at(step) if step == STEPS else {},
            "rng": {"policy": "seed, step, lane", "seed": 7},
            "attempt": attempt,
            "files": files,
            "weights_sha256": digest_at(step),
        }

    def lo_of(self, term: int) -> int:
        return next(line["step"] for name in self.files for line in self.files[name] if _restores(line, term))  # type: ignore[return-value]

    def fault(self, kind: str, node: int, seen_step: int, pids: list[int], **fields: object) -> None:
        number = 1 + sum(line["op"] == "fault" for line in self.files["chaos"])
        where = {"target": node, "node": node, "seen_step": seen_step, "pids": pids}
        self.write("chaos", "fault", kind=kind, number=number, **where, **fields)
        self.write("chaos", "effect", kind=kind, fault=number, proof=f"{len(pids)} processes have ended")

    def finish(self, term: int, *, ended: list[tuple[int, int]], blamed: tuple[int, int] | None = None) -> None:
        """Write the end; `blamed` is a fault's number, and the rank that `status --why` reports as killed."""
        for node, code in ended:
            self.write("chaos", "exit", node=node, code=code)
        self.write("chaos", "healed", seconds=1.5)
        self.write("chaos", "clean", orphans=[], leases=[], drafts=[], shared_memory=[])
        if blamed is not None:
            killed = {"do": "start", "exit_code": 75, "of_rank": blamed[1], "sentence": "was killed by SIGKILL"}
            self.write("chaos", "why", fault=blamed[0], **killed)
            self.write("chaos", "why", do="nothing", exit_code=0, of_rank=None, sentence="all steps are trained")
        (self.folder / "history").mkdir()
        for name, lines in self.files.items():
            (self.folder / "history" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = {
            "status": "done",
            "format": 4,
            "step": STEPS,
            "term": term,
            "weights_sha256": digest_at(STEPS),
            "mlflow_run_id": "m",
        }
        counts = {"coverage": coverage_at(STEPS), "num_samples": ROWS, "epochs": EPOCHS}
        counts |= {"num_left_out": 0, "num_truncated": 0, "holes": [], "fast_steps": [], "skipped_steps": []}
        how = {"ended_by": "last step", "improvement": None, "metrics": metrics_at(STEPS)}
        (self.folder / "result.json").write_text(json.dumps({**result, **counts, **how}))
        config = {
            "epochs": EPOCHS,
            "max_steps": None,
            "run": JOB,
            "batch": BATCH,
            "checkpoint": {"url": None, "keep_last": KEPT},
            "task": TASK,
            "data": {**DATA, "train": None, "validation": str(self.folder.parent / "held-out")},
            "validation": {"every": None, "max_samples": None, "weights": "trained", "early_stopping": None},
            "tracking": {"mlflow_uri": "sqlite:///mlflow.db"},
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        (self.folder / "manifest.json").write_text(json.dumps({"files": [{"row_groups": [60, ROWS - 60]}]}))
        (self.folder.parent / "held-out").mkdir(exist_ok=True)
        pq.write_table(pa.table({"x": pa.array(range(HELD_OUT))}), self.folder.parent / "held-out" / "part.parquet")
        held_out = {"files": [{"path": "part.parquet", "row_groups": [HELD_OUT]}], "columns": {"x": "int64"}}
        (self.folder.parent / "held-out" / "manifest.json").write_text(json.dumps(held_out))
        (self.folder / "terms").mkdir()
        for number in self.metrics:
            (self.folder / "terms" / f"{number:08d}.json").write_text(json.dumps({"run_id": "recorded"}))
        (self.folder / "metrics").mkdir()
        for number, lines in self.metrics.items():
            path = self.folder / "metrics" / f"{number:08d}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        held = [[step, loss_of(step)] for step in range(1, STEPS + 1)]
        (self.folder / "tracked.json").write_text(json.dumps({"train/loss": held}))


def _restores(line: dict[str, object], term: int) -> bool:
    return line["op"] == "restore" and line["term"] == term


def record(folder: Path) -> Path:
    """Write a run with faults and its reference below `folder`."""
    _record_faulted(folder / "faulted")
    _record_reference(folder / "reference")
    return folder


def _record_faulted(folder: Path) -> None:
    folder.mkdir(parents=True)
    recorder = Recorder(folder, first_pid=20000)
    recorder.write("chaos", "scenario", name="recorded", seed=7, reference=True)
    recorder.term(1, FAULTED[0])
    recorder.now += 0.05
    recorder.fault("kill_node", 1, 13, [1, 20011], at_step=13, is_drawn=True, term=1)
    recorder.now += 1.0
    recorder.term(2, FAULTED[1])
    recorder.now -= 0.15
    recorder.fault("start_node", 1, 21, [2], at_step=21, is_drawn=True, term=2)
    recorder.now += 0.5
    recorder.term(3, FAULTED[2])
    recorder.finish(3, ended=[(0, 0), (1, 0)], blamed=(1, 1))
    np.save(folder / "witness.npy", np.full(ROWS, EPOCHS, dtype=np.int64))


def _record_reference(folder: Path) -> None:
    folder.mkdir(parents=True)
    recorder = Recorder(folder, first_pid=30000)
    recorder.term(1, REFERENCE[0])
    recorder.finish(1, ended=[(0, 0), (1, 0)])
