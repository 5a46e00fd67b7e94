"""Elastic, fault-tolerant training: every sample counts once, and the weights do not depend on what broke.

    import elastic_train as et

The names in `__all__` are the public interface; every other module may change with any version. They are loaded on
first use (PEP 562), so the import itself loads neither torch nor numpy nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_train.checkpoint.commits.reader import discover, read_state
    from elastic_train.checkpoint.commits.record import CommitRecord
    from elastic_train.checkpoint.commits.retention_policies import holding
    from elastic_train.checkpoint.stores.open import open_store
    from elastic_train.config.schema import Config
    from elastic_train.config.sources import load_config
    from elastic_train.core.accounting import CoverageSums
    from elastic_train.core.lanes import owned_lanes
    from elastic_train.core.order import Cursor, Order
    from elastic_train.data.dataset.manifest import Manifest, build_manifest, load_manifest
    from elastic_train.data.loading.lane_batch import LaneBatch
    from elastic_train.data.loading.loader import LaneLoader
    from elastic_train.data.loading.reader import Reader
    from elastic_train.errors import (
        ConfigError,
        DataError,
        ElasticTrainError,
        Preempted,
        ResultError,
        StorageError,
    )
    from elastic_train.launch.ray_trainer import ElasticTrainer
    from elastic_train.tasks.task import LaneLoss, ParameterGroup, Task
    from elastic_train.training.result import TrainResult
    from elastic_train.training.run import train

__all__ = [
    "CommitRecord",
    "Config",
    "ConfigError",
    "CoverageSums",
    "Cursor",
    "DataError",
    "ElasticTrainError",
    "ElasticTrainer",
    "LaneBatch",
    "LaneLoader",
    "LaneLoss",
    "Manifest",
    "Order",
    "ParameterGroup",
    "Preempted",
    "Reader",
    "ResultError",
    "StorageError",
    "Task",
    "TrainResult",
    "build_manifest",
    "discover",
    "holding",
    "load_config",
    "load_manifest",
    "open_store",
    "owned_lanes",
    "read_state",
    "train",
]

_NAMES_OF = {
    "checkpoint.commits.reader": ("discover", "read_state"),
    "checkpoint.commits.record": ("CommitRecord",),
    "checkpoint.commits.retention_policies": ("holding",),
    "checkpoint.stores.open": ("open_store",),
    "config.schema": ("Config",),
    "config.sources": ("load_config",),
    "core.accounting": ("CoverageSums",),
    "core.lanes": ("owned_lanes",),
    "core.order": ("Cursor", "Order"),
    "data.dataset.manifest": ("Manifest", "build_manifest", "load_manifest"),
    "data.loading.lane_batch": ("LaneBatch",),
    "data.loading.loader": ("LaneLoader",),
    "data.loading.reader": ("Reader",),
    "errors": ("ConfigError", "DataError", "ElasticTrainError", "Preempted", "ResultError", "StorageError"),
    "launch.ray_trainer": ("ElasticTrainer",),
    "tasks.task": ("LaneLoss", "ParameterGroup", "Task"),
    "training.result": ("TrainResult",),
    "training.run": ("train",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it, once."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.errors").show_uncaught()
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
