"""Everything that determines the computation is equal on all ranks, or a rank that differs learns which keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from pydantic import Field
from torch import nn

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.config.schema import Config, keys
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.errors import ConfigError, PeerLostError, WeightsDifferError
from elastic_train.job.build import build_state
from elastic_train.job.plan import Plan
from elastic_train.job.state import name_others
from elastic_train.parallel.attention.choice import Choice
from elastic_train.parallel.devices.switches import TUNED
from elastic_train.placement.grains import Listed, lay_out
from elastic_train.placement.holdings import Column
from elastic_train.placement.table import Parts, Table
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.world import agreement
from elastic_train.world.agreement import (
    OWN,
    OWN_SECTIONS,
    check_alike,
    deciding,
    differing_kernels,
    job_of,
    kernels_of,
)
from elastic_train.world.equal_weights import check_same_weights
from tests.memory_machine import in_memory, rank_here
from tests.memory_world import group_of


def plan_with(
    changes: dict[str, dict[str, object]], digest: str = "rows", validation: str | None = None, task: object = None
) -> Plan:
    config = Config.model_validate({"data": {"train": "here"}, **changes})
    feed = SimpleNamespace(validation_digest=validation)
    return SimpleNamespace(config=config, task=task, manifest=SimpleNamespace(digest=digest), feed=feed)  # type: ignore[return-value]


PLANS = [
    plan_with({}),
    plan_with(
        {
            "data": {"train": "/elsewhere", "cache_dir": "/scratch"},
            "run": {"dir": "mine"},
            "tracking": {"mlflow_uri": None},
            "checkpoint": {"url": "s3://bucket/run", "keep_last": 2},
        }
    ),
    plan_with(
        {
            "optimizer": {"clip_norm": 0.5},
            "validation": {"every": "7 steps"},
            "task": {"params": {"dim": 8}},
            "parallel": {"bucket_mb": None, "expert": 2},
            "monitoring": {"port": 7},
        }
    ),
    plan_with(
        {
            "checkpoint": {"keep_best": "min loss"},
            "optimizer": {"clip_norm": None},
            "parallel": {"offload": "optimizer", "recompute": "units"},
        },
        digest="other rows",
    ),
    plan_with({}),
    plan_with({}, validation="held out", task=TextClassifier(vocabulary=64)),
    *(plan_with({}) for _ in range(4)),
]
MODELS = {
    0: {"body.weight": torch.zeros(4, 3), "head.weight": torch.zeros(2, 4)},
    6: {"body.weight": torch.zeros(4, 3), "head.weight": torch.zeros(3, 4), "scale": torch.zeros(2)},
    7: {"body.weight": torch.zeros(4, 3), "head.weight": torch.zeros(2, 4), "scale": torch.zeros(2)},
    8: {"body.weight": torch.zeros(4, 3), "head.weight": torch.zeros(2, 4, dtype=torch.float16)},
}
GROUPS, PARAMETERS = "the list of parameter groups", "the parameters"
GROUPING = ["2 parameters, rate 0.1"]
OTHER_GROUPING = ["1 parameters, rate 0.1", "1 parameters, rate 0.01"]
LINES = ["body.weight float32 [4, 3], in parameter group 0", "head.weight float32 [2, 4], in parameter group 0"]
OUTLINE = {GROUPS: GROUPING, PARAMETERS: LINES}
OUTLINES = {
    4: {**OUTLINE, GROUPS: OTHER_GROUPING},
    9: {**OUTLINE, PARAMETERS: [LINES[0], "head.weight float32 [2, 4], frozen"]},
}


def compare(rank: int, size: int) -> list[str]:
    group = group_of("world", rank, size)
    try:
        check_alike(group, PLANS[rank], OUTLINES.get(rank, OUTLINE), MODELS.get(rank, MODELS[0]))
    except ConfigError as error:
        return list(error.problems)
    return []


def test_a_rank_that_differs_from_rank_0_learns_in_which_keys() -> None:
    """Paths may differ between nodes; every other relevant key is named with both values."""
    found = [problems for problems in in_memory(compare, len(PLANS)) if problems is not None]
    assert found[:2] == [[], []]
    assert [problem.partition(" is ")[0] for problem in found[2]] == [
        "optimizer.clip_norm",
        "parallel.bucket_mb",
        "parallel.expert",
        "task.params",
        "validation.every",
    ]
    assert found[2][0] == "optimizer.clip_norm is 0.5 here and 1.0 on rank 0: all nodes must have the same"
    assert found[2][1] == "parallel.bucket_mb is None here and 'auto' on rank 0: all nodes must have the same"
    assert [problem.partition(" on rank 0")[0] for problem in found[3]] == [
        "checkpoint.keep_best is 'min loss' here and None",
        "optimizer.clip_norm is None here and 1.0",
        "parallel.offload is 'optimizer' here and 'none'",
        "parallel.recompute is 'units' here and 'none'",
        "the training set's digest is 'other rows' here and 'rows'",
    ]
    [frozen] = found[9]
    assert frozen.startswith(
        "the first of the parameters that differs is 'head.weight float32 [2, 4], frozen' here and 'head.weight float32"
    )
    differing = f"the list of parameter groups is {OTHER_GROUPING!r} here and {GROUPING!r} on rank 0"
    assert found[4] == [f"{differing}: all nodes must have the same"]
    assert [problem.partition(" is ")[0] for problem in found[5]] == [
        "the task's modules",
        "the validation set's digest",
    ]
    for rank, here, there in (
        (6, "head.weight float32 [3, 4]", "head.weight float32 [2, 4]"),
        (7, "scale float32 [2]", "none"),
        (8, "head.weight float16 [2, 4]", "head.weight float32 [2, 4]"),
    ):
        [problem] = found[rank]
        assert problem.startswith(
            f"the first of the model's tensors that differs is {here!r} here and {there!r} on rank 0"
        )


def here() -> int:
    rank = rank_here()
    assert rank is not None
    return rank


def kernels_here(device: torch.device) -> dict[str, str]:
    return {"device": "AVX512", "torch": "2", "numpy": "2", "processor": "one" if here() < 2 else "another"}


def compare_kernels(rank: int, size: int) -> list[list[str]]:
    group = group_of("world", rank, size)
    return [differing_kernels(group, torch.device("cpu"), compiles=compiles) for compiles in (False, True)]


@patch.object(agreement, "kernels_of", kernels_here)
@patch.object(agreement, "compiler_of", lambda device: {"compiler": "gcc 12" if here() < 1 else "gcc 13"})
def test_every_rank_learns_which_machines_round_otherwise() -> None:
    """If kernels are compiled, a different compiler counts as well."""
    lines = in_memory(compare_kernels, 3)
    another = "processor another, not one"
    compiled = [f"rank 1 has {(by := 'compiler gcc 13, not gcc 12')}", f"rank 2 has {another}; {by}"]
    assert lines == [[[f"rank 2 has {another}"], compiled]] * 3


ATTENTIONS = ("FA3", "torch", "flex", "torch")


def tuned_kernels_here(device: torch.device) -> dict[str, str]:
    tuned = {} if here() == 3 else {f"{TUNED}scan for 8": "num_warps: 4"}
    return {"device": "H200" if here() != 2 else "A100", **tuned}


def compare_attention(rank: int, size: int) -> list[str] | str:
    """Rank 1 can compute as rank 0 does, rank 3 cannot; rank 2 is another machine type."""
    group = group_of("world", rank, size)
    try:
        return differing_kernels(group, torch.device("cuda"))
    except ConfigError as error:
        return str(error)
    except PeerLostError:
        return "a peer was lost"


@pytest.mark.parametrize("size", [3, 4])
@patch.object(agreement, "kernels_of", tuned_kernels_here)
@patch.object(agreement, "fingerprint", lambda *, compiles: ATTENTIONS[here()])
@patch.object(agreement, "machine_of", lambda device, *, compiles: None)
@patch.object(agreement, "adopt", lambda name, machine: here() == 1 and name == "FA3")
@patch.object(agreement, "current", lambda: Choice("torch", "torch", refused={"FA3": "compute capability 8.0"}))
def test_ranks_compute_attention_as_rank_0_does_or_are_refused(size: int) -> None:
    """Other machine differences are reported as before; a kernel that only one rank has tuned is no difference."""
    found = in_memory(compare_attention, size)
    if size == 3:
        assert found == [["rank 2 has device A100, not H200; attention flex, not FA3"]] * 3
    else:
        assert "attention is computed by torch on " in str(found[3]) and "(FA3: compute capability 8.0)" in str(
            found[3]
        )
        assert found[0] == "a peer was lost", "the others form a world without it"


def test_kernels_are_known_by_device_libraries_and_processor() -> None:
    assert set(kernels_of(torch.device("cpu"))) >= {"device", "torch", "numpy", "pyarrow", "processor"}


def test_what_is_not_compared_exists() -> None:
    """A renamed key would be compared, and nodes could no longer choose it."""
    known = {key for key, *_ in keys()}
    assert known >= OWN and {key.partition(".")[0] for key in known} >= set(OWN_SECTIONS)


def test_a_release_with_one_more_key_trains_with_those_that_do_not_know_it() -> None:
    """Once somebody has set the key, it is named, on either side."""

    class NewerOptimizer(OptimizerConfig):
        warm_restarts: int = 0

    class NewerConfig(Config):
        optimizer: NewerOptimizer = Field(default_factory=NewerOptimizer)

    def newer(optimizer: dict[str, object]) -> Plan:
        config = NewerConfig.model_validate({"data": {"train": "here"}, "optimizer": optimizer})
        return SimpleNamespace(config=config, task=None, manifest=PLANS[0].manifest, feed=PLANS[0].feed)  # type: ignore[return-value]

    assert job_of(newer({"lr": 0.5})) == job_of(plan_with({"optimizer": {"lr": 0.5}}))
    assert deciding(newer({"warm_restarts": 3})) == deciding(PLANS[0]) | {"optimizer.warm_restarts": 3}


@pytest.mark.parametrize(("version", "is_let_in"), [("0.1.7", True), ("0.1.0.dev3", True), ("0.2.0", False)])
def test_releases_of_a_series_train_together(version: str, is_let_in: bool) -> None:
    """A live job can thus be upgraded node by node; a new series may compute differently."""
    with patch.object(agreement, "_version", lambda _: "0.1.0"):
        ours = deciding(PLANS[0])
    with patch.object(agreement, "_version", lambda _: version):
        theirs = deciding(PLANS[0])
    differing = [key for key in ours if ours[key] != theirs[key]]
    assert differing == ([] if is_let_in else ["the version of elastic-train"])


def test_optimizers_and_schedules_of_ones_own_are_compared_by_their_source() -> None:
    """The source of their modules is compared, like the task's."""
    here = "tests.elastic_train.job.optimizers"
    own = {"name": f"{here}.test_choice:Plain", "schedule": f"{here}.test_schedule:halved"}
    lines = deciding(plan_with({"optimizer": own}))["the task's modules"]
    assert isinstance(lines, list) and set(lines) > set(deciding(PLANS[0])["the task's modules"])  # type: ignore[call-overload]
    assert {f"{here}.test_choice", f"{here}.test_schedule"} <= {line.partition(" ")[0] for line in lines}


