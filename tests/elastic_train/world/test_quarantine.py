"""Quarantine from the outside: the same hole and bits, whichever rank finds it, at any time, after any restart."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from chaos.judge.checker import judge
from chaos.judge.evidence.run_files import collect
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.cli.audit import audit
from elastic_train.core.accounting import Hole
from elastic_train.core.order import Order
from elastic_train.data.dataset.manifest import check_there, load_manifest
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.data.dataset.row_lengths import load_lengths, make_lengths
from elastic_train.data.loading import loader, read_ahead, reader
from elastic_train.errors import AwayError, DataError, PeerLostError, StorageError, UnreadableError
from elastic_train.job.sample_streams import Feed
from elastic_train.parallel.group import Group
from elastic_train.training.opening import resources
from elastic_train.world.quarantine import _look_again, _readers, find_holes, known_holes, make_hole
from tests.conftest import write_rows
from tests.elastic_train.data.loading.test_batch_builder import damage
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, WITNESS, result, succeed
from tests.memory_job import start

QUARANTINE = {"quarantine": ["unreadable"], "too_long": "truncate"}


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """331 rows of known lengths; row group 2 of the second file cannot be read."""
    folder = write_rows(tmp_path_factory.mktemp("torn") / "train", 331, seed=1)
    make_lengths(load_manifest(str(folder)), "input_ids")
    damage(folder, "part-1.parquet", 2)
    return folder


def config(folder: Path, data: Path, tree: dict[str, object], **rules: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "run": {"dir": str(folder / "run"), "seed": 5, "forensic": True},
        "data": {"train": str(data), **rules},
        **tree,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    return str(folder / "config.yaml")


def newest_commit(folder: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads(max((folder / "run" / "commits").iterdir()).read_text())
    return fields


def truths(folder: Path) -> dict[str, str]:
    """Return the chaos judge's statements about coverage."""
    found = {finding.invariant: finding.truth for finding in judge(collect(folder / "run"))}
    return {name: found[name] for name in ("agreement", "partition", "coverage", "sums", "witness") if name in found}


