"""The image classifier: what it refuses before training, its pixels and its loss, and its models."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, features

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.image_classifier import ImageClassifier, ResNetShape, SmallResNet, mixed

IDS = np.arange(70, 74)
TINY_RESNET = {
    "model_type": "resnet",
    "embedding_size": 4,
    "hidden_sizes": [4, 8],
    "depths": [1, 1],
    "layer_type": "basic",
}
TINY_VIT = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def image(seed: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(content, "png")
    return content.getvalue()


IMAGES = pa.array([image(seed) for seed in range(4)])
LABELS = pa.array([0, 1, 2, 1])
ROWS = pa.table({"image": IMAGES, "label": LABELS})


def described(folder: Path, columns: dict[str, pa.Array] | None = None, **facts: Any) -> Manifest:
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns or {"image": IMAGES, "label": LABELS}), folder / "a.parquet")
    return build_manifest(str(folder), **{"label_column": "label", **facts})


def prepared(manifest: Manifest, **params: Any) -> ImageClassifier:
    task = ImageClassifier(**{"size": 8, **params})
    task.prepare(manifest)
    return task


def drawn(*, is_training: bool = True, epoch: int = 0) -> SampleRandom:
    return SampleRandom(1, epoch, IDS, is_training)


def test_pixels_follow_from_the_samples_and_the_epoch(tmp_path: Path) -> None:
    """Of training; a validation sees the same whatever the numbers, and nothing is mixed in it."""
    task = prepared(described(tmp_path / "rows"), mixup=0.2)
    first = task.collate(ROWS, IDS, drawn())
    assert first["pixels"].shape == (4, 3, 8, 8) and first["pixels"].dtype == torch.uint8
    assert first["label"].tolist() == LABELS.to_pylist()
    alone = task.collate(ROWS.slice(2, 1), IDS[2:3], SampleRandom(1, 0, IDS[2:3]))
    assert alone["pixels"][0].equal(first["pixels"][2]) and alone["share"][0] == first["share"][2]
    assert not task.collate(ROWS, IDS, drawn(epoch=1))["pixels"].equal(first["pixels"])
    validated = [task.collate(ROWS, IDS, drawn(is_training=False, epoch=epoch)) for epoch in (0, 1)]
    assert set(validated[0]) == {"pixels", "label"}
    assert validated[0]["pixels"].equal(validated[1]["pixels"])


@pytest.mark.slow
def test_the_loss_is_the_sum_over_images(tmp_path: Path) -> None:
    task = prepared(described(tmp_path / "rows"))
    torch.manual_seed(1)
    model = task.build_model().eval()
    batch = task.collate(ROWS, IDS, drawn())
    loss = task.loss(model, batch)
    mean, std = (torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = F.cross_entropy(model((batch["pixels"] / 255 - mean) / std), batch["label"], reduction="sum")
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.weight == 4.0
    values = {}
    for name, metric in task.metrics().items():
        metric.update(loss.predictions, loss.targets)
        values[name] = float(metric.compute())
    assert set(values) == {"accuracy", "macro_f1", "auc"}


def test_mixed_images_have_mixed_labels(tmp_path: Path) -> None:
    """With a share of 1 nothing changes, with 0 an image and its label are the next one; no validation is mixed."""
    task = prepared(described(tmp_path / "rows"), cutmix=1.0, label_smoothing=0.1)
    batch = task.collate(ROWS, IDS, drawn())
    images = torch.randn(4, 3, 8, 8)
    none = {"blend": torch.ones(4), "box": torch.zeros(4, 4, dtype=torch.long), "share": torch.ones(4)}
    assert mixed(images, none).equal(images)
    assert mixed(images, {**none, "blend": torch.zeros(4)}).equal(images.roll(-1, 0))
    boxed = mixed(images, {**none, "box": torch.tensor([[1, 2, 4, 8]] * 4)})
    assert boxed[:, :, 1:4, 2:8].equal(images.roll(-1, 0)[:, :, 1:4, 2:8])
    boxed[:, :, 1:4, 2:8] = images[:, :, 1:4, 2:8]
    assert boxed.equal(images)
    torch.manual_seed(1)
    model = task.build_model().train()
    swapped = {**batch, **none, "blend": torch.zeros(4), "share": torch.zeros(4)}
    rolled = {"pixels": batch["pixels"].roll(-1, 0), "label": batch["label"].roll(-1), **none}
    assert task.loss(model, swapped).total.item() == pytest.approx(task.loss(model, rolled).total.item(), rel=1e-6)
    plain = ImageClassifier(size=8)
    whole = {"pixels": batch["pixels"], "label": batch["label"]}
    assert task.loss(model.eval(), batch).total.equal(plain.loss(model, whole).total)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": pa.array(["a.png"]), "label": pa.array([0])}, "column 'image' is string, not the bytes of encoded"),
        ({"photo": pa.array([b""]), "label": pa.array([0])}, "no column 'image'; it has photo, label"),
        ({"image": pa.array([b""]), "kind": pa.array([0])}, "no column 'label'"),
    ],
)
def test_columns_that_cannot_be_used_are_refused(tmp_path: Path, columns: dict[str, pa.Array], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(described(tmp_path / "rows", columns, label_column=None), label="label")


def test_labels_must_be_counted_and_known(tmp_path: Path) -> None:
    manifest = described(tmp_path / "rows", label_column=None)
    with pytest.raises(ConfigError, match=r"task\.params\.label: .* names no label column"):
        prepared(manifest)
    with pytest.raises(DataError, match="no labels were counted in column 'label'"):
        prepared(manifest, label="label")


def test_an_image_that_does_not_decode_is_named_by_its_sample(tmp_path: Path) -> None:
    task = prepared(described(tmp_path / "rows"))
    unknown = "it is in no format that Pillow knows"
    for wrong, why in (b"none", unknown), (None, unknown), (image(1)[:60], ""), (damaged_avif(), ""):
        rows = ROWS.set_column(0, "image", pa.array([*IMAGES.to_pylist()[:3], wrong]))
        with pytest.raises(DataError, match=rf"sample 73: its image in column 'image' cannot be decoded \({why}"):
            task.collate(rows, IDS, drawn())
        ((row, said),) = task.unfit_rows(rows)
        assert row == 3 and "0x" not in said
        assert "column 'image' holds no image" in said if wrong is None else f"can be decoded: {why}" in said


def damaged_avif() -> bytes:
    """Return what Pillow opens, and refuses to decode with a RuntimeError."""
    if not features.check("avif"):
        pytest.skip("this Pillow does not decode AVIF")
    content = io.BytesIO()
    Image.open(io.BytesIO(image(1))).save(content, "avif")
    damaged = bytearray(content.getvalue())
    at = damaged.index(b"mdat") + 4
    damaged[at:] = bytes(len(damaged) - at)
    return bytes(damaged)


def test_a_model_without_adapters_has_the_groups_that_its_optimizer_had_before(tmp_path: Path) -> None:
    """Parameters that a custom task freezes stay in the optimizer's state, so its commits load."""
    task = prepared(described(tmp_path / "rows"))
    model = task.build_model()
    for parameter in model.blocks.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    assert not task.parameter_groups(model)


