# SPDX-License-Identifier: Apache-2.0
"""Augmentation inside forward: its random draws have to stay with the trainer's generator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cut_models import Case, LogMel, NormalizedResNet, first_argument, images, waves


class SpecAugment(LogMel):
    """Random bands of time and frequency are set to zero in training."""

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        wave = wave.float() / 32768.0
        power = torch.stft(wave, 64, 16, window=self.window, return_complex=True).abs().square()
        mel = (power.transpose(1, 2) @ self.bands).clamp(min=1e-10).log().transpose(1, 2)
        if self.training:
            for dim in (1, 2):
                size = mel.shape[dim]
                start = torch.randint(0, size - 3, (mel.shape[0], 1))
                index = torch.arange(size)
                hidden = (index >= start) & (index < start + 3)
                mel = mel.masked_fill(hidden.unsqueeze(3 - dim), 0.0)
        return self.head(F.relu(self.conv(mel)).mean(2))


class Mixup(NormalizedResNet):
    """A permutation of the batch and a weight, drawn in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() / 255 - self.mean) / self.std
        if self.training:
            weight = torch.distributions.Beta(0.4, 0.4).sample()
            x = weight * x + (1 - weight) * x[torch.randperm(x.shape[0])]
        return self.head(F.relu(self.norm1(self.stem(x))).mean((2, 3)))


class RandomResolution(NormalizedResNet):
    """Resizes to another resolution at every step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() / 255 - self.mean) / self.std
        size = 12 + 4 * int(torch.randint(0, 3, ()))
        x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
        return self.head(F.relu(self.norm1(self.stem(x))).mean((2, 3)))


AUGMENTATION = [
    Case(
        "spec_augment",
        SpecAugment,
        waves,
        first_argument,
        True,
        "SpecAugment",
        "the draws and the masking stay",
    ),
    Case(
        "mixup",
        Mixup,
        images,
        first_argument,
        True,
        "mixup in forward",
        "the draws and the mixing stay",
    ),
    Case(
        "random_size",
        RandomResolution,
        images,
        first_argument,
        True,
        "resize by a drawn size",
        "two graphs; the drawn size becomes a Python number",
    ),
]
