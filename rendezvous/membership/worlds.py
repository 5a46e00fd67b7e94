"""A world: who trains together, in which order, and where they meet; and its record in the store.

A world's record names all its members and all of them read it, so its bytes grow with the square of its size. Since
format 2 it has runs of neighbouring seats, and what the ids of a node's members begin with only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from rendezvous.membership.lenient_json import UnreadableRecordError, from_fields

Cause = Literal["start", "lost", "joined", "restart"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place in a world: the first seat is group rank 0."""

    member: str
    num_workers: int
    role: str = ""


@dataclass(frozen=True)
class World:
    """The members that train together, in rank order, and the address of the TCPStore hosted by the first."""

    term: int
    seats: tuple[Seat, ...]
    cause: Cause
    address: str
    port: int
    sealed_at: float
    left: tuple[str, ...] = ()
    """Members that have left after their workers finished, while others still worked: they are not lost."""

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {seat.member: rank for rank, seat in enumerate(self.seats)}

    def rank_of(self, member_id: str) -> int | None:
        return self._ranks.get(member_id)

    def pack(self) -> dict[str, object]:
        """Return the fields of its record."""
        starts = dict[str, int]()

        def shorten(member: str) -> str:
            start = member[: member.rfind(".") + 1]
            return f"{starts.setdefault(start, len(starts))}:{member.removeprefix(start)}"

        runs = [
            _Run(tuple(shorten(seat.member) for seat in seats), num_workers, role)
            for (num_workers, role), seats in groupby(self.seats, key=lambda seat: (seat.num_workers, seat.role))
        ]
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seats"}
        return {"format": 2, "starts": [*starts], "runs": runs, **others}

    @staticmethod
    def unpack(found: dict[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a world from those of its record, which has seats up to format 1.

        Raises UnreadableRecordError.
        """
        if "runs" not in found:
            return found
        packed: _Packed = from_fields(_Packed, found)
        try:
            seats = [
                Seat(member, run.num_workers, run.role)
                for run in packed.runs
                for member in _restore(run.members, packed.starts)
            ]
        except ValueError as error:
            raise UnreadableRecordError(f"runs: {error}") from None
        return {**found, "seats": [asdict(seat) for seat in seats]}


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring seats with as many workers each, in one role."""

    members: tuple[str, ...]
    """Of each id the place of its beginning among the starts, a colon, and the rest."""
    num_workers: int
    role: str


@dataclass(frozen=True, slots=True)
class _Packed:
    starts: tuple[str, ...]
    runs: tuple[_Run, ...]


def _restore(shortened: Iterable[str], starts: Sequence[str]) -> Iterator[str]:
    """Yield the ids again; raises ValueError for one that begins with none of `starts`."""
    for text in shortened:
        place, colon, rest = text.partition(":")
        if not colon or not 0 <= int(place) < len(starts):
            raise ValueError(f"{text[:40]!r} begins with none of {len(starts)} starts")
        yield starts[int(place)] + rest
