# SPDX-License-Identifier: Apache-2.0
"""Run an offloaded model of which no calls move as if it had not been offloaded.

Between the program and its forward are Dynamo's guards and the lookup of the batch: 0.1 to 0.5 ms a
call. While no calls move, they have no effect, so after some such calls in a row, only every
`EXAMINED_EVERY`th call is examined, in case another batch, another mode or another price makes a
cut worthwhile. The calls in between run the program's forward directly.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_Mode = tuple[bool, bool]

# Batches in flight lack the workers' results, and the loader returns few lazy tensors after about
# 20 calls: this is longer than both.
UNMOVED_CALLS_MIN = 32
EXAMINED_EVERY = 16


class UnmovedCalls:
    """Tracks whether calls of one offloaded model move. Confined to the training thread."""

    def __init__(self, model: Any) -> None:
        self._model = model if isinstance(model, torch.nn.Module) else None
        # By mode, as programs alternate between training and validation: consecutive calls in which
        # no work moved, and calls skipped since the last one that was examined.
        self._unmoved_counts: Counter[_Mode] = Counter()
        self._skipped_calls: Counter[_Mode] = Counter()

    @property
    def weight(self) -> int:
        """Return the number of calls that the presently examined call represents."""
        return 1 + self._skipped_calls[self._mode]

    def may_skip(self, lacks_batch: bool = False) -> bool:
        """Return whether this call need not be examined; call exactly once for each call.

        With `lacks_batch`, its arguments do not show the batch, so an examination would be useless.
        """
        mode = self._mode
        is_due = 1 + self._skipped_calls[mode] >= EXAMINED_EVERY
        if not lacks_batch and (self._unmoved_counts[mode] < UNMOVED_CALLS_MIN or is_due):
            return False
        self._skipped_calls[mode] += 1
        return True

    def note_call(self, is_unmoved: bool) -> None:
        """Note an examined call; call after each.

        `is_unmoved` means that no work moved in it, and that it included no capture or planning.
        """
        mode = self._mode
        self._unmoved_counts[mode] = self._unmoved_counts[mode] + 1 if is_unmoved else 0
        self._skipped_calls[mode] = 0

    @property
    def _mode(self) -> _Mode:
        training = True if self._model is None else self._model.training
        return training, torch.is_grad_enabled()
