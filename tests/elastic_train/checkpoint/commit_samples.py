"""Small states and commits for the tests of this folder."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.stores.store import Store
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.order import Cursor
from elastic_train.world.fencing import StoreFence

State = dict[str, object]


def facts(step: int) -> CommitFacts:
    """Describe a state after `step` steps."""
    return CommitFacts(
        step=step,
        cursor=Cursor(0, step * 8),
        coverage=CoverageSums(step, 2**64 - 1, step),
        rng={"seed": 1},
        metrics={"loss": 1.0 / (step + 1), "diverged": float("nan")},
        config_digest="config",
        manifest_digest="manifest",
        world_size=2,
    )


def small_state(value: float = 1.0) -> State:
    """Return a state of a few bytes that `value` identifies."""
    return {"model": {"w": torch.full((5,), float(value))}, "scheduler": {"last_epoch": int(value)}}


def trained(num_steps: int, seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """Build a model with buffers and its optimizer, and take some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    take_steps(model, optimizer, 0, num_steps)
    return model, optimizer


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, lo: int, hi: int) -> None:
    """Take the steps [lo, hi), each on a different batch."""
    for step in range(lo, hi):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def writer(store: Store, parent: CommitRecord | None = None, term: int | None = None) -> CommitWriter:
    """Open a writer under a freshly claimed term."""
    fence = StoreFence(store)
    return CommitWriter(store, fence, fence.claim(term or 1), parent)


def commit_steps(store: Store, *steps: int, parent: CommitRecord | None = None) -> list[CommitRecord]:
    """Publish one small commit per step under one new term."""
    commits = writer(store, parent)
    return [commits.save(small_state(step), facts(step)) for step in steps]


def aged(store: Store, record: CommitRecord) -> CommitRecord:
    """Convert a commit to format 3; return its record."""
    old = dataclasses.replace(record, format=3)
    store.delete(old.key)
    store.create(old.key, old.encode())
    return old
