"""Packed documents, and masked tokens, in models of transformers: losses are transformers' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.errors import ConfigError
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models import own_attention
from elastic_train.tasks.models.packed_rows import depends_on_length
from tests.elastic_train.tasks.language_rows import WITH_TRANSFORMERS, described, lists
from tests.elastic_train.tasks.models.test_folder_weights import saved

pytestmark = WITH_TRANSFORMERS

V = 53
BASE: dict[str, Any] = {"vocab_size": V, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
BASE |= {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8}
BASE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_OLD = {"vocab_size": V, "n_layer": 2, "n_embd": 32, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
RIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "gemma2": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 40},
    "gpt2": {**_OLD, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "falcon": {**{name: BASE[name] for name in ("vocab_size", "hidden_size")}, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "alibi": True, "new_decoder_architecture": False},
    "bloom": {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": V, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "gptj": {**_OLD, "rotary_dim": 4},
}
REFUSED: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 4}
    | {"mamba_d_head": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"state_size": 4},
}

_LACKING = {
    "bamba": ["head_dim"],
    "qwen2": ["head_dim"],
    "lfm2": ["head_dim"],
    "mamba": ["head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"],
}


def config_of(kind: str, own: dict[str, Any]) -> dict[str, Any]:
    known = {} if "vocab_size" in own else BASE
    return {
        "model_type": kind,
        **{name: value for name, value in known.items() if name not in _LACKING.get(kind, ())},
        **own,
    }


def built(folder: Path, config: dict[str, Any], columns: dict[str, pa.Array]) -> tuple[CausalLM, Any]:
    task = CausalLM(hf={"config": config}, max_tokens=40)
    task.prepare(described(folder / "rows", columns))
    torch.manual_seed(1)
    return task, task.build_model().eval()


def own_loss(model: Any, row: list[int], mask: list[int] | None = None) -> float:
    read = torch.tensor(mask or [1] * len(row))
    named: dict[str, Tensor] = {} if mask is None else {"attention_mask": read[None]}
    logits = model(input_ids=torch.tensor(row)[None], use_cache=False, **named).logits[0]
    is_target = (read[1:] * read[:-1]) == 1
    return float(F.cross_entropy(logits[:-1][is_target], torch.tensor(row)[1:][is_target], reduction="sum"))


A, B = ([(7 * place + start) * place % V for place in range(1, 14)] for start in (3, 5))


@pytest.mark.parametrize("kind", RIGHT)
@torch.no_grad()
def test_each_document_has_the_loss_that_it_has_alone(tmp_path: Path, kind: str) -> None:
    """With full, sliding and chunked layers, ALiBi, and eager attention. The generator stays where it is."""
    packed = {"input_ids": lists(A + B), "document_ids": lists([7] * 13 + [5] * 13)}
    task, model = built(tmp_path, config_of(kind, RIGHT[kind]), packed)
    state = torch.get_rng_state()
    loss = float(task.loss(model, task.collate(pa.table(packed), np.arange(1))).total)
    assert loss == pytest.approx(own_loss(model, A) + own_loss(model, B), abs=4e-5)
    torch.manual_seed(1)
    task.build_model()
    assert torch.get_rng_state().equal(state)


MASKS = {"llama": "none", "gpt2": "none", "gemma3_text": "some", "llama4_text": "some", "falcon": "all"}


@pytest.mark.parametrize("kind", MASKS)
def test_full_layers_have_no_mask_where_a_trial_allows_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are those with masks, up to rounding; windows, and dropout of attention, keep theirs."""
    from transformers import masking_utils

    own = {**RIGHT[kind], **({"attn_pdrop": 0.1} if kind == "gpt2" else {})}
    packed = {"input_ids": lists(A + B), "document_ids": lists([7] * 13 + [5] * 13)}
    task, model = built(tmp_path, config_of(kind, own), packed)
    calls = list[tuple[int, ...]]()
    attend = own_attention.attend_documents
    monkeypatch.setattr(
        own_attention,
        "attend_documents",
        lambda query, *given: calls.append(tuple(query.shape)) or attend(query, *given),
    )
    batch, found = task.collate(pa.table(packed), np.arange(1)), []
    language_model: Any = task.language_model
    assert language_model._masks == MASKS[kind]
    looked = list[Tensor]()
    look = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda one: looked.append(one) or look(one))
    for _ in range(2):
        assert MASKS[kind] != "none" or not looked, "a GPU would be waited for"
        torch.manual_seed(2)
        total = task.loss(model.train(), batch).total
        found.append([total, *torch.autograd.grad(total, [one for one in model.parameters() if one.requires_grad])])
        language_model._masks = "all"
    assert len(calls) == (model.config.num_hidden_layers if MASKS[kind] == "none" else 0)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_folders_models_keep_documents_apart_whenever_they_are_built(tmp_path: Path) -> None:
    """Only the first one is tried; the second one is trained, and a third is built while weights are drawn."""
    folder = saved(tmp_path / "model", "AutoModelForCausalLM", config_of("llama", {}))
    packed = {"input_ids": lists(A + B), "document_ids": lists([7] * 13 + [5] * 13)}
    task = CausalLM(hf={"path": str(folder)}, max_tokens=40)
    task.prepare(described(tmp_path / "rows", packed))
    task.sketch_model()
    model: Any = task.sketch_model()
    model.load_state_dict(dict(task.initial_weights()), assign=True)
    task.sketch_model()
    loss = float(task.loss(model.eval(), task.collate(pa.table(packed), np.arange(1))).total)
    assert loss == pytest.approx(own_loss(model, A) + own_loss(model, B), abs=4e-5)


