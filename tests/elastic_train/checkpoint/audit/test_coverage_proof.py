"""The audit proves coverage from records alone and names mistakes; its forensics name the samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from elastic_train.checkpoint.audit.coverage_proof import audit
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.cli.audit import audit as audit_run
from elastic_train.core.accounting import CoverageSums, Hole, SampleAccount
from elastic_train.core.arrays import Int64s, group_of, ranges_of
from elastic_train.core.lineage import Interval
from elastic_train.core.order import VERSION, LengthBuckets, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.row_lengths import load_lengths, make_lengths
from elastic_train.data.dataset.training_sources import fingerprint_of
from elastic_train.errors import ConfigError
from elastic_train.tracking.history import History
from elastic_train.world.quarantine import make_hole
from tests.conftest import write_rows
from tests.elastic_train.tracking.unqueued import Unqueued

LANES, MICRO_BATCH, SEED = 3, 4, 5
Spoil = Callable[[int, Int64s], Int64s]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    manifest = load_manifest(str(write_rows(tmp_path_factory.mktemp("audit") / "data", 47, group_rows=5)))
    make_lengths(manifest, "input_ids")
    return manifest


@dataclass
class Run:
    """A run with its commits and histories: steps of two ranks, whose ids `spoil` may change."""

    folder: Path
    manifest: Manifest
    is_bucketing: bool = False
    holes: tuple[Hole, ...] = ()
    ids_of: dict[int, Int64s] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = load_lengths(self.manifest)
        buckets = LengthBuckets(lengths, MICRO_BATCH, fingerprint=lengths.fingerprint)
        arrangement = buckets if self.is_bucketing else None
        rows = self.manifest.group_rows
        self.order = Order(rows, num_lanes=LANES, seed=SEED, block_row_groups=2, arrangement=arrangement)

    def train(self, steps: int, *, commit_at: tuple[int, ...], spoil: Spoil = lambda step, ids: ids) -> CommitRecord:
        """Apply steps, the first half by term 1, and commit; return the newest record."""
        store, order, half = open_store(str(self.folder)), self.order, max(1, steps // 2)
        histories: dict[int, list[History]] = {1: [], 2: []}
        coverage, account, record = CoverageSums(), SampleAccount(), None
        for step in range(steps):
            cursor, term = order.cursor_at(step, MICRO_BATCH), 1 if step < half else 2
            histories[term] = histories[term] or [History(Unqueued(), self.folder, term, rank) for rank in range(2)]
            whole = [self._lane(step, lane) for lane in range(LANES)]
            ids = spoil(step, np.concatenate([ids for ids, _ in whole]))
            for rank, part in enumerate((ids[:3], ids[3:])):
                histories[term][rank].read(step=step + 1, epoch=cursor.epoch, ids=ranges_of(part), world=2)
            coverage += CoverageSums.of_ids(ids)
            account = account.advance(step, self.holes, sum(left for _, left in whole), 1)
            if order.cursor_at(step + 1, MICRO_BATCH).epoch > cursor.epoch:
                account = account.end_epoch(coverage)
            if step + 1 in commit_at:
                record = self._record(step + 1, half, coverage, account)
                store.create(record.key, record.encode())
        assert record is not None
        return record

    def _lane(self, step: int, lane: int) -> tuple[Int64s, int]:
        cursor = self.order.cursor_at(step, MICRO_BATCH)
        ids = self.order.epoch(cursor.epoch).ids(lane, cursor.offset, cursor.offset + MICRO_BATCH)
        kept = np.ones(len(ids), dtype=bool)
        for hole in self.holes:
            kept &= (ids < hole.lo) | (ids >= hole.hi) | (step < hole.since)
        return ids[kept], int((~kept).sum())

    def _record(self, step: int, half: int, coverage: CoverageSums, account: SampleAccount) -> CommitRecord:
        intervals = (Interval(1, 0, min(step, half)), *([Interval(2, half, step)] if step > half else []))
        return CommitRecord(
            step=step,
            cursor=self.order.cursor_at(step, MICRO_BATCH),
            coverage=coverage,
            rng={"seed": SEED},
            metrics={},
            config_digest="c",
            manifest_digest=self.manifest.digest,
            world_size=2,
            account=account,
            order={
                "version": VERSION,
                "num_samples": self.order.num_samples,
                "num_lanes": LANES,
                "micro_batch": MICRO_BATCH,
                "block_row_groups": 2,
                "lengths": fingerprint_of(self.order),
            },
            weights_sha256="w",
            term=intervals[-1].term,
            parent=None,
            parent_key=None,
            intervals=intervals,
            attempt="data/a",
            int_keyed=(),
            empty=(),
            versions={},
            created_at=0.0,
            files={},
        )


def in_words(lines: list[str]) -> str:
    return "\n".join(lines)


@pytest.mark.parametrize("is_bucketing", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 8, 10, 11])
def test_a_good_run_is_proven_at_any_step(tmp_path: Path, dataset: Manifest, steps: int, is_bucketing: bool) -> None:
    """Finished epochs by their closed form, the current one by the order; 4 steps are an epoch."""
    Run(tmp_path, dataset, is_bucketing).train(steps, commit_at=(1, 4, steps) if steps > 4 else (steps,))
    found = audit(open_store(str(tmp_path)), [dataset])
    assert (found.wrong, found.unproven, found.exit_code) == ([], [], 0)
    assert f"steps [0, {steps}) were applied once each" in found.proven[0]
    assert ("counted exactly once: the sums are the closed form's" in in_words(found.proven)) == (steps >= 4)
    assert (f"epoch {steps // 4}, the first" in in_words(found.proven)) == (steps % 4 > 0)


def test_steps_without_an_update_are_named(tmp_path: Path, dataset: Manifest) -> None:
    """Their samples count as applied, although the weights have not changed."""
    record = Run(tmp_path, dataset).train(4, commit_at=(4,))
    store = open_store(str(tmp_path / "other"))
    store.create(record.key, replace(record, skipped_steps=((1, 2),)).encode())
    said = audit(store, [dataset]).proven[0]
    assert "applied once each" in said and "1 update was left out because the loss or gradient was not finite" in said


def test_holes_are_excluded_from_the_proof_and_reported(tmp_path: Path, dataset: Manifest) -> None:
    """A hole that begins inside an epoch excludes only the samples that the epoch had not applied."""
    whole = Run(tmp_path, dataset)
    group = int(group_of(whole.order.group_first_id, whole.order.epoch(0).ids(0, 0, 1))[0])
    hole = make_hole(whole.order, dataset, MICRO_BATCH, 1, group, "gone")
    assert hole.applied_before
    Run(tmp_path, dataset, holes=(hole,)).train(9, commit_at=(9,))
    found = audit(open_store(str(tmp_path)), [dataset])
    assert (found.wrong, found.unproven, found.holes) == ([], [], (hole,))
    assert f"{hole}, are left out, and no other sample is" in found.proven


def swapped(step: int, ids: Int64s) -> Int64s:
    """Replace one of the first step's samples by another."""
    return np.where((step == 0) & (np.arange(len(ids)) < 1), ids[1], ids)


