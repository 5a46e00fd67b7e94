"""Our own loader, with the cache of decoded row groups that an epoch has filled."""

from __future__ import annotations

from benchmarks.data.peers.ours import Ours

PEER = Ours(is_cached=True)
