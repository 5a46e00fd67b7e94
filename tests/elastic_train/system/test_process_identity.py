"""A process is identified among those of all machines and times, with the files that it holds."""

from __future__ import annotations

import os
import socket

from elastic_train.system.process_identity import process_identity, process_usage
from rendezvous.process_table import boot_id, is_alive


def test_a_process_is_known_by_its_host_its_boot_and_its_first_moment() -> None:
    """Its number alone comes again."""
    identity = process_identity()
    assert identity == process_identity()
    assert (identity["host"], identity["boot"]) == (socket.gethostname(), boot_id())
    assert isinstance(identity["born"], int)
    assert is_alive(os.getpid(), identity["born"])


def test_usage_counts_what_grows() -> None:
    before = process_usage()
    with socket.socket():
        assert process_usage()["fds"] == before["fds"] + 1
    assert before["rss"] > 1_000_000 and before["threads"] >= 1
