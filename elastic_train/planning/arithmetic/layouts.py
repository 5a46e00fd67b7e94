"""Layouts: how a run is spread over devices, and the rules that exclude a layout before anything is computed.

`runs_today` is false for a layout that the trainer refuses (`config.combinations`) but that can still be planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from elastic_train.config.combinations import FEATURES, Feature, Found, refusals
from elastic_train.config.parallel import BucketSize, bucket_bytes
from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.model import ModelFacts
from elastic_train.system.wording import counted

Shards = Literal["none", "optimizer", "gradients", "parameters"]
Offload = Literal["none", "optimizer", "all"]
SHARDS: tuple[Shards, ...] = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True, slots=True)
class Batch:
    """The lanes of a step, each of `micro_batch` samples."""

    num_lanes: int
    micro_batch: int

    @property
    def samples(self) -> int:
        return self.num_lanes * self.micro_batch


@dataclass(frozen=True, slots=True)
class Layout:
    """The distribution of state and work over devices.

    `interleave` is the number of model chunks per pipeline stage; `schedule` orders the lanes in stages of one chunk.
    `cuts_rest`: tensor ranks also shard embeddings and the output layer, as Megatron's do; the trainer replicates them.
    """

    shards: Shards = "none"
    copies: int = 1
    recompute: str = "none"
    offload: Offload = "none"
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    interleave: int = 1
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    bucket_mb: BucketSize = "auto"
    wire: str = "exact"
    cuts_rest: bool = False

    @property
    def cell(self) -> int:
        """Number of ranks that compute one lane together."""
        return self.tensor * self.pipeline * self.expert * self.context

    def bucket_bytes(self, *, on_cpu: bool) -> float | None:
        """Return the least bytes of gradients exchanged at once during the backward pass; None if after it.

        Over NCCL, ranks of a cell exchange them after it (`Share.is_beside`).
        """
        return None if self.cell > 1 and not on_cpu else bucket_bytes(self.bucket_mb, on_cpu=on_cpu)

    @property
    def deals(self) -> bool:
        """True if gradients are reduced and sharded during the backward pass, so that no rank holds all of them."""
        return self.shards in ("gradients", "parameters")

    @property
    def gathers_for_steps(self) -> bool:
        """True if sharded weights are gathered once per step instead of per unit and pass."""
        return self.shards == "parameters" and self.pipeline * self.expert > 1

    @property
    def features(self) -> Mapping[Feature, str]:
        """The features that a configuration of this layout enables, with their text in the layout's name."""
        own: Mapping[Feature, str | None] = {
            "tensor": f"tp {self.tensor}" if self.tensor > 1 else None,
            "sequence": f"sp {self.tensor}" if self.sequence else None,
            "pipeline": f"pp {self.pipeline}" if self.pipeline > 1 else None,
            "interleaved": f"vpp {self.interleave}" if self.pipeline > 1 and self.interleave > 1 else None,
            "expert": f"ep {self.expert}" if self.expert > 1 else None,
            "context": f"cp {self.context}" if self.context > 1 else None,
            "wire: bf16": "wire bf16" if self.wire == "bf16" else None,
        }
        held = (f"shards: {self.shards}", f"offload: {self.offload}", f"recompute: {self.recompute}")
        by_value = {feature: feature.replace(":", "") for feature in FEATURES if feature in held}
        return {feature: text for feature, text in own.items() if text is not None} | by_value

    @property
    def runs_today(self) -> bool:
        """True if the trainer supports this layout, provided that the task defines its tensor split and stages."""
        return not self.cuts_rest and not refusals(self.features)

    @property
    def name(self) -> str:
        words = [f"shards {self.shards}"]
        words += [f"copies {self.copies}"] if self.shards != "none" else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        degrees = [("tp", self.tensor), ("pp", self.pipeline), ("ep", self.expert), ("cp", self.context)]
        degrees.insert(1, ("sp", self.tensor if self.sequence else 1))
        degrees += [("vpp", self.interleave)] if self.pipeline > 1 else []
        words += [f"{short} {degree}" for short, degree in degrees if degree > 1]
        words += ["gpipe"] if self.pipeline > 1 and self.interleave == 1 and self.schedule == "gpipe" else []
        return ", ".join(words)

    def replicas(self, world: int) -> int:
        return world // self.cell

    def summing(self, world: int) -> int:
        """Return the number of ranks that sum gradients of the same parameters: replicas times context ranks."""
        return self.replicas(world) * self.context

    def fitting(self, world: int) -> Layout:
        """Return the layout of a smaller world, of which all ranks hold what it cannot hold so many times."""
        return replace(self, copies=min(self.copies, max(1, self.summing(world))))

    def without_copies(self, world: int) -> bool:
        """Return True if losing one rank loses part of the state."""
        return self.summing(world) == 1 or (self.shards != "none" and self.copies == 1)


