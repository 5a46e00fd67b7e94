"""What a worker imports before it trains; a node's standby process imports it once, for all workers that it forks.

So it does with what every worker would find out about installed packages.
"""

import contextlib

import pyarrow.compute  # noqa: F401 - the first cast of a column imports it
import torch._dynamo  # noqa: F401 - the first optimizer imports it

import elastic_train.cli.main
import elastic_train.tasks.causal_lm
import elastic_train.tasks.image_classifier
import elastic_train.tasks.language_metrics
import elastic_train.tasks.text_classifier
import elastic_train.training.run  # noqa: F401
from elastic_train.system.extras import version_of
from elastic_train.tasks.classification_metrics import classification_metrics

with contextlib.suppress(ImportError):  # the `hf` extra, whose tasks would import it in every worker
    import transformers.models.auto.modeling_auto  # noqa: F401
for _package in ("elastic-train", "torch", "numpy", "pyarrow", "transformers", "peft"):
    version_of(_package)
classification_metrics(num_classes=2)  # torchmetrics asks for packages when its first metric is made
