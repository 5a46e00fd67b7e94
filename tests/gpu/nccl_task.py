"""Tasks whose import connects ranks that share a device by NCCL, for which a job takes one device a rank.

NCCL lets them where they look like ranks of different hosts. Without a device gloo connects them, as ever.
"""

from __future__ import annotations

import os

import torch

from chaos.tasks.paced_classifier import PacedClassifier
from chaos.tasks.paced_language import PacedLanguage
from elastic_train.parallel.devices.device import Device, device_of
from elastic_train.world import forming

__all__ = ["PacedClassifier", "PacedLanguage"]


def connected_by_nccl(device: torch.device, transport: str) -> Device:
    os.environ["NCCL_HOSTID"] = f"host-{os.getpid()}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return device_of(device, "auto")


forming.device_of = connected_by_nccl