def made_good(step: int, ids: Int64s) -> Int64s:
    """Skip a sample in epoch 0 and repeat it in epoch 1, so that the total sums are right."""
    if step == 0:
        return ids[1:]
    return np.append(ids, 0) if step == 4 else ids


def in_progress(step: int, ids: Int64s) -> Int64s:
    return np.where((step == 8) & (np.arange(len(ids)) < 1), ids[1], ids)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (swapped, "epoch 0: the sums over the samples applied are not those of each of 47 samples"),
        (made_good, "epoch 0: the sums over the samples applied are not"),
        (in_progress, "epoch 2, the first 4 places of each of 3 lanes: 12 samples counted, and they are not the 12"),
    ],
)
def test_a_repeated_or_skipped_sample_is_reported(
    tmp_path: Path, dataset: Manifest, spoil: Spoil, expected: str
) -> None:
    """A sample in place of another is found, in a finished epoch or in the current one."""
    Run(tmp_path, dataset).train(9, commit_at=(9,), spoil=spoil)
    found = audit(open_store(str(tmp_path)), [dataset])
    assert expected in in_words(found.wrong)
    assert found.exit_code == 65


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: replace(r, intervals=(Interval(1, 0, 3), Interval(2, 4, 9))), "gap: steps [3, 4)"),
        (lambda r: replace(r, cursor=replace(r.cursor, offset=8)), "step 9 is not at Cursor(epoch=2, offset=8)"),
        (lambda r: replace(r, account=replace(r.account, epochs=r.account.epochs[1:])), "has sums of 1"),
    ],
)
def test_a_record_that_contradicts_itself_is_reported(
    tmp_path: Path, dataset: Manifest, change: Callable[[CommitRecord], CommitRecord], expected: str
) -> None:
    record = Run(tmp_path / "good", dataset).train(9, commit_at=(9,))
    spoiled = change(record)
    store = open_store(str(tmp_path / "spoiled"))
    store.create(spoiled.key, spoiled.encode())
    assert expected in in_words(audit(store, [dataset]).wrong)


