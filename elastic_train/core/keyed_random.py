"""Keyed mixing functions for order, coverage and samples' random numbers: frozen, as stored runs depend on them.

`mix64` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), a
bijection on 64-bit words. `derive` folds any number of words into one key, `derive_each` folds one more into many.
`permute` is a Feistel network with cycle walking (Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002): a
bijection on [0, n) for every n.

Golden vectors in the tests pin them: a change would silently reorder every stored run.

`SampleRandom` has the random numbers for samples, used by `collate`, so that augmentation never depends on the world.

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

NUM_ROUNDS = 8
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_SHIFTS, _FACTORS = [np.uint64(by) for by in (30, 27, 31)], [np.uint64(_M1), np.uint64(_M2)]


def mix64(x: int) -> int:
    """Mix one 64-bit word."""
    x = (x ^ (x >> 30)) * _M1 & _MASK
    x = (x ^ (x >> 27)) * _M2 & _MASK
    return x ^ (x >> 31)


def mix64_array(x: UInt64s) -> UInt64s:
    """Mix every word of an array; the same function as `mix64`."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def derive(*words: int) -> int:
    """Fold words into one 64-bit key; the order of the words matters."""
    key = 0
    for word in words:
        key = mix64((key + _GAMMA & _MASK) ^ mix64(word + _GAMMA & _MASK))
    return key


def derive_each(key: int | UInt64s, words: UInt64s) -> UInt64s:
    """Fold one more word into a key or an array of keys: `derive(*some, word)` folds `word` into `derive(*some)`.

    Keys and words are broadcast; the result has their common shape, with at least one dimension.
    """
    keys = np.atleast_1d(np.asarray(key, dtype=np.uint64))  # numpy warns if a scalar overflows
    return mix64_array((keys + np.uint64(_GAMMA)) ^ mix64_array(words + np.uint64(_GAMMA)))


def permute(positions: Int64s, n: int, key: int) -> Int64s:
    """Map each position in [0, n) to its place under the keyed permutation of [0, n)."""
    assert n >= 1, "nothing to permute"
    if n == 1:
        return np.zeros_like(positions)
    num_bits = max(2, (n - 1).bit_length())
    low_bits = num_bits // 2
    round_keys = derive_each(derive(key), np.arange(NUM_ROUNDS, dtype=np.uint64))
    words = positions.astype(np.uint64)
    walking = np.arange(words.size)
    while walking.size:  # fewer than two rounds expected: the domain is smaller than 2n (than 4 for n = 2)
        words[walking] = _feistel(words[walking], low_bits, num_bits - low_bits, round_keys)
        walking = walking[words[walking] >= np.uint64(n)]
    return words.astype(np.int64)


def _feistel(words: UInt64s, low_bits: int, high_bits: int, round_keys: UInt64s) -> UInt64s:
    """Run one pass of an alternating Feistel network over `low_bits + high_bits` bits; a bijection for any rounds."""
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    low, high = words & low_mask, words >> np.uint64(low_bits)
    for round_, round_key in enumerate(round_keys):
        if round_ % 2:
            low = low ^ (mix64_array(high + round_key) & low_mask)
        else:
            high = high ^ (mix64_array(low + round_key) & high_mask)
    return (high << np.uint64(low_bits)) | low


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