@pytest.mark.parametrize(
    ("facts", "labels", "message"),
    [
        ({"labels": ("a", "b", "c")}, [0, 1, 2, 2], None),
        ({"labels": ("b", "a", "c")}, [0, 1, 2, 2], "its labels differ from those of"),
        ({}, [0, 1, 2, 3], "labels up to 3, but .* only 3 classes"),
    ],
)
def test_a_validation_set_of_other_classes_is_refused(
    tmp_path: Path, facts: dict[str, Any], labels: list[int], message: str | None
) -> None:
    task = prepared(described(tmp_path / "train", labels=("a", "b", "c")))
    other = described(tmp_path / "other", {"image": IMAGES, "label": pa.array(labels)}, **facts)
    if message is None:
        task.check_held_out(other)
        return
    with pytest.raises(DataError, match=message):
        task.check_held_out(other)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"channels": 4}, "channels 1 or 3"),
        ({"model": {"with": 3}}, "model has no 'with'; did you mean 'width'"),
        ({"model": {"width": 0}}, "width must be at least 1"),
        ({"model": {}, "hf": {}}, "not both"),
        ({"hf": {}}, "hf needs a path, or a config"),
        ({"label_smoothing": 1.0}, "label_smoothing must be"),
        ({"crop": "center"}, "did you mean 'centre'"),
    ],
)
def test_an_impossible_task_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageClassifier(**params)


