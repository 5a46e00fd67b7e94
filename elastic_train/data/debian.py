"""Package descriptions that apt knows of this machine's archives; the label is the section, rare ones are `other`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator

from elastic_train.data.sample import Sample, measure
from elastic_train.errors import DataError

NUM_SECTIONS = 10
OTHER = "other"
_HINT = "this import needs Debian or Ubuntu with package lists: run `apt-get update`"


def read_listing() -> str:
    """Return the output of `apt-cache dumpavail`; DataError if there is no apt-cache or it knows no packages."""
    command = shutil.which("apt-cache")
    if command is None:
        raise DataError(f"apt-cache is not installed; {_HINT}")
    done = subprocess.run([command, "dumpavail"], capture_output=True, check=False)
    if done.returncode:
        raise DataError(f"apt-cache dumpavail failed: {done.stderr.decode(errors='replace').strip()}; {_HINT}")
    listing = done.stdout.decode(errors="replace")
    if "Description" not in listing:
        raise DataError(f"apt-cache knows no package; {_HINT}")
    return listing


def read_packages(listing: str, num_samples: int, seed: int) -> list[Sample]:
    """Return a description for each of `num_samples` packages drawn by the seed; equal texts count once."""
    packages: dict[bytes, tuple[str, dict[str, str]]] = {}
    for package in _paragraphs(listing):
        text = _description(package)
        if text:
            packages.setdefault(hashlib.sha256(f"{seed}\n{text}".encode()).digest(), (text, package))
    chosen = [packages[key] for key in sorted(packages)[:num_samples]]
    sections = Counter(_section(package) for _, package in chosen)
    kept = {name for name, _ in sorted(sections.items(), key=lambda item: (-item[1], item[0]))[:NUM_SECTIONS]}
    return [_sample(text, package, kept) for text, package in chosen]


def _paragraphs(listing: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package; continuation lines are joined to their field."""
    for paragraph in listing.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.split("\n"):
            if line[:1] in (" ", "\t") and name:
                fields[name] += "\n" + line[1:]
            elif ":" in line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if fields:
            yield fields


def _description(package: dict[str, str]) -> str:
    """Return the short description, and the long one where the lists hold it."""
    return package.get("Description", package.get("Description-en", "")).strip()


def _section(package: dict[str, str]) -> str:
    return package.get("Section", OTHER).rpartition("/")[2]


def _sample(text: str, package: dict[str, str], kept: set[str]) -> Sample:
    section = _section(package)
    depends, size = package.get("Depends"), package.get("Size", "")
    return Sample(
        text,
        section if section in kept else OTHER,
        (
            *measure(text),
            float(package.get("Package", "").count("-")),
            None if depends is None else float(depends.count(",") + 1),
            float(size) if size.isdigit() else None,
        ),
        (
            package.get("Architecture"),
            package.get("Priority"),
            package.get("Section", "").rpartition("/")[0] or "main",
            package.get("Multi-Arch"),
        ),
    )
