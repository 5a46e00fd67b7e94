"""Package descriptions: what apt lists, by a real apt-cache where the machine has one or a stand-in that prints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from elastic_train.data.debian import NUM_SECTIONS, OTHER, read_listing, read_packages
from elastic_train.errors import DataError

LISTING = """Package: lib-one-dev
Priority: optional
Section: contrib/libs
Architecture: amd64
Multi-Arch: same
Depends: a, b, c
Size: 120
Description: the first library
 with a second line
 .
 and a last one

Package: two
Section: net
Size: unknown
Description-en: a tool for networks

Package: three
Section: net
Description: the first library
 with a second line
 .
 and a last one

Package: without
Section: net
"""


def put_apt_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make `script` the only command on PATH, named apt-cache."""
    path = folder / "apt-cache"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_packages_become_samples() -> None:
    """Equal descriptions count once, packages without any are left out, fields that lack are None."""
    samples = sorted(read_packages(LISTING, 10, seed=1), key=lambda sample: sample.label)
    assert [(sample.text, sample.label) for sample in samples] == [
        ("the first library\nwith a second line\n.\nand a last one", "libs"),
        ("a tool for networks", "net"),
    ]
    assert [sample.numeric[3:] for sample in samples] == [(2.0, 3.0, 120.0), (0.0, None, None)]
    assert [sample.categorical for sample in samples] == [
        ("amd64", "optional", "contrib", "same"),
        (None, None, "main", None),
    ]


def test_rare_sections_are_other() -> None:
    """The ten commonest sections keep their names; ties are broken by name."""
    sections = [f"s{i:02}" for i in range(13) for _ in range(2 if i < 9 else 1)]
    listing = "\n\n".join(f"Section: {name}\nDescription: package {i}" for i, name in enumerate(sections))
    found = Counter(sample.label for sample in read_packages(listing, 100, seed=1))
    assert found == Counter({**{f"s{i:02}": 2 for i in range(9)}, "s09": 1, OTHER: 3})
    assert len(found) == NUM_SECTIONS + 1


def test_the_seed_draws_the_packages() -> None:
    """So many packages are drawn, the same for one seed and others for another."""
    listing = "\n\n".join(f"Section: s\nDescription: package {i}" for i in range(100))
    drawn = [[sample.text for sample in read_packages(listing, 20, seed)] for seed in (1, 1, 2)]
    assert [len(texts) for texts in drawn] == [20, 20, 20]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_listing_is_what_apt_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`apt-cache dumpavail` is asked, and bytes that are no UTF-8 do not stop it."""
    put_apt_cache(tmp_path, monkeypatch, r"printf 'Description: %s \351\n' $1")
    assert read_listing() == "Description: dumpavail \ufffd\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken >&2; exit 3", "dumpavail failed: broken; .*apt-get update"),
        ("true", "no package; .*apt-get update"),
    ],
)
def test_apt_that_knows_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    """An apt-cache that fails or lists nothing gives a message with the command that helps."""
    put_apt_cache(tmp_path, monkeypatch, script)
    with pytest.raises(DataError, match=message):
        read_listing()


def test_without_apt_there_is_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without apt-cache is told what the import needs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="apt-cache is not installed; this import needs Debian or Ubuntu"):
        read_listing()
