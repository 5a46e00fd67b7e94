"""The keys of commits: where they are published, how often, and which of them are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ByteSize, Field, PositiveFloat, PositiveInt, field_serializer, field_validator

from elastic_train.config.recipe import checked_best
from elastic_train.config.section import Old, Section, folder, home

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0, "days": 86400.0}


def _periods_of(text: str | None) -> dict[str, float]:
    """Return the periods of a text, in steps and in seconds; ValueError for what names none."""
    periods = dict[str, float]()
    for part in text.split(",") if text is not None else ():
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(steps?|s|min|h|days?)", part.strip())
        if found is None or not float(found[1]) or (found[2].startswith("step") and not found[1].isdecimal()):
            raise ValueError(f"'{part.strip()}' is no period: write '10000 steps', '90 s', '15 min', '2 h' or '1 day'")
        unit = "steps" if found[2].startswith("step") else "s"
        if unit in periods:
            raise ValueError(f"names two periods in {'steps' if unit == 'steps' else 'time'}: give one of each")
        periods[unit] = float(found[1]) * _SECONDS.get(found[2], 1.0)
    return periods


def _keep_every(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the periods of a section that has a key for steps, and one for seconds."""
    given = ((old.get("keep_every_steps"), "steps"), (old.get("keep_every_s"), "s"))
    return {"keep_every": ", ".join(f"{number} {unit}" for number, unit in given if number is not None)}


def _keep_bytes(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the size of a section that has a key for it, which a resolved configuration has as bytes."""
    budget = old["storage_budget"]
    return {"keep_last": f"{budget}B" if isinstance(budget, int) else budget}


class CheckpointConfig(Section):
    url: str | None = None
    """Folder or fsspec URL of the commits. Default: run.dir."""
    near_dir: str | None = None
    """Local folder on every node, such as tmpfs, for copies of the newest commits. They are read first."""
    every_steps: PositiveInt | Literal["auto"] | None = 50
    """Commit every N steps. null: ignore the step count. auto: measure saves and faults, and commit at the interval
    that loses the least time, within every_s."""
    every_s: PositiveFloat | None = 900.0
    """Commit this many seconds after the last commit. With every_steps: auto, the largest number of seconds of
    training that a fault may cost. null: ignore the time."""
    when_busy: Literal["skip", "wait"] = "skip"
    """If a commit is due while the last one is still being written: skip it, or wait."""
    give_up_after_s: float | None = Field(default=600.0, ge=0)
    """End training when at least ten commits in a row have failed, for this many seconds. null: never."""
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
    """Also keep the commit with the best validation metric: 'min loss', 'max macro_f1'."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "rpo_s": Old(
            float,
            900.0,
            "is now every_s, with every_steps: auto",
            lambda old: {"every_s": old["rpo_s"]} if "auto" in (old.get("every_steps"), old.get("interval")) else {},
        ),
        "interval": Old(str | None, None, "is now every_steps: auto", lambda old: {"every_steps": "auto"}),
        "give_up_after": Old(
            int | None,
            10,
            "is ignored, and is ten; for never, set give_up_after_s to null",
            lambda old: {"give_up_after_s": None} if old["give_up_after"] is None else {},
        ),
        "storage_budget": Old(ByteSize | None, None, "is now keep_last, which takes a size", _keep_bytes),
        "keep_every_steps": Old(int | None, None, "is now keep_every: 'N steps'", _keep_every),
        "keep_every_s": Old(float | None, None, "is now keep_every: 'N s'", _keep_every),
    }
    _is_folder = field_validator("near_dir")(folder)
    _expands = field_validator("url")(home)

    @field_validator("keep_last", mode="before")
    @classmethod
    def _has_a_unit(cls, kept: object) -> object:
        if isinstance(kept, str) and kept.strip().isdecimal():
            raise ValueError("a size has a unit, such as 200GB; a number of commits is written without quotes")
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
        _periods_of(text)
        return text

    @property
    def keep_every_steps(self) -> int | None:
        steps = _periods_of(self.keep_every).get("steps")
        return None if steps is None else int(steps)

    @property
    def keep_every_s(self) -> float | None:
        return _periods_of(self.keep_every).get("s")

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
