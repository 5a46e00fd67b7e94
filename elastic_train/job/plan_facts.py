"""What follows from a configuration, in words: of a mixture's sources, a pipeline, and what is in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from elastic_train.config.schema import Config
from elastic_train.core.mixture.dealing import Mixture
from elastic_train.core.schedules import Pipeline, bubble
from elastic_train.data.dataset.training_sources import Source
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.sharded.elementwise import slots_of


def describe_sources(order: Mixture, sources: Sequence[Source], length: int) -> dict[str, str]:
    """Return for each source how much of every batch it is, and how often it is passed in so many places of a lane."""
    counts = np.sum([order.counts(lane, length) for lane in range(order.num_lanes)], axis=0)
    return {
        f"source {source.name}": f"{source.manifest.num_rows} samples, {source.share} of {sum(order.shares)} places, "
        f"{count / source.manifest.num_rows:.2f} epochs"
        for source, count in zip(sources, counts, strict=True)
    }


def describe_pipeline(config: Config) -> str:
    """Return what a pipeline's stages wait for one another in one cell; more cells have fewer lanes each."""
    parallel, num_lanes = config.parallel, config.batch.num_lanes
    of_each = -(-num_lanes // parallel.expert)  # ranks with experts have a pipeline each
    waits = bubble(Pipeline(parallel.schedule, parallel.pipeline, of_each, parallel.num_chunks))
    chunks = f" with {parallel.num_chunks} chunks each" if parallel.num_chunks > 1 else ""
    return (
        f"{parallel.pipeline} stages{chunks}, {parallel.schedule}; with all {num_lanes} lanes in one cell they wait "
        f"{100 * waits:.0f} % of a step"
    )


def describe_offload(config: Config, device: torch.device) -> str:
    """Return what of a parameter that a rank holds is in host memory, beside what is on its device."""
    choice = choose(config.optimizer, device.type, is_fp16=config.precision == "fp16")
    num = len(slots_of(choice.tried(), choice.make, device).moments) + (config.optimizer.ema is not None)
    weights = 4 if config.parallel.offload == "all" else 0
    where = "the host's memory, which is this device's" if device.type == "cpu" else "pinned host memory"
    return f"{4 * num + weights} of {4 * num + 8} bytes of each fp32 parameter that a rank holds are in {where}"
