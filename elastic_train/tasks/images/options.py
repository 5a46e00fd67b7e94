"""Options of image augmentation and normalisation, validated without Pillow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.system.wording import did_you_mean, nearest

CROPS = ("resized", "shift", "centre")
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_GREY = ((0.5,), (0.5,))
_CENTRE = 224 / 256
_FILE = "preprocessor_config.json"
_BILINEAR = 2
"""Pillow's number."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Cropping, flipping and mixing of training images; validation uses the centre.

    `crop: resized` scales a random part of `scale` of the area; `shift` moves the image by up to `shift` pixels;
    `centre` is not random. `mixup` and `cutmix` are the parameters of their beta distributions, 0 for none.
    """

    crop: str = "resized"
    scale: tuple[float, float] = (0.08, 1.0)
    shift: int = 4
    flip: bool = True
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            meant = did_you_mean(nearest(self.crop, CROPS))
            raise ValueError(f"crop must be {', '.join(CROPS[:-1])} or {CROPS[-1]}, not {self.crop!r}{meant}")
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be two shares of the area, such as [0.08, 1], not {list(self.scale)}")
        for name in ("shift", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def centre_share(self) -> float:
        """Share of an image's shorter side that a validation uses: below 1 for models trained on resized crops."""
        return _CENTRE if self.crop == "resized" else 1.0


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Mean and standard deviation of each channel, for pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(
        cls, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None, folder: Path | None
    ) -> Normalisation:
        """Return the given values, else those of a model's folder, else ImageNet's (0.5 if grey); raise ValueError."""
        known = _of_folder(folder) if folder else None
        usual = known if known and len(known[0]) == channels else _IMAGENET if channels == 3 else _GREY
        chosen = cls(tuple(mean or usual[0]), tuple(std or usual[1]))
        if len(chosen.mean) != channels or len(chosen.std) != channels or min(chosen.std) <= 0:
            raise ValueError(f"mean and std must be {channels} numbers each, std above 0, not {mean} and {std}")
        return chosen

    def write(self, folder: Path, size: int, centre_share: float) -> None:
        """Write the image preprocessing of validation into the folder of a transformers model."""
        prepared = {
            "image_processor_type": "BitImageProcessor",  # crops at any size, unlike ConvNeXt's
            "do_resize": True,
            "size": {"shortest_edge": int(size / centre_share)},
            "resample": _BILINEAR,
            "do_center_crop": True,
            "crop_size": {"height": size, "width": size},
            "do_convert_rgb": len(self.mean) == 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.std,
        }
        (folder / _FILE).write_text(json.dumps(prepared, indent=2) + "\n")


def _of_folder(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    try:
        found = json.loads((folder / _FILE).read_text())
        return tuple(map(float, found["image_mean"])), tuple(map(float, found["image_std"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
