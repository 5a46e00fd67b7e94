"""Decode and augment images: crops, flips, mixup and CutMix, by the samples' own random numbers.

Pillow crops and scales an image in one integer step, so every machine with the same Pillow gets the same pixels. Random
choices depend on seed, epoch and sample id only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.dataset.encoded_images import MOST_MEGAPIXELS, in_mode, open_image
from elastic_train.tasks.images.options import Augmentation

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]
Draws = npt.NDArray[np.float64]

_RATIO = 4 / 3
_MODES = {1: "L", 3: "RGB"}


def decode(content: bytes, channels: int, most_megapixels: float = MOST_MEGAPIXELS) -> Image.Image:
    """Decode an image, turned upright, in grey or RGB; raise one of `decoding_errors`."""
    return in_mode(open_image(content, most_megapixels), _MODES[channels])


def view(image: Image.Image, size: int, how: Augmentation, draws: Draws | None) -> Pixels:
    """Return (channels, size, size) of an image: its centre, or the crop chosen by five numbers in [0, 1)."""
    if draws is None or how.crop != "resized":
        box = centre(image.size, how.centre_share)
    else:
        box = random_box(image.size, how.scale, draws[:4])
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    pixels = pixels.reshape(size, size, -1)
    if draws is not None and how.crop == "shift" and how.shift:
        pixels = shifted(pixels, how.shift, draws[:2])
    if draws is not None and how.flip and draws[4] < 0.5:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def centre(sides: tuple[int, int], share: float) -> Box:
    """Return the central square of an image of (width, height), with side `share` of the shorter one."""
    side = min(sides) * share
    left, top = (sides[0] - side) / 2, (sides[1] - side) / 2
    return left, top, left + side, top + side


def random_box(sides: tuple[int, int], scale: Sequence[float], draws: Draws) -> Box:
    """Return a random crop: its share of the area in `scale`, its aspect ratio from 3/4 to 4/3.

    As the random crops of Szegedy et al. (Going deeper with convolutions, 2015); sides that are too long are clipped.
    """
    area = sides[0] * sides[1] * (scale[0] + (scale[1] - scale[0]) * draws[0])
    ratio = _RATIO ** (2 * draws[1] - 1)
    width, height = min(sides[0], (area * ratio) ** 0.5), min(sides[1], (area / ratio) ** 0.5)
    left, top = (sides[0] - width) * draws[2], (sides[1] - height) * draws[3]
    return left, top, left + width, top + height


def shifted(pixels: Pixels, most: int, draws: Draws) -> Pixels:
    """Shift an image by up to `most` pixels each way; new pixels at the edges are black."""
    height, width = pixels.shape[:2]
    down, right = (int(draw * (2 * most + 1)) for draw in draws)
    padded = np.pad(pixels, ((most, most), (most, most), (0, 0)))
    return padded[down : down + height, right : right + width]


@dataclass(frozen=True, slots=True)
class Mixing:
    """Parameters for mixing each image of a micro-batch with the next one.

    `blend` (n,) is the weight of its own pixels, `box` (n, 4) the top, left, bottom and right of the region that the
    other one covers, `share` (n,) the weight of its own label.
    """

    blend: npt.NDArray[np.float32]
    box: npt.NDArray[np.int64]
    share: npt.NDArray[np.float32]


def draw_mixing(draw: SampleRandom, size: int, how: Augmentation) -> Mixing:
    """Draw mixup (Zhang et al. 2018), CutMix (Yun et al. 2019), or one of both per image if both are enabled.

    Weights follow a beta distribution with both parameters `mixup` or `cutmix`, from the sample's own generator.
    """
    num_images = len(draw.ids)
    blend, share = np.ones(num_images), np.ones(num_images)
    box = np.zeros((num_images, 4), dtype=np.int64)
    is_cut = draw.uniform("which mixing") < (0.5 if how.mixup and how.cutmix else float(how.cutmix > 0))
    centres = draw.uniform("cutmix", 2)
    for at in range(num_images):
        alpha = how.cutmix if is_cut[at] else how.mixup
        weight = draw.generator("mixing", at).beta(alpha, alpha)
        if not is_cut[at]:
            blend[at] = share[at] = weight
            continue
        half = size * (1 - weight) ** 0.5 / 2
        middle = np.floor(centres[at] * size)
        lo, hi = (np.clip(np.rint(middle + by), 0, size).astype(np.int64) for by in (-half, half))
        box[at] = (*lo, *hi)
        share[at] = 1 - float(np.prod(hi - lo)) / size**2
    return Mixing(blend.astype(np.float32), box, share.astype(np.float32))
