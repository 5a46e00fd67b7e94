"""Read a run's files: histories, commits, results, the witness, the faults.

Nothing is imported from the code that is judged. A torn last line of a history (its process died) is skipped. Any other
unreadable file is listed in `Evidence.unreadable` and treated as missing.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import yaml

from chaos.judge.evidence.clocks import leaders, moved, offsets_of, on_one_clock
from chaos.judge.evidence.files import Files, mapping_in, parsed
from chaos.judge.evidence.identities import identified
from chaos.judge.evidence.stored_weights import Tensors, digests_of_state, load_averages, load_weights

Line = dict[str, object]
_LARGEST_VOID = 100
MANIFEST = "manifest.json"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, ten times as fast, where PyYAML has it."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit record on disk: key, SHA-256 of its bytes, and fields (None if damaged)."""

    key: str
    digest: str
    fields: Line | None
    is_sealed: bool = True
    """True if the seal matches; also for records without one."""

    @classmethod
    def of(cls, key: str, content: bytes) -> Commit:
        fields = parsed(content)
        is_sealed = fields is None or not {"format", "seal"} & fields.keys() or fields.get("seal") == seal_of(fields)
        return cls(key, hashlib.sha256(content).hexdigest(), fields, is_sealed)


def seal_of(record: Line) -> str:
    """Return the SHA-256 of a record without its seal, in canonical form (docs/formats.md, Commits)."""
    fields = {name: value for name, value in record.items() if name != "seal"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run's parsed files; `processes` holds each history file's lines as written."""

    folder: Path
    processes: list[list[Line]]
    commits: list[Commit]
    config: Line
    result: Line | None
    witness: npt.NDArray[np.int64] | None = field(repr=False)
    metrics: dict[int, list[Line]] | None = field(default=None, repr=False)
    """Lines by term; None if the run logs none."""
    pruned: str | None = None
    """Description of deleted histories; None if all are there."""
    tracked: Line | None = field(default=None, repr=False)
    """The tracker's values by metric; None if it was not read."""
    rows: int | None = None
    """Rows of the training set by its manifest; None without one."""
    sizes: tuple[int, ...] = ()
    """Rows of each source of a mixture; empty without one."""
    terms: dict[int, Line] | None = None
    """Claims of terms in the run's folder; None if stored elsewhere."""
    unreadable: tuple[str, ...] = ()
    """Unreadable files, each with the reason."""
    load: Callable[[Line], Tensors] | None = field(default=None, repr=False)
    """Returns the weights in a commit record's files; raises Violated if they do not match it."""
    averages: Callable[[Line], Tensors] | None = field(default=None, repr=False)
    """Returns the averaged weights in them."""
    state: Callable[[Line], dict[str, str]] | None = field(default=None, repr=False)
    """Returns a digest of every other value of a commit: optimizer, schedule and averages."""
    # Caches; `replace` starts with empty ones.
    _as_read: dict[str, list[Line]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_op: dict[str, list[Line]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_term: dict[str, dict[int, list[Line]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _derived: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def has(self, op: str) -> bool:
        """Return True if any line has this operation, whatever else it lacks."""
        return bool(self._lines().get(op))

    def of(self, op: str) -> list[Line]:
        if op not in self._by_op:
            self._by_op[op] = sorted(self._lines().get(op, ()), key=lambda line: number(line, "t"))
        return self._by_op[op]

    def _lines(self) -> dict[str, list[Line]]:
        """Return the lines by operation, process after process."""
        if not self._as_read:
            for process in self.processes:
                for line in process:
                    self._as_read.setdefault(str(line.get("op")), []).append(line)
        return self._as_read

    def in_term(self, op: str, term: int) -> list[Line]:
        if op not in self._by_term:
            found: dict[int, list[Line]] = {}
            for line in self.of(op):
                found.setdefault(whole(line, "term"), []).append(line)
            self._by_term[op] = found
        return self._by_term[op].get(term, [])


def once(derive: Callable[[Evidence], T]) -> Callable[[Evidence], T]:
    """Cache a function of a run; callers must not change its result."""

    @functools.wraps(derive)
    def remembered(run: Evidence) -> T:
        if derive.__qualname__ not in run._derived:
            run._derived[derive.__qualname__] = derive(run)
        return cast(T, run._derived[derive.__qualname__])

    return remembered


def collect(folder: Path) -> Evidence:
    """Read everything below a run's folder; never raises because of a file's content."""
    files = Files(folder)
    files.check_own()
    config = files.mapping(folder / "config.yaml", lambda content: yaml.load(content, Loader=_LOADER)) or {}
    sizes = [rows for manifest in manifests_of(folder, config, files.mapping) if (rows := _rows(files, manifest))]
    histories = [_process([files.history(path) for path in parts]) for parts in _histories(folder)]
    commits = [_commit(path) for path in record_files(folder)]
    read = Evidence(
        folder=folder,
        processes=files.normal("processes are unclear", histories, lambda: identified(without_vain(histories))),
        commits=commits,
        config=config,
        result=files.mapping(folder / "result.json"),
        witness=files.counts(folder / "witness.npy"),
        metrics=metrics_of(folder, files.lines),
        pruned=_pruned(folder, files.mapping(folder / "history" / "summary.json") or {}),
        tracked=files.mapping(folder / "tracked.json"),
        rows=sum(sizes) if sizes else None,
        sizes=tuple(sizes) if _sources_of(config) else (),
        terms=_terms(files, config),
        load=functools.partial(load_weights, folder),
        averages=functools.partial(load_averages, folder),
        state=functools.partial(digests_of_state, folder),
    )
    read = files.normal("clocks cannot be compared", read, lambda: with_one_clock(read))
    return replace(read, unreadable=tuple(files.unreadable))


def _rows(files: Files, manifest: Line) -> int | None:
    try:
        return rows_of(manifest)
    except (KeyError, TypeError, ValueError) as error:
        files.unreadable.append(f"a manifest of the training set does not list its files' row groups ({error})")
        return None


def _terms(files: Files, config: Line) -> dict[int, Line] | None:
    """Read the claim of each term; None if they are stored elsewhere, with the commits, and not copied here."""
    if (mapping_in(config.get("checkpoint")) or {}).get("url") and not (files.folder / "terms").is_dir():
        return None
    paths = [path for path in sorted((files.folder / "terms").glob("*.json")) if path.stem.isdecimal()]
    return {int(path.stem): claim for path in paths if (claim := files.mapping(path)) is not None}


def with_one_clock(run: Evidence) -> Evidence:
    """Return the evidence with all times on the executor's clock."""
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
    """Drop faults without effect, which a `missed` line marks: they explain nothing."""
    vain = {line["fault"] for process in processes for line in process if line["op"] == "missed" and "fault" in line}
    return [
        [line for line in process if line["op"] != "fault" or line.get("number") not in vain] for process in processes
    ]


def manifests_of(folder: Path, config: Line, read: Callable[[Path], Line | None] | None = None) -> list[Line]:
    """Read the training set's manifests, from the run's folder or the configured place; empty unless all are found."""
    data = mapping_in(config.get("data")) or {}
    train = data.get("train")
    sources = _sources_of(config) or ([train] if isinstance(train, str) else [""])
    found = []
    for number, source in enumerate(sources):
        places = [folder / copy_of_manifest(number), *([Path(source) / MANIFEST] if source else [])]
        place = next((place for place in places if place.is_file()), None)
        found.append((read or _mapping_in)(place) if place else None)
    return [each for each in found if each is not None] if None not in found else []


def copy_of_manifest(number: int) -> str:
    """Return the name of a source's manifest in a run's folder; the first keeps the plain name."""
    return MANIFEST if number == 0 else f"manifest-{number}.json"


def _sources_of(config: Line) -> list[str]:
    """Return the sources of a mixture; empty without one."""
    mixture = (mapping_in(config.get("data")) or {}).get("mixture")
    return [str(line.get("source")) for line in mixture if isinstance(line, dict)] if isinstance(mixture, list) else []


def row_groups_of(manifest: Line) -> list[int]:
    return [rows for file in cast(list[Line], items(manifest, "files")) for rows in cast(list[int], file["row_groups"])]


def rows_of(manifest: Line) -> int:
    groups = row_groups_of(manifest)
    if (least := min(groups, default=0)) < 0:
        raise ValueError(f"a row group of {least} rows")
    return sum(groups)


def _histories(folder: Path) -> list[list[Path]]:
    """Return the parts of every process's history in order: X.jsonl, X.p000001.jsonl."""
    paths = sorted((folder / "history").glob("*.jsonl"))
    return [list(parts) for _, parts in itertools.groupby(paths, key=lambda path: path.name.partition(".")[0])]


def _process(parts: list[list[Line]]) -> list[Line]:
    """Return a process's lines without repeats: every part starts with some earlier lines, marked `again`."""
    lines, said = list[Line](), set[tuple[object, object]]()
    for line in itertools.chain.from_iterable(parts):
        if not line.get("again") or (line["op"], line.get("t")) not in said:
            lines.append(line)
        said.add((line["op"], line.get("t")))
    return lines


def _pruned(folder: Path, summary: Line) -> str | None:
    """Describe the histories that were deleted during the run: whole terms, or first parts of long ones."""
    if terms := summary.get("pruned"):
        return f"the histories of the terms up to {terms} were deleted"
    firsts = [parts[0].name for parts in _histories(folder)]
    shortened = next((name for name in firsts if ".p" in name), None)
    return f"the first parts of {shortened} were deleted" if shortened else None


def record_files(folder: Path) -> list[Path]:
    """Return the commit records below a run's folder, oldest first, without names claimed by a sweep."""
    return [path for path in sorted((folder / "commits").glob("[0-9]*.json")) if _is_record(path)]


def _is_record(path: Path) -> bool:
    try:
        return path.is_file() and (path.stat().st_size > _LARGEST_VOID or not is_void(path.read_bytes()))
    except OSError:
        return False  # deleted since it was listed, or not a file


def is_void(content: bytes) -> bool:
    """Return True if the content marks a record that will never exist."""
    return parsed(content) == {"void": True}


def metrics_of(folder: Path, read: Callable[[Path], list[Line]] | None = None) -> dict[int, list[Line]]:
    """Read the metrics lines of every term below a run's folder."""
    return {
        int(path.stem): (read or _lines_in)(path)
        for path in sorted((folder / "metrics").glob("*.jsonl"))
        if path.stem.isdecimal()
    }


def _lines_in(path: Path) -> list[Line]:
    return [line for text in path.read_bytes().splitlines() if (line := parsed(text)) is not None]


def _mapping_in(path: Path) -> Line | None:
    return parsed(path.read_bytes())


def parse_lines(content: bytes) -> Iterator[Line]:
    """Yield the complete lines of a history; torn ones are skipped."""
    for text in content.splitlines():
        line = parsed(text)
        if line is not None and "op" in line:
            yield line


def scenario_field(run: Evidence, key: str) -> object:
    """Return a field of the executor's description of the run; None if missing."""
    return next((line.get(key) for line in run._lines().get("scenario", ())), None)


def number(line: Line, key: str) -> float:
    """Return a line's number; raise KeyError or TypeError without one, which makes a verdict unknown."""
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(_not(line, key, "a number"))
    return value


def whole(line: Line, key: str) -> int:
    """Return a line's integer; raise KeyError or TypeError without one."""
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_not(line, key, "an integer"))
    return value


def part(line: Line, key: str) -> Line:
    """Return a line's mapping; raise KeyError or TypeError without one."""
    value = line[key]
    if not isinstance(value, dict):
        raise TypeError(_not(line, key, "a mapping"))
    return value


def periods(text: object) -> dict[str, float]:
    """Return the periods of a text such as '20 worlds, 30 min' by unit; times in seconds, under 's'."""
    found = re.findall(r"([\d.]+) *([a-z]+)", text) if isinstance(text, str) else []
    seconds = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0, "days": 86400.0}
    return {
        "s" if unit in seconds else f"{unit.removesuffix('s')}s": float(amount) * seconds.get(unit, 1.0)
        for amount, unit in found
    }


def items(line: Line, key: str) -> list[object]:
    """Return a line's list; raise KeyError or TypeError without one."""
    value = line[key]
    if not isinstance(value, list):
        raise TypeError(_not(line, key, "a list"))
    return value


def _not(line: Line, key: str, what: str) -> str:
    """Return a message about a value of the wrong type."""
    named = ", ".join(f"{name} {line[name]!r}" for name in ("op", "status", "term", "rank", "step") if name in line)
    return f"{key} is {str(line[key])[:40]!r}, not {what}{f' ({named[:120]})' if named else ''}"


def lanes_of(line: Line) -> range:
    """Return the lanes of a step's line: half-open, with a stride if dealt."""
    bounds = [one for one in items(line, "lanes") if isinstance(one, int)]
    if not 2 <= len(bounds) == len(items(line, "lanes")) <= 3:
        raise TypeError(f"lanes of {line} are not two or three integers")
    return range(*bounds)


def _commit(path: Path) -> Commit:
    return Commit.of(f"commits/{path.name}", path.read_bytes())
