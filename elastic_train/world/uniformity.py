"""Ranks that train together compute one thing: what decides it must be the same in all of their configurations.

By which path a node reaches data and commits, and where metrics are shown, is its own affair. A rate that one node has
and another has not is not: weights would differ from rank to rank, and a rank that validates or commits at other steps
would wait for ever.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.errors import ConfigError, WeightsDifferError
from elastic_train.job.plan import Plan
from elastic_train.parallel.group import Group

_SECTIONS = ("task", "batch", "optimizer", "validation")
_KEYS = {
    "run": ("seed",),
    "data": ("block_row_groups", "length_bucketing", "unreadable", "too_long"),
    "checkpoint": ("every_steps", "interval", "when_busy"),
}
_TOP = ("epochs", "max_steps", "precision", "reduction", "threads_per_rank")


def check_alike(group: Group, plan: Plan, grouping: Sequence[str]) -> None:
    """Raise ConfigError, with every key that differs, on each rank whose configuration or data are not rank 0's.

    `grouping` describes the optimizer's parameter groups, which follow from the task's code. Rank 0 is the member that
    has been there for longest: who comes with something else is not let in.
    """
    mine = deciding(plan) | {"the list of parameter groups": list(grouping)}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
    seen = group.all_gather(torch.tensor(int.from_bytes(digest[:7], "big"))).flatten()
    if bool((seen == seen[0]).all()):
        return
    theirs = group.broadcast_object(mine, 0)
    assert isinstance(theirs, dict), "rank 0 sends what decides there"
    if seen[group.rank] != seen[0]:
        raise ConfigError(
            *(
                f"{key} is {mine.get(key)!r} here and {theirs.get(key)!r} on rank 0: all nodes must have the same"
                for key in sorted({*mine, *theirs})
                if mine.get(key) != theirs.get(key)
            )
        )


def deciding(plan: Plan) -> dict[str, object]:
    """Return what decides, in configuration and data, what is computed: JSON's types, by the names of the keys."""
    config = plan.config.model_dump(mode="json")
    found = {key: config[key] for key in _TOP} | {"the training set's digest": plan.manifest.digest}
    for section in _SECTIONS:
        found |= {f"{section}.{key}": value for key, value in config[section].items()}
    for section, keys in _KEYS.items():
        found |= {f"{section}.{key}": config[section][key] for key in keys}
    return found


def has_equal_kernels(group: Group, device: torch.device) -> bool:
    """Say whether all ranks compute on the same kind of device with the same library, so that bits can be equal."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    mine = torch.tensor([zlib.crc32(f"{device.type} {name} {torch.__version__}".encode())])
    return bool((group.all_gather(mine) == mine).all())


def check_same_weights(group: Group, weights: Mapping[str, Tensor], step: int) -> None:
    """Raise WeightsDifferError, on every rank, if not all ranks hold rank 0's weights and buffers bit for bit.

    Called before a commit begins, of which every rank writes a part. Costs a checksum of the weights, and one number a
    rank; nothing in a world of one.
    """
    if group.size == 1:
        return
    mine = torch.tensor([checksum(tensor) for tensor in weights.values()], dtype=torch.int64)
    whole = zlib.crc32(mine.numpy().tobytes())
    seen = group.all_gather(torch.tensor(whole)).flatten()
    if bool((seen == seen[0]).all()):
        return
    rows = group.all_gather(mine)
    is_other = rows != rows[0]
    ranks = [rank for rank in range(group.size) if bool(is_other[rank].any())]
    first = list(weights)[int(is_other.any(0).nonzero()[0])]
    raise WeightsDifferError(
        f"step {step}: ranks {ranks} hold other weights than rank 0, first in '{first}': a kernel is not deterministic,"
        " the task draws initial weights without torch's generator, or a device computes wrongly. The "
        "last commit is intact; set `reduction: fast` to train without equal bits"
    )
