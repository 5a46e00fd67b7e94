"""What a run has left, read from files alone: histories, commits, results, the witness, the faults.

Nothing here is imported from what is judged. A torn last line of a history (its process died) is passed over.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import yaml

from chaos.judge.evidence.clocks import leaders, moved, offsets_of, on_one_clock
from chaos.judge.evidence.identities import identified
from chaos.judge.evidence.stored_weights import Tensors, load_weights

Line = dict[str, object]
_LARGEST_VOID = 100
MANIFEST = "manifest.json"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, ten times as fast, where PyYAML was built with it."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit record as it is on disk: its key, the SHA-256 of its bytes, and its fields (None if damaged)."""

    key: str
    digest: str
    fields: Line | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The files of one run, parsed; `processes` holds each history file's lines in the order they were written."""

    folder: Path
    processes: list[list[Line]]
    commits: list[Commit]
    config: Line
    result: Line | None
    witness: npt.NDArray[np.int64] | None = field(repr=False)
    metrics: dict[int, list[Line]] | None = field(default=None, repr=False)
    """Each term's lines; None where nobody could have logged any."""
    pruned: str | None = None
    """Which histories the run has deleted, in words; None if all are there."""
    tracked: Line | None = field(default=None, repr=False)
    """What the tracker held, by metric; None if it was not read."""
    rows: int | None = None
    """How many rows the training set has by its manifest; None without one."""
    sizes: tuple[int, ...] = ()
    """How many of them each source of a mixture has; none without one."""
    load: Callable[[Line], Tensors] | None = field(default=None, repr=False)
    """Returns the weights that the files of a commit record hold; raises Violated where they are not what it says."""
    # What is worked out of the files once; `replace` begins with none of it.
    _as_read: dict[str, list[Line]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_op: dict[str, list[Line]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_term: dict[str, dict[int, list[Line]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _derived: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def has(self, op: str) -> bool:
        """Say whether any line is of an operation, whatever else it lacks."""
        return bool(self._lines().get(op))

    def of(self, op: str) -> list[Line]:
        """Return the lines of one operation, in the order of their times."""
        if op not in self._by_op:
            self._by_op[op] = sorted(self._lines().get(op, ()), key=lambda line: number(line, "t"))
        return self._by_op[op]

    def _lines(self) -> dict[str, list[Line]]:
        """Return the lines of each operation, one process after the other."""
        if not self._as_read:
            for process in self.processes:
                for line in process:
                    self._as_read.setdefault(str(line.get("op")), []).append(line)
        return self._as_read

    def in_term(self, op: str, term: int) -> list[Line]:
        """Return the lines of one operation in one term, in the order of their times."""
        if op not in self._by_term:
            found: dict[int, list[Line]] = {}
            for line in self.of(op):
                found.setdefault(whole(line, "term"), []).append(line)
            self._by_term[op] = found
        return self._by_term[op].get(term, [])


def once(derive: Callable[[Evidence], T]) -> Callable[[Evidence], T]:
    """Work a fact out once for each run; callers must not change it."""

    @functools.wraps(derive)
    def remembered(run: Evidence) -> T:
        if derive.__qualname__ not in run._derived:
            run._derived[derive.__qualname__] = derive(run)
        return cast(T, run._derived[derive.__qualname__])

    return remembered


def collect(folder: Path) -> Evidence:
    """Read everything below a run's folder."""
    witness = folder / "witness.npy"
    config = _mapping(yaml.load(_text(folder / "config.yaml") or "{}", Loader=_LOADER))
    result, held = _text(folder / "result.json"), _text(folder / "tracked.json")
    manifests = manifests_of(folder, config or {})
    sizes = [rows_of(manifest) for manifest in manifests]
    read = Evidence(
        folder=folder,
        processes=identified(without_vain([_process(parts) for parts in _histories(folder)])),
        commits=[_commit(path) for path in record_files(folder)],
        config=config or {},
        result=_parsed(result.encode()) if result else None,
        witness=np.load(witness, allow_pickle=False) if witness.exists() else None,
        metrics=metrics_of(folder),
        pruned=_pruned(folder),
        tracked=_parsed(held.encode()) if held else None,
        rows=sum(sizes) if sizes else None,
        sizes=tuple(sizes) if _sources_of(config or {}) else (),
        load=functools.partial(load_weights, folder),
    )
    return with_one_clock(read)


def with_one_clock(run: Evidence) -> Evidence:
    """Return the evidence with all times on the executor's clock, as far as hosts' clocks differ by seconds."""
    offsets = offsets_of(run.processes)
    if not offsets:
        return run
    leads = leaders(run.processes)
    ahead = {term: offsets.get(host, 0.0) for term, host in leads.items()}
    metrics = run.metrics and {
        term: [moved(x, ahead.get(term, 0.0)) for x in run.metrics[term]] for term in run.metrics
    }
    commits = [
        replace(commit, fields=commit.fields and moved(commit.fields, ahead.get(commit.fields.get("term"), 0.0)))
        for commit in run.commits
    ]
    return replace(run, processes=on_one_clock(run.processes, offsets), metrics=metrics, commits=commits)


def without_vain(processes: list[list[Line]]) -> list[list[Line]]:
    """Leave out the faults that had no effect: a `missed` line has their number, and they explain nothing."""
    vain = {line["fault"] for process in processes for line in process if line["op"] == "missed" and "fault" in line}
    return [
        [line for line in process if line["op"] != "fault" or line.get("number") not in vain] for process in processes
    ]


def manifests_of(folder: Path, config: Line) -> list[Line]:
    """Read the training set's manifest, or those of a mixture's sources: the copy in the run's folder, or where its
    configuration says; none unless all are there."""
    data = _mapping(config.get("data")) or {}
    train = data.get("train")
    sources = _sources_of(config) or ([train] if isinstance(train, str) else [""])
    found = []
    for number, source in enumerate(sources):
        places = [folder / copy_of_manifest(number), *([Path(source) / MANIFEST] if source else [])]
        content = next((place.read_bytes() for place in places if place.is_file()), b"")
        found.append(_parsed(content) if content else None)
    return [each for each in found if each is not None] if None not in found else []


def copy_of_manifest(number: int) -> str:
    """Return the name under which a run's folder keeps the manifest of a source, the first or only one's as it was."""
    return MANIFEST if number == 0 else f"manifest-{number}.json"


def _sources_of(config: Line) -> list[str]:
    """Return where the sources of a mixture are; none without one."""
    mixture = (_mapping(config.get("data")) or {}).get("mixture")
    return [str(line["source"]) for line in mixture if isinstance(line, dict)] if isinstance(mixture, list) else []


def rows_of(manifest: Line) -> int:
    """Count the rows of all row groups that a manifest lists."""
    return sum(sum(cast(list[int], file["row_groups"])) for file in cast(list[Line], items(manifest, "files")))


def _histories(folder: Path) -> list[list[Path]]:
    """Return the parts of every process's history in the order in which they were written: X.jsonl, X.p000001.jsonl."""
    paths = sorted((folder / "history").glob("*.jsonl"))
    return [list(parts) for _, parts in itertools.groupby(paths, key=lambda path: path.name.partition(".")[0])]


def _process(parts: list[Path]) -> list[Line]:
    """Return a process's lines, each once: every part begins with some of the first one's `again`."""
    lines, said = list[Line](), set[tuple[object, object]]()
    for line in itertools.chain.from_iterable(parse_lines(path.read_bytes()) for path in parts):
        if not line.get("again") or (line["op"], line.get("t")) not in said:
            lines.append(line)
        said.add((line["op"], line.get("t")))
    return lines


def _pruned(folder: Path) -> str | None:
    """Say which histories were deleted while the run went on, whole terms or the first parts of long ones."""
    summary = _parsed((_text(folder / "history" / "summary.json") or "{}").encode()) or {}
    if terms := summary.get("pruned"):
        return f"the histories of the terms up to {terms} were deleted (run.history_terms)"
    firsts = [parts[0].name for parts in _histories(folder)]
    shortened = next((name for name in firsts if ".p" in name), None)
    return f"the first parts of {shortened} were deleted (run.history_bytes)" if shortened else None


def record_files(folder: Path) -> list[Path]:
    """Return the commit records below a run's folder, the oldest first; names that a sweep has taken are none."""
    return [path for path in sorted((folder / "commits").glob("[0-9]*.json")) if _is_record(path)]


def _is_record(path: Path) -> bool:
    try:
        return path.stat().st_size > _LARGEST_VOID or not is_void(path.read_bytes())
    except FileNotFoundError:
        return False  # deleted since it was listed


def is_void(content: bytes) -> bool:
    """Say whether a record's place holds a mark that there will never be one."""
    return _parsed(content) == {"void": True}


def metrics_of(folder: Path) -> dict[int, list[Line]]:
    """Read the lines of every term's metrics below a run's folder."""
    return {
        int(path.stem): [line for text in path.read_bytes().splitlines() if (line := _parsed(text)) is not None]
        for path in sorted((folder / "metrics").glob("*.jsonl"))
        if path.stem.isdecimal()
    }


def parse_lines(content: bytes) -> Iterator[Line]:
    """Yield the whole lines of a history; what is torn is passed over."""
    for text in content.splitlines():
        line = _parsed(text)
        if line is not None and "op" in line:
            yield line


def scenario_field(run: Evidence, key: str) -> object:
    """Return what the executor wrote of the run before it began; None if nothing."""
    return next((line.get(key) for line in run._lines().get("scenario", ())), None)


def number(line: Line, key: str) -> float:
    """Return a line's number; KeyError or TypeError if there is none, which makes a verdict unknown."""
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} of {line} is not a number")
    return value


def whole(line: Line, key: str) -> int:
    """Return a line's integer."""
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key} of {line} is not an integer")
    return value


def part(line: Line, key: str) -> Line:
    """Return a line's mapping."""
    value = line[key]
    if not isinstance(value, dict):
        raise TypeError(f"{key} of {line} is not a mapping")
    return value


def items(line: Line, key: str) -> list[object]:
    """Return a line's list."""
    value = line[key]
    if not isinstance(value, list):
        raise TypeError(f"{key} of {line} is not a list")
    return value


def lanes_of(line: Line) -> range:
    """Return the lanes that a step's line speaks for: half-open, with a stride where they are dealt."""
    bounds = [one for one in items(line, "lanes") if isinstance(one, int)]
    if not 2 <= len(bounds) == len(items(line, "lanes")) <= 3:
        raise TypeError(f"lanes of {line} are not two or three integers")
    return range(*bounds)


def _commit(path: Path) -> Commit:
    content = path.read_bytes()
    return Commit(f"commits/{path.name}", hashlib.sha256(content).hexdigest(), _parsed(content))


def _parsed(content: bytes) -> Line | None:
    try:
        return _mapping(json.loads(content))
    except ValueError:
        return None


def _mapping(value: object) -> Line | None:
    return value if isinstance(value, dict) else None


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
