"""The kinds of adapters, and those that are refused before training, with an alternative."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.config.schema import TaskConfig
from elastic_train.errors import ConfigError
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.image_classifier import ImageClassifier
from elastic_train.tasks.language.language_model import Logits
from elastic_train.tasks.models.adapters import Adapter, heads_of
from elastic_train.tasks.models.hugging_face import Source
from elastic_train.tasks.placements import Piece
from elastic_train.tasks.sequence_classifier import SequenceClassifier
from elastic_train.tasks.task import Task, load_task
from tests.elastic_train.tasks.language_rows import LLAMA, WITH_TRANSFORMERS, built, described, lists, prepared

FOLDER = {"path": "models/base"}


@pytest.mark.parametrize("task", [CausalLM, SequenceClassifier, ImageClassifier])
@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"lora": {"r": 2}, "adapter": {"type": "ia3"}}, "give lora, or adapter, of which LoRA is one type, not both"),
        ({"hf": {"config": {"model_type": "vit"}}, "adapter": {"type": "ia3"}}, "adapter needs hf.path: the base is"),
        ({"lora": True}, r"lora must be a mapping, such as {r: 8} .*, not True"),
        ({"adapter": "ia3"}, r"adapter must be a mapping, such as .*{type: ia3}, not 'ia3'"),
        ({"hf": "models/base"}, "hf must be a mapping, such as {path: FOLDER}, not 'models/base'"),
        ({"hf": {**FOLDER, "config": ["gpt2"]}}, r"hf.config must be a mapping, such as .*, not \['gpt2'\]"),
        ({"adapter": {"r": 2}}, "adapter.type must be one of lora, ia3, loha, lokr, ln_tuning.*, not None"),
        ({"adapter": {"type": "vera"}}, "adapter.type must be one of lora, .*, not 'vera'"),
        ({"adapter": {"type": "adalora"}}, "not 'adalora', since it moves ranks between layers after an update"),
        ({"adapter": {"type": "prefix_tuning"}}, "not 'prefix_tuning', since its keys and values go through"),
    ],
)
def test_what_is_no_adapter_is_refused(task: type[Task], params: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        task(**{"hf": FOLDER, **params})


@pytest.mark.parametrize("task", [SequenceClassifier, ImageClassifier])
def test_prompts_are_for_language_models(task: type[Task]) -> None:
    """With one a classifier would not see where a row ends."""
    with pytest.raises(ValueError, match="not 'p_tuning', since with a prompt a model sees embeddings"):
        task(hf=FOLDER, adapter={"type": "p_tuning", "num_virtual_tokens": 2})


def test_a_configuration_with_an_unfit_adapter_names_its_key() -> None:
    config = TaskConfig(
        path="elastic_train.tasks.causal_lm:CausalLM", params={"hf": FOLDER, "adapter": {"type": "lorra"}}
    )
    with pytest.raises(ConfigError, match=r"task.params: .*: adapter.type must be one of lora, ia3, .*prompt_tuning"):
        load_task(config)


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"type": "ia3", "r": 2}, "task.params.adapter: peft's IA3Config has no 'r'"),
        ({"type": "lora", "rr": 2}, "task.params.adapter: peft's LoraConfig has no 'rr'; did you mean 'r'"),
        ({"type": "lora", "init_lora_weights": "pissa"}, "init_lora_weights: pissa changes the base's own weights"),
        ({"type": "lora", "modules_to_save": "norm"}, "modules_to_save must be a list of modules, not 'norm'"),
        (
            {"type": "prompt_tuning", "num_virtual_tokens": 2, "prompt_tuning_init": "TEXT"}
            | {"prompt_tuning_init_text": "Classify:", "tokenizer_name_or_path": "some/model"},
            "prompt_tuning_init: TEXT needs tokenizer_name_or_path, a local folder .*, and 'some/model' is not one",
        ),
        ({"type": "lora", "target_modules": ["layer"]}, r"the base has BatchNorm \('norm'\), whose statistics move"),
    ],
)
def test_what_peft_or_a_base_cannot_do_is_refused(values: dict[str, Any], why: str) -> None:
    pytest.importorskip("peft")
    adapter = Adapter.of(Source(Path("models/base")), None, values, takes_prompts=True)
    assert adapter is not None
    with pytest.raises(ConfigError, match=why):
        adapter.attach(WithBatchNorm(), modules_to_save=["layer"])


@pytest.mark.parametrize("num_tokens", [None, "abc", "8", 0, True, 2.0])
def test_a_prompt_has_a_whole_number_of_tokens(num_tokens: object) -> None:
    for given in ({"num_virtual_tokens": num_tokens}, {}):
        with pytest.raises(ValueError, match="prompt_tuning needs num_virtual_tokens, a whole number of at least 1"):
            CausalLM(hf=FOLDER, adapter={"type": "prompt_tuning", **given})


SMALL: dict[str, Any] = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "intermediate_size": 8}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2}
TOWERS = {"vision_config": SMALL, "text_config": {**SMALL, "vocab_size": 40}}
HEADS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("vit", "ViTForImageClassification", SMALL, ["classifier"]),
    ("clip", "CLIPForImageClassification", TOWERS, ["classifier"]),
    ("siglip", "SiglipForImageClassification", TOWERS, ["classifier"]),
    ("deit", "DeiTForImageClassificationWithTeacher", SMALL, ["cls_classifier", "distillation_classifier"]),
    ("swin", "SwinForImageClassification", {"depths": [1], "num_heads": [2], "embed_dim": 8}, ["classifier"]),
    (
        "perceiver",
        "PerceiverForImageClassificationLearned",
        {"num_latents": 2, "d_latents": 8, "d_model": 8, "num_blocks": 1, "num_self_attends_per_block": 1},
        ["perceiver.decoder.decoder.final_layer"],
    ),
    ("poolformer", "PoolFormerForImageClassification", {}, ["classifier"]),
]
TARGETS = {kind: ["query", "key", "value", "q_proj", "v_proj"] for kind, *_ in HEADS} | {"poolformer": ["conv1"]}


class TestHeads:
    pytestmark = WITH_TRANSFORMERS

    @pytest.mark.parametrize(("kind", "name", "sizes", "heads"), HEADS, ids=[each[0] for each in HEADS])
    def test_the_head_is_what_depends_on_the_classes(
        self, kind: str, name: str, sizes: dict[str, Any], heads: list[str]
    ) -> None:
        """And peft trains it alone beside the adapters."""
        import transformers

        pytest.importorskip("peft")
        config = transformers.AutoConfig.for_model(kind, num_labels=3, **sizes)
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
            assert heads_of(model) == heads
            adapter = Adapter.of(Source(Path("models/base")), {"r": 2, "target_modules": TARGETS[kind]}, None)
            assert adapter is not None
            adapted = adapter.attach(model, modules_to_save=heads)
        trained = [one for one, parameter in adapted.named_parameters() if parameter.requires_grad]
        whole = {one.partition(".modules_to_save.")[0] for one in trained if "lora_" not in one}
        assert whole == {f"base_model.model.{head}" for head in heads}
        assert any("lora_" in one for one in trained)

    def test_a_model_without_a_head_is_refused(self) -> None:
        import transformers

        sizes = {**SMALL, "num_labels": 3}
        model = transformers.ViTModel(transformers.AutoConfig.for_model("vit", **sizes))
        with pytest.raises(ConfigError, match=r"no weights of ViTModel change with the number of classes.*: train the"):
            heads_of(model)

    def test_a_head_whose_name_others_end_with_is_refused(self) -> None:
        import transformers

        class Classifier(transformers.ViTForImageClassification):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.pre_classifier = nn.Linear(8, 8)

        model = Classifier(transformers.AutoConfig.for_model("vit", **SMALL))
        with pytest.raises(
            ConfigError, match="the head of Classifier is 'classifier', and peft takes 'pre_classifier'"
        ):
            heads_of(model)


class TestPrompts:
    pytestmark = WITH_TRANSFORMERS

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path: Path) -> None:
        import transformers

        sizes = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
        made = transformers.AutoConfig.for_model("llama", **sizes, num_hidden_layers=1)
        values = {"type": "prompt_tuning", "num_virtual_tokens": 2, "prompt_tuning_init": "TEXT"}
        values |= {"prompt_tuning_init_text": "Classify:", "tokenizer_name_or_path": str(tmp_path)}
        adapter = Adapter.of(Source(Path("models/base")), None, values, takes_prompts=True)
        assert adapter is not None
        with pytest.raises(ConfigError, match=r"task\.params\.adapter: peft cannot use"):
            adapter.attach(transformers.AutoModelForCausalLM.from_config(made), task_type="CAUSAL_LM")

    def test_a_prompt_is_for_rows_of_one_document(self, tmp_path: Path) -> None:
        """And takes positions of the model's."""
        import transformers

        made = transformers.AutoConfig.for_model(
            "llama", vocab_size=40, hidden_size=16, num_attention_heads=2, max_position_embeddings=20
        )
        made.save_pretrained(tmp_path / "base")
        columns = {"input_ids": lists([5, 6, 7]), "document_ids": lists([0, 0, 1])}
        manifest = described(tmp_path / "rows", columns)
        prompt = {"type": "prompt_tuning", "num_virtual_tokens": 5}
        given = {"hf": {"path": str(tmp_path / "base")}, "adapter": prompt}
        with pytest.raises(ConfigError, match="set these to false, or use another type"):
            CausalLM(max_tokens=15, **given).prepare(manifest)
        CausalLM(max_tokens=15, document_ids=False, **given).prepare(manifest)
        with pytest.raises(ConfigError, match=r"the model .* has 20 positions"):
            CausalLM(max_tokens=16, document_ids=False, **given).prepare(manifest)

    def test_logits_are_those_of_a_rows_own_tokens(self, tmp_path: Path) -> None:
        """One that is the embeddings of three tokens computes what the model does after these."""
        import transformers

        torch.manual_seed(1)
        sizes = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
        made = transformers.AutoConfig.for_model("llama", **sizes, num_hidden_layers=2, intermediate_size=24)
        base = transformers.AutoModelForCausalLM.from_config(made)
        base.save_pretrained(tmp_path / "base")
        task = CausalLM(hf={"path": str(tmp_path / "base")}, adapter={"type": "prompt_tuning", "num_virtual_tokens": 3})
        task.prepare(described(tmp_path / "rows", {"input_ids": lists([5, 6, 7])}))
        model = task.build_model().eval()
        weight = model.get_parameter("prompt_encoder.default.embedding.weight")
        with torch.no_grad():
            weight.copy_(base.get_input_embeddings().weight[[8, 9, 10]])
            expected = base.eval()(input_ids=torch.tensor([[8, 9, 10, 5, 6, 7]])).logits[:, 3:]
            found = task.language_model.run(model, {"tokens": torch.tensor([[5, 6, 7]])}, Piece())
        assert isinstance(found, Logits)
        torch.testing.assert_close(found.values, expected)


@pytest.mark.slow
def test_an_adapter_is_not_exported_alone_if_its_base_is_changed_by_the_configuration(tmp_path: Path) -> None:
    """Whoever loads it takes the folder's own configuration; dropouts do not matter then."""
    pytest.importorskip("peft")
    built(LLAMA).save_pretrained(tmp_path / "base")
    manifest = described(tmp_path / "rows", {"input_ids": lists([1, 2, 3])})
    changes: tuple[dict[str, Any], ...] = ({"attention_dropout": 0.1}, {"num_hidden_layers": 1})
    for number, change in enumerate(changes):
        hf = {"path": str(tmp_path / "base"), "config": change}
        task = prepared(manifest, hf=hf, lora={"r": 2, "target_modules": ["q_proj"]})
        model, folder = task.build_model(), tmp_path / str(number)
        folder.mkdir()
        if "attention_dropout" in change:
            task.export(model, folder, is_merged=False)
            continue
        with pytest.raises(ConfigError, match="its base as the folder has it, without num_hidden_layers: export with"):
            task.export(model, folder, is_merged=False)
        task.export(model, folder, is_merged=True)
        assert (folder / "model.safetensors").is_file()
