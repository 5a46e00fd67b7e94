"""Layouts in whole runs: one hash for all that compute the same, over any cells and shards, and commits between them.

Tensor, sequence and context parallelism each have their own rounding, for which one cell is the reference. Replicas,
stages, schedules, expert ranks, shards, copies, recomputation, offload, buckets and devices change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from chaos.tasks import paced
from chaos.tasks.orders import give
from elastic_train.cli.main import main
from elastic_train.system.failpoints import VARIABLE
from tests.conftest import start as start_processes
from tests.conftest import write_rows
from tests.elastic_train.data.loading.test_batch_builder import damage
from tests.elastic_train.training.jobs import history, losses, result, succeed
from tests.elastic_train.training.whole_runs.compared import (
    EXPERTS,
    TERMS,
    assert_near,
    assert_same_bits,
    assert_stock_reader_finds_all,
    bytes_of,
    file_of,
    newest_weights,
    write,
)
from tests.memory_job import start
from tests.memory_machine import rank_here
from tests.rounding import assert_same_but_for_rounding

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("layouts")]  # reference runs
Keys = Mapping[str, object]
Reference = Callable[[Keys], Path]
HUNT = pytest.mark.hunt  # what other rows, STRETCHES or `test_lost_ranks` have, or costs seconds
DEVICES = {"on_devices": True}

TENSOR, CONTEXT, EXPERT, STAGES = ({f"parallel.{key}": 2} for key in ("tensor", "context", "expert", "pipeline"))
SEQUENCE = {**TENSOR, "parallel.sequence": True}
GPIPE = {**STAGES, "parallel.schedule": "gpipe"}
CHUNKS = {**STAGES, "parallel.schedule": "interleaved"}
OPTIMIZER, GRADIENTS, PARAMETERS = ({"parallel.shards": kind} for kind in ("optimizer", "gradients", "parameters"))
ONCE = {"parallel.copies": 1}
UNITS = {"parallel.recompute": "units"}
AUDITED = {"run.audit_lanes": 2}
COMPILED = {"compile": True, "task.params.fixed_width": True}
FP8 = {"precision": "fp8"}
ADAFACTOR = {"optimizer.name": "adafactor"}
SMALL, ALL_AT_ONCE = {"parallel.bucket_mb": 0.001}, {"parallel.bucket_mb": None}
OWN_BITS = ("parallel.tensor", "parallel.sequence", "parallel.context", "precision", "epochs")
OWN_BITS += ("optimizer.name", "optimizer.options.fused", *COMPILED)
"""The keys that determine the bits."""


def flags(keys: Keys) -> list[str]:
    said = {key: "null" if value is None else str(value).lower() for key, value in keys.items()}
    return [text for key, value in said.items() for text in (f"--{key}", value)]


def sizes(keys: Keys) -> dict[str, object]:
    """Return the other sizes of a job's model: experts for expert ranks, four blocks for four chunks or stages, and
    heads of which a tensor rank's are wide enough for float8."""
    has_four = keys.get("parallel.schedule") == "interleaved" or keys.get("parallel.pipeline") == 4
    is_wide = "precision" in keys and "parallel.tensor" in keys
    own = EXPERTS if "parallel.expert" in keys else {}
    return {**own, **({"depth": 4} if has_four else {}), **({"dim": 64} if is_wide else {})}


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """Reset the compiler; ranks as threads restore torch's stance in any order, though it is global."""
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, fewer_rows: Path) -> Reference:
    """Reference runs of one cell (of one process if possible) without shards."""
    known = dict[str, Path]()

    def found(keys: Keys) -> Path:
        own = {key: keys[key] for key in OWN_BITS if key in keys}
        size = int(str(own.get("parallel.tensor", 1))) * int(str(own.get("parallel.context", 1)))
        if (name := str((own, sizes(keys)))) not in known:
            folder = tmp_path_factory.mktemp("reference")
            succeed(start([write(folder, fewer_rows, sizes(keys)), *flags(own)], num_ranks=size))
            known[name] = folder
        return known[name]

    return found