def test_the_small_resnet_has_the_layers_it_is_named_after() -> None:
    """ResNet-8 by default; every stage halves the image, and any size of image is taken."""
    for depth, num_layers in ((1, 8), (3, 20)):
        model = SmallResNet(ResNetShape(num_classes=10, depth=depth))
        layers = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear) and "shortcut" not in name
        ]
        assert len(layers) == num_layers
        assert len(model.blocks) == 3 * depth
    assert model(torch.randn(2, 3, 9, 13)).shape == (2, 10)
    assert [block.conv_1.stride[0] for block in model.blocks] == [1, 1, 1, 2, 1, 1, 2, 1, 1]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("config", [TINY_RESNET, TINY_VIT], ids=["resnet", "vit"])
def test_models_of_transformers_classify(tmp_path: Path, config: dict[str, Any]) -> None:
    """From a configuration, and from a folder; of a folder for other classes the head is drawn, and the body kept.

    What was exported has the same bits, and its normalisation is taken. Nothing imports torchvision.
    """
    manifest = described(tmp_path / "rows", labels=("cat", "dog", "eel"))
    task = prepared(manifest, hf={"config": config}, mean=[0.1] * 3, std=[0.2] * 3)
    model = task.build_model()
    assert task.loss(model, task.collate(ROWS, IDS, drawn())).predictions.shape == (4, 3)  # type: ignore[union-attr]
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "eel"}
    task.export(model, tmp_path / "model", is_merged=False)
    for path, labels in ((tmp_path / "same", ("cat", "dog", "eel")), (tmp_path / "other", ("a", "b", "c", "d"))):
        of_folder = prepared(described(path, labels=labels), hf={"path": str(tmp_path / "model")})
        assert of_folder.normalisation.mean == (0.1, 0.1, 0.1)
        loaded, kept = of_folder.build_model().state_dict(), model.state_dict()
        is_same = {name: name in kept and loaded[name].equal(kept[name]) for name in loaded}
        assert {name for name in is_same if not is_same[name]} <= {
            name for name in is_same if name.startswith("classifier.")
        }
        assert all(is_same.values()) == (len(labels) == 3)
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    why = prepared(manifest).why_not_exported()
    assert why is not None and why.startswith("transformers does not know") and why.endswith(": use --to safetensors")


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("saved", [["layernorm"], None])
def test_the_head_is_trained_beside_the_modules_that_a_user_names(tmp_path: Path, saved: list[str] | None) -> None:
    """It was drawn, and would be in no commit otherwise."""
    pytest.importorskip("peft")
    whole = prepared(described(tmp_path / "three", labels=("a", "b", "c")), hf={"config": TINY_VIT})
    whole.export(whole.build_model(), tmp_path / "vit", is_merged=False)
    given = {"r": 2, "target_modules": "all-linear", "modules_to_save": saved}
    task = prepared(
        described(tmp_path / "four", labels=("a", "b", "c", "d")), hf={"path": str(tmp_path / "vit")}, lora=given
    )
    model = task.build_model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name.split(".modules_to_save.")[0].rpartition(".")[2] for name in trained if "modules_to_save" in name}
    assert kept == {"classifier", *(saved or [])}
    assert trained <= model.state_dict().keys()


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_images_of_another_size_than_the_models_are_refused(tmp_path: Path) -> None:
    manifest = described(tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"task\.params\.size: 16, but the model \(ViTConfig\) has image_size 8"):
        prepared(manifest, hf={"config": TINY_VIT}, size=16)
    with pytest.raises(ConfigError, match=r"task\.params\.channels: 1, but the model .* has num_channels 3"):
        prepared(manifest, hf={"config": TINY_VIT}, channels=1)
