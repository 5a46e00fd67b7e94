"""The imports and cached facts of the process from which the tests' trainers and ranks are forked.

A trainer determines once per process what optimizers store and which modules a task consists of: a sixth of the
computation of a rank that trains for a few steps.
"""

import torch

import tests.conftest  # noqa: F401 - with all that most test modules import
from chaos.tasks.paced_classifier import PacedClassifier
from chaos.tasks.paced_language import PacedLanguage
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.sharded.elementwise import slots_of
from elastic_train.preload import import_common_models
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.task_source import source_of
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.tasks.witness import Witness
from tests.huge_pages import use_huge_pages


def _find_out() -> None:
    for kind in (CausalLM, TextClassifier, Witness, PacedClassifier, PacedLanguage):
        source_of(kind)
    config, device = OptimizerConfig(), torch.device("cpu")
    choice = choose(config)
    slots_of(choice.tried(), choice.make, device)
    for decay in (config.weight_decay, 0.0):
        group = {"params": [torch.nn.Parameter(torch.zeros(2, 2))], "weight_decay": decay}
        slots_of(choice.make([group]), choice.make, device)


_find_out()
import_common_models()
use_huge_pages()
