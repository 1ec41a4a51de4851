# SPDX-License-Identifier: Apache-2.0
"""The inputs of a prefix: the tensors of the batch, and the seed of its draws."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch

from penstock.graph.lowering import Lowering


def seed_of_prefix(draws_of: str) -> int:
    """The seed of the graph whose draws are named so: 64 bits of the name's SHA-256."""
    return int.from_bytes(sha256(draws_of.encode()).digest()[:8], "little")


def leaves_of(lowering: Lowering, inputs: Sequence[Any], leaf_count: int) -> list[torch.Tensor]:
    """All tensors of the batch by number, as workers have them, on the CPU; those that the model
    was not given are empty."""
    leaves = [torch.empty(0) for _ in range(leaf_count)]
    for item, value in zip(lowering.inputs, inputs, strict=True):
        if item.kind == "leaf":
            leaves[item.leaf_index] = value.cpu()
    return leaves
