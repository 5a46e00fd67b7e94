"""Live in-memory jobs that lose ranks, with each combination: no applied step is lost, and no bit differs."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from chaos.judge.evidence.run_files import Evidence, collect
from chaos.judge.invariants.rollbacks import copies
from chaos.judge.invariants.whole_run import check_kept
from chaos.judge.job_shape import cell_size
from elastic_train.training import supervisor
from elastic_train.training.open_session import open_session
from elastic_train.training.session import Process, Session
from elastic_train.world.forming import Formed
from tests import memory_job, memory_live
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, average_of, config, result, succeed
from tests.memory_job import Loss
from tests.memory_machine import rank_here

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("lost ranks")]  # reference runs

Parallel = Mapping[str, object]
OF_JOBS = ("precision", "compile", "on_devices", "fused", "tied", "optimizer")
"""The keys of a layout that are not of the section `parallel`."""
STEPS = 8
MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "tied": False}
ALONE = ("tensor", "sequence", "context", "precision", "wire", "compile", "fused", "tied", "optimizer")
"""The keys that change the bits; no other degree and no sharding does."""
TENSOR, CONTEXT, STAGES, EXPERTS = {"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"expert": 2}
CHUNKS = {**STAGES, "schedule": "interleaved"}
OPTIMIZER, GRADIENTS, PARAMETERS = ({"shards": kind} for kind in ("optimizer", "gradients", "parameters"))
COPIES = {"copies": 3}
ALL_IN_ALL = {**TENSOR, **STAGES, **CONTEXT, **OPTIMIZER}
OFFLOADED, ALL_OFFLOADED = {"offload": "optimizer"}, {**PARAMETERS, "offload": "all"}
COMPILED = {"compile": True}
ADAFACTOR = {"optimizer": "adafactor"}
FP16, FP8, DEVICES, ROUNDED = (
    {"precision": "fp16"},
    {"precision": "fp8"},
    {"on_devices": True},
    {**GRADIENTS, "wire": "bf16"},
)


def write(folder: Path, rows: Path, layout: Parallel) -> str:
    parallel = {key: value for key, value in layout.items() if key not in OF_JOBS}
    sizes = {**MODEL, "depth": 4 if parallel.get("schedule") == "interleaved" else 2}
    sizes |= {"tied": "tied" in layout}
    if "expert" in parallel:
        sizes |= {"experts": 4, "hidden": 16}
    params = {"model": sizes, "max_tokens": 16, "fixed_width": "compile" in layout}
    keys: dict[str, object] = {
        "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params},
        "batch": {"global_batch": 24, "micro_batch": 6},
        "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "ema_decay": 0.9}
        | ({"options": {"fused": True}} if "fused" in layout else {})
        | ({"name": layout["optimizer"]} if "optimizer" in layout else {}),
        "checkpoint": {"every": "3 steps", "keep_last": 2},
        "parallel": parallel,
        "precision": layout.get("precision", "fp32"),
        "compile": layout.get("compile", False),
        "max_steps": STEPS,
    }
    return config(folder, rows, keys)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Callable[[Parallel], tuple[object, ...]]:
    """Results of undisturbed jobs, by degrees, in one cell without shards."""

    def ended(parallel: Parallel) -> tuple[object, ...]:
        kept = ("expert", "schedule")  # the model depends on these
        own = {key: value for key, value in parallel.items() if key in ALONE} | {
            key: 1 if key == "expert" else value for key, value in parallel.items() if key in kept
        }
        if "tied" in own:  # both stages add to one gradient
            own |= STAGES
        if "wire" in own:
            own |= PARAMETERS if own.get("precision") in ("bf16", "fp8") else GRADIENTS
        return of(tuple(own.items()))

    @cache
    def of(own: tuple[tuple[str, object], ...]) -> tuple[object, ...]:
        folder = tmp_path_factory.mktemp("undisturbed")
        path = write(folder, few_rows, dict(own))
        succeed(memory_job.start([path], num_ranks=cell_size({"parallel": dict(own)})))
        return found(folder)

    return ended


def found(folder: Path) -> tuple[object, ...]:
    return result(folder)["weights_sha256"], result(folder)["num_samples"], average_of(folder)


ROWS = [
    ({}, 3, [Loss(1, 2, "backward"), Loss(0, 5, "apply")]),
    ({}, 3, [Loss(2, 3, "exchange"), Loss(3, 1, "restore")]),
    (OPTIMIZER, 3, [Loss(0, 2, "applied"), Loss(3, 1, "hand-over")]),
    (GRADIENTS, 3, [Loss(0, 1, "commit"), Loss(2, 8, "backward")]),
    (PARAMETERS, 3, [Loss(1, 9, "forward"), Loss(2, 4, "apply")]),
    (ALL_OFFLOADED, 2, [Loss(0, 3, "apply")]),
    ({**FP16, "fused": True}, 3, [Loss(1, 6, "apply"), Loss(0, 2, "applied")]),
    ({**PARAMETERS, "wire": "bf16", "precision": "bf16"}, 3, [Loss(1, 9, "forward"), Loss(2, 4, "apply")]),
    ({**ADAFACTOR, **STAGES}, 2, [Loss(3, 7, "backward"), Loss(1, 6, "applied")]),
    (FP8, 3, [Loss(1, 2, "backward"), Loss(0, 5, "apply"), Loss(3, 1, "restore")]),
    (TENSOR, 2, [Loss(3, 8, "backward"), Loss(0, 4, "apply"), Loss(4, 1, "commit")]),
    ({**TENSOR, **OPTIMIZER, **DEVICES}, 2, [Loss(2, 3, "applied"), Loss(1, 170)]),
    ({**TENSOR, **PARAMETERS}, 2, [Loss(2, 7, "forward"), Loss(1, 4, "exchange")]),
    (CONTEXT, 2, [Loss(1, 9, "backward"), Loss(2, 3, "apply")]),
    ({**STAGES, "schedule": "1f1b"}, 2, [Loss(3, 7, "backward"), Loss(1, 6, "applied")]),
    ({**STAGES, **PARAMETERS}, 2, [Loss(3, 5, "forward"), Loss(1, 7, "backward")]),
    ({**CHUNKS, **GRADIENTS, "tied": True}, 3, [Loss(1, 3, "applied"), Loss(4, 5, "backward")]),
    (CHUNKS, 2, [Loss(1, 5, "forward"), Loss(2, 17, "backward")]),
    (EXPERTS, 2, [Loss(2, 4, "backward"), Loss(1, 6, "forward")]),
    ({**EXPERTS, **PARAMETERS}, 2, [Loss(3, 9, "backward"), Loss(0, 3, "exchange")]),
    ({**CONTEXT, **STAGES}, 1, [Loss(3, 7, "backward"), Loss(0, 3, "apply")]),
    *(
        pytest.param(*row, marks=pytest.mark.hunt)
        for row in (
            (ALL_IN_ALL, 2, [Loss(9, 6, "backward"), Loss(2, 4, "apply")]),
            ({**EXPERTS, **TENSOR, "sequence": True}, 2, [Loss(6, 5, "backward")]),
            ({**TENSOR, "sequence": True}, 2, [Loss(1, 9, "backward")]),
            ({**EXPERTS, **STAGES, "recompute": "units"}, 2, [Loss(5, 7, "backward")]),
            ({**CONTEXT, "expert": 1}, 2, [Loss(3, 7, "backward")]),
            ({**TENSOR, **OFFLOADED}, 3, [Loss(5, 6, "forward"), Loss(0, 1, "hand-over")]),
            ({**PARAMETERS, "wire": "bf16", **FP8}, 3, [Loss(1, 9, "forward"), Loss(2, 4, "apply")]),
            ({**ADAFACTOR, **PARAMETERS}, 3, [Loss(1, 9, "forward"), Loss(3, 1, "hand-over")]),
            ({**STAGES, "tied": True}, 2, [Loss(3, 6, "apply"), Loss(0, 4, "exchange")]),
            (CONTEXT, 1, [Loss(0, 5, "backward"), Loss(1, 5, "applied")]),
            ({**STAGES, "schedule": "1f1b"}, 3, [Loss(5, 2, "apply"), Loss(0, 1, "hand-over")]),
            ({**ADAFACTOR, **CHUNKS, "tied": True, **GRADIENTS}, 3, [Loss(1, 3, "applied"), Loss(4, 5, "backward")]),
            ({"optimizer": "muon", **STAGES, "tied": True}, 2, [Loss(3, 6, "apply"), Loss(0, 4, "exchange")]),
            ({**STAGES, "schedule": "gpipe"}, 2, [Loss(2, 8, "forward")]),
            ({**EXPERTS, "offload": "optimizer"}, 2, [Loss(1, 7, "backward"), Loss(2, 3, "apply")]),
            (OPTIMIZER | COPIES, 3, [Loss(1, 2, "apply"), Loss(0, 1, "hand-over")]),
            (PARAMETERS | COPIES, 3, [Loss(1, 2, "apply"), Loss(0, 1, "hand-over")]),
            ({**TENSOR, **OPTIMIZER, **COPIES}, 3, [Loss(5, 2, "apply"), Loss(0, 1, "hand-over")]),
            ({**TENSOR, **GRADIENTS}, 3, [Loss(4, 3, "backward"), Loss(1, 4, "exchange")]),
            ({**CONTEXT, **PARAMETERS}, 2, [Loss(3, 3, "backward"), Loss(0, 5, "applied")]),
            ({**STAGES, **GRADIENTS}, 3, [Loss(3, 5, "backward"), Loss(0, 3, "apply")]),
            ({**EXPERTS, **OPTIMIZER}, 2, [Loss(1, 6, "backward"), Loss(2, 3, "applied")]),
            ({**TENSOR, **CONTEXT, "sequence": True, **COMPILED}, 2, [Loss(7, 8, "backward")]),
        )
    ),
]


@pytest.mark.parametrize(("parallel", "num_cells", "losses"), ROWS, ids=str)
def test_lost_ranks_cost_no_applied_step(
    tmp_path: Path,
    few_rows: Path,
    undisturbed: Callable[[Parallel], tuple[object, ...]],
    parallel: Parallel,
    num_cells: int,
    losses: list[Loss],
) -> None:
    """Survivors keep their processes and shards, newcomers get the lost ones, and the judge finds nothing."""
    size = num_cells * cell_size({"parallel": parallel})
    run = lose(tmp_path, few_rows, parallel, size, losses)
    assert len({line["term"] for line in run.of("form")}) > len(losses)
    restored = [line for line in run.of("restore") if int(str(line["term"])) > 1]
    assert all(int(str(line["step"])) > 0 for line in restored) and not run.of("rollback")
    assert found(tmp_path) == undisturbed(parallel)


def lose(folder: Path, rows: Path, layout: Parallel, size: int, losses: list[Loss]) -> Evidence:
    """Run a live job that loses ranks; return its evidence, in which the judge finds nothing."""
    path, on_devices = write(folder, rows, layout), "on_devices" in layout
    with remembering() as kept:
        done = memory_live.start([path], num_ranks=size, losses=losses, on_devices=on_devices)
    assert not kept, "ranks keep what belonged to a world that has ended"
    assert sorted(done.codes) == [-9] * len(losses) + [0] * size, done.output
    run = collect(folder / "run")
    check_kept(run)
    copies(run)
    return run


@contextlib.contextmanager
def remembering() -> Iterator[list[str]]:
    """Yield what ranks still keep of their last world once they have opened the next; nothing looks for cycles."""
    kept, last = list[str](), dict[int | None, dict[str, weakref.ref[object]]]()

    def opened(process: Process, formed: Formed) -> Session:
        session, rank = open_session(process, formed), rank_here()
        now = {id(tensor) for _, tensor in session.gradients.tensors()}  # a share keeps its own
        before = {name: known for name, known in last.get(rank, {}).items() if id(known()) not in now}
        deadline = time.monotonic() + 5.0  # threads of the last world may be about to end
        while any(known() is not None for known in before.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        kept.extend(f"{name} of rank {rank}" for name, known in before.items() if known() is not None)
        tensors = {f"{what} {number}": one for number, (what, one) in enumerate(session.gradients.tensors())}
        mine = {**tensors, "the group": session.world.group, "the sum": session.gradients}
        last[rank] = {name: weakref.ref(one) for name, one in mine.items()}
        return session

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(supervisor, "open_session", opened):
            yield kept
    finally:
        gc.enable()


@pytest.mark.parametrize("parallel", [PARAMETERS, TENSOR, {**TENSOR, **PARAMETERS}, {**STAGES, **OPTIMIZER}], ids=str)
def test_a_rank_lost_before_the_first_step_is_replaced(
    tmp_path: Path, few_rows: Path, undisturbed: Callable[[Parallel], tuple[object, ...]], parallel: Parallel
) -> None:
    """The other rank has its shards already, and the newcomer gets the initial weights of the lost one's."""
    lose(tmp_path, few_rows, parallel, 2, [Loss(1, 1, "backward")])
    assert found(tmp_path) == undisturbed(parallel)