def compare_weights(rank: int, size: int, wrong: list[int], ends_early: bool) -> str:
    """Compare the weights of a world in which some ranks hold wrong ones, each different; return the error."""
    group = group_of("world", rank, size)
    model = nn.Module()
    model.body, model.head = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    if rank in wrong:
        model.head.data[1] = rank + 1
    shards = build_state(model, OptimizerConfig(), 8, "cpu", is_fp16=False).shards
    shards.enter(Mesh(rank, size), None)

    def lost(value: object) -> list[object]:
        raise PeerLostError("the others have ended")

    if ends_early:
        group.all_gather_objects = lost  # type: ignore[method-assign]
    with pytest.raises(WeightsDifferError) as caught:
        check_same_weights(group, shards, 7)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "wrong", "said"),
    [
        (3, [0], "ranks [0] hold other weights than the 2 others, first in 'head'"),
        (5, [1, 3], "ranks [1, 3] hold other weights than the 3 others, first in 'head'"),
        (2, [0], "ranks 0 and 1 hold different weights, and nothing says which of them is right, first in 'head'"),
    ],
)
def test_the_ranks_that_hold_other_weights_than_most_are_named(size: int, wrong: list[int], said: str) -> None:
    """Rank 0 may be one of them; on every rank, each with its place."""
    for rank, error in enumerate(in_memory(compare_weights, size, wrong, False)):
        assert str(error).startswith(f"step 7: {said}: ")
        assert f"This is rank {rank} on " in str(error)


