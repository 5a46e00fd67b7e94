"""Our own loader, with a cache of decoded row groups filled by one epoch."""

from __future__ import annotations

from benchmarks.data.peers.ours import Ours

PEER = Ours(is_cached=True)
