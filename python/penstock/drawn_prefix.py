# SPDX-License-Identifier: Apache-2.0
"""A prefix that draws random numbers, in the trainer.

What such a prefix draws for a batch follows from the batch's place in the stream and from nothing
else, so the trainer can make what no worker has sent, and hold what one has sent against its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from penstock import _C
from penstock.lowering import Lowering
from penstock.provenance import BatchHandle


def seed_of_prefix(draws_of: str) -> int:
    """The seed of the graph whose draws are named so: 64 bits of the name's SHA-256."""
    return int.from_bytes(sha256(draws_of.encode()).digest()[:8], "little")


def leaves_of(lowering: Lowering, inputs: Sequence[Any], leaf_count: int) -> list[torch.Tensor]:
    """All tensors of the batch by number; those that the model was not given are empty."""
    leaves = [torch.empty(0) for _ in range(leaf_count)]
    for item, value in zip(lowering.inputs, inputs, strict=True):
        if item.kind == "leaf":
            leaves[item.leaf_index] = value
    return leaves


@dataclass(frozen=True)
class DrawnPrefix:
    """Thread-compatible."""

    executor: Any
    seed: int
    lowering: Lowering

    @staticmethod
    def of(
        lowering: Lowering, prefix: str, constants: Sequence[torch.Tensor], seed: int
    ) -> DrawnPrefix:
        """`constants` are copied, as they are for workers."""
        copies = [constant.detach().clone() for constant in constants]
        executor = _C.Executor(_C.parse_graph(prefix), copies, allow_random=True)
        return DrawnPrefix(executor, seed, lowering)

    def run(self, inputs: Sequence[Any], handle: BatchHandle) -> list[torch.Tensor]:
        """The boundary tensors of the batch `handle`, given the inputs of a call. No generator
        moves. Raises PenstockError where an operator fails."""
        leaves = leaves_of(self.lowering, inputs, handle.leaf_count)
        seed = _C.seed_of_batch(self.seed, *handle.place)
        made: list[torch.Tensor] = self.executor.run(leaves, seed)
        return made