def test_a_rank_whose_peers_have_ended_with_the_error_does_not_keep_its_state() -> None:
    """It would treat the lost peer as a reason to hand its state over to the next world."""
    for error in in_memory(compare_weights, 2, [1], True):
        assert "hold different weights, and nothing says which of them is right: a kernel" in str(error)


def test_without_a_majority_all_sets_of_ranks_are_named() -> None:
    assert name_others([5, 5, 6, 6]) == (
        "ranks [0, 1] and [2, 3] hold different weights, and no majority says which are right",
        0,
    )
    assert name_others([4, 5, 6])[0].startswith("ranks [0] and [1] and [2] hold different weights")


def test_of_ranks_that_hold_a_part_those_that_differ_are_named_by_their_numbers_in_the_world() -> None:
    """Two cells of two stages of two ranks: the second cell's first rank has wrong weights of the first stage."""
    stages = [Listed("first", (8,), "torch.float32"), Listed("second", (8,), "torch.float32")]
    columns = [Column(lay_out([replace(one, shape=(8 * (one is stage),)) for one in stages])) for stage in stages]
    parts = Parts(lay_out(stages), columns, {"first": [0, 8], "second": [0, 0]}, {"first", "second"})
    table = Table(parts, (), size=8, cell=Cell(stage=2, context=2))
    seen = torch.ones(8, 2, dtype=torch.int64)
    seen[4, 0] = 9
    share = SimpleNamespace(
        weights_at=lambda *_: torch.zeros(0), table=table, layout=columns[0].layout, model=nn.Module()
    )
    shards = SimpleNamespace(table=table, share=share)
    group = SimpleNamespace(rank=0, size=8, all_gather=lambda mine: seen, all_gather_objects=lambda one: [one] * 8)
    with pytest.raises(WeightsDifferError, match=r"step 3: ranks \[4\] hold other weights than the 3 others: a kernel"):
        check_same_weights(group, shards, 3)  # type: ignore[arg-type]
