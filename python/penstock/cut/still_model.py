# SPDX-License-Identifier: Apache-2.0
"""Lets a model of which nothing moves run as if it had not been offloaded.

Between the program and its forward stand Dynamo's guards and our look at the batch: 0.1 to 0.5 ms a
call. While nothing moves they find nothing, so after some such calls in a row only every
`LOOKED_AT_EVERY`th is looked at, in case another batch, another mode or another price has made a
cut worth while. The calls in between run the program's own forward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_Mode = tuple[bool, bool]

# Batches that were under way come without the workers' results, and the loader gives out few lazy
# tensors after about 20 calls: this is longer than both.
STILL_CALLS_MIN = 32
LOOKED_AT_EVERY = 16


class StillModel:
    """Notes whether anything moves of one offloaded model. Confined to the training thread."""

    def __init__(self, model: Any) -> None:
        self._model = model if isinstance(model, torch.nn.Module) else None
        # By mode, as programs take turns at training and validation: calls in a row in which
        # nothing moved, and those skipped since the last that was looked at.
        self._still_calls: Counter[_Mode] = Counter()
        self._skipped_calls: Counter[_Mode] = Counter()

    @property
    def weight(self) -> int:
        """For how many calls the one stands that is looked at now."""
        return 1 + self._skipped_calls[self._mode]

    def may_skip(self, is_blind: bool = False) -> bool:
        """Whether this call needs no look at it. To be asked once for each call; `is_blind` if a
        look would find nothing, as the batch is not to be seen in its arguments."""
        mode = self._mode
        is_due = 1 + self._skipped_calls[mode] >= LOOKED_AT_EVERY
        if not is_blind and (self._still_calls[mode] < STILL_CALLS_MIN or is_due):
            return False
        self._skipped_calls[mode] += 1
        return True

    def note_call(self, is_still: bool) -> None:
        """To be called after each call that was looked at; `is_still` if nothing moved in it and
        nothing was captured or planned."""
        mode = self._mode
        self._still_calls[mode] = self._still_calls[mode] + 1 if is_still else 0
        self._skipped_calls[mode] = 0

    @property
    def _mode(self) -> _Mode:
        training = True if self._model is None else self._model.training
        return training, torch.is_grad_enabled()
