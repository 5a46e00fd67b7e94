"""A small residual network with batch normalisation: by default ResNet-8, or deeper and wider ones.

Architecture: He et al. (Deep residual learning for image recognition, 2016), section 4.2, for small images: a 3 x 3
convolution, three stages of `depth` blocks, of which the second and third halve the image and double the channels, the
mean over positions, and a linear layer: 6 * depth + 2 layers. Shortcuts that change shape are 1 x 1 convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

_STAGES = 3


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """Channels of the image and of the first stage, and blocks per stage."""

    num_classes: int
    channels: int = 3
    width: int = 16
    depth: int = 1

    def __post_init__(self) -> None:
        for name in ("num_classes", "channels", "width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, inside a residual."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the stage's channels, and half the sides with stride 2."""
        inner = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(inner)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Classify images: logits (batch, num_classes) from (batch, channels, height, width)."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape.channels, shape.width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(shape.width)
        widths = [shape.width, *(shape.width << stage for stage in range(_STAGES) for _ in range(shape.depth))]
        strides = [1 + (at > 0 and at % shape.depth == 0) for at in range(_STAGES * shape.depth)]
        self.blocks = nn.ModuleList(
            Block(before, after, stride) for before, after, stride in zip(widths, widths[1:], strides, strict=False)
        )
        self.head = nn.Linear(widths[-1], shape.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]