@pytest.mark.slow
def test_two_ranks_finding_a_hole_match_one_process_that_knew_it(
    tmp_path: Path, torn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights have the same bits; commits and result list the samples; the judge accepts exactly these.

    With rows grouped by length, long ones truncated and counted, and every step's ids stored.
    """
    rules = {**QUARANTINE, "length_bucketing": True}
    found = tmp_path / "found"
    done = succeed(start([config(found, torn, CLASSIFIER, **rules)], num_ranks=2))
    (hole,) = newest_commit(found)["account"]["holes"]  # type: ignore[index]
    assert (hole["file"], hole["row_group"], hole["hi"] - hole["lo"], hole["kept"]) == ("part-1.parquet", 2, 17, [])
    assert f"QUARANTINED: row group 2 of part-1.parquet, samples [{hole['lo']}, {hole['hi']}), from step" in done.output
    assert result(found)["holes"] == [hole] and result(found)["num_left_out"] == 34

    assert audit(str(found / "run"), forensic=True) == 0
    proven = capsys.readouterr().out
    assert "in each of the epochs 0 to 1, each of 331 samples, those of holes aside, counted exactly once" in proven
    assert "epoch 1: by the ids that 28 lines name, none is repeated and none missing" in proven
    lengths = load_lengths(load_manifest(str(torn)))(np.array([*range(hole["lo"]), *range(hole["hi"], 331)]))
    assert result(found)["num_truncated"] == 2 * int((lengths > PARAMS["max_tokens"]).sum()) > 0

    known = tmp_path / "known"
    path = config(known, torn, CLASSIFIER, **rules)
    (known / "run" / "holes").mkdir(parents=True)
    (known / "run" / "holes" / "known.json").write_text(json.dumps([{**hole, "since": 0, "why": "known"}]))
    succeed(start([path]))
    for key in ("weights_sha256", "coverage", "num_left_out", "num_truncated"):
        assert result(known)[key] == result(found)[key], key
    assert newest_commit(known)["account"]["epochs"] == newest_commit(found)["account"]["epochs"]  # type: ignore[index]
    assert set(truths(found).values()) == set(truths(known).values()) == {"true"}

    unlisted = tmp_path / "unlisted"
    shutil.copytree(found, unlisted)
    fields = json.loads((unlisted / "run" / "result.json").read_text())
    (unlisted / "run" / "result.json").write_text(json.dumps({**fields, "holes": []}))
    assert {truths(unlisted)["coverage"], truths(unlisted)["sums"]} == {"false"}


@pytest.mark.slow
@pytest.mark.parametrize("quarantine", [[], ["unreadable"]])
def test_a_storage_that_is_away_for_a_while_costs_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quarantine: list[str]
) -> None:
    """The training and validation sets go at a row group's decoding, and come back once their rank waits."""
    data, away, decode = tmp_path / "data", tmp_path / "away", RowGroups.decode
    train, held_out = (str(write_rows(data / name, 121, seed=1)) for name in ("train", "held-out"))
    decoded, waits = Counter[str](), list[str]()

    def decode_later(groups: RowGroups, group: int) -> object:
        url = groups._manifest.url
        decoded[url] += threading.current_thread().name.startswith("decode")  # not by the inspection of rows
        if decoded[url] == 3:
            decoded[url] += 1
            data.rename(away)
        return decode(groups, group)

    def check(url: str) -> None:
        try:
            check_there(url)
        except AwayError:
            waits.append(url)
            away.rename(data)
            raise

    monkeypatch.setattr(RowGroups, "decode", decode_later)
    monkeypatch.setattr(read_ahead, "num_decoders", lambda: 1)
    monkeypatch.setattr(reader, "check_there", check)
    monkeypatch.setattr(loader, "LOOK_AGAIN_S", 0.0)
    rules = {"validation": held_out, "quarantine": quarantine, "too_long": "truncate"}
    done = succeed(start([config(tmp_path / "job", Path(train), CLASSIFIER, **rules)]))
    assert sorted(waits) == [held_out, train] and "the storage of the data is back after" in done.output
    assert result(tmp_path / "job")["holes"] == [] and set(truths(tmp_path / "job").values()) == {"true"}
    monkeypatch.undo()
    succeed(start([config(tmp_path / "plain", Path(train), CLASSIFIER, **rules)]))
    assert result(tmp_path / "job")["weights_sha256"] == result(tmp_path / "plain")["weights_sha256"]


@pytest.mark.slow
def test_a_run_that_starts_again_waits_for_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start refuses a folder without data at once: its name may be wrong."""
    data, away = write_rows(tmp_path / "data", 60), tmp_path / "away"
    path = config(tmp_path, data, CLASSIFIER, too_long="truncate")
    monkeypatch.setattr(loader, "LOOK_AGAIN_S", 0.0)
    data.rename(away)
    refused = start([path, "--max_steps", "2"])
    assert refused.code == 2 and "no manifest.json there; make the dataset" in refused.output
    away.rename(data)
    succeed(start([path, "--max_steps", "2"]))
    data.rename(away)
    gone = start([path, "--max_steps", "3", "--peer_timeout_s", "1e-6"])
    assert gone.code == 1 and "Mount it, or make it answer again" in gone.output

    def check(url: str) -> None:
        try:
            check_there(url)
        except AwayError:
            away.rename(data)
            raise

    monkeypatch.setattr(resources, "check_there", check)
    assert "the storage of the data is back" in succeed(start([path, "--max_steps", "3"])).output
    assert result(tmp_path)["step"] == 3


CANNOT, CAN = "cannot be read", ""


@pytest.mark.parametrize(
    ("missed_by", "seen", "may_have_passed", "expected"),
    [
        ([0], {0: CANNOT, 1: CANNOT, 2: CANNOT}, True, ["hole"] * 3),
        ([0], {0: CANNOT, 1: CANNOT, 2: CAN}, True, ["ends", "goes on", "goes on"]),
        ([0, 2], {0: CAN, 1: CAN, 2: CANNOT}, True, ["goes on", "goes on", "ends"]),
        ([0, 2], {0: CAN, 1: CAN, 2: CANNOT}, False, ["ends", "goes on", "ends"]),
        ([1], {0: CANNOT, 1: CAN, 2: CANNOT}, True, ["again"] * 3),
        ([1], {0: CANNOT, 1: CAN, 2: CANNOT}, False, ["hole"] * 3),
        ([0, 1, 2], {0: CANNOT, 1: CANNOT, 2: CANNOT}, True, ["hole"] * 3),
        ([0, 1, 2], {0: CAN, 1: CAN, 2: CAN}, True, ["again"] * 3),
        ([0, 1, 2], {0: CAN, 1: CAN, 2: CAN}, False, ["hole"] * 3),
    ],
)
def test_a_hole_is_what_nobody_can_read(
    missed_by: list[int], seen: dict[int, str], may_have_passed: bool, expected: list[str]
) -> None:
    """A rank that cannot read what others can exits; samples that all can read by now are retried, up to a limit."""
    missed = [{7: CANNOT} if rank in missed_by else {} for rank in range(3)]
    asked = _readers(7, missed, may_have_passed=may_have_passed)
    said = [{7: seen[rank]} if rank in asked else {} for rank in range(3)]
    ends = []
    for rank in range(3):
        world = SimpleNamespace(group=Saying(rank, said), announce=lambda _: None)
        plan = SimpleNamespace(feed=SimpleNamespace(why_unreadable=lambda _, rank=rank: seen[rank]))
        try:
            lost = _look_again(world, plan, missed, may_have_passed=may_have_passed)  # type: ignore[arg-type]
            ends.append("hole" if lost == {7: CANNOT} else "again")
        except UnreadableError as error:
            assert "this node's copy or disk is at fault" in str(error)
            ends.append("ends")
        except PeerLostError:
            ends.append("goes on")
    assert ends == expected


class Saying:
    """A group whose ranks' read results are given."""

    def __init__(self, rank: int, said: list[dict[int, str]]) -> None:
        self.rank, self.size, self._said = rank, len(said), said

    def all_gather(self, mine: object) -> None:
        raise PeerLostError("the rank at fault has ended")

    def broadcast_object(self, value: object, source: int) -> object:
        said = [[number, why] for number, why in self._said[source].items()]
        assert source != self.rank or value == said
        return said


@pytest.mark.parametrize("is_second", [False, True])
def test_data_whose_storage_is_away_is_not_lost(tmp_path: Path, is_second: bool) -> None:
    """As in a folder that is mounted no more: where the manifest cannot be read either, nobody leaves out samples."""
    manifests = [load_manifest(str(write_rows(tmp_path / name, 60))) for name in ("one", "two")]
    group = is_second * len(manifests[0].group_rows)
    order, store = Order(manifests[0].group_rows, num_lanes=2, seed=1), open_store(str(tmp_path / "run"))
    why_away = partial(Feed.why_away, SimpleNamespace(_manifests=manifests))  # type: ignore[arg-type]
    feed = SimpleNamespace(why_unreadable=lambda _: CANNOT, why_away=lambda _: why_away(group))
    plan = SimpleNamespace(feed=feed, order=order, manifest=manifests[0], micro_batch=3, sources=())
    world = SimpleNamespace(group=Group(0, 1, None, 1.0), store=store, term=1)
    lanes, away = [SimpleNamespace(unreadable={1: CANNOT})], tmp_path / "away"
    here = Path(manifests[is_second].url).rename(away)
    with pytest.raises(StorageError, match=r"nothing is quarantined: the storage of the data is away: .*no manifest"):
        find_holes(world, plan, SimpleNamespace(step=4), lanes)  # type: ignore[arg-type]
    assert store.list("holes/") == []
    here.rename(manifests[is_second].url)
    (hole,) = find_holes(world, plan, SimpleNamespace(step=4), lanes)  # type: ignore[arg-type]
    assert (hole.group, hole.since) == (1, 4)


@pytest.mark.parametrize(("num_ranks", "num_asked"), [(1, 1), (2, 2), (5, 5), (9, 5), (1000, 5)])
def test_few_ranks_read_once_more(num_ranks: int, num_asked: int) -> None:
    """The ranks that are asked are as far apart as possible."""
    missed = [{}] * (num_ranks - 1) + [{7: CANNOT}]
    asked = _readers(7, missed, may_have_passed=True)
    assert len(asked) == num_asked and num_ranks - 1 in asked
    assert num_ranks == 1 or {0, num_ranks - 2} <= asked


@pytest.mark.slow
def test_the_witness_counts_all_but_the_hole(tmp_path: Path, torn: Path) -> None:
    """Weight i counts sample i in every epoch, and never a listed one; the judge agrees."""
    succeed(start([config(tmp_path, torn, WITNESS, quarantine=["unreadable"])]))
    (hole,) = result(tmp_path)["holes"]  # type: ignore[misc]
    counts = np.load(tmp_path / "run" / "witness.npy")
    expected = np.full(331, 3)
    expected[hole["lo"] : hole["hi"]] = 0  # type: ignore[index]
    assert counts.tolist() == expected.tolist()
    assert truths(tmp_path)["witness"] == "true"
    np.save(tmp_path / "run" / "witness.npy", np.where(np.arange(331) == 5, 2, counts))
    assert truths(tmp_path)["witness"] == "false"


def test_holes_recorded_ahead_take_effect_and_those_of_a_dead_branch_do_not(tmp_path: Path) -> None:
    """A world begins with the holes in effect and those recorded for its steps, not with those of a dead branch."""
    manifest = load_manifest(str(write_rows(tmp_path / "data", 101, group_rows=7)))
    order = Order(manifest.group_rows, num_lanes=2, seed=1)
    store = open_store(str(tmp_path / "run"))
    plan = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(quarantine=("unreadable",))))
    world = SimpleNamespace(group=Group(0, 1, None, 1.0), store=store)

    def hole(group: int, since: int) -> Hole:
        return make_hole(order, manifest, 3, since, group, "gone")

    def state(step: int, *holes: Hole) -> SimpleNamespace:
        return SimpleNamespace(step=step, reached=SimpleNamespace(account=SimpleNamespace(holes=holes)))

    def known(step: int, *holes: Hole) -> list[Hole]:
        return list(known_holes(world, plan, state(step, *holes)))  # type: ignore[arg-type]

    assert known(0) == []
    for number, recorded in enumerate([hole(3, 9), hole(1, 4), hole(1, 7), hole(2, 2)]):
        store.create(f"holes/{number}.json", json.dumps([recorded.to_dict()]).encode())
    assert known(4) == [hole(1, 4), hole(3, 9)]
    assert known(5, hole(2, 2)) == [hole(2, 2), hole(1, 7), hole(3, 9)]
    assert known(10, hole(1, 4)) == [hole(1, 4)]
    for lo in (hole(1, 7).lo, hole(1, 7).lo + 2):  # a sample of a row group, which was refused as a hole
        deadly = replace(hole(1, 4), lo=lo, hi=lo + 1)
        assert known(5, deadly) == [deadly, hole(3, 9)]
    plan.config.data.quarantine = ()
    assert known(4, hole(2, 2)) == [hole(2, 2)]
    plan.config.data.quarantine = ("unreadable",)
    store.create("holes/x.json", b"{")
    with pytest.raises(DataError, match=r"holes/x\.json is not a record of holes"):
        known(4)
