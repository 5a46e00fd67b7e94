"""The memory that experts keep in a turn, and the order of its passes, on a rank with all experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.job.units.blocks import Recompute, recompute_blocks
from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.decoder.experts import Experts, MixtureOfExperts
from elastic_train.tasks.decoder.model import Decoder, DecoderShape

SHAPE = DecoderShape(vocabulary=11, dim=16, depth=2, heads=2, experts=4, expert_hidden=6, dropout=0.3)


class Turn:
    """A model with its experts on one rank; records whether each block's products were computed for a backward pass."""

    def __init__(self, how: Recompute) -> None:
        torch.manual_seed(3)
        self.model = Decoder(SHAPE)
        recompute_blocks(self.model, how)
        self.experts = [one for one in self.model.modules() if isinstance(one, Experts)]
        self.links = ExpertLinks(self.experts, self.experts if how != "none" else ())
        self.links.bind(Group(0, 1, None, 60))
        self.computed = list[tuple[int, bool]]()
        for number, one in enumerate(self.experts):
            one.links = self.links
            one.compute = self._noting(number, one)  # type: ignore[method-assign, assignment]

    def _noting(self, number: int, experts: Experts) -> Callable[[Tensor, Sequence[int]], Tensor]:
        compute = experts.compute

        def noted(x: Tensor, counts: Sequence[int]) -> Tensor:
            self.computed.append((number, torch.is_grad_enabled()))
            return compute(x, counts)

        return noted

    def gradients(self, *, precision: torch.dtype | None = None) -> list[Tensor]:
        """Run the passes of a lane; return the gradients of experts, and of all other parameters."""
        tokens = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(5)
        with self.links.turn(trains=True):
            with torch.autocast("cpu", precision, enabled=precision is not None):
                loss = self.model(tokens).float().logsumexp(-1).square().sum()
            loss.backward()
        [leaf] = self.links.leaves
        own = [leaf[id(one)] for experts in self.experts for one in experts.parameters()]
        return own + [one.grad for one in self.model.parameters() if one.grad is not None]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("how", ["units", "selective"])
def test_experts_of_blocks_that_are_computed_again_keep_nothing(how: Recompute, precision: torch.dtype | None) -> None:
    """They keep nothing until just before their backward pass, and gradients have the same bits."""
    kept, again = Turn("none"), Turn(how)
    expected, found = (turn.gradients(precision=precision) for turn in (kept, again))
    assert len(found) == len(expected) > 6 and all(map(torch.equal, found, expected))
    assert kept.computed == [(0, True), (1, True)]
    assert again.computed == [(0, False), (1, False), (1, True), (0, True)]


@pytest.mark.parametrize(("how", "num"), [("none", 2), ("units", 4)])
def test_a_rank_without_a_lane_takes_part_as_often(monkeypatch: pytest.MonkeyPatch, how: Recompute, num: int) -> None:
    """Recomputed blocks send their tokens again, so a rank without a lane joins one more count exchange per block."""
    turn, gathered = Turn(how), list[Tensor]()
    gather = Group.all_gather

    def noting(group: Group, mine: Tensor) -> Tensor:
        gathered.append(mine)
        return gather(group, mine)

    monkeypatch.setattr(Group, "all_gather", noting)
    turn.gradients()
    assert len(gathered) == num
    with turn.links.turn(trains=True):
        pass
    assert len(gathered) == 2 * num


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(8, 6, 2, 1, None)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.moe(x)
        return found


class Apart(nn.Module):
    """A model that runs experts directly, bypassing their block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        for one in self.parameters():
            nn.init.ones_(one)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks[0].get_submodule("moe")(x)
        return found


def test_experts_outside_of_what_is_computed_again_are_refused() -> None:
    model = Apart()
    recompute_blocks(model, "units")
    [experts] = [one for one in model.modules() if isinstance(one, Experts)]
    experts.links = links = ExpertLinks([experts], [experts])
    links.bind(Group(0, 1, None, 60))
    with (
        pytest.raises(
            ConfigError, match=r"recompute does not work with experts that a model calls outside .*, or call the block"
        ),
        links.turn(trains=True),
    ):
        model(torch.ones(2, 3, 8)).sum().backward()
