# SPDX-License-Identifier: Apache-2.0
"""A prefix that draws random numbers, in the trainer.

The draws of such a prefix for a batch follow from the batch's place in the stream and from nothing
else. So the trainer can make a result that no worker has sent, and compare one that a worker has
sent with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock import _C
from penstock.graph.lowering import Lowering
from penstock.graph.prefix_inputs import leaves_of
from penstock.tracking.batch_origin import BatchHandle


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
