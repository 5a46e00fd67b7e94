"""What a worker imports before it trains; a node's standby process imports it once, for all workers that it forks."""

import pyarrow.compute  # noqa: F401 - the first cast of a column imports it
import torch._dynamo  # noqa: F401 - the first optimizer imports it

import elastic_train.cli.main
import elastic_train.tasks.causal_lm
import elastic_train.tasks.classification_metrics
import elastic_train.tasks.image_classifier
import elastic_train.tasks.language_metrics
import elastic_train.tasks.text_classifier
import elastic_train.training.run  # noqa: F401
