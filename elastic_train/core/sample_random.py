"""Random numbers for samples, used by `collate`, so that augmentation never depends on the world.

A number is a pure function of (seed, epoch, sample id, name of the draw, index). So a sample gets the same numbers on
any rank, in any world, in a thread or worker process, before and after a resume, and others in the next epoch. They
come from this package's own frozen mixing functions: numpy's and torch's generators may change between versions, and a
run must not change with a library.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.core.arrays import Int64s, UInt64s
from elastic_train.core.keyed_random import derive, derive_each

_SAMPLES = 6  # separates these keys from those of order and lanes

Float64s = npt.NDArray[np.float64]
Size = int | tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRandom:
    """Random numbers for the samples of one micro-batch: row i of every result belongs to `ids[i]`.

    Every draw has a name, such as "crop". The same name always gives the same numbers; draws of different names are
    independent. So adding an augmentation does not change the others.

    `epoch` is one number, or in a mixture an array of the shape of `ids`, with each sample's epoch of its source.
    `is_training` is False if samples are read in file order without augmentation, as for validation.
    """

    seed: int
    epoch: int | Int64s
    ids: Int64s
    is_training: bool = True

    def uniform(self, name: str, size: Size = ()) -> Float64s:
        """Return numbers in [0, 1), multiples of 2^-53; shape (len(ids), *size)."""
        return (self._words(name, size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, name: str, low: int, high: int, size: Size = ()) -> Int64s:
        """Return integers in [low, high); shape (len(ids), *size). Raise ValueError for an empty range.

        Probabilities differ by a factor of at most 1 + (high - low) / 2^64.
        """
        if not low < high:
            raise ValueError(f"draw '{name}': no whole number is in [{low}, {high})")
        return (self._words(name, size) % np.uint64(high - low)).astype(np.int64) + low

    def seeds(self, name: str) -> UInt64s:
        """Return a 64-bit seed for each sample, for generators of other libraries; shape (len(ids),)."""
        return derive_each(self._key(name), self.ids.astype(np.uint64))

    def generator(self, name: str, place: int) -> np.random.Generator:
        """Return numpy's generator (Philox) for the sample `ids[place]`: for distributions not offered here.

        It is equally independent of the world, but may change with numpy's version.
        """
        return np.random.Generator(np.random.Philox(key=int(self.seeds(name)[place])))

    def _words(self, name: str, size: Size) -> UInt64s:
        """Return 64 random bits for each number; shape (len(ids), *size)."""
        shape = (size,) if isinstance(size, int) else size
        places = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
        return derive_each(self.seeds(name)[:, None], places).reshape(len(self.ids), *shape)

    def _key(self, name: str) -> int | UInt64s:
        """Return the key of a draw, or one per sample if epochs differ."""
        word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        if isinstance(self.epoch, int):
            return derive(self.seed, _SAMPLES, self.epoch, word)
        of_epochs = derive_each(derive(self.seed, _SAMPLES), self.epoch.astype(np.uint64))
        return derive_each(of_epochs, np.array([word], dtype=np.uint64))
