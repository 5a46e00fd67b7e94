"""Random numbers of samples: frozen by golden vectors, and functions of seed, epoch, sample and name alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.keyed_random import SampleRandom, derive, derive_each

IDS = np.array([0, 1, 41_999_999])
words = st.integers(0, 2**64 - 1)


def test_golden_numbers() -> None:
    """Every kind of draw gives the numbers that it gave when it was frozen: stored runs depend on them."""
    draw = SampleRandom(7, 2, IDS)
    assert draw.seeds("crop").tolist() == [0x78D7D368056377DC, 0xFE0866AD628434A5, 0xFCD857665E3A15B8]
    assert draw.uniform("crop", 2).tolist() == [
        [0.5084503796316927, 0.21637504515958095],
        [0.3666584396764465, 0.9383508043228236],
        [0.9089952833238201, 0.3957689435609216],
    ]
    assert draw.integers("flip", -3, 5).tolist() == [1, 4, -3]
    assert draw.integers("flip", 0, 10**12, (1, 2)).tolist() == [
        [[408866439756, 88635234336]],
        [[75581282327, 486736848439]],
        [[273984263952, 233917076693]],
    ]


@given(st.lists(words, max_size=3), st.lists(words, min_size=1, max_size=5))
def test_derive_each_agrees_with_derive(key: list[int], last: list[int]) -> None:
    """`derive_each` and `derive` are one function, also where words overflow."""
    expected = [derive(*key, word) for word in last]
    assert derive_each(derive(*key), np.array(last, dtype=np.uint64)).tolist() == expected


@given(st.integers(0, 2**63), st.integers(0, 99), st.lists(st.integers(0, 2**40), max_size=9), st.data())
def test_a_samples_draws_do_not_depend_on_its_micro_batch(
    seed: int, epoch: int, ids: list[int], data: st.DataObject
) -> None:
    """Whatever samples share a micro-batch, in whatever order, each gets its own numbers."""
    shuffled = np.array(data.draw(st.permutations(ids)), dtype=np.int64)
    part = shuffled[: data.draw(st.integers(0, len(ids)))]
    whole = SampleRandom(seed, epoch, np.array(ids, dtype=np.int64))
    rows = [ids.index(id_) for id_ in part.tolist()]
    other = SampleRandom(seed, epoch, part)
    assert np.array_equal(other.uniform("a", (2, 3)), whole.uniform("a", (2, 3))[rows])
    assert np.array_equal(other.integers("a", 0, 7, 2), whole.integers("a", 0, 7, 2)[rows])
    assert np.array_equal(other.seeds("a"), whole.seeds("a")[rows])
    for place, row in enumerate(rows):
        assert other.generator("a", place).random() == whole.generator("a", row).random()


def test_seed_epoch_sample_name_and_place_all_matter() -> None:
    """No two of 2 x 2 x 3 x 2 x 4 draws are equal."""
    draws = [SampleRandom(seed, epoch, IDS).uniform(name, 4) for seed in (0, 1) for epoch in (0, 1) for name in "ab"]
    assert len(np.unique(np.concatenate(draws))) == 96


def test_the_order_of_draws_does_not_matter() -> None:
    """A draw that is added leaves the others as they were, and a name that is used again gives the same numbers."""
    first, second = SampleRandom(1, 0, IDS), SampleRandom(1, 0, IDS)
    crop = first.uniform("crop")
    second.uniform("flip")
    assert np.array_equal(second.uniform("crop"), crop)
    assert np.array_equal(second.uniform("crop"), crop)


def test_numbers_fill_their_ranges_evenly() -> None:
    """Uniform numbers and whole numbers fill their ranges evenly, bounds included where they are allowed."""
    draw = SampleRandom(3, 0, np.arange(20_000))
    uniform, integers = draw.uniform("u"), draw.integers("i", -2, 3)
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    assert abs(np.histogram(uniform, 10, (0, 1))[0] - 2000).max() < 220, "five standard deviations"
    assert abs(np.bincount(integers + 2, minlength=5) - 4000).max() < 290
    assert integers.min() == -2 and integers.max() == 2
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.036


def test_the_widest_range_of_whole_numbers() -> None:
    """All of int64 but its last number is a range like any other."""
    low, high = -(2**63), 2**63 - 1
    numbers = SampleRandom(3, 0, np.arange(1000)).integers("i", low, high)
    assert numbers.min() < low // 2 and numbers.max() > high // 2


def test_an_empty_range_is_refused() -> None:
    """The message names the draw and the range."""
    with pytest.raises(ValueError, match=r"draw 'top': no whole number is in \[3, 3\)"):
        SampleRandom(0, 0, IDS).integers("top", 3, 3)


def test_no_samples_give_empty_draws() -> None:
    """An empty micro-batch draws arrays of no rows."""
    none = SampleRandom(0, 0, IDS[:0])
    assert (none.uniform("a", (2, 3)).shape, none.integers("a", 0, 2).shape) == ((0, 2, 3), (0,))
