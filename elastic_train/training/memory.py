"""A process's memory: measured periodically without waiting for a device, and recorded when it runs out.

On an out-of-memory error, a snapshot is written to the run folder and a note added to the error, which is raised
unchanged. A process killed by the kernel cannot do so: then the history's last `memory` line is the best evidence.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.config.combinations import Feature, refusals
from elastic_train.config.schema import Config
from elastic_train.insight.page import Facts
from elastic_train.insight.phases import FOLDER, PARTS, REST, MemoryFacts
from elastic_train.job.state import AppliedState
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.system.files import write_atomically
from elastic_train.system.process_identity import resident
from elastic_train.system.wording import first_line, size
from elastic_train.tracking.history import History
from rendezvous.waiting import GivenUp, begin

HOST = "host"
"""Category of tensors in host memory on a rank with a GPU."""


class Storage(NamedTuple):
    """Memory that tensors share, its category, and the first tensor in it."""

    part: str
    num_bytes: int
    tensor: Tensor


class Meter:
    """Measures one process's memory, from before its model is built until it ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._program = resident().now

    def measure(self, held: Iterable[OfPart] = ()) -> MemoryFacts:
        """Return the peaks so far, and the bytes held by category."""
        parts = dict.fromkeys((*PARTS, HOST), 0)
        for one in storages(held, self.device):
            parts[one.part] += one.num_bytes
        host, peak = parts.pop(HOST), resident().peak
        if self.device.type != "cuda":
            return MemoryFacts(str(self.device), peak, parts, self._program)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        return MemoryFacts(str(self.device), allocated, parts, 0, reserved, host, peak)


def held_by(state: AppliedState, gradients: GradientSum | None, saves: SaveMemory) -> Iterator[OfPart]:
    """Yield the tensors that a rank holds between steps; a tensor may occur more than once."""
    yield from (("weights", weights) for weights in state.model.parameters())
    yield from (("buffers", buffer) for buffer in state.model.buffers())
    yield from state.shards.tensors()
    if gradients is not None:
        yield from gradients.tensors()
    yield from (("staging", memory) for memory in saves.staging.tensors())


def storages(held: Iterable[OfPart], device: torch.device) -> Iterator[Storage]:
    """Yield each storage once, under the first category that has it; storages off the device count as `HOST`."""
    seen = set[int]()
    for part, tensor in held:
        if tensor.is_meta:
            continue
        try:
            memory = tensor.untyped_storage()
            num_bytes, start = memory.nbytes(), memory.data_ptr()
        except (NotImplementedError, RuntimeError):  # a tensor that stands for others, or has no memory
            continue
        if num_bytes and start not in seen:
            seen.add(start)
            yield Storage(part if tensor.device.type == device.type else HOST, num_bytes, tensor)


log = logging.getLogger(__name__)


class MemoryWatch:
    """Measures a rank's memory in one world, every `every_steps` steps; `held` yields its tensors."""

    def __init__(
        self,
        meter: Meter,
        held: Callable[[], Iterable[OfPart]],
        history: History,
        every_steps: int,
        page: Facts | None = None,
    ) -> None:
        self.held, self.meter = held, meter
        self._history, self._every_steps, self._page = history, every_steps, page
        self._num_steps = 0
        self._unsaid: int | None = None
        self._has_failed = False

    def step(self, step: int) -> None:
        self._unsaid = step
        if self._num_steps % self._every_steps == 0:
            self.say()
        self._num_steps += 1

    def say(self) -> None:
        """Report the memory if steps were applied since the last report."""
        step, self._unsaid = self._unsaid, None
        if step is None or self._has_failed:
            return
        try:
            facts = self.look()
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            self._has_failed = True
            log.warning("this rank's memory is not looked at in this world any longer: %s", first_line(error))
            return
        self._history.memory(step=step, facts=facts.as_fields())
        if self._page is not None:
            self._page.memory = facts

    def look(self) -> MemoryFacts:
        return self.meter.measure(self.held())


