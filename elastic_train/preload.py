"""Import once, in a node's standby process, the modules that all of its forked workers need.

Facts about installed packages are looked up here as well. `prepare` gets the program's arguments and imports what only
some jobs need: transformers alone would be a fifth of all import time.
"""

import contextlib
import os
from collections.abc import Sequence

import pyarrow.compute  # noqa: F401 - the first cast of a column imports it
import torch._dynamo  # noqa: F401 - the first optimizer imports it

import elastic_train.cli.main
import elastic_train.tasks.causal_lm
import elastic_train.tasks.image_classifier
import elastic_train.tasks.language.metrics
import elastic_train.tasks.text_classifier
import elastic_train.training.run  # noqa: F401
from elastic_train.config import sources
from elastic_train.errors import ConfigError
from elastic_train.system.extras import version_of
from elastic_train.tasks.classification_metrics import classification_metrics
from elastic_train.tasks.task_source import task_imports

for _package in ("elastic-train", "torch", "numpy", "pyarrow", "transformers", "peft"):
    version_of(_package)
classification_metrics(["0", "1"])  # torchmetrics asks for packages when its first metric is made


def prepare(arguments: Sequence[str]) -> None:
    """Import what the job of a configuration needs beyond that; over the configuration come keys and their values."""
    config, *overrides = arguments or ("",)
    try:
        task = sources.load(config, environ=os.environ, arguments=overrides).task
    except ConfigError:
        return  # the worker reports it
    if task.params.get("hf") is not None or task_imports(task.path, "transformers"):
        import_common_models()


def import_common_models() -> None:
    """Import what is common to all of its models, if the `hf` extra is installed."""
    with contextlib.suppress(ImportError):
        import transformers.models.auto.modeling_auto  # noqa: F401
