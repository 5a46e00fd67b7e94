"""Read single files of a run's folder; what cannot be read is noted, and treated as missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import yaml

Line = dict[str, object]
T = TypeVar("T")
_OF_RANK = re.compile(r"(\d{8,})-(\d{5,})-")


class Files:
    """Reads the files of a run's folder, and collects unreadable ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: list[str] = []

    def mapping(self, path: Path, parse: Callable[[bytes], object] = json.loads) -> Line | None:
        try:
            value = parse(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            self._note(path, f"cannot be read: {str(error).partition(chr(10))[0]}")
            return None
        if not isinstance(value, dict):
            self._note(path, f"holds {_kind_of(value)} instead of a mapping")
            return None
        return value

    def lines(self, path: Path) -> list[Line]:
        """Return the mappings of a file's lines; the last may be torn."""
        try:
            *texts, last = path.read_bytes().split(b"\n")
        except OSError as error:
            self._note(path, f"cannot be read: {error.strerror}")
            return []
        found = [(number, text, parsed(text)) for number, text in enumerate([*texts, last], 1) if text.strip()]
        if not found:
            self._note(path, "is empty")
        for number, _, line in found:
            if line is None and number <= len(texts):
                self._note(path, f"line {number} is not a JSON object")
        return [line for _, _, line in found if line is not None]

    def history(self, path: Path) -> list[Line]:
        """Return the lines of a history; each must name its operation."""
        lines = self.lines(path)
        if any(not isinstance(line.get("op"), str) for line in lines):
            self._note(path, "a line names no operation (`op`)")
        said = set[str]()
        for line in lines:
            text = json.dumps(line, sort_keys=True)
            if "t" in line and text in said:
                self._note(path, f"a line of `{line.get('op')}` is there twice")
            said.add(text)
        if whose := _OF_RANK.match(path.name):
            place = int(whose[1]), int(whose[2])
            places = [(line.get("term", place[0]), line.get("rank", place[1])) for line in lines]
            if any(each != place for each in places):
                self._note(path, "a line is not of the term and rank that the file is named after")
        return [line for line in lines if isinstance(line.get("op"), str)]

    def counts(self, path: Path) -> npt.NDArray[np.int64] | None:
        try:
            found = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            self._note(path, f"cannot be read: {error}")
            return None
        if isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype == np.int64:
            return found
        self._note(path, "does not hold one int64 for each sample")
        return None

    def normal(self, problem: str, as_read: T, normalise: Callable[[], T]) -> T:
        """Return the normalised value; on malformed lines note the problem and return `as_read`."""
        try:
            return normalise()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.unreadable.append(f"history: {problem}, because a line lacks a value or has another kind ({error})")
            return as_read

    def check_own(self) -> None:
        """Note links among the run's files, which are no evidence, and folders in place of files."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_symlink():
                self._note(path, "is a link: the run has written files alone")
            elif path.suffix in (".json", ".jsonl") and path.is_dir():
                self._note(path, "is a folder instead of a file")

    def _note(self, path: Path, why: str) -> None:
        named = path.relative_to(self.folder) if path.is_relative_to(self.folder) else path
        self.unreadable.append(f"{named} {why}" if not why.startswith("line ") else f"{named}: {why}")


def _kind_of(value: object) -> str:
    return {list: "a list", str: "text", type(None): "null"}.get(type(value), "a number")


def parsed(content: bytes) -> Line | None:
    try:
        return mapping_in(json.loads(content))
    except (ValueError, RecursionError):
        return None


def mapping_in(value: object) -> Line | None:
    return value if isinstance(value, dict) else None
