"""The section `data`: one training set or a mixture of several, the validation set, and how they are read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from elastic_train.config.section import Old, Section, folder

_UNNAMEABLE = re.compile(r"[^\w\-./ ]", re.ASCII)
"""Characters that MLflow refuses in the name of a metric."""


class SourceConfig(Section):
    source: str
    """Folder or URL of one dataset with a manifest.json."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Relative share of every batch: 0.7 and 0.3, or 7 and 3."""
    name: str | None = None
    """Name in metrics and results. Default: the shortest end of the path that is unique."""

    @field_validator("name")
    @classmethod
    def _can_be_in_a_metric(cls, name: str | None) -> str | None:
        if name is not None and (not name or _UNNAMEABLE.search(name)):
            raise ValueError("must be of letters, digits, spaces and _ - . / only")
        return name


def _quarantine(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return what is left out by a section that has a key for each kind of sample."""
    return {"quarantine": [kind for kind in ("unreadable", "deadly") if old.get(kind, "fail") != "fail"]}


class DataConfig(Section):
    train: str | None = None
    """Folder or URL of the training set with a manifest.json (made by `elastic-train data`). Give this or
    mixture."""
    mixture: tuple[SourceConfig, ...] | None = Field(default=None, min_length=1)
    """Several training sets with their shares of every batch. Each is repeated; training ends when all have been
    passed `epochs` times."""
    validation: str | None = None
    """Folder or URL of the validation set. null: no validation."""
    block_row_groups: PositiveInt = 8
    """Number of row groups that are shuffled together. More mix better and take more memory."""
    length_bucketing: bool = False
    """Put rows of similar length into a micro-batch. Run `elastic-train data verify --add-lengths` first. Not
    with mixture."""
    num_workers: int = Field(default=0, ge=0)
    """Loader processes of each rank. 0: threads, which are faster unless collating is slow."""
    quarantine: tuple[Literal["unreadable", "deadly"], ...] = ()
    """Continue without some samples, and list them in every commit. unreadable: those of row groups that cannot be
    read. deadly: those that crash the processes that compute them, in several worlds. []: end the run."""
    too_long: Literal["fail", "truncate"] = "fail"
    """When a row has more values than the task takes: fail ends the run, truncate shortens and counts the row."""
    cache_dir: str | None = None
    """Local folder on every node for decoded row groups, shared by ranks, epochs and restarts. It takes up to half of
    its disk; the least recently used row groups are deleted first. null: no cache."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "unreadable": Old(str, "fail", "is now quarantine: [unreadable]", _quarantine),
        "deadly": Old(str, "fail", "is now quarantine: [deadly]", _quarantine),
        "cache_bytes": Old(int, 64 << 30, "is ignored: the cache takes up to half of its disk"),
    }
    _is_folder = field_validator("cache_dir")(folder)

    @field_validator("mixture", mode="before")
    @classmethod
    def _is_list(cls, mixture: object) -> object:
        if mixture is not None and not isinstance(mixture, list | tuple):
            raise ValueError(
                "must be a list of sources, such as [{source: data/wiki, weight: 2}]; "
                "a number such as mixture.0 stands for an element that the file has"
            )
        return mixture

    @model_validator(mode="after")
    def _names_a_training_set(self) -> DataConfig:
        if (self.train is None) == (self.mixture is None):
            what = "no training set is given" if self.train is None else "train and mixture are both given"
            raise ValueError(f"{what}: set train to one dataset, or mixture to several, and the other to null")
        if self.mixture is not None:
            check_distinct(self.mixture)
        if self.mixture is not None and self.length_bucketing:
            raise ValueError(
                "length_bucketing does not work with mixture, since its micro-batches have rows of all sources: set "
                "data.length_bucketing to false, or train on one dataset"
            )
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.train,) if self.train is not None else tuple(each.source for each in self.mixture or ())

    @property
    def shares(self) -> tuple[int, ...] | None:
        """The sources' shares of a mixture in whole numbers; None for one training set."""
        return None if self.mixture is None else shares_of([each.weight for each in self.mixture])


def check_distinct(sources: Sequence[SourceConfig]) -> None:
    """Raise ValueError if a dataset is there twice, or two have one name."""
    first: dict[str, int] = {}
    for number, each in enumerate(sources):
        if (before := first.setdefault(_place(each.source), number)) != number:
            raise ValueError(
                f"mixture.{before} and mixture.{number} are the same dataset, {each.source}: name it once, with the "
                "sum of their weights"
            )
    names_of(sources)


def names_of(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Return a name for each source: its own, or the end of its path; ValueError if two would have the same."""
    paths = [_UNNAMEABLE.sub("_", _place(each.source).rpartition("://")[2]).split("/") for each in sources]
    for num_parts in range(1, max(map(len, paths)) + 1):
        names = [each.name or "/".join(path[-num_parts:]) for each, path in zip(sources, paths, strict=True)]
        if len(set(names)) == len(names):
            return tuple(names)
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"two sources of mixture would be called '{twice}': give them names")


def _place(source: str) -> str:
    """Return a folder or URL in the form in which it can be compared with others."""
    return source.rstrip("/") if "://" in source else os.path.normpath(source)


FINEST_TURN = 10_000
"""Sum of shares that have to be rounded: exact to a ten-thousandth."""


def shares_of(weights: Sequence[float], turn: int = FINEST_TURN) -> tuple[int, ...]:
    """Return integer shares in the ratio of the weights as written: 0.7 and 0.3 give 7 and 3.

    Shares that would add up to more than `turn` are rounded to add up to it; none is 0. Raise ValueError if a weight is
    not a positive number, or there are more weights than positions.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be positive numbers: {list(weights)}")
    if len(weights) > turn:
        raise ValueError(f"{len(weights)} sources do not fit into a turn of {turn} places")
    written = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in written))
    whole = [int(weight * common) for weight in written]
    shares = [share // math.gcd(*whole) for share in whole]
    return tuple(shares) if sum(shares) <= turn else _rounded(shares, turn)


def _rounded(weights: Sequence[int], turn: int) -> tuple[int, ...]:
    """Return shares that add up to `turn`, each as close to its weight as possible."""
    exact = [Fraction(weight * turn, sum(weights)) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) != turn:
        step = 1 if sum(shares) < turn else -1
        changeable = [number for number, share in enumerate(shares) if share + step >= 1]
        missing = [step * (exact[number] - shares[number]) for number in changeable]
        shares[changeable[missing.index(max(missing))]] += step
    return tuple(shares)
