# SPDX-License-Identifier: Apache-2.0
"""Permutations that follow from a seed and a place alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def drawn_order(count: int, seed: int, place: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A permutation of ``count`` indices: int64, shape (count,).

    Seeds are derived by numpy's SeedSequence, and the permutation is drawn by ``torch.randperm``.
    """
    words = np.random.SeedSequence(seed, spawn_key=place).generate_state(2)
    generator = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
    order: np.ndarray[Any, Any] = torch.randperm(count, generator=generator).numpy()
    return order