WRITE_TIMEOUT_S = 20.0
MOST_KEPT, MOST_LISTED, MOST_TEXT = 4, 20, 8000
"""Maximum number of snapshots per rank number, of tensors in one, and of characters in each of its texts."""
MOST_RECORDED_BYTES = 64 << 20
"""Largest record of a GPU's allocations that is kept."""
MOST_RECORDED = 100_000
"""Number of recent allocations and releases recorded."""
FRAGMENTED = 0.1
"""Unused fraction of a GPU's reserved memory above which a remedy is suggested."""
_SIGNS = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_PREFIX = "out of memory: "


@dataclass(frozen=True, slots=True)
class Moment:
    """A rank's position: the step that it computes, and the lane, if any; unknown before its first world."""

    term: int = 0
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    num_ranks: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))
    step: int | None = None
    lane: int | None = None

    def __str__(self) -> str:
        before = f"on its way into world {self.term}" if self.term else "before its first world"
        where = before if self.step is None else f"step {self.step}"
        return f"rank {self.rank}, {where}" + ("" if self.lane is None else f", lane {self.lane}")


def record_allocations(device: torch.device) -> None:
    """Make torch record a GPU's allocations with their stack traces."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MOST_RECORDED, stacks="python")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a device or the host ran out of memory; torch has no common class for such errors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def note_out_of_memory(
    error: BaseException,
    config: Config,
    meter: Meter,
    moment: Moment | None = None,
    held: Iterable[OfPart] = (),
    model: nn.Module | None = None,
) -> None:
    """If memory ran out, write a snapshot and add the findings and remedies to the error; never raises.

    `held` has the rank's tensors, and `model` gives names for some of them. An error that has such a note keeps it.
    """
    if not is_out_of_memory(error) or any(note.startswith(_PREFIX) for note in getattr(error, "__notes__", ())):
        return
    moment, facts = moment or Moment(), None
    try:
        held = list(held)
        facts = meter.measure(held)
        where = _take(error, config, meter.device, moment, facts, _largest(held, meter.device, model))
    except Exception as why:  # noqa: BLE001 - memory may run out here as well, and the error itself matters
        where = f"no snapshot could be taken: {first_line(why)}"
    found = f"{moment}, {meter.device}" + ("" if facts is None else f": {in_words(facts)}")
    error.add_note(f"{_PREFIX}{found}; {where}. {remedies(config, moment.num_ranks, facts)}")


def _take(
    error: BaseException,
    config: Config,
    device: torch.device,
    moment: Moment,
    facts: MemoryFacts,
    largest: Sequence[Mapping[str, object]],
) -> str:
    """Write a snapshot; return its path, or the reason why there is none."""
    tree = config.model_dump(mode="json")
    snapshot = {
        "t": time.time(),
        **asdict(moment),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "error": f"{type(error).__name__}: {error}"[:MOST_TEXT].splitlines(),
        "memory": facts.as_fields(),
        **_room(device),
        "largest": largest,
        "configuration": {key: tree[key] for key in ("batch", "parallel", "precision", "compile")},
        "traceback": "".join(traceback.format_exception(error))[-MOST_TEXT:].splitlines(),
    }
    if device.type == "cuda":
        snapshot["allocator"] = torch.cuda.memory_summary(device)[:MOST_TEXT].splitlines()
    path = Path(config.run.dir) / FOLDER / f"{moment.term:08d}-{moment.rank:05d}.json"
    try:
        begin("memory snapshot", lambda: _write(path, snapshot, device)).result(WRITE_TIMEOUT_S)
    except GivenUp:
        return f"{path} could not be written: no answer in {WRITE_TIMEOUT_S:.0f} s"
    except OSError as why:
        return f"{path} could not be written: {first_line(why)}"
    return f"snapshot: {path}"


def in_words(facts: MemoryFacts) -> str:
    """Return a peak and its composition as text, the largest category first."""
    parts = {**facts.parts, "program": facts.program, REST: facts.rest}
    made_of = ", ".join(
        f"{name} {size(taken)}" for name, taken in sorted(parts.items(), key=lambda one: -one[1]) if taken
    )
    return f"at its peak {size(facts.peak)} ({made_of})"


_MORE_SHARDS: Mapping[str, Feature] = {
    "none": "shards: optimizer",
    "optimizer": "shards: gradients",
    "gradients": "shards: parameters",
}


def remedies(config: Config, num_ranks: int, facts: MemoryFacts | None = None) -> str:
    """Return settings that need less memory, least intrusive first; keys of `parallel` may change at a resume."""
    keys, is_on_gpu = config.parallel, facts is not None and facts.reserved is not None
    found = []
    if keys.recompute == "none":
        found.append("parallel.recompute: units")
    more = _MORE_SHARDS.get(keys.shards)
    if keys.pipeline * keys.expert > 1 and more == "shards: parameters":
        more = None  # weights are gathered for a step anyway
    if more is not None and num_ranks // keys.cell.num_parts > keys.copies and _works(config, more):
        found.append(f"parallel.{more}")
    if is_on_gpu and not keys.has_offload and _works(config, "offload: optimizer"):
        found.append("parallel.offload: optimizer")
    if facts is not None and facts.reserved and facts.reserved - facts.peak > FRAGMENTED * facts.reserved:
        found.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment")
    if config.batch.micro_batch > 1:
        found.append(f"in a new run, batch.micro_batch below {config.batch.micro_batch}")
    listed = "; ".join(found) or "a smaller model, or a device with more memory"
    return f"To use less memory: {listed}. `elastic-train plan CONFIG --by memory` says how much"


def _works(config: Config, more: Feature) -> bool:
    """Return True if a configuration works with another setting of shards or offload."""
    key = more.split(":")[0]
    kept = {feature: text for feature, text in config.features.items() if not feature.startswith(f"{key}:")}
    return not refusals({**kept, more: f"parallel.{more}"})


def _largest(held: Iterable[OfPart], device: torch.device, model: nn.Module | None) -> list[dict[str, object]]:
    """Describe the largest storages among held tensors and all other tensors that Python knows."""
    named = () if model is None else model.named_parameters()
    names = {one.untyped_storage().data_ptr(): name for name, one in reversed([*named])}
    live = (("other", one) for one in gc.get_objects() if issubclass(type(one), Tensor))
    found = sorted(storages(chain(held, live), device), key=lambda one: -one.num_bytes)
    return [
        {
            "part": one.part,
            "bytes": one.num_bytes,
            "name": names.get(one.tensor.untyped_storage().data_ptr()),
            "shape": list(one.tensor.shape),
            "dtype": str(one.tensor.dtype),
            "device": str(one.tensor.device),
        }
        for one in found[:MOST_LISTED]
    ]


def _room(device: torch.device) -> dict[str, int]:
    """Return the total and free memory of the device, or else of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        try:
            lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
            free, total = (int(lines[key].split()[0]) << 10 for key in ("MemAvailable", "MemTotal"))
        except (OSError, ValueError, KeyError):
            return {}
    return {"free": free, "total": total}


def _write(path: Path, snapshot: Mapping[str, object], device: torch.device) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(snapshot, indent=1) + "\n")
    if device.type == "cuda":
        _write_record(path.with_suffix(".pickle"))
    rank = path.stem.partition("-")[2]
    others = sorted(set(path.parent.glob(f"*-{rank}.json")) - {path}, key=lambda other: other.stat().st_mtime)
    for old in others[: 1 - MOST_KEPT]:
        for one in (old, old.with_suffix(".pickle")):
            one.unlink(missing_ok=True)


def _write_record(path: Path) -> None:
    """Write torch's record of GPU allocations, if it was enabled, for https://pytorch.org/memory_viz."""
    recorded = torch.cuda.memory._snapshot()
    if any(recorded["device_traces"]) and len(content := pickle.dumps(recorded)) <= MOST_RECORDED_BYTES:
        path.write_bytes(content)
