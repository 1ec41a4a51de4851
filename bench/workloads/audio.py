# SPDX-License-Identifier: Apache-2.0
"""Audio: one second of 16 kHz wav to 64 log-mel bands, item by item; batch 32."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import torch
from mel_bands import mel_bands
from torch.utils.data import Dataset

from workloads.workload import Workload, fetch_samples

RATE_HZ = 16_000
WINDOW, HOP = 400, 160  # samples


def prepare(folder: Path, quick: bool) -> None:
    """Writes chirps with noise as 16-bit wav files."""
    generator = torch.Generator().manual_seed(0)
    seconds = torch.arange(RATE_HZ) / RATE_HZ
    for index in range(64 if quick else 512):
        low, high, phase = torch.rand(3, generator=generator).tolist()
        hertz = 100 + 2000 * low + 4000 * (high - low) * seconds
        noise = torch.randn(RATE_HZ, generator=generator)
        signal = 0.5 * torch.sin(2 * torch.pi * (hertz * seconds + phase)) + 0.05 * noise
        with wave.open(str(folder / f"{index:04}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE_HZ)
            file.writeframes((signal.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes())


class LogMels(Dataset[tuple[torch.Tensor, int]]):
    """The log-mel spectrogram of each file and a label."""

    def __init__(self, folder: Path) -> None:
        # Sixteen times round the files is an epoch, so that a run is not made of ends of epochs.
        self._paths = [str(path) for path in sorted(folder.glob("*.wav"))] * 16
        self._window = torch.hann_window(WINDOW)
        self._bands = mel_bands(WINDOW // 2 + 1, 64, RATE_HZ)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with wave.open(self._paths[index], "rb") as file:
            frames = bytearray(file.readframes(file.getnframes()))
        signal = torch.frombuffer(frames, dtype=torch.int16).to(torch.float32) / 32768
        spectrum = torch.stft(signal, WINDOW, HOP, window=self._window, return_complex=True)
        mels = self._bands.T @ spectrum.abs().square()
        return torch.log(mels + 1e-6), index % 10


def build(folder: Path) -> dict[str, Any]:
    return {"dataset": LogMels(folder), "batch_size": 32, "shuffle": True}


WORKLOAD = Workload(
    "audio",
    build,
    fetch_samples,
    work_is="the samples of each batch, no collate, 2 processes",
    prepare=prepare,
)
