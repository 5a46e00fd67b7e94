"""Find the ranks that differ from the majority."""

from __future__ import annotations

from collections.abc import Sequence


def name_others(sums: Sequence[int], what: str = "weights", ranks: Sequence[int] | None = None) -> tuple[str, int]:
    """Describe the ranks whose `what` differs from the majority's, by checksum, and return one rank of the majority.

    The checksums are of `ranks`, by default all ranks. Without a majority, the text says that none is known to be
    right.
    """
    ranks = ranks or range(len(sums))
    alike: dict[int, list[int]] = {}
    for rank, value in zip(ranks, sums, strict=True):
        alike.setdefault(value, []).append(rank)
    most = max(alike.values(), key=len)
    if 2 * len(most) > len(sums):
        others = [rank for rank in ranks if rank not in most]
        return f"ranks {others} hold other {what} than the {len(most)} others", most[0]
    if len(sums) == 2:
        return f"ranks {ranks[0]} and {ranks[1]} hold different {what}, and nothing says which of them is right", ranks[
            0
        ]
    sets = " and ".join(str(ranks) for ranks in alike.values())
    return f"ranks {sets} hold different {what}, and no majority says which are right", ranks[0]
