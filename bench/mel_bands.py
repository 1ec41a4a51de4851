# SPDX-License-Identifier: Apache-2.0
"""Mel bands, for the sound workloads: torchaudio, which has them too, ends at torch 2.11."""

from __future__ import annotations

import torch


def mel_bands(bin_count: int, band_count: int, rate_hz: int) -> torch.Tensor:
    """The share of each bin of a spectrum in each band: [bin_count, band_count], float32.

    The bins are evenly spaced from 0 Hz to half of ``rate_hz``. A band is a triangle between the
    centres of its neighbours, and the centres are evenly spaced in mel,
    2595 * log10(1 + hertz / 700) (O'Shaughnessy, Speech Communication, 1987).
    """
    highest = 2595 * torch.log10(torch.tensor(1 + rate_hz / 2 / 700, dtype=torch.float64)).item()
    mels = torch.linspace(0, highest, band_count + 2, dtype=torch.float64)
    edges = 700 * (10 ** (mels / 2595) - 1)
    hertz = torch.linspace(0, rate_hz / 2, bin_count, dtype=torch.float64).unsqueeze(1)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (hertz - low) / (centre - low), (high - hertz) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0).float()