BOTH, SEQUENCE = {**TENSOR, **CONTEXT}, {"sequence": True}
AT_ANY_EXCHANGE = [
    *({**TENSOR, **shards} for shards in ({}, OPTIMIZER, GRADIENTS, PARAMETERS)),
    *({**CONTEXT, **shards} for shards in ({}, OPTIMIZER, GRADIENTS)),
    {**BOTH, **ROUNDED},
    *({**BOTH, **SEQUENCE, **shards} for shards in ({}, OPTIMIZER, GRADIENTS)),
    *({**degrees, **OFFLOADED} for degrees in (TENSOR, CONTEXT, BOTH)),
    {**TENSOR, **OPTIMIZER, **OFFLOADED},
    *({**TENSOR, **FP16, **shards} for shards in ({}, GRADIENTS, {**PARAMETERS, **OFFLOADED})),
    {**CONTEXT, **OPTIMIZER, **FP16},
    *({**TENSOR, **DEVICES, **shards} for shards in ({}, OPTIMIZER, GRADIENTS, PARAMETERS, ALL_OFFLOADED)),
    *({**CONTEXT, **DEVICES, **shards} for shards in ({}, OPTIMIZER)),
    *({**CHUNKS, **shards} for shards in (GRADIENTS, ROUNDED)),
    *({**EXPERTS, **shards} for shards in (GRADIENTS, ROUNDED)),
    *({**degrees, **ALL_OFFLOADED} for degrees in (TENSOR, CONTEXT, STAGES, EXPERTS)),
    *({**CHUNKS, **EXPERTS, **shards} for shards in (GRADIENTS, ALL_OFFLOADED)),
]


