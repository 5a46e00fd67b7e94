"""The loss of a language model by chunks of tokens: that of whole logits, of which there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.language.language_model import LastLayer
from elastic_train.tasks.task import Batch, LaneLoss
from tests.elastic_train.tasks.language_rows import (
    GPT2,
    LLAMA,
    MODEL,
    VOCABULARY,
    WITH_TRANSFORMERS,
    chunks_of,
    counting_rows,
    described,
    prepared,
)

NUM_ROWS = 6
ROWS = 17
"""Of a chunk: more than a hidden size, whose weights are not mistaken for logits."""


def task_and_batch(folder: Path, *, few_targets: bool = False, **params: Any) -> tuple[CausalLM, nn.Module, Batch]:
    """Return a prepared task, its model and a micro-batch, in which some or most tokens are targets."""
    tokens = counting_rows(NUM_ROWS)
    columns = {"input_ids": tokens}
    if few_targets:
        columns["labels"] = pa.array([[-100] * (len(row) - 1) + row[-1:] for row in tokens.to_pylist()], tokens.type)
    task = prepared(described(folder / "rows", columns), **params)
    torch.manual_seed(1)
    return task, task.build_model(), task.collate(pa.table(columns), np.arange(NUM_ROWS))


def trained(task: CausalLM, model: nn.Module, batch: Batch) -> tuple[LaneLoss, dict[str, Tensor]]:
    """Return the loss of a micro-batch, and gradients by parameter."""
    model.zero_grad()
    loss = task.loss(model, batch)
    (3 * loss.total).backward()
    return loss, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


class Logits(TorchDispatchMode):
    """Notes for how many tokens one tensor has logits."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor) and one.shape[-1:] == (VOCABULARY,)]
        self.most = max([self.most, *(one.numel() // VOCABULARY for one in made)])
        return out


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": {**MODEL, "tied": True}, "z_loss": 0.1},
    "experts": {"model": {**MODEL, "experts": 4, "experts_per_token": 2, "expert_hidden": 8, "hidden": 0}},
    "few": {"few_targets": True},
}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_whole_logits(tmp_path: Path, case: str, precision: torch.dtype) -> None:
    task, model, batch = task_and_batch(tmp_path, **CASES[case])
    autocast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
    apart = {"rtol": 1e-5, "atol": 1e-5} if precision == torch.float32 else {"rtol": 0.02, "atol": 0.3}
    with autocast:
        whole, expected = trained(task, model, batch)
        with chunks_of(ROWS), Logits() as logits:
            loss, found = trained(task, model, batch)
    assert loss.weight == whole.weight and loss.predictions is None
    torch.testing.assert_close(loss.total, whole.total, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], **apart)
    assert 0 < logits.most <= ROWS


def test_metrics_are_fed_with_what_whole_logits_say(tmp_path: Path) -> None:
    task, model, batch = task_and_batch(tmp_path)
    with torch.no_grad():
        whole = task.loss(model.eval(), batch)
        with chunks_of(ROWS), Logits() as logits:
            found = task.loss(model, batch)
    assert whole.predictions is not None and whole.targets is not None
    assert found.predictions is not None and found.targets is not None
    torch.testing.assert_close(found.predictions, whole.predictions)
    assert found.targets.equal(whole.targets)
    assert 0 < logits.most <= ROWS


def test_the_same_chunks_have_the_same_bits(tmp_path: Path) -> None:
    task, model, batch = task_and_batch(tmp_path)
    with chunks_of(ROWS):
        one, first = trained(task, model, batch)
        again, second = trained(task, model, batch)
    assert one.total.equal(again.total) and all(first[name].equal(second[name]) for name in first)


def test_a_micro_batch_without_targets_trains_nothing(tmp_path: Path) -> None:
    task, model, batch = task_and_batch(tmp_path)
    nothing = {**batch, "places": batch["places"][:0], "targets": batch["targets"][:0]}
    with chunks_of(ROWS):
        loss, gradients = trained(task, model, nothing)
    assert loss.total.item() == loss.weight == 0.0
    assert gradients and all(not one.any() for one in gradients.values())


def test_logits_that_fit_one_chunk_are_computed_as_a_whole(tmp_path: Path) -> None:
    """So do those in fp16, whose gradients need the scale of the loss."""
    head = nn.Linear(4, 50_000)
    assert LastLayer(head, 0.0).takes_chunks(1025) and not LastLayer(head, 0.0).takes_chunks(1024)
    small = LastLayer(nn.Linear(4, 100), 0.0)
    assert small.takes_chunks((1 << 25) // 100 + 1) and not small.takes_chunks((1 << 25) // 100)
    with torch.autocast("cpu", torch.float16):
        assert not LastLayer(head, 0.0).takes_chunks(1 << 20)


def test_a_bias_and_a_frozen_layer_have_their_gradients() -> None:
    hidden, targets = torch.randn(9, 8, requires_grad=True), torch.arange(9)
    head = nn.Linear(8, 30)
    logits = head(hidden)
    (F.cross_entropy(logits, targets, reduction="sum") + 0.2 * logits.logsumexp(-1).square().sum()).backward()
    assert hidden.grad is not None and head.bias.grad is not None
    expected, of_bias = hidden.grad.clone(), head.bias.grad.clone()
    for is_frozen in (False, True):
        hidden.grad = head.weight.grad = head.bias.grad = None
        head.requires_grad_(not is_frozen)
        with chunks_of(2):
            LastLayer(head, 0.2).loss(hidden, targets, is_training=True).total.backward()
        torch.testing.assert_close(hidden.grad, expected)
        if is_frozen:
            assert head.weight.grad is None and head.bias.grad is None
        else:
            torch.testing.assert_close(head.bias.grad, of_bias)


class TestTransformers:
    """Models whose last module is a linear layer, and others."""

    pytestmark = WITH_TRANSFORMERS

    @pytest.mark.heavy
    @pytest.mark.parametrize("config", [GPT2, {**LLAMA, "tie_word_embeddings": False}], ids=["gpt2", "llama"])
    def test_loss_and_gradients_are_those_of_whole_logits(self, tmp_path: Path, config: dict[str, Any]) -> None:
        dropouts = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if config is GPT2 else {}
        task, model, batch = task_and_batch(tmp_path, hf={"config": {**config, **dropouts}})
        whole, expected = trained(task, model, batch)
        with chunks_of(ROWS), Logits() as logits:
            loss, found = trained(task, model, batch)
        assert 0 < logits.most <= ROWS
        torch.testing.assert_close(loss.total, whole.total, rtol=1e-5, atol=1e-5)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)

    def test_a_model_that_changes_its_logits_is_computed_as_a_whole(self, tmp_path: Path) -> None:
        """Also one that a task has put into another."""
        capped = {**LLAMA, "model_type": "gemma2", "final_logit_softcapping": 2.0, "head_dim": 8}
        task, model, batch = task_and_batch(tmp_path / "capped", hf={"config": capped})
        assert task.language_model.head(model) is None
        with chunks_of(ROWS):
            assert task.loss(model, batch).total.equal(task.loss(model, batch).total)
        task, model, _ = task_and_batch(tmp_path / "plain", hf={"config": LLAMA})
        assert task.language_model.head(model) is not None
        assert task.language_model.head(nn.Sequential(model)) is None
