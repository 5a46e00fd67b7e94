"""Muon for hidden matrices and AdamW for all else, as one optimizer with one state, which saves and restores as any.

Muon orthogonalises a matrix's momentum (Jordan et al., 2024). Its authors leave embeddings, the head and what is no
matrix to AdamW; a parameter group with `use_muon` is Muon's here, as in their code. Both work on this optimizer's own
groups and state, so that nothing is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

Groups = Sequence[dict[str, Any]]


class MuonWithAdamW(Optimizer):
    """One optimizer of two; every parameter group says which one's it is, `use_muon`.

    `adamw` and `muon` are their own keyword arguments. An update of Muon's is scaled to the size of AdamW's unless
    `muon` says otherwise, so that one learning rate and one decay suit both.
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
        super().__init__(groups, {})  # the parts have given these very groups their settings

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all groups, in which gradients are in place."""
        assert closure is None, "gradients are in place"
        for is_muon, part in self._parts.items():  # a restored state is in other groups
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is is_muon]
            part.state = self.state
            part.step()
        return None
