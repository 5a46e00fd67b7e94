"""The keys of commits: where they are published, how often, and which of them are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ByteSize, PositiveInt, ValidationInfo, field_serializer, field_validator

from elastic_train.config.recipe import checked_best
from elastic_train.config.section import Forms, Old, Section, folder, has_unit, home, periods_of, whole, written

_EVERY = "50 steps, 15 min"
_CAP_S = 900.0
"""Seconds of training that a fault may cost with `every: auto`."""
_TIMES = "'15 min' (s, min, h or day)"
_EVERY_FORMS = Forms(
    ("steps", "s"), f"write '100 steps', {_TIMES}, '100 steps, 15 min', auto, 'auto, 1 h', or null (only at the end)"
)
_LIMIT_FORMS = Forms(("s",), "auto takes a limit in time: write auto, or 'auto, 1 h' (s, min, h or day)")
_KEEP_FORMS = Forms(("steps", "s"), f"write '10000 steps', {_TIMES}, '10000 steps, 1 day', or null (none)")
_PATIENCE = "is ignored: give_up_after, a key of the top level, sets for how long commits may fail"


def _keep_every(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the periods of a section that has a key for steps, and one for seconds."""
    return {"keep_every": written(steps=old.get("keep_every_steps"), s=old.get("keep_every_s"))}


def _every(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the interval of a section that has keys for steps, for seconds, and for the limit of auto."""
    today = old.get("every", _EVERY)
    steps: Any = "auto" if old.get("interval") == "auto" else old.get("every_steps", _steps_of(today))
    seconds = old.get("every_s", _seconds_of(today))
    if steps == "auto":
        seconds = old.get("rpo_s", seconds)
        return {"every": "auto" if seconds == _CAP_S else f"auto, {written(s=seconds or 1e9)}"}
    return {"every": written(steps=steps, s=seconds)}


def _steps_of(every: str | None) -> int | Literal["auto"] | None:
    if every is not None and every.split(",")[0].strip() == "auto":
        return "auto"
    return whole(periods_of(every, _EVERY_FORMS).get("steps"))


def _seconds_of(every: str | None) -> float | None:
    """Return the interval of commits in seconds; with auto, the largest."""
    if _steps_of(every) != "auto":
        return periods_of(every, _EVERY_FORMS).get("s")
    _, _, cap = (every or "").partition(",")
    return periods_of(cap, _LIMIT_FORMS)["s"] if cap else _CAP_S


def _keep_bytes(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the size of a section that has a key for it, which a resolved configuration has as bytes."""
    budget = old["storage_budget"]
    return {"keep_last": f"{budget}B" if isinstance(budget, int) else budget}


def checked_size(text: str) -> str:
    """Refuse a size without a unit, such as 5.0: as one of bytes it would keep a single commit."""
    if not any(map(str.isalpha, text)):
        raise ValueError("a size has a unit, such as 200GB; a number of commits is written without quotes")
    return text


class CheckpointConfig(Section):
    url: str | None = None
    """Folder or fsspec URL of the commits. Default: run.dir."""
    near_dir: str | None = None
    """Local folder on every node, such as tmpfs, for copies of the newest commits. They are read first."""
    every: str | None = _EVERY
    """Commit after so many steps, so much time (s, min, h, day), or whichever is first: '50 steps, 15 min'. auto:
    measure saves and faults, and commit at the interval that loses the least time, at most 15 minutes ('auto, 1 h':
    an hour). null: only at the end. A commit that is due while the last one is still being written is skipped; with
    '1 step' training waits for it instead."""
    accept_loss: str | None = None
    """Continue from an older commit although this one, named TERM-STEP, is lost. Without it the start is refused,
    and the message has the value to set. It applies to that commit only, so it may stay set."""
    keep_last: PositiveInt | ByteSize = 5
    """Number of newest commits to keep, or a size such as 200GB: as many of the newest as fit into it, together with
    those that other keys keep. The newest valid commit, pinned commits and commits in use are never deleted."""
    keep_every: str | None = None
    """Also keep the first commit of each period: '10000 steps', '6 h' (s, min, h, day), or both: '10000 steps, 1
    day'."""
    keep_best: str | None = None
    """Also commit and keep the state with the best validation: 'min loss', 'max macro_f1'."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "every_steps": Old(int | Literal["auto"] | None, 50, "is now every: 'N steps'", _every),
        "every_s": Old(float | None, 900.0, "is now every: 'N s'", _every),
        "rpo_s": Old(float, 900.0, "is now every: 'auto, N s'", _every),
        "interval": Old(str | None, None, "is now every: auto", _every),
        "when_busy": Old(str, "skip", "is ignored: training waits for commits with every: '1 step' only"),
        "give_up_after": Old(int | None, 10, f"{_PATIENCE}, and at least ten must fail"),
        "give_up_after_s": Old(float | None, 600.0, _PATIENCE),
        "storage_budget": Old(ByteSize | None, None, "is now keep_last, which takes a size", _keep_bytes),
        "keep_every_steps": Old(int | None, None, "is now keep_every: 'N steps'", _keep_every),
        "keep_every_s": Old(float | None, None, "is now keep_every: 'N s'", _keep_every),
    }
    _is_folder = field_validator("near_dir")(folder)
    _expands = field_validator("url")(home)

    @field_validator("keep_last", mode="before")
    @classmethod
    def _has_a_unit(cls, kept: object) -> object:
        if type(kept) is int and kept < 1:  # which would be taken for a size
            raise ValueError("must be at least 1")
        return checked_size(kept) if isinstance(kept, str) else kept

    @field_validator("keep_last")
    @classmethod
    def _keeps_something(cls, kept: int | ByteSize) -> int | ByteSize:
        if kept < 1:
            raise ValueError("must be at least 1")
        return kept

    @field_serializer("keep_last")
    def _with_its_unit(self, kept: int | ByteSize) -> int | str:
        return f"{kept:d}B" if isinstance(kept, ByteSize) else kept

    @property
    def budget(self) -> int | None:
        """The size that the newest commits may take, in bytes; None where their number counts."""
        return self.keep_last if isinstance(self.keep_last, ByteSize) else None

    @field_validator("keep_every")
    @classmethod
    def _names_periods(cls, text: str | None) -> str | None:
        periods_of(text, _KEEP_FORMS)
        return text

    @field_validator("every", "keep_every", mode="before")
    @classmethod
    def _has_units(cls, every: object, info: ValidationInfo) -> object:
        return has_unit(every, _EVERY_FORMS if info.field_name == "every" else _KEEP_FORMS)

    @field_validator("every")
    @classmethod
    def _names_an_interval(cls, text: str | None) -> str | None:
        _seconds_of(text)
        return text

    @property
    def every_steps(self) -> int | Literal["auto"] | None:
        return _steps_of(self.every)

    @property
    def every_s(self) -> float | None:
        """The interval of commits in seconds; with auto, the largest."""
        return _seconds_of(self.every)

    @property
    def keep_every_steps(self) -> int | None:
        return whole(periods_of(self.keep_every, _KEEP_FORMS).get("steps"))

    @property
    def keep_every_s(self) -> float | None:
        return periods_of(self.keep_every, _KEEP_FORMS).get("s")

    @field_validator("accept_loss")
    @classmethod
    def _names_a_commit(cls, text: str | None) -> str | None:
        if text is not None and re.fullmatch(r"\d+-\d+", text) is None:
            raise ValueError(f"'{text}' names no commit: give its term and step, such as 5-1200")
        return text

    @field_validator("keep_best")
    @classmethod
    def _names_a_best(cls, text: str | None) -> str | None:
        return None if text is None else checked_best(text)