ROWS = [
    # replicas
    pytest.param(2, UNITS, {}),
    pytest.param(3, {**PARAMETERS, **SMALL}, {}, marks=HUNT),
    pytest.param(4, {**GRADIENTS, "parallel.recompute": "selective"}, {}),
    # tensor parallelism: cells of two ranks
    pytest.param(4, {**TENSOR, **UNITS, **AUDITED, **SMALL}, {}),
    pytest.param(6, {**TENSOR, **OPTIMIZER, **SMALL}, {}, marks=HUNT),
    pytest.param(4, {**TENSOR, **PARAMETERS, **ONCE, **UNITS, **AUDITED}, {}, marks=HUNT),
    pytest.param(4, {**TENSOR, **GRADIENTS, **UNITS}, DEVICES),
    pytest.param(4, {**TENSOR, **OPTIMIZER, **ONCE, **UNITS, **AUDITED}, {}, marks=HUNT),
    # sequence parallelism
    pytest.param(4, {**SEQUENCE, **OPTIMIZER, **ONCE, **SMALL}, {}, marks=HUNT),
    pytest.param(4, {**SEQUENCE, **PARAMETERS, **UNITS, **AUDITED}, DEVICES),
    pytest.param(4, {**SEQUENCE, **CHUNKS}, {}, marks=HUNT),
    # context parallelism
    pytest.param(4, {**CONTEXT, **UNITS, **AUDITED, **SMALL}, {}),
    pytest.param(4, {**CONTEXT, **OPTIMIZER}, DEVICES),
    pytest.param(4, {**CONTEXT, **CHUNKS, **SMALL}, {}, marks=HUNT),
    pytest.param(8, {**CONTEXT, **GPIPE, **OPTIMIZER, **ONCE}, {}, marks=HUNT),
    pytest.param(4, {**CONTEXT, **PARAMETERS, **ONCE, **UNITS, **AUDITED}, {}),
    pytest.param(6, {**CONTEXT, "parallel.expert": 1, **OPTIMIZER, **ONCE, **UNITS}, {}, marks=HUNT),
    pytest.param(8, {**CONTEXT, **CHUNKS, **GRADIENTS, **AUDITED}, {}, marks=HUNT),
    pytest.param(4, {**CONTEXT, **STAGES, **UNITS, **AUDITED}, {}, marks=HUNT),
    # pipeline stages
    pytest.param(4, {"parallel.pipeline": 4}, {}, marks=HUNT),
    pytest.param(4, {**GPIPE, **OPTIMIZER, **ONCE, **SMALL, **AUDITED}, {}),
    pytest.param(6, {**STAGES, **PARAMETERS, **ONCE, **UNITS}, {}, marks=HUNT),
    pytest.param(4, {**STAGES, **GRADIENTS, **UNITS}, DEVICES, marks=HUNT),
    pytest.param(4, {**CHUNKS, **UNITS, **SMALL, "run.audit_lanes": 1}, {}, marks=HUNT),
    pytest.param(6, {**CHUNKS, **GRADIENTS, **ONCE}, {}, marks=HUNT),
    pytest.param(4, {**CHUNKS, **PARAMETERS, "parallel.offload": "all", **AUDITED}, {}),
    pytest.param(4, {**CHUNKS, **OPTIMIZER, **ALL_AT_ONCE}, DEVICES),
    pytest.param(4, {**GPIPE, **GRADIENTS, **AUDITED}, {}, marks=HUNT),
    # experts spread over ranks, some of which have one lane more
    pytest.param(2, {**EXPERT, **SMALL, "parallel.recompute": "selective"}, {}, marks=HUNT),
    pytest.param(4, {"parallel.expert": 4, **ALL_AT_ONCE}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, **PARAMETERS, "parallel.offload": "all", **AUDITED}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, **GRADIENTS, **UNITS, **AUDITED}, {}),
    pytest.param(4, {**EXPERT, **OPTIMIZER, "parallel.offload": "optimizer", **ONCE}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, **UNITS, **AUDITED}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, **GPIPE}, {}, marks=HUNT),
    pytest.param(8, {**EXPERT, **CHUNKS, **SMALL, **UNITS, **AUDITED}, {}, marks=HUNT),
    pytest.param(8, {**EXPERT, **CHUNKS, **SMALL, **GRADIENTS, **ONCE}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, **CHUNKS, **OPTIMIZER, "parallel.recompute": "selective"}, DEVICES, marks=HUNT),
    pytest.param(8, {**EXPERT, **STAGES, **PARAMETERS, **ONCE}, {}, marks=HUNT),
    # combinations
    pytest.param(8, {**TENSOR, **STAGES, **GRADIENTS, **ONCE}, {}, marks=HUNT),
    pytest.param(8, {**TENSOR, **CONTEXT, **UNITS, **OPTIMIZER, **ONCE}, {}, marks=HUNT),
    pytest.param(8, {**TENSOR, **CONTEXT, **STAGES}, {}, marks=HUNT),
    pytest.param(8, {**SEQUENCE, **CONTEXT, **GRADIENTS, **AUDITED}, {}, marks=HUNT),
    pytest.param(4, {**TENSOR, **EXPERT}, {}, marks=HUNT),
    pytest.param(4, {**SEQUENCE, **EXPERT, **UNITS, **AUDITED}, {}, marks=HUNT),
    pytest.param(6, {**SEQUENCE, "parallel.expert": 1, **GRADIENTS}, {}, marks=HUNT),
    pytest.param(8, {**TENSOR, **EXPERT, **STAGES}, {}, marks=HUNT),
    pytest.param(4, {**TENSOR, "parallel.expert": 1, **OPTIMIZER, **UNITS, **AUDITED}, {}, marks=HUNT),
    # blocks compiled between their exchanges
    pytest.param(4, {**TENSOR, **UNITS, **COMPILED}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, **COMPILED}, {}, marks=HUNT),
    # other kernels; in fp16 the first steps search for the scale, and stages without a loss must skip the same updates
    pytest.param(4, {**CHUNKS, "precision": "fp16", "epochs": 2, "parallel.offload": "optimizer"}, {}),
    pytest.param(3, {"precision": "fp16", "epochs": 2, "optimizer.options.fused": True}, {}),
    pytest.param(4, {**CHUNKS, "optimizer.name": "muon", **OPTIMIZER, **ONCE}, {}, marks=HUNT),
    pytest.param(3, {**ADAFACTOR, **PARAMETERS, **ONCE, "parallel.offload": "all"}, {}),
    pytest.param(2, {**ADAFACTOR, **GRADIENTS, "parallel.offload": "optimizer"}, {}),
    pytest.param(4, {**ADAFACTOR, **CHUNKS, **OPTIMIZER, **ONCE}, {}, marks=HUNT),
    pytest.param(4, {**ADAFACTOR, **STAGES, **AUDITED}, {}),
    pytest.param(
        4, {**ADAFACTOR, **CHUNKS, "precision": "fp16", "epochs": 2, "parallel.offload": "optimizer"}, {}, marks=HUNT
    ),
    pytest.param(4, {**GPIPE, "optimizer.name": "muon"}, {}, marks=HUNT),
    pytest.param(4, {**CONTEXT, **ADAFACTOR, **GRADIENTS}, {}, marks=HUNT),
    # float8, whose scales are of rows: of tokens, of outputs, and of what a rank sums over
    pytest.param(3, {**FP8, "parallel.recompute": "selective", **AUDITED}, {}),
    pytest.param(2, {**FP8, **GRADIENTS, **UNITS}, {}),
    pytest.param(4, {**FP8, **EXPERT, **PARAMETERS, **ONCE}, {}, marks=HUNT),
    pytest.param(4, {**FP8, **SEQUENCE, **OPTIMIZER, **UNITS}, {}, marks=HUNT),
    pytest.param(4, {**FP8, **TENSOR, **AUDITED}, DEVICES, marks=HUNT),
    pytest.param(4, {**FP8, **CONTEXT, **CHUNKS}, {}, marks=HUNT),
    pytest.param(2, {**FP8, **COMPILED}, {}, marks=HUNT),
    pytest.param(4, {**EXPERT, "optimizer.name": "muon", **OPTIMIZER}, {}, marks=HUNT),
]


