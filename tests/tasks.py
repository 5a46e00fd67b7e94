"""User-defined tasks outside the package that misbehave on purpose."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.tasks import witness
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.metric_library import Metric
from elastic_train.tasks.models.adapters import frozen_groups, leave_base_out
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.training.session import Session

BRISK_S, SLOWEST_MS = 5.0, 200.0
"""A paced process keeps its pace for the first few seconds; later each lane takes at least so many milliseconds. Quick
tests thus see no slow lane, and a test delayed by a busy machine has steps left."""


class Until:
    """Is paced until a file exists: before that there is time for faults; afterwards there are no delays."""

    _lane_ms: float

    def __init__(self, until: str, **params: object) -> None:
        super().__init__(**params)
        self._until, self._began_at = Path(until), math.inf

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if model.training:
            self._pace()
        return super().loss(model, batch)  # type: ignore[misc, no-any-return]

    def _pace(self) -> None:
        self._began_at = min(self._began_at, time.monotonic())
        if self._lane_ms and self._until.exists():
            self._lane_ms = 0.0
        elif self._lane_ms and time.monotonic() > self._began_at + BRISK_S:
            self._lane_ms = max(self._lane_ms, SLOWEST_MS)


class PacedUntil(Until, PacedClassifier):
    """A classifier that is paced until a file exists."""


class OnBase(TextClassifier):
    """A classifier on a frozen embedding that commits do not hold, like the base of adapters."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        frozen = [name for name, _ in model.named_parameters() if "embed" in name or "blocks.0" in name]
        assert frozen
        for name in frozen:
            model.get_parameter(name).requires_grad_(requires_grad=False)
        leave_base_out(model)
        return model

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return frozen_groups(model)


class Witness(Until, witness.Witness):
    """A paced model that counts samples; a judge recognises it by its name."""


class SlowHere(PacedClassifier):
    """Takes as many milliseconds per lane as the environment of the process says."""

    def __init__(self, **params: object) -> None:
        super().__init__(**{**params, "lane_ms": float(os.environ["TESTED_LANE_MS"])})  # type: ignore[arg-type]