def test_a_model_whose_choice_of_tokens_depends_on_their_place_is_refused(tmp_path: Path) -> None:
    """Sparse attention to the best tokens, among equal ones of which the place decides; and chunks that masks shift."""
    assert depends_on_length(SimpleNamespace(index_topk=40), 40) == ""
    assert depends_on_length(SimpleNamespace(index_topk=30), 40).startswith("attends to the best tokens alone (index_t")
    packed = {"input_ids": lists(A + B), "document_ids": lists([7] * 13 + [5] * 13)}
    masked = {**packed, "attention_mask": lists(([0] * 3 + [1] * 10) * 2)}
    with pytest.raises(ConfigError, match=r"\(llama4_text\) cannot keep the documents of a row apart"):
        built(tmp_path / "chunks", config_of("llama4_text", RIGHT["llama4_text"]), masked)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_mixes_documents_is_refused(tmp_path: Path, kind: str) -> None:
    packed = {"input_ids": lists(A + B), "document_ids": lists([7] * 13 + [5] * 13)}
    with pytest.raises(ConfigError, match=rf"\({kind}\) cannot keep the documents of a row apart: a document's loss"):
        built(tmp_path / "packed", config_of(kind, REFUSED[kind]), packed)
    built(tmp_path / "plain", config_of(kind, REFUSED[kind]), {"input_ids": lists(A)})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mistral"])
@torch.no_grad()
def test_masked_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Positions go on over a hole, and an id that comes back is another document."""
    mask = [1] * 5 + [0] * 2 + [1] * 6
    holed = {"input_ids": lists(A), "attention_mask": lists(mask)}
    task, model = built(tmp_path / "a", config_of(kind, RIGHT[kind]), holed)
    loss = float(task.loss(model, task.collate(pa.table(holed), np.arange(1))).total)
    assert loss == pytest.approx(own_loss(model, A, mask), abs=4e-5)
    back = {"input_ids": lists(A), "document_ids": lists([5] * 5 + [7] * 4 + [5] * 4)}
    task, model = built(tmp_path / "b", config_of(kind, RIGHT[kind]), back)
    batch = task.collate(pa.table(back), np.arange(1))
    assert batch["positions"][0, :13].tolist() == [*range(5), *range(4), *range(4)]
    alone = own_loss(model, A[:5]) + own_loss(model, A[5:9]) + own_loss(model, A[9:])
    assert float(task.loss(model, batch).total) == pytest.approx(alone, abs=4e-5)


@pytest.mark.parametrize("error", [AssertionError("its own"), ZeroDivisionError("by 0"), ImportError("a kernel")])
def test_an_error_of_transformers_is_one_of_the_configuration(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a model is built, and while it is tried: it names the model and the reason."""

    def fail(*_: object, **__: object) -> None:
        raise error

    config, rows = config_of("llama", {}), {"input_ids": lists(A)}
    with monkeypatch.context() as patch:
        patch.setattr("transformers.LlamaForCausalLM.forward", fail)
        with pytest.raises(ConfigError, match=rf"LlamaForCausalLM \(llama\) cannot compute a row: {error}"):
            built(tmp_path / "tried", config, rows)
    monkeypatch.setattr("transformers.LlamaForCausalLM.__init__", fail)
    with pytest.raises(ConfigError, match=f"'llama'.*transformers cannot use it: {error}"):
        built(tmp_path / "built", config, rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_attention_is_the_one_that_is_asked_for(tmp_path: Path, attention: str) -> None:
    rows = {"input_ids": lists(A)}
    task = CausalLM(hf={"config": config_of("llama", {}), "attention": attention}, max_tokens=40)
    task.prepare(described(tmp_path / "rows", rows))
    model: Any = task.build_model()
    assert model.config._attn_implementation == attention
    with pytest.raises(ValueError, match=r"hf.attention must be sdpa, eager, flex, not 'flash'"):
        CausalLM(hf={"config": config_of("llama", {}), "attention": "flash"})