@pytest.mark.parametrize(("num_ranks", "keys", "where"), ROWS, ids=str)
def test_layouts_that_compute_the_same_have_the_same_bits(
    tmp_path: Path, fewer_rows: Path, reference: Reference, num_ranks: int, keys: Keys, where: dict[str, bool]
) -> None:
    """Jobs have dropout, clipping, an average, validations, unequal lane counts per cell, and a step of one sample."""
    done = succeed(start([write(tmp_path, fewer_rows, sizes(keys)), *flags(keys)], num_ranks=num_ranks, **where))
    assert ("blocks compiled before training" in done.output) == ("compile" in keys)
    assert_same_bits(tmp_path, reference(keys))


def test_so_have_devices_of_processes(tmp_path: Path, fewer_rows: Path, reference: Reference) -> None:
    """They exchange over gloo; each device has its own queue and thread."""
    keys = {**EXPERT, **CHUNKS, **OPTIMIZER, "parallel.recompute": "selective"}
    run = write(tmp_path, fewer_rows, sizes(keys), "tests.device_task:PacedLanguage")
    succeed(start_processes([run, *flags(keys)], num_ranks=4))
    assert_same_bits(tmp_path, reference(keys))


STRETCHES: dict[str, list[tuple[int, Keys]]] = {
    "shards": [(3, OPTIMIZER), (4, {**PARAMETERS, "parallel.copies": 3}), (2, {**GRADIENTS, **ONCE})],
    "stages": [(4, {"parallel.pipeline": 4, **GRADIENTS}), (6, {**CHUNKS, **OPTIMIZER}), (3, PARAMETERS)],
    "tensor": [(6, {**TENSOR, **GRADIENTS}), (4, {**TENSOR, **STAGES, **PARAMETERS, **ONCE}), (2, TENSOR)],
    "sequence": [(2, SEQUENCE), (4, {**SEQUENCE, **STAGES}), (4, SEQUENCE)],
    "context": [(4, {**CONTEXT, **CHUNKS, **PARAMETERS}), (2, {**CONTEXT, **GRADIENTS}), (4, {**CONTEXT, **STAGES})],
    "float8": [(2, {**FP8, **PARAMETERS}), (3, {**FP8, **OPTIMIZER}), (4, {**FP8, **STAGES})],
    "adafactor": [
        (3, {**ADAFACTOR, **PARAMETERS, **ONCE}),
        (1, ADAFACTOR),
        (4, {**ADAFACTOR, **STAGES}),
        (2, {**ADAFACTOR, **OPTIMIZER, "parallel.offload": "optimizer"}),
    ],
    "experts": [(4, {**EXPERT, **STAGES}), (4, {"parallel.expert": 4}), (4, {**EXPERT, **PARAMETERS})],
}


