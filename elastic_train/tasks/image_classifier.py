"""Image classification over Parquet rows of encoded images, by a small ResNet or a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.arrow.numbers import plain_name
from elastic_train.data.dataset.encoded_images import (
    MOST_MEGAPIXELS,
    TooLargeError,
    decoding_errors,
    reason,
    undecodable,
    with_remedy,
)
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.decoder.as_transformers import save_folder
from elastic_train.tasks.images.options import Augmentation, Normalisation
from elastic_train.tasks.models.adapters import Adapter, frozen_groups, heads_of, leave_base_out
from elastic_train.tasks.models.folder_weights import open_folder, runs_as_listed
from elastic_train.tasks.models.hugging_face import Kind, Source
from elastic_train.tasks.rows.classes import (
    check_columns,
    check_label,
    check_same_classes,
    class_names,
    count_classes,
    label_of,
    labels_of,
    predicted,
    unfit_labels,
)
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup

if TYPE_CHECKING:
    from torchmetrics import Metric

_STAGES = 3


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """Channels of the image and of the first stage, and blocks per stage."""

    num_classes: int
    channels: int = 3
    width: int = 16
    depth: int = 1

    def __post_init__(self) -> None:
        for name in ("num_classes", "channels", "width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, inside a residual."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the stage's channels, and half the sides with stride 2."""
        inner = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(inner)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Classify images: logits (batch, num_classes) from (batch, channels, height, width).

    Architecture: He et al. (Deep residual learning for image recognition, 2016), section 4.2, for small images: a 3
    x 3 convolution, three stages of `depth` blocks, of which the second and third halve the image and double the
    channels, the mean over positions, and a linear layer: 6 * depth + 2 layers. Shortcuts that change shape are 1 x
    1 convolutions.
    """

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape.channels, shape.width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(shape.width)
        widths = [shape.width, *(shape.width << stage for stage in range(_STAGES) for _ in range(shape.depth))]
        strides = [1 + (at > 0 and at % shape.depth == 0) for at in range(_STAGES * shape.depth)]
        self.blocks = nn.ModuleList(
            Block(before, after, stride) for before, after, stride in zip(widths, widths[1:], strides, strict=False)
        )
        self.head = nn.Linear(widths[-1], shape.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


_SIZES = [each.name for each in fields(ResNetShape) if each.name != "num_classes"]
_NUM_DRAWS = 5
_REMEDY = "replace it by a whole PNG or JPEG, or leave the row out, and build the manifest again"


class ImageClassifier:
    """Classify images into the classes of the label column; the model sees `size` x `size` pixels.

    `model` gives the sizes of the package's own ResNet (channels, width, depth). `hf` selects a model of transformers
    instead: {path: its local folder}, or {config: {model_type: resnet, …}} for random initial weights; the head of a
    folder with other classes is initialised randomly. `channels` is 3 for colour and 1 for grey. With `lora`, values of
    peft's LoraConfig, adapters of a folder's model and its head are trained, and the rest is frozen; `adapter` is for
    other types of peft: {type: ia3, …}.

    Training images are cropped (`crop`: resized, shift or centre; `scale`, `shift`), flipped, and mixed (`mixup`,
    `cutmix`) by the samples' own random numbers; validation uses the centre. `mean` and `std` normalise pixels in [0,
    1]; by default the model folder's, or ImageNet's. Images of more than `max_megapixels` are rejected.
    """

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        model: Mapping[str, Any] | None = None,
        hf: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Any] | None = None,
        image: str = "image",
        label: str | None = None,
        crop: str = "resized",
        scale: Sequence[float] = (0.08, 1.0),
        shift: int = 4,
        flip: bool = True,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        max_megapixels: float = MOST_MEGAPIXELS,
    ) -> None:
        if not max_megapixels > 0:
            raise ValueError(f"max_megapixels must be greater than 0, not {max_megapixels}")
        self._most_megapixels = max_megapixels
        if model is not None and hf is not None:
            raise ValueError("give model, the sizes of a small ResNet, or hf, a model of transformers, not both")
        if size < 1 or channels not in (1, 3):
            raise ValueError(f"size must be at least 1 and channels 1 or 3, not {size} and {channels}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and less than 1, not {label_smoothing}")
        for name in model or {}:
            if name not in _SIZES:
                raise ValueError(f"model has no '{name}'{did_you_mean(nearest(name, _SIZES))}")
        self._sizes = {"channels": channels, **(model or {})}
        ResNetShape(num_classes=2, **self._sizes)  # rejects invalid sizes
        self.source = None if hf is None else Source.of(hf)
        self.adapter = Adapter.of(self.source, lora, adapter)
        self.size, self.channels, self.label_smoothing = size, channels, label_smoothing
        self.augmentation = Augmentation(crop, (scale[0], scale[-1]), shift, flip, mixup, cutmix)
        self.normalisation = Normalisation.of(channels, mean, std, self.source.path if self.source else None)
        self._image, self._label, self._has_labels = image, label, True

    def prepare(self, manifest: Manifest) -> None:
        with needed_for("training on images"):
            import PIL  # noqa: F401 - refused here, not by a thread that collates
        self._label = label_of(manifest, self._label)
        self._check_columns(manifest)
        self._known, self.num_classes = manifest, count_classes(manifest, self._label)
        if self.source is not None:
            self.config = self._checked_config(self.source, manifest)

    def _checked_config(self, source: Source, manifest: Manifest) -> Any:
        """Return the model's configuration with these classes; reject one for images of another kind."""
        names = manifest.labels if manifest.labels and len(manifest.labels) == self.num_classes else None
        named = dict(enumerate(names or map(str, range(self.num_classes))))
        config = source.load_config(id2label=named, label2id={name: number for number, name in named.items()})
        for key, mine, what in (("num_channels", self.channels, "channels"), ("image_size", self.size, "size")):
            theirs = getattr(config, key, mine)
            if theirs not in (mine, [mine, mine], (mine, mine)):
                raise ConfigError(
                    f"task.params.{what}: {mine}, but the model ({type(config).__name__}) has {key} {theirs}: set "
                    f"{what} to that, or {key} in hf.config to this"
                )
        return config

    def check_held_out(self, manifest: Manifest) -> None:
        self._check_columns(manifest)
        if self._has_labels:
            check_same_classes(self._known, manifest, str(self._label), self.num_classes)

    def _check_columns(self, manifest: Manifest) -> None:
        """Reject a dataset that lacks a column, or has it in an unusable type."""
        image, label = self._image, str(self._label)
        check_columns(manifest, *([image, label] if self._has_labels else [image]))
        if plain_name(manifest.columns[image]) not in ("binary", "large_binary"):
            raise DataError(
                f"{manifest.url}: column '{image}' is {manifest.columns[image]}, not the bytes of encoded images; make "
                "the dataset with `elastic-train data import images`"
            )
        if self._has_labels:
            check_label(manifest, label)

    def columns(self) -> Sequence[str]:
        assert self._label is not None, "prepare comes first"
        return [self._image, self._label] if self._has_labels else [self._image]

    def inspected_columns(self) -> Sequence[str]:
        return [self._image, str(self._label)]

    def unfit_rows(self, rows: pa.Table) -> Sequence[tuple[int, str]]:
        found = undecodable(rows.column(self._image), self._most_megapixels)
        remedy = f"{_REMEDY} (`elastic-train data verify --images {self._image}` lists all such rows)"
        images = [(row, f"column '{self._image}' {with_remedy(why, remedy)}") for row, why in found]
        return sorted([*images, *unfit_labels(rows, str(self._label), self.num_classes)])

    def build_model(self) -> nn.Module:
        if self.source is None:
            return SmallResNet(ResNetShape(num_classes=self.num_classes, **self._sizes))
        built: nn.Module = self.source.build(self._kind)
        if self.adapter is not None:
            built = self.adapter.attach(built, modules_to_save=heads_of(built))
            leave_base_out(built)
        return built

    def sketch_model(self) -> nn.Module | None:
        if self.source is None or self.adapter is not None:
            return None
        opened = open_folder(self.source, self._kind)
        if opened is None:
            return None
        model, self._first_weights = opened
        pixels = torch.zeros(1, self.channels, self.size, self.size)
        return model if runs_as_listed(model, pixel_values=pixels) else None

    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._first_weights)

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return () if self.adapter is None else frozen_groups(model)

    @property
    def _kind(self) -> Kind:
        return Kind("AutoModelForImageClassification", self.config, draws_head=True, attention=None)

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> Batch:
        from elastic_train.tasks.images.augmentation import draw_mixing

        label = np.zeros(len(ids), np.int64)
        if self._has_labels:
            label = labels_of(rows, ids, str(self._label), self.num_classes)
        batch = {"pixels": self._pixels(rows, draw), "label": label}
        if draw.is_training and self.augmentation.mixes:
            mixing = draw_mixing(draw, self.size, self.augmentation)
            batch |= {"blend": mixing.blend, "box": mixing.box, "share": mixing.share}
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _pixels(self, rows: pa.Table, draw: SampleRandom) -> npt.NDArray[np.uint8]:
        """Return (rows, channels, size, size); raise DataError with a sample that does not decode."""
        from elastic_train.tasks.images.augmentation import decode, view

        refused = decoding_errors()
        draws = draw.uniform("view", _NUM_DRAWS) if draw.is_training else [None] * len(draw.ids)
        pixels = np.empty((len(draw.ids), self.channels, self.size, self.size), dtype=np.uint8)
        for at, content in enumerate(rows.column(self._image).to_pylist()):
            try:
                pixels[at] = view(
                    decode(content or b"", self.channels, self._most_megapixels),
                    self.size,
                    self.augmentation,
                    draws[at],
                )
            except TooLargeError as error:
                raise DataError(f"sample {draw.ids[at]}: its image in column '{self._image}' {error}") from error
            except refused as error:
                raise DataError(
                    f"sample {draw.ids[at]}: its image in column '{self._image}' cannot be decoded ({reason(error)}); "
                    f"{_REMEDY} (`elastic-train data verify --images {self._image}` lists all such rows)"
                ) from error
        return pixels

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        images, label = self._normalised(batch["pixels"]), batch["label"]
        is_mixed = model.training and "share" in batch
        logits = self._logits(model, mixed(images, batch) if is_mixed else images)
        smoothing = self.label_smoothing if model.training else 0.0
        losses = F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)
        if is_mixed:
            other = F.cross_entropy(logits, label.roll(-1), reduction="none", label_smoothing=smoothing)
            losses = batch["share"] * losses + (1 - batch["share"]) * other
        return LaneLoss(losses.sum(), float(len(label)), logits.detach().softmax(dim=-1), label)

    def _normalised(self, pixels: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(each, device=pixels.device)[:, None, None] * 255
            for each in (self.normalisation.mean, self.normalisation.std)
        )
        return (pixels.float() - mean) / std

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        logits: Tensor = model(images) if self.source is None else model(pixel_values=images).logits
        return logits.float()

    def why_not_exported(self) -> str | None:
        own = "transformers does not know the package's own ResNet: use --to safetensors"
        return own if self.source is None else None

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        """Write a folder for transformers' AutoModelForImageClassification, including the image preprocessing."""
        save_folder(model, folder, is_merged=is_merged)
        self.normalisation.write(folder, self.size, self.augmentation.centre_share)

    def begin_predicting(self, manifest: Manifest) -> None:
        self._has_labels = False

    def predictions(self, loss: LaneLoss, batch: Batch) -> Mapping[str, Tensor | Sequence[str]]:
        assert loss.predictions is not None, "`loss` has returned probabilities"
        return predicted(loss.predictions, class_names(self._known, self.num_classes))

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.classification_metrics import classification_metrics

        return classification_metrics(class_names(self._known, self.num_classes))


def mixed(images: Tensor, batch: Batch) -> Tensor:
    """Mix each image with the next one of the micro-batch, the last with the first; the shape of `images`."""
    others, size = images.roll(-1, dims=0), images.shape[-1]
    blend, places = batch["blend"][:, None, None, None], torch.arange(size, device=images.device)
    top, left, bottom, right = batch["box"].T[:, :, None]
    is_down, is_across = (places >= top) & (places < bottom), (places >= left) & (places < right)
    is_covered = (is_down[:, :, None] & is_across[:, None, :])[:, None]
    return torch.where(is_covered, others, blend * images + (1 - blend) * others)
