"""The section `parallel`: what ranks hold shares of, what they compute together, and how they exchange it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from elastic_train.config.combinations import FEATURES, Feature, Found
from elastic_train.config.section import Old, Section
from elastic_train.core.mesh import Cell

ScheduleKind = Literal["gpipe", "1f1b", "interleaved"]


class ParallelConfig(Section):
    shards: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """What ranks hold shares of: nothing, the optimizer's state (ZeRO-1), the gradients, too (ZeRO-2), or all
    (ZeRO-3). Where several ranks make up a replica, over those that hold the same part of the model."""
    tensor: PositiveInt = 1
    """How many ranks, workers of one node, hold the model together and compute each lane together (tensor parallelism):
    a cell. The task has to say how its model is cut. A state is lost when all cells have lost the same part of it."""
    sequence: bool = False
    """Whether tensor ranks go on with some tokens of every row each between the layers that are cut (sequence
    parallelism), so that all that a block keeps for its backward pass is divided by `tensor`."""
    pipeline: PositiveInt = 1
    """How many stages a model runs in, each on other workers (pipeline parallelism): they are a cell, too, and may be
    of different nodes. The task has to say what the stages are. No number of stages shows in the bits."""
    expert: PositiveInt = 1
    """Over how many workers of a node the experts of each block are spread (expert parallelism): a cell, or a stage of
    one, each of whose ranks computes lanes of its own and sends tokens to their experts. No degree shows in the
    bits."""
    context: PositiveInt = 1
    """How many workers of a node compute each row together, some of its tokens each (context parallelism), so that
    activations of long rows fit: a cell, each of whose ranks holds the whole model, or its part with `tensor` or
    `pipeline`. The task has to know how."""
    schedule: str = Field(default="1f1b", pattern=r"^(gpipe|1f1b|interleaved(:([2-9]|[1-9]\d+))?)$")
    """In which order a stage computes its lanes: all forward passes first, or forward and backward passes in turn,
    which keeps fewer activations: of at most as many lanes as there are stages from it on. `interleaved` gives each
    stage several chunks of the model: stages wait less for one another, and send more. Same bits."""
    copies: PositiveInt = 2
    """How many ranks hold each share, on different nodes if there are; once all are lost, the newest commit is read."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is held in pinned host memory, and goes through the GPU in blocks to be updated: nothing, what the optimizer
    keeps of each parameter, or the weights that a rank holds, too (which needs shards: parameters). Same bits."""
    recompute: Literal["none", "units", "selective"] = "none"
    """What a backward pass computes again, so that less is kept for it: nothing, each block of the model, or all of a
    block but products of matrices and attention. Same bits."""
    bucket_mb: PositiveFloat | None = 2.0
    """Megabytes of gradients that are exchanged together, beside the backward pass that computes the next ones; null to
    exchange all after it. With shards: gradients or parameters a block is what is exchanged together."""
    wire: Literal["exact", "bf16"] = "exact"
    """Gradients as ranks send them to one another: exact, or each lane's rounded to bf16, half the bytes; they are
    added in fp32 all the same, and no world shows in the bits. bf16 needs shards: gradients or parameters."""
    transport: Literal["auto", "gloo"] = "auto"
    """What carries tensors between ranks' GPUs: auto is NCCL, which needs a GPU for each rank; gloo goes through host
    memory, also where ranks share a GPU. Between CPUs it is always gloo."""
    domain: str | None = None
    """What may fail together with this node and others, such as a rack's name; copies go to different ones."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "virtual_stages": Old(
            int,
            2,
            "is now parallel.schedule: interleaved:N",
            lambda old: {"schedule": f"interleaved:{old['virtual_stages']}"} if "interleaved" in old.values() else {},
        )
    }

    @field_validator("wire", mode="before")
    @classmethod
    def _is_of_one_leaf(cls, value: object) -> object:
        if isinstance(value, str) and value.lower() == "powersgd":
            raise ValueError(
                "powersgd sends factors of sums over the ranks, and keeps on each rank what they leave out, so the "
                "bits would depend on the world, and a lost rank would take a part of the state along: set wire to bf16"
            )
        return value

    @property
    def order(self) -> ScheduleKind:
        """The kind of schedule."""
        return "interleaved" if self.virtual_stages > 1 else "gpipe" if self.schedule == "gpipe" else "1f1b"

    @property
    def virtual_stages(self) -> int:
        """How many chunks of the model each stage has, where there are several stages."""
        kind, _, number = self.schedule.partition(":")
        return 1 if kind != "interleaved" else int(number or 2)

    @property
    def has_shares(self) -> bool:
        """Whether ranks hold runs of the state by their seats, be it that each holds all of it."""
        return self.shards != "none" or self.has_offload

    @property
    def has_offload(self) -> bool:
        return self.offload != "none"

    @property
    def degrees(self) -> Mapping[str, int]:
        """The keys that make a replica one of several ranks, and what they are set to."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert, "context": self.context}

    @property
    def features(self) -> Mapping[Feature, str]:
        """The features that are set, and how: by key and value."""
        schedule = f"parallel.schedule: {self.schedule}"
        own: Mapping[Feature, str | None] = {
            "tensor": self._degree("tensor"),
            "sequence": "parallel.sequence: true" if self.sequence else None,
            "pipeline": self._degree("pipeline"),
            "interleaved": schedule if self.num_chunks > 1 else None,
            "expert": self._degree("expert"),
            "context": self._degree("context"),
            "wire: bf16": "parallel.wire: bf16" if self.wire == "bf16" else None,
        }
        held = [f"{key}: {getattr(self, key)}" for key in ("shards", "offload", "recompute")]
        by_value = {feature: f"parallel.{feature}" for feature in FEATURES if feature in held}
        return {feature: text for feature, text in own.items() if text is not None} | by_value

    def found(self) -> Iterator[Found]:
        """Yield the traits that these keys have."""
        shards = f"parallel.shards: {self.shards}"
        if self.shards != "parameters":
            yield Found("weights that stay on the GPU", shards)
        if self.shards in ("none", "optimizer"):
            yield Found("gradients that are exchanged as sums", shards)
        if self.tensor == 1:
            yield Found("one tensor rank", "parallel.tensor: 1")

    def _degree(self, key: str) -> str | None:
        return f"parallel.{key}: {self.degrees[key]}" if self.degrees[key] > 1 else None

    @property
    def num_chunks(self) -> int:
        """How many chunks of the model each stage of a pipeline has."""
        return self.virtual_stages if self.pipeline > 1 else 1

    @property
    def num_pieces(self) -> int:
        """How many pieces a model runs in, on all stages together."""
        return self.pipeline * self.num_chunks

    @property
    def set_degrees(self) -> str:
        """What of the configuration makes a replica one of several ranks; that of `tensor` where nothing does."""
        found = [f"parallel.{key}: {degree}" for key, degree in self.degrees.items() if degree > 1]
        return " and ".join(found or [f"parallel.tensor: {self.tensor}"])

    @property
    def token_multiple(self) -> int:
        """What divides the number of tokens of each part of a row: tensor ranks share them out with `sequence`."""
        return self.tensor if self.sequence else 1

    @property
    def cell(self) -> Cell:
        """The ranks that make up a replica."""
        return Cell(stage=self.pipeline, tensor=self.tensor, expert=self.expert, context=self.context)