@pytest.mark.parametrize(
    "name", [name if name in ("shards", "stages", "context") else pytest.param(name, marks=HUNT) for name in STRETCHES]
)
def test_commits_continue_in_any_layout_that_computes_the_same(
    tmp_path: Path, fewer_rows: Path, reference: Reference, name: str
) -> None:
    """A commit has whole tensors, moments included, which torch's reader and one process find; a stretch is a step."""
    stretches = STRETCHES[name]
    first = stretches[0][1]
    run = write(tmp_path, fewer_rows, sizes(first))
    for step, (num_ranks, keys) in enumerate(stretches, start=1):
        until = {} if step == len(stretches) else {"max_steps": step}
        succeed(start([run, *flags({**keys, **until})], num_ranks=num_ranks))
        newest_weights(tmp_path)
        assert_stock_reader_finds_all(tmp_path)
    assert_same_bits(tmp_path, reference(first))


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_commits_continue_in_layouts_that_round_otherwise(
    tmp_path: Path, fewer_rows: Path, sizes: dict[str, object]
) -> None:
    """The samples are the same, and the weights up to rounding; split rows draw other random numbers."""
    whole, other, model = tmp_path / "whole", tmp_path / "other", {"dropout": 0.0, **sizes}
    succeed(start([write(whole, fewer_rows, model)], num_ranks=1))
    run = write(other, fewer_rows, model)
    stretches = [(4, {**TENSOR, **OPTIMIZER}), (3, {"parallel.context": 3}), (2, SEQUENCE)]
    for step, (num_ranks, keys) in enumerate(stretches, start=1):
        until = {} if step == len(stretches) else {"max_steps": step}
        succeed(start([run, *flags({**keys, **until})], num_ranks=num_ranks))
    assert result(other)["num_samples"] == result(whole)["num_samples"]
    assert result(other)["weights_sha256"] != result(whole)["weights_sha256"]
    assert_same_but_for_rounding(losses(other), losses(whole), TERMS)
    assert_near(other, whole)


