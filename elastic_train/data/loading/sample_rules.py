"""Rules for unusable samples, and a decoder that follows the rule for holes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic_train.data.arrow.rows import Rows
from elastic_train.errors import UnreadableError


@dataclass(frozen=True, slots=True)
class SampleRules:
    """Rules for samples that cannot be used as they are.

    `holes` are row groups by number, each with its first step without them; `left_out` are id ranges [lo, hi), each
    with its first step. With `quarantines` an unreadable row group is named in its micro-batch instead of raising.
    `longest` bounds the values of list columns; longer rows are truncated if `truncates`, else they raise.
    """

    holes: tuple[tuple[int, int], ...] = ()
    left_out: tuple[tuple[int, int, int], ...] = ()
    quarantines: bool = False
    longest: Mapping[str, int] = field(default_factory=dict)
    truncates: bool = False


AS_THEY_ARE = SampleRules()


class Decoder(Protocol):
    """Decodes row groups; thread-safe."""

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group, or raise UnreadableError."""


class SkippingHoles:
    """A decoder that does not read holes in effect at a step."""

    def __init__(self, decoder: Decoder, rules: SampleRules, step: int) -> None:
        self._decoder = decoder
        self._left_out = frozenset(group for group, since in rules.holes if since <= step)

    def decode(self, group: int) -> Rows:
        if group in self._left_out:
            raise UnreadableError(f"row group {group} is in a hole")
        return self._decoder.decode(group)
