"""The phrase list in `make check`: where each phrase is refused, and that the message says what to write."""

from __future__ import annotations

from pathlib import Path

from tests.release.words import EVERYWHERE, in_code, in_text

PATH = Path("elastic_train/a.py")


def test_a_phrase_in_a_message_is_refused_with_its_line_and_what_to_write() -> None:
    source = 'def f():\n    """Train on beside it."""\n    raise ValueError(\n        "rank 1 goes on"\n    )\n'
    assert [*in_code(source, PATH)] == ["elastic_train/a.py:4: 'goes on': write continue, resume, run"]


def test_phrases_that_are_refused_everywhere_are_found_in_docstrings_comments_and_pages() -> None:
    found = [*in_code('"""Nodes that are let in."""\n\nX = 1  # it was mended\n', PATH)]
    assert [line.partition(": write")[0] for line in found] == [f"{PATH}:1: 'let in'", f"{PATH}:3: 'mended'"]
    [line] = in_text("ranks\nhave theirs\n", Path("docs/a.md"), 1, EVERYWHERE)
    assert line == "docs/a.md:2: 'have theirs': write the noun: have their shards"


def test_names_and_keys_are_no_messages() -> None:
    assert [*in_code('BESIDE = "beside"\nbefalls_all = 1\n', PATH)] == []
