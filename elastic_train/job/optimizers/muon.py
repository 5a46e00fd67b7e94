"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer with one state.

Muon orthogonalises a matrix's momentum (Jordan et al., 2024). As in its authors' code, parameter groups with `use_muon`
use Muon, and embeddings, the head and non-matrices use AdamW. Both work on this optimizer's groups and state, so that
nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

Groups = Sequence[dict[str, Any]]


class MuonWithAdamW(Optimizer):
    """Muon and AdamW in one optimizer; each parameter group's `use_muon` chooses.

    `adamw` and `muon` are their own keyword arguments. Muon's updates are scaled to the size of AdamW's unless `muon`
    says otherwise, so that one learning rate and one weight decay suit both.
    """

    def __init__(
        self, groups: Groups, lr: float, weight_decay: float, *, adamw: dict[str, Any], muon: dict[str, Any]
    ) -> None:
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        parts = {is_muon: [group for group in groups if group["use_muon"] is is_muon] for is_muon in (True, False)}
        self._parts: dict[bool, Optimizer] = {}
        if parts[True]:
            self._parts[True] = torch.optim.Muon(parts[True], **both, **{"adjust_lr_fn": "match_rms_adamw", **muon})
        if parts[False]:
            self._parts[False] = AdamW(parts[False], **both, **adamw)
        super().__init__(groups, {})  # the parts have already filled in these groups' settings

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all groups from their gradients."""
        assert closure is None, "gradients are in place"
        for is_muon, part in self._parts.items():  # restoring a state replaces the groups
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is is_muon]
            part.state = self.state
            part.step()
        return None
