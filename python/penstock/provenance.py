# SPDX-License-Identifier: Apache-2.0
"""Tells a model's input apart from any other tensor: which batch it came with, and whether it still
is what came.

The table is keyed by tensor identity and holds tensors weakly, so a batch dies when the user drops
it. A tensor that was written to in place since its delivery has lost its provenance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(eq=False, slots=True)
class BatchHandle:
    """One delivered batch: its boundary tensors by key, and how many leaves it has."""

    leaf_count: int
    boundary: dict[str, torch.Tensor] = field(default_factory=dict)


class Provenance(NamedTuple):
    """Leaf ``leaf_index`` of the batch ``handle``, delivered when its tensor had version
    ``version``.
    """

    handle: BatchHandle
    leaf_index: int
    version: int


class ProvenanceTable:
    """Thread-compatible."""

    def __init__(self) -> None:
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def record(self, tensor: torch.Tensor, provenance: Provenance) -> None:
        self._entries[tensor] = provenance

    def lookup(self, tensor: torch.Tensor) -> Provenance | None:
        """The provenance of ``tensor``, or None when it did not come from the loader or was
        changed since.
        """
        provenance: Provenance | None = self._entries.get(tensor)
        if provenance is None or tensor.is_inference() or tensor._version != provenance.version:
            return None
        return provenance
