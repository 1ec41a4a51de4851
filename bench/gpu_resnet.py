# SPDX-License-Identifier: Apache-2.0
"""A ResNet-50 for machines without torchvision, with random weights (He et al. 2015, the stride in
the 3 x 3 convolution)."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *_convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, after, 1),
        )
        is_same = stride == 1 and before == after
        self.short = (
            nn.Identity() if is_same else nn.Sequential(*_convolution(before, after, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


class ResNet50(nn.Module):
    def __init__(self, class_count: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(3, 2, 1))
        before = 64
        for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for place in range(depth):
                stride = 2 if place == 0 and width > 64 else 1
                layers.append(Bottleneck(before, width, stride))
                before = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, class_count)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x)
        return scores


def _convolution(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after)]
