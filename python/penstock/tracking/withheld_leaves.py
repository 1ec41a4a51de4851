# SPDX-License-Identifier: Apache-2.0
"""The leaves of one batch that stayed with the worker that made it.

The program has lazy tensors in their place. When the values of one are asked for, the whole batch
is recalled: from the worker that made it while that still has the leaves, else from any worker, who
makes the batch again. A batch that was made again has to be the batch that came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.graph.constants import is_same_bits
from penstock.seams.storages import write_count

# Gives all leaves of the batch and its boundary tensors, by key. Blocks.
Recall = Callable[[], tuple[Sequence[torch.Tensor], Mapping[str, torch.Tensor]]]


class WithheldLeaves:
    """Thread-compatible: the lock of the lazy values is held by every caller."""

    def __init__(
        self,
        recall: Recall,
        boundary: Mapping[str, torch.Tensor],
        name: str,
        note: Callable[[int], None],
    ) -> None:
        """`name` is that of the batch, for people. `note` is told of each leaf that is read."""
        self._recall = recall
        self._boundary = boundary
        self._name = name
        self._note = note
        self.counts_reads = True

    def recall(self, index: int) -> Sequence[torch.Tensor]:
        """All leaves of the batch, since this one is read. Blocks until the batch is here.

        Raises RuntimeError where the dataset gave other values than before, the dataset's error
        where the batch could not be made again, and PenstockError where no worker is left to ask.
        """
        if self.counts_reads:
            self._note(index)
        leaves, boundary = self._recall()
        self._check(index, boundary)
        return leaves

    def _check(self, index: int, made: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in self._boundary.items():
            if key in made and write_count(tensor) == 0 and not is_same_bits(tensor, made[key]):
                raise RuntimeError(
                    f"tensor {index} of {self._name} had stayed with its worker, and when the "
                    f"program read it, the batch was made again with other values: the dataset "
                    f"does not give the same sample for the same index and seeds, or a worker of "
                    f"another kind made it (loader.plan names those). Make it do so, use workers "
                    f'of one kind, or pass cut="none" to penstock.offload'
                )