def why_not(layout: Layout, model: ModelFacts, batch: Batch, cluster: Cluster) -> list[str]:
    """Return the reasons that exclude a layout regardless of memory, e.g. indivisible degrees or too few lanes."""
    world, wrong = cluster.size, list[str]()
    if world % layout.cell:
        wrong.append(f"tp x pp x ep x cp = {layout.cell} does not divide {world} devices")
        return wrong
    if (replicas := layout.replicas(world)) > batch.num_lanes:
        wrong.append(
            f"{replicas} replicas, but only {batch.num_lanes} lanes: make batch.micro_batch smaller, or global_batch "
            "larger"
        )
    if layout.tensor > cluster.per_node:
        wrong.append(f"tp {layout.tensor} reaches beyond a node of {cluster.per_node} devices")
    if layout.context > cluster.per_node:
        wrong.append(f"cp {layout.context} reaches beyond a node of {cluster.per_node} devices")
    ranks = layout.tensor * layout.expert * layout.context  # ranks of a stage, which share a node
    degrees = "tp x ep x cp" if layout.expert > 1 else "tp x cp"
    if max(layout.tensor, layout.context) <= cluster.per_node < ranks:
        wrong.append(f"{degrees} = {ranks} reaches beyond a node of {cluster.per_node} devices")
    if cluster.nodes > 1 and ranks <= cluster.per_node and (idle := cluster.per_node % ranks):
        wrong.append(
            f"{degrees} = {ranks} leaves {idle} of a node's {cluster.per_node} devices over: stages are not of two "
            "nodes"
        )
    if layout.shards != "none" and layout.copies > (holders := layout.summing(world)):
        who = "replicas" if layout.context == 1 else "ranks of each part"
        wrong.append(f"copies {layout.copies}, but only {holders} {who} to hold them")
    return wrong + refusals(layout.features, _traits(layout, model, batch, cluster))


def _traits(layout: Layout, model: ModelFacts, batch: Batch, cluster: Cluster) -> Iterator[Found]:
    """Yield the traits of model, batch and devices that are incompatible with some layouts."""
    lanes = counted(batch.num_lanes, "lane")
    if layout.pipeline > batch.num_lanes // layout.expert:
        yield Found("fewer lanes than stages", lanes)
    if layout.expert > batch.num_lanes:
        yield Found("fewer lanes than expert ranks", lanes)
    if not any(unit.experts for unit in model.units):
        yield Found("a model without experts", "a model that has no experts")
    if not model.blocks:
        yield Found("a model without blocks", "a model that has no blocks")
    elif len(model.blocks) < (pieces := layout.pipeline * layout.interleave):
        yield Found("fewer blocks than stages", f"{counted(len(model.blocks), 'block')} in {pieces} stages")
    if layout.shards != "parameters":
        yield Found("weights that stay on the GPU", f"shards {layout.shards}")
    if cluster.device.is_cpu:
        yield Found("`device: cpu`", cluster.device.name)


def candidates(own: Layout, world: int, *, with_cells: bool, is_cpu: bool) -> Iterator[Layout]:
    """Yield the layouts to compare: modes with and without recomputation and offload; with `with_cells`, cells too.

    With selective recomputation there are no others: it is part of the model's facts.
    """
    recomputes = (own.recompute,) if own.recompute == "selective" else ("none", "units")
    powers = [1 << power for power in range(6)]
    degrees = [(t, p, 1) for t in powers[:4] for p in powers if t * p <= world] if with_cells else []
    for tensor, pipeline, expert in dict.fromkeys([own_cell(own), *degrees]):
        cell = replace(own, tensor=tensor, pipeline=pipeline, expert=expert)
        for shards in SHARDS:
            wire = own.wire if shards in ("gradients", "parameters") else "exact"
            for copies in (1, 2) if shards != "none" else (1,):
                for recompute in recomputes:
                    for offload in _offloads(shards, is_cpu):
                        yield replace(
                            cell, shards=shards, copies=copies, recompute=recompute, offload=offload, wire=wire
                        )


def _offloads(shards: Shards, is_cpu: bool) -> tuple[Offload, ...]:
    if is_cpu:
        return ("none",)
    return ("none", "optimizer", "all") if shards == "parameters" else ("none", "optimizer")


def own_cell(layout: Layout) -> tuple[int, int, int]:
    return layout.tensor, layout.pipeline, layout.expert


def stage_share(model: ModelFacts, layout: Layout) -> float:
    """Return the fraction of the model's blocks in the largest stage, whose chunks may have one block more than others.

    It is exact for one chunk per stage, and otherwise at most a block per chunk too much.
    """
    if layout.pipeline == 1:
        return 1.0
    pieces = layout.pipeline * layout.interleave
    return math.ceil(len(model.blocks) / pieces) * layout.interleave / max(1, len(model.blocks))


def rest_elements(model: ModelFacts, layout: Layout, *, trained: bool) -> float:
    """Return the elements of the rest of the model on one rank.

    Its ends are on the first and the last stage, of which both have tied weights.
    """
    whole = model.rest.trained if trained else model.rest.elements
    tied = min(model.tied, whole)
    return ((whole - tied) / min(2, layout.pipeline) + tied) / rest_parts(layout)


def rest_parts(layout: Layout) -> int:
    """Return the number of tensor ranks that shard the rest of the model."""
    return layout.tensor if layout.cuts_rest else 1


def place_elements(model: ModelFacts, layout: Layout, *, trained: bool) -> float:
    """Return the number of elements on the model-parallel rank with the most."""
    blocks, experts = 0.0, 0.0
    for unit in model.blocks:
        size, of_experts = (unit.trained, unit.trained_experts) if trained else (unit.elements, unit.experts)
        experts += of_experts
        blocks += size - of_experts
    share, rest = stage_share(model, layout) / layout.tensor, rest_elements(model, layout, trained=trained)
    return math.ceil(blocks * share + experts * share / layout.expert + rest)
