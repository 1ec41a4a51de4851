# SPDX-License-Identifier: Apache-2.0
"""Trains a network that detects tones in noise, on waveforms from which its forward makes
spectrograms.

See which part could run in the workers: `penstock explain examples/spectrogram.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

RATE_HZ, TONES_HZ = 16_000, torch.tensor([220.0, 330.0, 440.0, 880.0])


class ToneNet(nn.Module):
    """Takes waveforms as recorded: int16 [B, samples]."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Buffer(torch.hann_window(512))
        bins, edges = torch.arange(257), torch.linspace(0, 257, 41)
        bands = (bins >= edges[:-1, None]) & (bins < edges[1:, None])
        self.bands = nn.Buffer(bands.float())
        self.convolutions = nn.Sequential(nn.Conv1d(40, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 5))
        self.classifier = nn.Linear(32, len(TONES_HZ))

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        waves = waves.float() / 32768
        spectrum = torch.stft(waves, 512, 128, window=self.window, return_complex=True)
        features = torch.log1p(self.bands @ spectrum.abs().square())
        logits: torch.Tensor = self.classifier(self.convolutions(features).relu().mean(2))
        return logits


def make_dataset(count: int) -> TensorDataset:
    labels = torch.randint(len(TONES_HZ), (count,))
    seconds = torch.arange(RATE_HZ // 2) / RATE_HZ
    tones = torch.sin(2 * torch.pi * TONES_HZ[labels, None] * seconds)
    waves = 4000 * tones + 4000 * torch.randn(count, len(seconds))
    return TensorDataset(waves.clamp(-32768, 32767).short(), labels)


def main() -> None:
    torch.manual_seed(0)
    model = ToneNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for waves, labels in DataLoader(make_dataset(1024), batch_size=32, shuffle=True, num_workers=2):
        loss = functional.cross_entropy(model(waves), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.3f}")


if __name__ == "__main__":
    main()
