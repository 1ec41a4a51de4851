# SPDX-License-Identifier: Apache-2.0
"""Sound: features and masks of torchaudio, and models that start from them.

torchaudio is imported where a model is made: collecting the tests should not wait for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cut_models import Case, first_argument, waves
from torch import nn


class Listens(nn.Module):
    """torchaudio's features, made from 16-bit samples, then a convolution over time."""

    def __init__(self, features: nn.Module, bands: int) -> None:
        super().__init__()
        self.features = features
        self.conv = nn.Conv1d(bands, 6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        features = self.features(wave.float() / 32768.0)
        return self.head(F.relu(self.conv(features)).mean(2))


class MasksBands(Listens):
    """torchaudio's SpecAugment after its mel spectrogram, in training only."""

    def __init__(self, features: nn.Module, bands: int) -> None:
        from torchaudio.transforms import FrequencyMasking, TimeMasking

        super().__init__(features, bands)
        self.masks = nn.Sequential(FrequencyMasking(4), TimeMasking(6))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        features = self.features(wave.float() / 32768.0)
        if self.training:
            features = self.masks(features)
        return self.head(F.relu(self.conv(features)).mean(2))


class Conforms(nn.Module):
    """A Conformer, which takes lengths in addition to its features."""

    def __init__(self) -> None:
        from torchaudio.models import Conformer
        from torchaudio.transforms import MelSpectrogram

        super().__init__()
        self.mel = MelSpectrogram(16_000, n_fft=64, hop_length=16, n_mels=16)
        self.net = Conformer(16, 2, 16, 1, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        mel = torch.log(self.mel(wave.float() / 32768.0) + 1e-6).transpose(1, 2)
        lengths = torch.full((mel.shape[0],), mel.shape[1])
        return self.head(self.net(mel, lengths)[0].mean(1))


def mel_bands() -> nn.Module:
    from torchaudio.transforms import AmplitudeToDB, MelSpectrogram

    return nn.Sequential(
        MelSpectrogram(16_000, n_fft=64, hop_length=16, n_mels=10), AmplitudeToDB()
    )


def mel() -> nn.Module:
    return Listens(mel_bands(), 10)


def masked_mel() -> nn.Module:
    return MasksBands(mel_bands(), 10)


def cepstra() -> nn.Module:
    from torchaudio.transforms import MFCC

    return Listens(MFCC(16_000, 8, melkwargs={"n_fft": 64, "hop_length": 16, "n_mels": 10}), 8)


def resampled() -> nn.Module:
    from torchaudio.transforms import Resample, Spectrogram

    return Listens(nn.Sequential(Resample(16_000, 8_000), Spectrogram(n_fft=32)), 17)


SOUND = [
    Case(
        "audio_mel",
        mel,
        waves,
        first_argument,
        True,
        "torchaudio mel spectrogram",
        "a graph break in torchaudio",
        package="torchaudio",
    ),
    Case(
        "audio_masks",
        masked_mel,
        waves,
        first_argument,
        True,
        "torchaudio SpecAugment",
        "a graph break in torchaudio",
        package="torchaudio",
    ),
    Case(
        "audio_mfcc",
        cepstra,
        waves,
        first_argument,
        True,
        "torchaudio cepstra",
        "a graph break in torchaudio",
        package="torchaudio",
    ),
    Case(
        "audio_resample",
        resampled,
        waves,
        first_argument,
        True,
        "torchaudio resampling",
        "a graph break in torchaudio",
        package="torchaudio",
    ),
    Case(
        "conformer",
        Conforms,
        waves,
        first_argument,
        True,
        "torchaudio model",
        "a graph break in torchaudio",
        package="torchaudio",
    ),
]
