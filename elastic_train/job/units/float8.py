"""Linear layers in float8 (`precision: fp8`): which of a model's layers, and checks of this machine."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from elastic_train.config.combinations import refused
from elastic_train.job.units.blocks import unit_names
from elastic_train.parallel.devices.repeats import NotRepeatableError
from elastic_train.parallel.linear_products import ScaledLinear, fits, scaled_product
from elastic_train.parallel.product_probe import Call, check_products

_LEAST_CAPABILITY = 8, 9


def scale_linear_layers(model: nn.Module) -> None:
    """Let a model's blocks compute in float8; raise ConfigError if none has a linear layer that can.

    The layers stay the same objects, with the same parameters and names: only their class changes. Subclasses of
    `nn.Linear` have a `forward` of their own, and keep it.
    """
    blocks = (model.get_submodule(name) for name in unit_names(model))
    layers = [
        each for block in blocks for each in block.modules() if type(each) is nn.Linear and fits(each.weight.shape)
    ]
    if not layers:
        raise refused("unfit linear layers", f"{type(model).__name__}, which has no layer that fits")
    for layer in layers:
        layer.__class__ = ScaledLinear


def check_multiplies(device: torch.device) -> None:
    """Raise ConfigError if a device, or its torch, has no product in float8 with scales for each row."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        has, needed = (".".join(map(str, each)) for each in (capability, _LEAST_CAPABILITY))
        name = torch.cuda.get_device_name(device)
        raise refused("no float8 kernel", f"this machine's {name}, of compute capability {has} ({needed} is the least)")
    try:
        scaled_product(*torch.ones(2, 16, 16, device=device))
    except (RuntimeError, AttributeError) as error:
        what = f"torch {torch.__version__}, which lacks their kernel for this machine's {device.type.upper()}"
        raise refused("no float8 kernel", what) from error


def check_repeats(calls: Collection[Call], device: torch.device) -> None:
    """Raise ConfigError if a run's products in float8 have other bits in a second run, here or in another process."""
    try:
        check_products(calls, device)
    except NotRepeatableError as error:
        raise refused("no float8 kernel", f"this machine's products in float8 ({error})") from error
