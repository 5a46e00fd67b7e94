"""Augmentation: what an image becomes follows from its sample's own draws, and nothing is drawn in a validation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.dataset.encoded_images import why_undecodable
from elastic_train.tasks.images.augmentation import Pixels, centre, decode, draw_mixing, random_box, shifted, view
from elastic_train.tasks.images.options import Augmentation, Normalisation

SHARE = st.floats(0, 1, exclude_max=True)


def ramp(width: int, height: int) -> Image.Image:
    """Return an image whose red grows to the right, and whose green grows downwards."""
    down, right = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([right * 2, down * 2, np.zeros_like(down)], axis=2).astype(np.uint8))


def seen(image: Image.Image, draws: list[float] | None, size: int = 8, **how: Any) -> Pixels:
    return view(image, size, Augmentation(**how), None if draws is None else np.array(draws))


@given(st.integers(1, 300), st.integers(1, 300), st.tuples(SHARE, SHARE, SHARE, SHARE), SHARE)
def test_a_random_box_is_in_the_image(width: int, height: int, draws: tuple[float, ...], least: float) -> None:
    left, top, right, bottom = random_box((width, height), (max(0.01, least), 1.0), np.array(draws))
    assert -1e-9 <= left < right <= width + 1e-9 and -1e-9 <= top < bottom <= height + 1e-9


def test_the_area_of_a_random_box_is_what_was_drawn() -> None:
    left, top, right, bottom = random_box((100, 100), (0.2, 0.4), np.array([0.5, 0.25, 0.0, 0.99999]))
    assert (right - left) * (bottom - top) == pytest.approx(0.3 * 100 * 100)
    assert (right - left) / (bottom - top) == pytest.approx((4 / 3) ** -0.5)
    assert left == 0 and bottom == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize(("format_", "orientation"), [("png", 1), ("tiff", 1), ("tiff", 6)])
def test_of_16_bits_the_upper_ones_are_seen(format_: str, orientation: int) -> None:
    """Pillow clips values above 255 of 65,535 to white."""
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(levels * 257).save(content := io.BytesIO(), format_, exif=exif)
    upright = levels if orientation == 1 else np.rot90(levels, -1)
    for channels in (1, 3):
        pixels = np.asarray(decode(content.getvalue(), channels)).reshape(16, 16, channels)
        assert (pixels == upright[:, :, None]).all()
    assert why_undecodable(content.getvalue()) is None


def test_pixels_of_no_known_range_are_refused() -> None:
    """At import, and before the first step: they were all black, or all white."""
    for kind in (np.float32, np.int32):
        Image.fromarray(np.ones((4, 4), kind)).save(content := io.BytesIO(), "tiff")
        assert "convert it to 8 or 16 bits" in str(why_undecodable(content.getvalue()))
        with pytest.raises(ValueError, match="convert it"):
            decode(content.getvalue(), 3)


def test_a_validation_sees_the_centre() -> None:
    """Of a square from the middle, all of it, or the share that models trained on random parts expect."""
    assert centre((100, 60), 1.0) == (20, 0, 80, 60)
    assert centre((256, 256), 224 / 256) == (16, 16, 240, 240)
    image = ramp(100, 60)
    whole = seen(image, None, 60, crop="shift")
    assert whole.shape == (3, 60, 60)
    assert whole[0, 0, 0] == 40 and whole[1, 0, 0] == 0
    part = seen(image, None, 30, crop="resized")
    assert whole[0, 0, 0] < part[0, 0, 0] < part[0, 0, -1] < whole[0, 0, -1]


def test_flips_and_shifts_move_pixels() -> None:
    image = ramp(8, 8)
    plain = seen(image, [0.5, 0.5, 0, 0, 0.9], crop="shift", shift=2)
    assert (plain == seen(image, None, crop="shift")).all()
    assert (seen(image, [0.5, 0.5, 0, 0, 0.4], crop="shift", shift=2) == plain[:, :, ::-1]).all()
    assert (seen(image, [0.5, 0.5, 0, 0, 0.4], crop="shift", shift=2, flip=False) == plain).all()
    moved = shifted(np.asarray(image), 2, np.array([0.99, 0.01]))
    assert (moved[:6, 2:] == np.asarray(image)[2:, :6]).all()
    assert not moved[6:].any() and not moved[:, :2].any()


@pytest.mark.parametrize(("channels", "mode"), [(1, "RGB"), (3, "L"), (3, "P"), (3, "RGBA"), (1, "I;16")])
def test_images_of_any_kind_are_decoded(channels: int, mode: str) -> None:
    content = io.BytesIO()
    Image.new(mode, (6, 5)).save(content, "png")
    assert view(decode(content.getvalue(), channels), 4, Augmentation(), None).shape == (channels, 4, 4)


def test_an_image_on_its_side_is_turned() -> None:
    """As cameras store it: the pixels lie on their side, and a tag says so."""
    content, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = 6
    ramp(8, 4).save(content, "png", exif=tags)
    assert decode(content.getvalue(), 3).size == (4, 8)


def test_mixing_follows_from_samples_alone() -> None:
    """A sample is mixed alike in whatever company; a box covers what its label's share says."""
    how = Augmentation(mixup=0.2, cutmix=1.0)
    whole = draw_mixing(SampleRandom(3, 1, np.arange(200)), 16, how)
    part = draw_mixing(SampleRandom(3, 1, np.array([7, 150])), 16, how)
    for name in ("blend", "box", "share"):
        assert (getattr(part, name) == getattr(whole, name)[[7, 150]]).all(), name
    area = (whole.box[:, 2] - whole.box[:, 0]) * (whole.box[:, 3] - whole.box[:, 1])
    is_cut = whole.blend == 1
    assert (np.isclose(whole.share, 1 - area / 256) == is_cut).mean() > 0.95
    assert (whole.share[~is_cut] == whole.blend[~is_cut]).all() and not area[~is_cut].any()
    assert 60 < is_cut.sum() < 140
    assert (whole.box >= 0).all() and (whole.box <= 16).all()


