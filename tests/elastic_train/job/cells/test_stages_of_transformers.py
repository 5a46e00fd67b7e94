"""Models of transformers in stages have the bits of the whole model, with each schedule and with dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_train.config.parallel import ParallelConfig
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.sharded.first_weights import without_memory
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models.folder_weights import open_folder
from elastic_train.tasks.models.hugging_face import Kind, Source
from tests.conftest import standby_with
from tests.elastic_train.job.cells.test_stages import Subject, of_rank
from tests.elastic_train.tasks.language_rows import GPT2, LLAMA, WITH_TRANSFORMERS
from tests.memory_machine import in_memory

pytestmark = WITH_TRANSFORMERS
UNTIED = {"vocab_size": 11, "tie_word_embeddings": False}
CONFIGS: tuple[dict[str, Any], ...] = (
    {**LLAMA, **UNTIED, "num_hidden_layers": 5, "attention_dropout": 0.3},
    {**GPT2, **UNTIED, "n_layer": 5, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
)

"""GPT-2 has learned positions and dropout before its layers, which the second stage must skip."""


def of_transformers(config: dict[str, Any]) -> Subject:
    task = CausalLM(hf={"config": config})
    source = Source.of({"config": config})
    return Subject(task, partial(source.build, Kind("AutoModelForCausalLM", source.load_config())))


def of_rank_with_transformers(rank: int, size: int, kind: str) -> None:
    for number, config in enumerate(CONFIGS):
        of_rank(rank, size, kind, partial(of_transformers, config), f"world-{number}")


@pytest.mark.parametrize(("size", "kind"), [(2, "1f1b"), (3, "gpipe"), (2, "interleaved")])
def test_stages_of_transformers_compute_the_bits_of_the_whole(size: int, kind: str) -> None:
    """Losses and gradients of lanes with several shapes."""
    standby_with("tests.preload_transformers")
    in_memory(of_rank_with_transformers, size, kind)


def pages_of_folders() -> int:
    """Return the number of bytes of weight files that this process has mapped."""
    found, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            is_weights = words[-1].endswith(".safetensors")
        elif is_weights and words[0] == "Rss:":
            found += 1024 * int(words[1])
    return found


def test_a_stage_reads_its_own_weights_of_a_folder(tmp_path: Path) -> None:
    """The folder's type may differ from the trained type."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 3}
    config = transformers.AutoConfig.for_model(**{**LLAMA, **sizes, "tie_word_embeddings": False})
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    task, parallel = CausalLM(hf={"path": str(tmp_path)}), ParallelConfig(pipeline=3)
    source = Source.of({"path": str(tmp_path)})
    kind = Kind("AutoModelForCausalLM", source.load_config())
    whole = source.build(kind)
    size = (tmp_path / "model.safetensors").stat().st_size
    for place in range(3):
        opened = open_folder(source, kind)
        assert opened is not None
        model = without_memory(opened[0], torch.device("cpu"))
        plan = cell_plan_of(task, model, parallel)
        assert plan is not None
        most = 0

        def counted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal most
            for one in weights:
                yield one
                most = max(most, pages_of_folders())

        CutModel(model, plan, parallel.cell, CellLinks()).take_place(place, counted(opened[1]))
        own = {name: one for name, one in model.named_parameters() if one.numel()}
        assert all(one.equal(whole.get_parameter(name)) for name, one in own.items())
        assert most < 0.7 * size, "a third is its own, and a page brings some around it"
