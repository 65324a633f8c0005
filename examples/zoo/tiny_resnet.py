"""A small residual network (He et al., arXiv:1512.03385) for images of a few pixels.

Calorimeter towers around a candidate are such an image. There are three stages, each with one block
of two 3x3 convolutions and batch normalisation. The second and third stage halve the image size. At
the end is average pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """(n, inputs, H, W) -> (n, width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.body(image) + self.shortcut(image))


class TinyResNet(nn.Module):
    """(n, channels, H, W) float32 -> (n, classes) float32, probabilities."""

    def __init__(self, channels: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        strides = [1] + [2] * (len(widths) - 1)
        inputs = [widths[0], *widths[:-1]]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.stages = nn.Sequential(
            *(ResidualBlock(*sizes) for sizes in zip(inputs, widths, strides, strict=True))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, image: Tensor) -> Tensor:
        pooled = self.stages(torch.relu(self.stem(image))).mean(dim=(2, 3))
        return torch.softmax(self.head(pooled), dim=1)


def tiny_resnet(
    channels: int = 3, widths: tuple[int, ...] = (8, 16, 16), classes: int = 4
) -> nn.Module:
    """The model with random weights and batch statistics from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = TinyResNet(channels, tuple(widths), classes)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean = 0.2 * torch.randn(layer.num_features)
                layer.running_var = 0.5 + torch.rand(layer.num_features)
    return model