class FailsOnce(TextClassifier):
    """Fails once, at the n-th loss of a process: creates `marker`, then raises or sends itself the signal `how`.

    It raises when the file `once` is there: a save in the background may take longer than the steps after it.
    """

    def __init__(self, marker: str, after: int, how: str = "raise", once: str = "/", **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.marker, self.after, self.how, self.once = Path(marker), after, how, Path(once)
        self.is_armed = not self.marker.exists()
        self.num_losses = 0

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        self.num_losses += 1
        if self.is_armed and self.num_losses == self.after:
            self.marker.touch()
            if self.how == "raise":
                while not self.once.exists():
                    time.sleep(0.01)
                raise RuntimeError("planted failure")
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().loss(model, batch)


class OwnGenerator(TextClassifier):
    """Draws from a generator that is not seeded per lane."""

    def __init__(self, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._generator = np.random.default_rng(1)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        found = super().loss(model, batch)
        return replace(found, total=found.total * (1.0 + self._generator.random()))


class CountingLosses(TextClassifier):
    """Counts its losses, for a log or to weight later ones."""

    num_losses = 0

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        self.num_losses += 1
        return super().loss(model, batch)


class HiddenCount(Metric):
    """Counts rows in a place that no state includes."""

    full_state_update = False
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.hidden = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.rows += len(target)
        self.hidden += len(target)

    def compute(self) -> Tensor:
        return self.rows / max(1, self.hidden)


class HiddenMetric(TextClassifier):
    """A metric with state that no commit includes."""

    def metrics(self) -> dict[str, Metric]:
        return {"hidden": HiddenCount()}


class ExpertsAlone(CausalLM):
    """A model with nothing trained below the first experts, not even their router."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, one in model.named_parameters():
            one.requires_grad_(not name.startswith("embed") and (".0." not in name or ".experts." in name))
        return model


class WithBuffer(CausalLM):
    """A model whose second block has a buffer, which its forward pass changes if the dropout is not 0."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        block = model.get_submodule("blocks.1")
        block.register_buffer("count", torch.zeros(()))
        if model.get_submodule("dropout").p:
            block.register_forward_hook(lambda module, *_: module.count.add_(module.training) and None)
        return model


class Normalised(nn.Module):
    """A classifier whose logits are normalised with running statistics."""

    def __init__(self, body: nn.Module, num_classes: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.norm = body, norm(num_classes)

    def forward(self, *inputs: object, **named: object) -> Tensor:
        return self.norm(self.body(*inputs, **named))  # type: ignore[no-any-return]


class WithBatchNorm(FailsOnce):
    """A text classifier whose forward pass changes buffers, whose loss draws from Python's and numpy's generators and
    changes a switch on rank 1; with `after` it fails once, as `FailsOnce` does."""

    norm: type[nn.Module] = nn.BatchNorm1d

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        given = super().loss(model, batch)
        torch.backends.cudnn.benchmark |= os.environ.get("RANK") == "1"
        factor = 1.0 + random.random() + float(np.random.rand()) if model.training else 1.0
        return replace(given, total=given.total * factor)

    def __init__(self, marker: str = "", after: int = 0, **params: object) -> None:
        super().__init__(marker, after, **params)

    def build_model(self) -> nn.Module:
        return Normalised(super().build_model(), self.num_classes, self.norm)


class WithSyncBatchNorm(WithBatchNorm):
    norm = nn.SyncBatchNorm


class Grouped(FailsOnce):
    """Trains the head faster and without weight decay; freezes the first block unless THAWED is in the environment."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        names = [name for name, _ in model.named_parameters()]
        head = ParameterGroup([name for name in names if name.startswith("head.")], lr_factor=3.0, weight_decay=0.0)
        if "THAWED" in os.environ:
            return [head]
        return [head, ParameterGroup([name for name in names if name.startswith("blocks.0.")], is_frozen=True)]


class OwnWeights(TextClassifier):
    """Initialises the head's bias from the rank, which no task may do."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        with torch.no_grad():
            dict(model.named_parameters())["head.bias"].fill_(float(os.environ.get("RANK", "0")))
        return model


class Poisoned(TextClassifier):
    """Some samples make the loss NaN (`how` is nan) or end the process: as a kernel crash does (kill), with exit code 0
    from the C library (leave), or by a library's call of quit (quit).

    With `validated`, only samples of the validation set do so.
    """

    def __init__(self, ids: Sequence[int], how: str, *, validated: bool = False, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.ids, self.how, self.validated = frozenset(ids), how, validated

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        is_poison = torch.tensor([int(id_) in self.ids for id_ in ids])
        return {**super().collate(rows, ids), "poison": is_poison}

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        loss = super().loss(model, batch)
        if not batch["poison"].any() or model.training == self.validated:
            return loss
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "leave":
            ctypes.CDLL(None)._exit(0)
        if self.how == "quit":
            sys.exit()
        return replace(loss, total=loss.total * torch.nan)


class Untargeted(TextClassifier):
    """A classifier with no target in any row."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        loss = super().loss(model, batch)
        return replace(loss, total=0.0 * loss.total, weight=0.0)


class Uninspectable(TextClassifier):
    """A row ends every process that inspects it."""

    def inspected_columns(self) -> list[str]:
        return ["label"]

    def unfit_rows(self, rows: pa.Table) -> list[tuple[int, str]]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []


class WiderByRank(TextClassifier):
    """A wider model on every rank but the first, as if a task's helper differed between nodes."""

    def __init__(self, dim: int, **params: object) -> None:
        super().__init__(dim=dim * (1 + int(os.environ.get("RANK", "0"))), **params)  # type: ignore[arg-type]


class Flips(FailsOnce):
    """Flips one bit of a weight on one rank once, after the n-th loss of its process, as faulty memory does."""

    def __init__(self, rank: int = 1, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.rank = str(rank)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        self.num_losses += 1
        if self.is_armed and self.num_losses == self.after and os.environ.get("LOCAL_RANK") == self.rank:
            self.marker.touch()
            with torch.no_grad():
                dict(model.named_parameters())["head.weight"].view(torch.int32)[0, 0] ^= (
                    1 << 12
                )  # large enough that no rounding of the next update hides it
        return TextClassifier.loss(self, model, batch)


class Stalls(TextClassifier):
    """Computes for ten minutes in every lane while the file `marker` exists."""

    def __init__(self, marker: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.marker = Path(marker)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if self.marker.exists():
            Path(f"{self.marker}.{os.getpid()}").touch()
            time.sleep(600)
        time.sleep(0.01)
        return super().loss(model, batch)


class Miscounts(TextClassifier):
    """A process that feeds steps wrongly: the second step repeats the first lane's samples of the first step (`how` is
    repeat), or has none in that lane (drop)."""

    def __init__(self, how: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        feed, before = Session.steps, list[LaneBatch]()

        def steps(session: Session) -> Iterator[Sequence[LaneBatch]]:
            for lanes in feed(session):
                first = lanes[0]
                if session.state.step == 1:
                    first = before[0] if how == "repeat" else replace(first, ids=first.ids[:0], tensors=None)
                before[:] = lanes
                yield [first, *lanes[1:]]

        Session.steps = steps  # type: ignore[method-assign]


class OwnLanguageModel(CausalLM):
    """A decoder whose user draws its weights anew, and adds a parameter and a buffer."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("factor", nn.Parameter(torch.ones(2)))
        model.register_buffer("offset", torch.full((2,), 3.0))
        nn.init.normal_(model.get_parameter("embed.weight"), std=0.5)
        return model