@pytest.mark.parametrize(
    ("how", "is_cut", "is_blended"), [({"mixup": 0.4}, False, True), ({"cutmix": 1.0}, True, False)]
)
def test_only_what_is_wanted_is_mixed(how: dict[str, float], is_cut: bool, is_blended: bool) -> None:
    mixing = draw_mixing(SampleRandom(3, 1, np.arange(50)), 16, Augmentation(**how))
    assert bool(mixing.box.any()) == is_cut and bool((mixing.blend < 1).any()) == is_blended


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"crop": "resize"}, "crop must be resized, shift or centre, not 'resize'; did you mean 'resized'"),
        ({"scale": (0.0, 1.0)}, "scale must be two shares"),
        ({"shift": -1}, "shift must be at least 0"),
        ({"mixup": -0.1}, "mixup must be at least 0"),
    ],
)
def test_an_impossible_augmentation_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**wrong)


def test_a_normalisation_has_a_number_for_each_channel() -> None:
    assert Normalisation.of(1, None, None, None) == Normalisation((0.5,), (0.5,))
    assert Normalisation.of(3, None, None, None).mean[0] == 0.485
    with pytest.raises(ValueError, match="must be 3 numbers each"):
        Normalisation.of(3, [0.5], None, None)
    with pytest.raises(ValueError, match="std above 0"):
        Normalisation.of(1, None, [0.0], None)


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize(("size", "crop"), [(16, "resized"), (384, "resized"), (384, "centre")])
def test_an_exported_model_sees_what_a_validation_does(tmp_path: Path, size: int, crop: str) -> None:
    """The centre, at the sizes at which some models of transformers squeeze the whole image, too."""
    from transformers import AutoImageProcessor

    image, how = ramp(120, 60).resize((1200, 600)), Augmentation(crop)
    normal = Normalisation.of(3, None, None, None)
    normal.write(tmp_path, size, how.centre_share)
    theirs = AutoImageProcessor.from_pretrained(str(tmp_path))(image, return_tensors="np")["pixel_values"][0]
    mean, std = (np.array(each)[:, None, None] for each in (normal.mean, normal.std))
    ours = (view(image, size, how, None) / 255 - mean) / std
    assert theirs.shape == ours.shape and np.abs(theirs - ours).max() < 0.2