@pytest.mark.parametrize(
    ("num_ranks", "keys"),
    [
        (8, {**TENSOR, **CONTEXT}),
        pytest.param(8, {**EXPERT, **CHUNKS, **SMALL}, marks=HUNT),
        (4, {**ADAFACTOR, **STAGES}),
    ],
    ids=str,
)
def test_fast_sums_differ_by_rounding_alone(
    tmp_path: Path, fewer_rows: Path, reference: Reference, num_ranks: int, keys: Keys
) -> None:
    run = write(tmp_path, fewer_rows, sizes(keys))
    succeed(start([run, *flags({**keys, "reduction": "fast"})], num_ranks=num_ranks))
    assert result(tmp_path)["num_samples"] == result(reference(keys))["num_samples"]
    assert_same_but_for_rounding(losses(tmp_path), losses(reference(keys)), TERMS)


def test_layouts_of_more_arithmetic_are_near_to_one_process(reference: Reference) -> None:
    """Layouts with tensor ranks, context parallelism, or both, with and without experts."""
    for keys in (TENSOR, SEQUENCE, {**TENSOR, **EXPERT}, {**SEQUENCE, **EXPERT}):
        one = reference({} if "parallel.expert" not in keys else EXPERT)
        assert result(reference(keys))["weights_sha256"] != result(one)["weights_sha256"]
        assert_same_but_for_rounding(losses(reference(keys)), losses(one), TERMS)
        assert_near(reference(keys), one)
    assert_same_but_for_rounding(losses(reference({**TENSOR, **CONTEXT})), losses(reference(CONTEXT)), TERMS)
    assert_near(reference({**TENSOR, **CONTEXT}), reference(CONTEXT))


def test_float8_learns_as_bf16_does(reference: Reference) -> None:
    in_float8, in_bf16 = (reference({"precision": precision, "epochs": 4}) for precision in ("fp8", "bf16"))
    assert result(in_float8)["weights_sha256"] != result(in_bf16)["weights_sha256"]
    expected = losses(in_bf16)
    assert losses(in_float8) == pytest.approx(expected, rel=0.02)
    assert min(expected.values()) < 0.99 * expected[1], "something is learned"


@pytest.mark.parametrize(
    "layouts",
    [
        [(2, SEQUENCE), (4, {**SEQUENCE, **GRADIENTS})],
        pytest.param(
            [
                (2, STAGES),
                (3, {"parallel.pipeline": 3}),
                (4, {**GPIPE, **OPTIMIZER, **ONCE}),
                (4, {**CHUNKS, **GRADIENTS, **AUDITED}),
                (6, {**STAGES, **PARAMETERS, **ONCE, **UNITS}),
            ],
            marks=HUNT,
        ),
        pytest.param([(4, {**TENSOR, **STAGES}), (8, {**TENSOR, **STAGES, **OPTIMIZER, **ONCE})], marks=HUNT),
    ],
    ids=["tokens", "stages", "tensor in stages"],
)
def test_a_tied_model_has_one_hash_in_all_layouts_that_compute_the_same(
    tmp_path: Path, fewer_rows: Path, layouts: list[tuple[int, Keys]]
) -> None:
    """The first and the last stage have its matrix each, and add their gradients, unlike one rank in one pass."""
    for number, (num_ranks, keys) in enumerate([(1, {}), *layouts]):
        run = write(tmp_path / str(number), fewer_rows, {"tied": True, "depth": 4})
        succeed(start([run, *flags(keys)], num_ranks=num_ranks))
        if number:
            assert_near(tmp_path / str(number), tmp_path / "0")
            assert_same_bits(tmp_path / str(number), tmp_path / "1")


def test_stages_write_what_they_hold(tmp_path: Path, fewer_rows: Path) -> None:
    """Each stage writes its blocks, which are adjacent unless a stage has two chunks; no other rank has them."""
    for keys, files in ((STAGES, ["0", "0", "0", "1", "1", "1"]), (CHUNKS, ["0", "0", "1", "0", "1", "1"])):
        folder = tmp_path / str(keys.get("parallel.schedule", "1f1b"))
        run = write(folder, fewer_rows, {"depth": 4})
        done = succeed(start([run, *flags(keys), "--max_steps", "1"], num_ranks=2))
        assert "2 ranks make one cell, the only holder of the state" in done.output
        names = ["embed.weight", *(f"blocks.{number}.mlp.up.weight" for number in range(4)), "head.weight"]
        assert [file_of(folder, f"model.{name}")[2:3] for name in names] == files


