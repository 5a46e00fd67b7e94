"""Tasks whose import makes groups treat a process's weights and gradients as tensors of a fake device."""

from __future__ import annotations

from chaos.tasks.paced_classifier import PacedClassifier
from chaos.tasks.paced_language import PacedLanguage
from elastic_train.world import forming
from tests.fake_device import FakeDevice

__all__ = ["PacedClassifier", "PacedLanguage"]
DEVICE = FakeDevice()
forming.device_of = lambda device, transport: DEVICE.seen()
