"""The section `parallel`: what ranks hold shares of, what they compute together, and how they exchange it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from elastic_train.config.combinations import FEATURES, Feature, Found
from elastic_train.config.section import Old, Section
from elastic_train.core.mesh import Cell

ScheduleKind = Literal["gpipe", "1f1b", "interleaved"]


BucketSize = PositiveFloat | Literal["auto"] | None
_AUTO_MB: Mapping[bool, float] = {True: 2.0, False: 32.0}
"""By whether it is a CPU: each exchange of a GPU costs some kernels, and few bytes take no time."""


def bucket_bytes(size: BucketSize, *, on_cpu: bool) -> float | None:
    """Return the least bytes of gradients to exchange at once during the backward pass; None if after it."""
    megabytes = _AUTO_MB[on_cpu] if size == "auto" else size
    return None if megabytes is None else megabytes * (1 << 20)


class ParallelConfig(Section):
    shards: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """Shard over data-parallel ranks: nothing (DDP), the optimizer state (ZeRO-1), also gradients (ZeRO-2), or also
    parameters (ZeRO-3)."""
    tensor: PositiveInt = 1
    """Tensor parallelism: number of ranks of one node that share each layer. The task has to support it."""
    sequence: bool = False
    """Sequence parallelism: also shard activations along the sequence between tensor-parallel layers."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism: number of stages, which may be on different nodes. The task has to support it. Same
    bits at any degree."""
    expert: PositiveInt = 1
    """Expert parallelism: number of ranks of one node that share the experts of each block and compute different
    lanes. Same bits at any degree."""
    context: PositiveInt = 1
    """Context parallelism: number of ranks of one node that each compute some tokens of every row. The task has to
    support it."""
    schedule: str = Field(default="1f1b", pattern=r"^(gpipe|1f1b|interleaved(:([2-9]|[1-9]\d+))?)$")
    """Order of a pipeline stage's lanes. gpipe: all forward passes first. 1f1b: forward and backward passes
    alternate, which keeps fewer activations. interleaved or interleaved:N: 1f1b with N (default 2) chunks of the
    model on each stage, which waits less and sends more. Same bits."""
    copies: PositiveInt = 2
    """Number of ranks that hold each shard, on different nodes where possible. When all are lost, the run continues
    from the newest commit."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Keep in pinned host memory: nothing, the optimizer state, or also the weights (needs shards: parameters). The
    GPU updates them block by block. Same bits."""
    recompute: Literal["none", "units", "selective"] = "none"
    """Activation checkpointing. units: keep only each block's input and compute the block again in the backward
    pass. selective: also keep matrix products and attention. Same bits."""
    bucket_mb: BucketSize = "auto"
    """Size (MB) of the gradient buckets that are exchanged during the backward pass. auto: 2 on CPUs, 32 on GPUs. null:
    exchange after it. With shards: gradients or parameters a bucket is a block."""
    wire: Literal["exact", "bf16"] = "exact"
    """Format on the network. bf16: round each lane's gradient to half the bytes and add in fp32; with precision: bf16
    or fp8 also round the weights gathered for a pass. Needs shards: gradients or parameters. Same bits in every
    world."""
    transport: Literal["auto", "gloo"] = "auto"
    """Transport between GPUs. auto: NCCL, which needs one GPU for each rank. gloo: through host memory, also for
    ranks that share a GPU. CPUs always use gloo."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "domain": Old(str | None, None, "is ignored: set the environment variable ELASTIC_TRAIN_DOMAIN on each node"),
        "virtual_stages": Old(
            int,
            2,
            "is now parallel.schedule: interleaved:N",
            lambda old: {"schedule": f"interleaved:{old['virtual_stages']}"} if "interleaved" in old.values() else {},
        ),
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
        return "interleaved" if self.virtual_stages > 1 else "gpipe" if self.schedule == "gpipe" else "1f1b"

    @property
    def virtual_stages(self) -> int:
        """Number of chunks of the model on each stage, if there are several stages."""
        kind, _, number = self.schedule.partition(":")
        return 1 if kind != "interleaved" else int(number or 2)

    @property
    def has_shares(self) -> bool:
        """True if each rank holds the runs of the state that its seat gives it, which may be all of them."""
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
        return self.virtual_stages if self.pipeline > 1 else 1

    @property
    def num_pieces(self) -> int:
        """Number of pieces that a model runs in, on all stages together."""
        return self.pipeline * self.num_chunks

    @property
    def set_degrees(self) -> str:
        """The keys that make a replica several ranks, with their values; that of `tensor` if none does."""
        found = [f"parallel.{key}: {degree}" for key, degree in self.degrees.items() if degree > 1]
        return " and ".join(found or [f"parallel.tensor: {self.tensor}"])

    @property
    def token_multiple(self) -> int:
        """Divisor of the number of tokens of each part of a row: with `sequence`, tensor ranks share them."""
        return self.tensor if self.sequence else 1

    @property
    def cell(self) -> Cell:
        return Cell(stage=self.pipeline, tensor=self.tensor, expert=self.expert, context=self.context)
