"""The health check of a device: a sound one has the known bits in all types, and its memory keeps what is written."""

from __future__ import annotations

import torch

from elastic_train.health.examinations import MOST, examine_memory, examine_products, room


def test_a_sound_device_is_fit(device: str) -> None:
    """Also in deterministic mode, in which jobs train."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        where = torch.device(device)
        findings = [*examine_products(where, tuple(MOST)), *examine_memory(where, room(where, 1), budget_s=60.0)]
    finally:
        torch.set_deterministic_debug_mode(before)
    assert [finding.level for finding in findings] == ["ok", "ok"], findings
