"""The layout of a state in files: which rank writes what, and where; the same on every rank that plans it.

A plan reads no tensor's values. It holds as long as the state keeps its shape, so it is made once and kept: at a save
only the plain values that changed are encoded again.
"""

from __future__ import annotations

import heapq
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from elastic_train.checkpoint.format.state_tree import StatePath, leaves_of, survey
from elastic_train.checkpoint.format.torch_frame import Frame, frame_of
from elastic_train.errors import ConfigError

State = dict[str, object]
Leaves = dict[StatePath, object]
LEAST_PART_BYTES = 4 << 20
"""A state is not cut into parts smaller than this: each costs requests, and another rank that must not fail."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place: its path in the state, and its frame at `offset` of its part's file."""

    path: StatePath
    dtype: torch.dtype
    shape: torch.Size
    frame: Frame
    offset: int
    index: MetadataIndex


@dataclass(frozen=True, slots=True)
class Part:
    """One writer's file; `num_bytes` are those of its framed tensors; plain values follow them."""

    name: str
    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlainSlot:
    """One plain value's place in the state."""

    path: StatePath
    index: MetadataIndex


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """Who writes what of a state of this shape; `int_keyed` and `empty` as in the commit's record."""

    parts: tuple[Part, ...]
    plain: Mapping[str, PlainSlot]
    metadata: Metadata
    int_keyed: tuple[StatePath, ...]
    empty: tuple[StatePath, ...]


def plan_attempt(state: State, num_writers: int = 1) -> AttemptPlan:
    """Plan the files of a replicated state, its tensors spread over at most `num_writers` by size."""
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(state, is_coordinator=True)
    except ValueError as error:  # two paths that read alike, such as a -> b.c and a.b -> c
        raise ConfigError(f"the state cannot be saved: {error}; rename one of them") from error
    local = planner.create_local_plan()
    _, metadata = planner.create_global_plan([local])
    paths: dict[str, StatePath] = {name: tuple(path) for name, path in metadata.planner_data.items()}
    tensors: list[tuple[StatePath, Tensor, MetadataIndex]] = []
    plain: dict[str, PlainSlot] = {}
    for item in local.items:
        path, value = paths[item.index.fqn], planner.state_dict[item.index.fqn]
        if isinstance(value, Tensor):
            tensors.append((path, value, item.index))
        else:
            plain[item.index.fqn] = PlainSlot(path, item.index)
    shares = _spread([tensor.nbytes for _, tensor, _ in tensors], num_writers)
    parts = [_lay_out(number, [tensors[place] for place in share]) for number, share in enumerate(shares)]
    return AttemptPlan(tuple(parts), plain, metadata, *survey(state))


class Planner:
    """Plans states, one like the last at almost no cost."""

    def __init__(self) -> None:
        self._made_for: object = None
        self._plan: AttemptPlan | None = None
        self._encoded: dict[str, tuple[bytes, bytes]] = {}

    def plan(self, state: State, leaves: Leaves, num_writers: int) -> AttemptPlan:
        """Plan a state whose leaves are given too; raise ConfigError for one that could not be read back."""
        kinds = [(path, leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else path for path, leaf in leaves.items()]
        made_for = (kinds, survey(state), num_writers)
        if self._plan is None or made_for != self._made_for:
            self._plan, self._made_for = plan_attempt(state, num_writers), made_for
        return self._plan

    def encode(self, plan: AttemptPlan, leaves: Leaves) -> dict[str, bytes]:
        """Return the files' bytes of every plain value."""
        return {name: self._encode(name, leaves[slot.path]) for name, slot in plan.plain.items()}

    def _encode(self, name: str, value: object) -> bytes:
        try:
            pickled = pickle.dumps(value)
            if self._encoded.get(name, (b"",))[0] != pickled:
                encoded = io.BytesIO()
                torch.save(value, encoded)
                encoded.seek(0)
                torch.load(encoded, weights_only=True)
                self._encoded[name] = (pickled, encoded.getvalue())
        except (pickle.PickleError, AttributeError, TypeError) as error:
            kind = type(value).__qualname__
            raise ConfigError(
                f"state '{name}' is a {kind}; a checkpoint holds tensors and plain values only"
            ) from error
        return self._encoded[name][1]


def _spread(sizes: Sequence[int], num_writers: int) -> list[list[int]]:
    """Deal the tensors out, the largest first, to the share with the fewest bytes; each share in the state's order."""
    num_parts = max(1, min(num_writers, sum(sizes) // LEAST_PART_BYTES))
    loads = [(0, part) for part in range(num_parts)]
    shares: list[list[int]] = [[] for _ in range(num_parts)]
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        load, part = heapq.heappop(loads)
        shares[part].append(place)
        heapq.heappush(loads, (load + sizes[place], part))
    return [sorted(share) for share in shares]


def _lay_out(number: int, tensors: Sequence[tuple[StatePath, Tensor, MetadataIndex]]) -> Part:
    slots: list[Slot] = []
    end = 0
    for path, tensor, index in tensors:
        if tensor.layout != torch.strided:
            raise ConfigError(f"state '{index.fqn}' is a {tensor.layout} tensor; a checkpoint holds strided ones only")
        frame = frame_of(tensor.dtype, tensor.shape)
        slots.append(Slot(path, tensor.dtype, tensor.shape, frame, end, index))
        end += frame.num_bytes
    return Part(f"__{number}_0.distcp", tuple(slots), end)


def leaves_by_path(state: State) -> Leaves:
    return dict(leaves_of(state))