@pytest.mark.parametrize(
    ("num_ranks", "keys", "said", "parts"),
    [
        (6, {**TENSOR, **GRADIENTS, **ONCE}, "3 cells of 2 ranks, over which the optimizer's state of each place", 1),
        (6, {**CONTEXT, **PARAMETERS, **ONCE}, "3 cells of 2 ranks, over which the state is held once", 2),
    ],
)
def test_a_rank_has_the_share_of_moments_that_it_says(
    tmp_path: Path, fewer_rows: Path, reference: Reference, num_ranks: int, keys: Keys, said: str, parts: int
) -> None:
    """Over three cells with one copy of each shard, all ranks together hold what one cell holds of it once."""
    done = succeed(start([write(tmp_path, fewer_rows), *flags(keys)], num_ranks=num_ranks))
    assert said in done.output
    assert_same_bits(tmp_path, reference(keys))
    whole, shared = sum(bytes_of(reference(keys), "optimizer").values()) / parts, bytes_of(tmp_path, "optimizer")
    assert len(shared) == 6 and sum(shared.values()) == pytest.approx(whole, rel=0.1)
    assert max(shared.values()) < 0.3 * whole


def test_a_cell_that_cannot_read_a_sample_keeps_no_other_waiting(tmp_path: Path) -> None:
    """It still exchanges gradients with the others; then all know, and repeat the step without the sample."""
    data = write_rows(tmp_path / "data", 151, seed=1)
    damage(data, "part-1.parquet", 2)
    rules = {"data": {"train": str(data), "quarantine": ["unreadable"], "too_long": "truncate"}, "validation": {}}
    found = {}
    for num_ranks, keys in ((2, {}), (4, {**GRADIENTS, **ONCE})):
        run = write(tmp_path / str(num_ranks), tmp_path, **rules)
        done = succeed(start([run, *flags({**TENSOR, **keys}), "--max_steps", "3"], num_ranks=num_ranks))
        assert "QUARANTINED: row group 2 of part-1.parquet" in done.output
        ended = result(tmp_path / str(num_ranks))
        found[num_ranks] = [ended[what] for what in ("weights_sha256", "num_samples", "num_left_out", "holes")]
    assert found[2] == found[4]


@HUNT
def test_lanes_without_a_token_for_some_ranks_experts_keep_nobody_waiting(tmp_path: Path, fewer_rows: Path) -> None:
    """Lanes with one row of four tokens for one of two experts: if tensor ranks of a cell had gradients of different
    blocks, they would wait for one another in a cycle."""
    model = {**EXPERTS, "experts": 2, "experts_per_token": 1, "depth": 8, "shared_hidden": 0}
    cells: dict[str, tuple[int, Keys]] = {"one": (2, {}), "gradients": (4, GRADIENTS), "parameters": (4, PARAMETERS)}
    for name, (num_ranks, keys) in cells.items():
        batch = {"global_batch": 8, "micro_batch": 1}
        run = write(tmp_path / name, fewer_rows, model, batch=batch, max_steps=2)
        shares = {**ONCE, **keys} if keys else {}
        succeed(start([run, *flags({**TENSOR, **shares})], num_ranks=num_ranks))
        assert_same_bits(tmp_path / name, tmp_path / "one")


@pytest.mark.parametrize("keys", [{}, pytest.param(STAGES, marks=HUNT)], ids=["whole", "staged"])
def test_lanes_are_audited_where_nothing_below_the_first_experts_is_trained(
    tmp_path: Path, fewer_rows: Path, keys: Keys
) -> None:
    """A backward pass reaches experts wherever their tokens come from, also in a recomputed lane."""
    for name, audits in [("plain", {}), ("audited", AUDITED)]:
        run = write(tmp_path / name, fewer_rows, EXPERTS, "tests.tasks:ExpertsAlone", max_steps=2)
        succeed(start([run, *flags({**EXPERT, **keys, **audits})], num_ranks=4))
    assert_same_bits(tmp_path / "audited", tmp_path / "plain")
    assert history(tmp_path / "audited", "event") == []