@pytest.mark.hunt
@pytest.mark.parametrize("layout", AT_ANY_EXCHANGE, ids=str)
def test_ranks_are_lost_at_any_exchange_and_no_bit_changes(
    tmp_path: Path, few_rows: Path, undisturbed: Callable[[Parallel], tuple[object, ...]], layout: Parallel
) -> None:
    """The last rank of each of two cells, at exchanges which are others in every layout.

    The first is lost while the first world forms, in one of five layouts, or in a step that ends with a commit; the
    second three steps later.
    """
    size = 2 * cell_size({"parallel": layout})
    part = 1.25 * zlib.crc32(str(layout).encode()) / (1 << 32)  # of a step's exchanges, and those of a commit
    first = Loss(size - 1, int(32 * part)) if part < 0.25 else Loss(size - 1, 2, "applied", part)
    lose(tmp_path, few_rows, layout, size, [first, Loss(size // 2 - 1, 5, "applied", 1.25 - part)])
    assert found(tmp_path) == undisturbed(layout), first


@pytest.mark.parametrize(
    ("parallel", "num_cells"),
    [
        (OPTIMIZER, 2),
        (PARAMETERS, 3),
        ({**TENSOR, **OPTIMIZER}, 2),
        pytest.param({**TENSOR, **STAGES}, 1, marks=pytest.mark.hunt),
    ],
    ids=str,
)
def test_without_a_second_copy_the_newest_commit_is_what_is_left(
    tmp_path: Path,
    few_rows: Path,
    undisturbed: Callable[[Parallel], tuple[object, ...]],
    parallel: Parallel,
    num_cells: int,
) -> None:
    """The log says at the start what losing a rank costs; the final bits match."""
    size = num_cells * cell_size({"parallel": parallel})
    once = {"copies": 1} if "shards" in parallel else {}
    path, lost = write(tmp_path, few_rows, {**parallel, **once}), Loss(size - 1, 2, "commit")
    done = memory_live.start([path], num_ranks=size, losses=[lost])
    assert sorted(done.codes) == [-9] + [0] * size, done.output
    assert ("held once" if once else "4 ranks make one cell, the only holder") in done.output
    if once:
        assert "all holders of" in done.output
        assert "cannot be restored, training resumes from step 3" in done.output
    assert "Traceback" not in done.output
    restored = [line for line in collect(tmp_path / "run").of("restore") if int(str(line["term"])) > 1]
    assert {line["step"] for line in restored} == {3} and all(line["commit"] for line in restored)
    assert found(tmp_path) == undisturbed(parallel)


def test_buffers_of_a_pass_that_a_lost_rank_has_ended_are_not_kept(tmp_path: Path, few_rows: Path) -> None:
    """Ranks that gather weights lose it in the middle of a pass, which has changed BatchNorm's statistics."""
    job = {**CLASSIFIER, "task": {"path": "tests.tasks:WithBatchNorm", "params": PARAMS}, "parallel": PARAMETERS}
    job["max_steps"] = 5  # an epoch's last step has micro-batches of one sample, which BatchNorm refuses
    succeed(memory_job.start([config(tmp_path / "alone", few_rows, job)]))
    lost = [Loss(1, 4, "backward"), Loss(0, 3, "forward")]
    done = memory_live.start([config(tmp_path, few_rows, job)], num_ranks=3, losses=lost)
    assert sorted(done.codes) == [-9, -9, 0, 0, 0], done.output
    assert result(tmp_path)["weights_sha256"] == result(tmp_path / "alone")["weights_sha256"]


def test_a_lost_share_of_weights_that_no_commit_holds_is_read_by_new_processes(tmp_path: Path, few_rows: Path) -> None:
    """The base of adapters, with one copy of each shard: the survivor ends, and a new process reads all of it."""
    task, parallel = {"path": "tests.tasks:OnBase", "params": PARAMS}, {**PARAMETERS, "copies": 1}
    job = {**CLASSIFIER, "task": task, "parallel": parallel, "checkpoint": {"every": "3 steps"}}
    succeed(memory_job.start([config(tmp_path / "alone", few_rows, job)]))
    path = config(tmp_path, few_rows, job)
    done = memory_live.start([path], num_ranks=2, losses=[Loss(1, 12, "apply")])
    assert "commits do not hold the frozen weights" in done.output and 0 not in done.codes
    assert "Resuming from step" in succeed(memory_job.start([path], num_ranks=2)).output
    assert result(tmp_path)["weights_sha256"] == result(tmp_path / "alone")["weights_sha256"]