def test_what_cannot_be_proven_is_reported(tmp_path: Path, dataset: Manifest) -> None:
    """Without the dataset, or with an older version's record, the audit says so, and fails."""
    record = Run(tmp_path / "new", dataset).train(9, commit_at=(9,))
    found = audit(open_store(str(tmp_path / "new")), [])
    assert "epoch 2, the first 4 places of each of 3 lanes: the dataset's manifest was not found" in found.unproven[0]
    assert "epochs 0 to 1" in in_words(found.proven) and found.exit_code == 1
    older = replace(record, account=None, order=None)
    store = open_store(str(tmp_path / "old"))
    store.create(older.key, older.encode())
    assert b"account" not in older.encode()
    assert audit(store, [dataset]).exit_code == 1
    with pytest.raises(ConfigError, match="no commits yet"):
        audit(open_store(str(tmp_path / "none")), [dataset])


def test_forensics_name_the_samples(tmp_path: Path, dataset: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    """The repeated and missing ids are named with their steps; samples of an abandoned term do not count."""
    run = Run(tmp_path, dataset)
    first = run._lane(0, 0)[0]
    run.train(9, commit_at=(9,), spoil=swapped)
    History(Unqueued(), tmp_path, 1, 0).read(step=7, epoch=1, ids=((0, 47),), world=1)  # term 2 applied step 7
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"train": dataset.url}}))
    assert audit_run(str(tmp_path), forensic=True) == 65
    printed = capsys.readouterr().out
    twice = f"WRONG: epoch 0: sample {first[1]} was applied 2 times, in steps 1 (term 1, rank 0), 1 (term 1, rank 0)"
    assert twice in printed
    assert f"WRONG: epoch 0: missing are the samples {first[0]}\n" in printed
    assert "proven: epoch 1: by the ids that 8 lines name, none is repeated and none missing" in printed
    assert "proven: epoch 2: by the ids" in printed

    assert audit_run(str(tmp_path), data=[dataset.url], json_=True) == 65
    fields = json.loads(capsys.readouterr().out)
    assert (fields["step"], fields["num_epochs"], fields["is_proven"], fields["num_truncated"]) == (9, 2, False, 9)
    assert len(fields["wrong"]) == 2  # both epochs' ends come after the first step


def test_ids_that_one_rank_could_not_write_accuse_nobody(
    tmp_path: Path, dataset: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a rank could not write its ids, its samples are unproven rather than missing."""
    Run(tmp_path, dataset).train(4, commit_at=(4,))
    path = next((tmp_path / "history").glob("00000002-00001-*"))
    path.write_bytes(path.read_bytes().splitlines()[0])
    assert audit_run(str(tmp_path), data=[dataset.url], forensic=True) == 1
    printed = capsys.readouterr().out
    assert "which samples the steps 4 applied: the ids of all ranks, or of some, are missing" in printed
    assert "WRONG" not in printed


def test_forensics_need_ids(tmp_path: Path, dataset: Manifest) -> None:
    """A run that recorded no ids cannot be examined in that detail."""
    Run(tmp_path, dataset).train(4, commit_at=(4,))
    for path in (tmp_path / "history").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"run\.forensic"):
        audit_run(str(tmp_path), forensic=True)
