"""Tasks of a user's own, from outside the package, that misbehave on purpose."""

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
from chaos.tasks.paced_language import PacedLanguage
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.tasks import witness
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.metric_library import Metric
from elastic_train.tasks.models.adapters import frozen_groups, leave_base_out
from elastic_train.tasks.placements import Piece
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.training.session import Session

BRISK_S, SLOWEST_MS = 5.0, 200.0
"""A process that is paced until something happens keeps its pace for a few seconds; after them each lane takes at least
so many milliseconds. A quick test meets no slow lane, and one that a busy machine holds up has steps left."""


class Until:
    """Is paced until a file exists: until then there is time for faults, and from then on none is waited for."""

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
    """A classifier that is."""


class PacedOnBaseUntil(PacedUntil):
    """A classifier on a frozen embedding, which commits do not hold, as the base of adapters."""

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


class PacedLanguageUntil(Until, PacedLanguage):
    """A language model that is, in stages or whole."""

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
        if model.training:
            self._pace()
        return super().run(model, batch, piece)


class Witness(Until, witness.Witness):
    """A model that counts and is; a judge knows it by its name."""


class SlowHere(PacedClassifier):
    """Is as slow as the environment of its process says, in milliseconds a lane."""

    def __init__(self, **params: object) -> None:
        super().__init__(**{**params, "lane_ms": float(os.environ["TESTED_LANE_MS"])})  # type: ignore[arg-type]


class FailsOnce(TextClassifier):
    """Fails once, at the n-th loss of a process: creates `marker`, then raises or sends itself the signal `how`."""

    def __init__(self, marker: str, after: int, how: str = "raise", **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.marker, self.after, self.how = Path(marker), after, how
        self.is_armed = not self.marker.exists()
        self.num_losses = 0

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        self.num_losses += 1
        if self.is_armed and self.num_losses == self.after:
            self.marker.touch()
            if self.how == "raise":
                raise RuntimeError("planted failure")
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().loss(model, batch)


class OwnGenerator(TextClassifier):
    """Draws from a generator that nothing seeds for a lane."""

    def __init__(self, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._generator = np.random.default_rng(1)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        found = super().loss(model, batch)
        return replace(found, total=found.total * (1.0 + self._generator.random()))


class CountingLosses(TextClassifier):
    """Counts its losses, for a log or to weigh later ones."""

    num_losses = 0

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        self.num_losses += 1
        return super().loss(model, batch)


class HiddenCount(Metric):
    """Counts rows where no state has them."""

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
    """Has such a metric."""

    def metrics(self) -> dict[str, Metric]:
        return {"hidden": HiddenCount()}


class ExpertsAlone(CausalLM):
    """A model of which nothing below the first experts is trained, nor what chooses among them."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, one in model.named_parameters():
            one.requires_grad_(not name.startswith("embed") and (".0." not in name or ".experts." in name))
        return model


class Normalised(nn.Module):
    """A classifier whose logits are normalised by running statistics."""

    def __init__(self, body: nn.Module, num_classes: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.norm = body, norm(num_classes)

    def forward(self, *inputs: object, **named: object) -> Tensor:
        return self.norm(self.body(*inputs, **named))  # type: ignore[no-any-return]


class WithBatchNorm(FailsOnce):
    """A text classifier whose forward pass changes buffers, and whose loss draws from the generators of Python and
    numpy, and changes a switch on rank 1; with `after` it fails once, as `FailsOnce` does."""

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
    """Trains its head faster and without decay, and its first block not at all; THAWED in the environment trains it."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        names = [name for name, _ in model.named_parameters()]
        head = ParameterGroup([name for name in names if name.startswith("head.")], lr_factor=3.0, weight_decay=0.0)
        if "THAWED" in os.environ:
            return [head]
        return [head, ParameterGroup([name for name in names if name.startswith("blocks.0.")], is_frozen=True)]


class OwnWeights(TextClassifier):
    """Draws its head's bias from the rank: what no task may do."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        with torch.no_grad():
            dict(model.named_parameters())["head.bias"].fill_(float(os.environ.get("RANK", "0")))
        return model


class Poisoned(TextClassifier):
    """Some samples make the loss NaN (`how` is nan), or end the process: as a crash in a kernel does (kill), with 0 by
    the C library (leave), or by a library's call of quit (quit).

    With `validated` those of the validation set do so, and no others.
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
    """A classifier no row of which has a target."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        loss = super().loss(model, batch)
        return replace(loss, total=0.0 * loss.total, weight=0.0)


class Uninspectable(TextClassifier):
    """Has a row that ends every process that inspects it."""

    def inspected_columns(self) -> list[str]:
        return ["label"]

    def unfit_rows(self, rows: pa.Table) -> list[tuple[int, str]]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []


class WiderByRank(TextClassifier):
    """Has a wider model on every rank but the first, as where a helper of the task is not the same on all nodes."""

    def __init__(self, dim: int, **params: object) -> None:
        super().__init__(dim=dim * (1 + int(os.environ.get("RANK", "0"))), **params)  # type: ignore[arg-type]


class Flips(FailsOnce):
    """One bit of a weight is another on one rank once, after the n-th loss of its process, as broken memory does it."""

    def __init__(self, rank: int = 1, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.rank = str(rank)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        self.num_losses += 1
        if self.is_armed and self.num_losses == self.after and os.environ.get("RANK") == self.rank:
            self.marker.touch()
            with torch.no_grad():
                dict(model.named_parameters())["head.weight"].view(torch.int32)[0, 0] ^= (
                    1 << 12
                )  # so much that no rounding of the next update takes it back
        return TextClassifier.loss(self, model, batch)


class Stalls(TextClassifier):
    """Computes for ten minutes in every lane, as long as the file `marker` exists."""

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
    """A process with a bug in how steps are fed: the second step has its first lane's samples of the first one again
    (`how` is repeat), or none in that lane (drop)."""

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