@pytest.mark.parametrize(
    ("num_ranks", "keys", "num_right"),
    [
        (3, {}, 4),
        (3, {**PARAMETERS, "parallel.offload": "all"}, 4),
        pytest.param(4, CHUNKS, 7, marks=HUNT),
        pytest.param(3, PARAMETERS, 4, marks=HUNT),
        pytest.param(3, {**GRADIENTS, "parallel.wire": "bf16"}, 4, marks=HUNT),
        pytest.param(4, EXPERT, 7, marks=HUNT),
    ],
    ids=str,
)
def test_a_rank_that_computes_wrongly_is_named(
    tmp_path: Path, fewer_rows: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, keys: Keys, num_right: int
) -> None:
    """Its first gradient is wrong. Audit and repetition compare each rank of a cell with its counterpart, a lane's
    gradient before it is cut and sent, with weights that are gathered for the ranks that recompute it."""
    points, flip, flipped = tmp_path / "points", paced._flip_gradient, list[int | None]()
    points.mkdir()
    give(points, "flip_gradient")
    monkeypatch.setattr(paced, "_flip_gradient", lambda *of: (flip(*of), flipped.append(rank_here())))
    job = sizes(keys), "chaos.tasks.paced_language:PacedLanguage"
    right, own = {} if "parallel.wire" not in keys else keys, {**keys, "run.audit_lanes": 1}
    succeed(start([write(tmp_path / "right", fewer_rows, *job), *flags(right)]))
    environ = {VARIABLE: str(points)}
    succeed(start([write(tmp_path / "wrong", fewer_rows, *job), *flags(own)], num_ranks=num_ranks, environ=environ))
    [event] = history(tmp_path / "wrong", "event")
    assert [event["kind"], event["of_rank"]] == ["wrong_gradient", *flipped]
    assert (event["value"], event["usual"]) == (1, num_right) and len(event["samples"]) == 6  # type: ignore[arg-type]
    assert not history(tmp_path / "wrong", "rollback")
    assert result(tmp_path / "wrong")["weights_sha256"] == result(tmp_path / "right")["weights_sha256"]
    assert losses(tmp_path / "wrong") == losses(tmp_path / "right")


@pytest.mark.parametrize(
    ("num_ranks", "keys", "message"),
    [
        (None, {"parallel.tensor": 3}, "parallel.tensor: 3 does not work with task.params.model.heads: 4, since"),
        (3, TENSOR, "3 ranks is not of whole cells of 2 (parallel.tensor: 2): start a multiple of 2 workers"),
    ],
)
def test_what_makes_no_cells_is_refused(
    tmp_path: Path, fewer_rows: Path, num_ranks: int | None, keys: Keys, message: str
) -> None:
    """The exit code is 2 before anything ran; the tests of `config.combinations` have all other cases."""
    done = start([write(tmp_path, fewer_rows), *flags(keys)], num_ranks=num_ranks)
    assert done.code == 2 and message in done.output.replace("\n", " "), done.output
    assert not list((tmp_path / "run").glob("commits/*"))


@pytest.mark.parametrize("keys", [STAGES, CONTEXT], ids=str)
def test_a_buffer_may_not_change_in_a_pass_of_several_ranks(tmp_path: Path, fewer_rows: Path, keys: Keys) -> None:
    """All ranks learn of it in the first step and end with the reason; one that stays the same is no obstacle."""
    job, tried = "tests.tasks:WithBuffer", [({"dropout": 0.1}, 2), ({"dropout": 0.0}, 0)]
    for model, code in tried:
        folder = tmp_path / str(code)
        done = start([write(folder, fewer_rows, model, job), *flags(keys), "--max_steps", "2"], num_ranks=4)
        assert done.codes == (code,) * 4, done.output
        assert ("does not work with a model whose forward pass changes a buffer" in done.output) is bool(code)


def test_validate_says_all_that_keeps_a_model_from_stages(
    tmp_path: Path, fewer_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reports all reasons without a start; for a model with stages it reports their cost."""

    def validate(run: str, keys: Keys) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["validate", run, *flags(keys)])
        return ended.value.code or 0, " ".join("".join(capsys.readouterr()).split())

    run = write(tmp_path, fewer_rows, {"depth": 5})
    code, said = validate(run, {"parallel.pipeline": 3})
    assert code == 0 and "3 stages, 1f1b; with all 5 lanes in one cell they wait 29 % of a step" in said
    code, said = validate(run, CHUNKS)
    assert code == 0
    assert "2 stages with 2 chunks each, interleaved; with all 5 lanes in one cell they wait 9 % of a step" in said
    code, said = validate(write(tmp_path / "own", fewer_rows, {"depth": 2}), {"parallel.pipeline": 3})
    assert code == 2 and "task.params.model.depth: 2 in 3 stages" in said
